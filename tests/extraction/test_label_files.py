"""Versions of label files: extracted, resumed, changed, damaged, repaired, copied, and joined
with frames."""

import json
import os
import signal
import tarfile
import uuid

import numpy as np
import pytest
import shim
from cache_contents import items, ledger
from damage import flip
from extractions import reasons_of
from label_files import ctm_of, long_textgrid, short_textgrid
from processes import commands, run_here
from shim import CHANGES, Faults, Strike, read_calls

import featcache
from featcache.errors import ConfigError, DamagedError, ManifestError
from featcache.extraction import from_files
from featcache.loader.events import Event

pytest.importorskip("praatio")

COLUMN = "{label}"


def words_of(number, end):
    """Labels of an utterance; the fourth has none."""
    if number == 3:
        return [(0, end, "")]
    middle = round(end / 2, 3)
    return [(0, 0.1, ""), (0.1, middle, f"w{number}"), (middle, end, f"é {number}")]


@pytest.fixture
def speech(plain, tmp_path):
    """The twelve plain clips with a TextGrid each, in a column of the manifest."""
    corpus = plain.copy(tmp_path / "corpus")
    (corpus.folder / "align").mkdir()
    lines = ["id,path,duration,label"]
    for number, row in enumerate(corpus.rows):
        write = (long_textgrid, short_textgrid)[number % 2]
        text = write(row["duration"], {"words": words_of(number, row["duration"])})
        path = f"align/{row['id']}.TextGrid"
        (corpus.folder / path).write_text(text, encoding=("utf-8", "utf-16")[number % 2])
        lines.append(f"{row['id']},{row['path']},{row['duration']},{path}")
    (corpus.folder / "train.csv").write_text("\n".join(lines) + "\n")
    return corpus


def config(folder, label_files=COLUMN, name="words", **others):
    params = {"label_files": label_files, **others.pop("params", {})}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, "extractor": "labels", "params": params, **others}))
    return path


def expected(number, end):
    return [Event(*label) for label in words_of(number, end) if label[2]]


def all_events(cache):
    return {id_: cache[id_] for id_ in cache}


def test_labels_live_as_features_do(speech, tmp_path, cli):
    """Extracted without audio, verified, damaged, repaired, recomputed, shown and copied."""
    for row in speech.rows:
        (speech.folder / row["path"]).unlink()
    manifest, cache = speech.folder / "train.csv", tmp_path / "cache"
    made = config(tmp_path, params={"tier": "words"})
    cli("extract", manifest, "-c", made, "-o", cache, "--shard-size", "0.0001").with_code(0)
    words = featcache.open(cache)
    by_number = {row["id"]: (i, row["duration"]) for i, row in enumerate(speech.rows)}
    assert all_events(words) == {id_: expected(*of) for id_, of in by_number.items()}
    assert words["utt-03"] == []
    assert words.lengths.sum() == 22
    summary = cli("info", cache).out
    assert "float64 [events, 2], any number of events for each utterance: start and end" in summary
    assert "12 utterances, 6.1 s of audio" in summary
    shown = cli("show", cache, "utt-01").out.splitlines()
    listed = [line.split(None, 2) for line in shown]
    first = listed.index(["0.100", "0.210", "w1"])
    assert listed[first + 1] == ["0.210", "0.420", "é 1"]
    (document,) = cli("show", cache, "utt-01", "--json").json()["versions"]
    assert document["events"] == [event._asdict() for event in words["utt-01"]]
    again = cli("extract", manifest, "-c", made, "-o", cache, "--json").json()
    assert again["versions"][0]["extracted"] == 0
    whole = items(cache)
    name, _ = words.index.place(words.position("utt-07"))
    for damaged in ("features/c/0/0", "side_labels/c/0"):
        flip(words.version.path / "shards" / name / damaged, 1)
        cli("verify", cache, "--manifest", manifest).with_code(1)
        cli("repair", cache, "--manifest", manifest).with_code(0)
        ends = ("--manifest", manifest, "--recompute", "12")
        assert "12 bit-identical" in cli("verify", cache, *ends).with_code(0).out
        assert items(cache) == whole
    words = featcache.open(cache)
    cli("copy", cache, tmp_path / "copy").with_code(0)
    assert all_events(featcache.open(tmp_path / "copy", check=True)) == all_events(words)
    differs = cli(
        "diff", words.version.path, tmp_path / "copy" / words.version.path.name, "--values", "12"
    )
    assert "12 of 12 utterances bit-identical" in differs.out
    half = speech.folder / "half.csv"
    half.write_text("\n".join(manifest.read_text().splitlines()[:7]) + "\n")
    cli("prune", cache, "--manifest", half, "--force", "--yes").with_code(0)
    assert [*featcache.open(cache)] == speech.ids[:6]


def test_rows_without_a_path_are_found_by_their_ids_alone(speech, tmp_path):
    options = featcache.Options(device="cpu", threads=1)
    featcache.extract(speech.folder / "train.csv", config(tmp_path), tmp_path / "cache", options)
    words = featcache.open(tmp_path / "cache")
    rows = [{"id": "utt-05", "speaker": "anna"}, {"id": "utt-03", "speaker": "ben"}]
    batch = featcache.FeatureDataset(words, rows, classes="features").batch([0, 1])
    assert (batch["speaker"], batch["lengths"].tolist()) == (["anna", "ben"], [2, 0])
    assert batch["features"].labels.tolist() == [0, 1]
    with pytest.raises(ManifestError, match=r"has no column 'label', which params\.label_files"):
        featcache.FeatureDataset(words, [{"id": "utt-05", "path": "05.wav"}])


def test_a_file_that_is_damaged_missing_or_without_the_tier_is_one_failure(speech, tmp_path, cli):
    align = speech.folder / "align"
    (align / "utt-02.TextGrid").write_bytes(b"File type = ")
    (align / "utt-05.TextGrid").unlink()
    (align / "utt-08.TextGrid").write_text(long_textgrid(1, {"a": [], "b": []}))
    manifest, cache = speech.folder / "train.csv", tmp_path / "cache"
    manifest.write_text(manifest.read_text().replace("align/utt-10.TextGrid", ""))
    made = config(tmp_path)
    cli("extract", manifest, "-c", made, "-o", cache).with_code(3)
    assert reasons_of(cli, cache) == {
        "utt-02": "not_labels",
        "utt-05": "file_missing",
        "utt-08": "extractor_refused",
        "utt-10": "file_missing",
    }
    assert len(featcache.open(cache)) == 8
    (align / "utt-02.TextGrid").write_text(long_textgrid(1, {"a": [(0, 1, "mended")]}))
    again = cli("extract", manifest, "-c", made, "-o", cache, "--json").with_code(3).json()
    assert (again["versions"][0]["extracted"], again["versions"][0]["failed"]) == (1, 3)
    assert featcache.open(cache)["utt-02"] == [Event(0, 0.44, "mended")]


def test_a_changed_file_is_extracted_again(speech, tmp_path, cli):
    manifest, cache = speech.folder / "train.csv", tmp_path / "cache"
    made = config(tmp_path)
    cli("extract", manifest, "-c", made, "-c", "fbank80", "-o", cache).with_code(0)
    changed = speech.folder / "align/utt-04.TextGrid"
    changed.write_text(changed.read_text().replace("w4", "w?"))
    os.utime(changed, ns=(1, 1))
    checked = cli("verify", cache / "words", "--sources", "--no-data").with_code(1)
    assert "utt-04.TextGrid: has changed since: its mtime is another" in checked.out
    why = cli("why", cache, manifest, "-c", made, "--check-sources").with_code(0).out
    assert "1 again: file changed: utt-04 (its file's mtime)" in why
    both = ("extract", manifest, "-c", made, "-c", "fbank80", "-o", cache, "--check-sources")
    assert [version["extracted"] for version in cli(*both, "--json").json()["versions"]] == [1, 0]
    assert featcache.open(cache, "words")["utt-04"][0].label == "w?"
    # another file is another row
    moved = speech.folder / "other.TextGrid"
    moved.write_text(long_textgrid(1, {"a": [(0, 0.2, "other")]}))
    text = manifest.read_text().replace("align/utt-06.TextGrid", "other.TextGrid")
    manifest.write_text(text)
    with pytest.raises(ManifestError, match=r"path align/utt-06\.TextGrid → other\.TextGrid"):
        featcache.FeatureDataset(featcache.open(cache, "words"), manifest)
    cli("extract", manifest, "-c", made, "-o", cache).with_code(0)
    assert featcache.open(cache, "words")["utt-06"] == [Event(0, 0.2, "other")]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Runs commands with a shim that kills them at a call of the system."""
    with commands(env={"LD_PRELOAD": str(shim.build(tmp_path_factory.mktemp("shim")))}) as cli:
        yield cli


@pytest.mark.parametrize("at", [0.2, 0.5, 0.9])
def test_a_killed_run_goes_on_to_the_same_shards(speech, tmp_path, faulty, at):
    made = config(tmp_path)
    manifest = speech.folder / "train.csv"
    header, *rows = (line.split(",") for line in manifest.read_text().splitlines())
    hours = [",".join([id_, path, "3600", label]) for id_, path, _, label in rows]
    manifest.write_text("\n".join([",".join(header), *hours]) + "\n")  # a shard for each
    whole, cache, record = (tmp_path / name for name in ("whole", "cache", "record"))
    command = ("extract", manifest, "-c", made, "--threads", "1", "-o")
    faulty(*command, whole, faults=Faults(whole, record=record)).with_code(0)
    assert len(featcache.open(whole).index.shards) == 12
    total = sum(call.kind in CHANGES for call in read_calls(record))
    strike = Strike(int(at * total), "kill")
    killed = faulty.start(*command, cache, faults=Faults(cache, strike)).wait()
    assert killed.code == -signal.SIGKILL
    faulty(*command, cache).with_code(0)
    opened = featcache.open(cache, strict=True)
    assert all_events(opened) == all_events(featcache.open(whole))
    assert opened.index.shards == featcache.open(whole).index.shards
    faulty("verify", cache, "--manifest", manifest).with_code(0)


def test_a_segment_of_a_row_cuts_the_labels_as_it_cuts_audio(tmp_path, cli):
    folder = tmp_path
    (folder / "long.TextGrid").write_text(
        long_textgrid(4, {"words": [(0, 1, "a"), (1, 2.5, "b"), (2.5, 3, ""), (3, 4, "c")]})
    )
    rows = ["id,path,start,duration", "first,long.wav,,1.5", "middle,long.wav,1.25,1.5"]
    rows += ["end,long.wav,2.75,", "silent,long.wav,2.5,0.5", "behind,long.wav,4.5,1"]
    manifest = folder / "segments.csv"
    manifest.write_text("\n".join(rows) + "\n")
    made = config(folder, "{folder}/{stem}.TextGrid")
    cli("extract", manifest, "-c", made, "-o", folder / "cache").with_code(3)
    cache = featcache.open(folder / "cache")
    assert all_events(cache) == {
        "first": [Event(0, 1, "a"), Event(1, 1.5, "b")],
        "middle": [Event(0, 1.25, "b")],
        "end": [Event(0.25, 1.25, "c")],
        "silent": [],
    }
    assert reasons_of(cli, folder / "cache") == {"behind": "segment_outside"}
    (info,) = cli("info", folder / "cache", "--json").json()["versions"]
    assert info["audio_seconds"] == 1.5 + 1.5 + 1.25 + 0.5


def test_recordings_in_one_file_are_found_by_their_names(tmp_path, cli):
    """In a CTM and an RTTM, at segments of the recordings, and with lines in any order."""
    labels = {"a": [(0.5, 1, "x"), (2, 2.5, "y")], "b": [(0, 0.25, "z")]}
    lines = "".join(ctm_of(*recording) for recording in labels.items()).splitlines()
    text = ";; a comment\n" + "\n".join([lines[0], lines[2], lines[1]]) + "\n"
    (tmp_path / "all.ctm").write_text(text)
    (tmp_path / "all.rttm").write_text(
        "SPEAKER a 1 0 1 <NA> <NA> anna <NA> <NA>\nSPEAKER b 1 0.5 1 <NA> <NA> ben <NA> <NA>\n"
    )
    rows = ["id,path,start,duration", "a-1,wav/a.wav,0,2", "a-2,wav/a.wav,1.5,2", "b,wav/b.wav,,"]
    rows.append("c,wav/c.wav,,")
    manifest = tmp_path / "segments.csv"
    manifest.write_text("\n".join(rows) + "\n")
    ctm = config(tmp_path, "all.ctm/{stem}", "ctm")
    rttm = config(tmp_path, "all.rttm/{stem}", "rttm")
    cache = tmp_path / "cache"
    cli("extract", manifest, "-c", ctm, "-c", rttm, "-o", cache).with_code(3)
    assert all_events(featcache.open(cache, "ctm")) == {
        "a-1": [Event(0.5, 1, "x")],
        "a-2": [Event(0.5, 1, "y")],
        "b": [Event(0, 0.25, "z")],
    }
    assert featcache.open(cache, "rttm")["a-1"] == [Event(0, 1, "anna")]
    (failure,) = cli("info", cache / "ctm", "--json").json()["versions"][0]["failures"]
    assert failure["reason"] == "file_missing"
    assert "the file has no line of 'c', but of a, b" in failure["message"]
    # the recording appears, and the others are as they were
    (tmp_path / "all.ctm").write_text(text + "c 1 0 1 new\n")
    again = cli("extract", manifest, "-c", ctm, "-o", cache, "--json").with_code(0).json()
    assert again["versions"][0]["extracted"] == 1
    assert featcache.open(cache, "ctm")["c"] == [Event(0, 1, "new")]


def test_the_first_line_of_a_ctm_with_a_byte_order_mark_is_read(tmp_path, cli):
    lines = ctm_of("a", [(0.5, 1, "x"), (2, 2.5, "y")])
    (tmp_path / "all.ctm").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "train.csv").write_text("id,path\na,wav/a.wav\n")
    made = config(tmp_path, "all.ctm/{stem}")
    cli("extract", tmp_path / "train.csv", "-c", made, "-o", tmp_path / "cache").with_code(0)
    assert featcache.open(tmp_path / "cache")["a"] == [Event(0.5, 1, "x"), Event(2, 2.5, "y")]


def test_labels_at_the_edges_of_rows_are_sorted_and_those_of_the_next_row_left_out(tmp_path, cli):
    """The words of 0.1 + 0.2 s and of 1.1 + 2.2 s end where the next ones begin."""
    words = [(0.1, 0.1 + 0.2, "a"), (0.3, 1.1, "b"), (1.1, 3.3, "c"), (3.3, 4, "d")]
    turns = [(0, 5, "anna"), (0.5, 1.5, "ben"), (3.3, 3.4, "cleo")]
    (tmp_path / "x.ctm").write_text(ctm_of("x", words))
    (tmp_path / "x.rttm").write_text(
        "".join(f"SPEAKER x 1 {at} {end - at} <NA> <NA> {who} <NA>\n" for at, end, who in turns)
    )
    rows = ["id,path,start,duration", "r0,x.wav,,0.3", "r1,x.wav,0.3,0.8", "r2,x.wav,1.1,2.2"]
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    made = [config(tmp_path, f"{{stem}}.{suffix}", suffix) for suffix in ("ctm", "rttm")]
    cache = tmp_path / "cache"
    cli("extract", tmp_path / "train.csv", "-c", made[0], "-c", made[1], "-o", cache).with_code(0)

    def labels(name, id_):
        events = featcache.open(cache, name)[id_]
        return [(round(start, 6), round(end, 6), label) for start, end, label in events]

    assert [labels("ctm", id_) for id_ in ("r0", "r1", "r2")] == [
        [(0.1, 0.3, "a")],
        [(0, 0.8, "b")],
        [(0, 2.2, "c")],
    ]
    assert [labels("rttm", id_) for id_ in ("r1", "r2")] == [
        [(0, 0.8, "anna"), (0.2, 0.8, "ben")],
        [(0, 0.4, "ben"), (0, 2.2, "anna")],
    ]


def test_label_files_in_a_tar_are_read_there(speech, tmp_path, cli):
    with tarfile.open(speech.folder / "align.tar", "w") as tar:
        tar.add(speech.folder / "align", "align")
    inside = config(tmp_path, "align.tar/align/{id}.TextGrid", "inside")
    beside = config(tmp_path, "align/{id}.TextGrid", "beside")
    manifest, cache = speech.folder / "train.csv", tmp_path / "cache"
    cli("extract", manifest, "-c", inside, "-c", beside, "-o", cache).with_code(0)
    inside, beside = (featcache.open(cache, name) for name in ("inside", "beside"))
    assert all_events(inside) == all_events(beside)


def test_the_labels_of_a_faster_copy_are_earlier(speech, tmp_path, cli):
    made = config(tmp_path, augment={"speed": [0.5, 1.0]})
    cache = tmp_path / "cache"
    cli("extract", speech.folder / "train.csv", "-c", made, "-o", cache).with_code(0)
    words = featcache.open(cache)
    assert len(words) == 24
    for id_ in speech.ids:
        slow = [Event(2 * first, 2 * last, label) for first, last, label in words[id_]]
        assert words[f"{id_}_sp0.5"] == slow
    dataset = featcache.FeatureDataset(words, speech.folder / "train.csv", copies=False)
    assert [*dataset.ids] == speech.ids


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("all.ctm", "give a path with"),
        ("s3://bucket/{id}", "without ':'"),
        ("cat {id} |", "without ':' and '|'"),
        ("{id}.{", "give a path with"),
        ("{label}/{nothing}.ctm", "has no column 'nothing', which params.label_files names"),
    ],
)
def test_a_template_without_meaning_is_one_line(speech, tmp_path, cli, template, what):
    made = config(tmp_path, template)
    manifest = speech.folder / "train.csv"
    refused = cli("extract", manifest, "-c", made, "-o", tmp_path / "cache").with_code(2)
    (line,) = refused.err.strip().splitlines()
    assert what in line
    assert not (tmp_path / "cache").exists() or not [*(tmp_path / "cache").iterdir()]


def test_what_has_no_meaning_for_labels_is_one_line(speech, tmp_path, cli):
    made, cache = config(tmp_path), tmp_path / "cache"
    manifest = speech.folder / "train.csv"
    cli("extract", manifest, "-c", made, "-o", cache).with_code(0)
    for arguments, what in (
        (("stats", cache, "-o", tmp_path / "stats.npz"), "holds events"),
        (("fit-kmeans", cache, "-k", "2", "-o", tmp_path / "k"), "k-means takes"),
        (("probe", made, manifest), "reads no audio"),
        (
            ("extract", manifest, "-c", made, "--from", cache, "-o", cache),
            "--from is only for units and for store.pool: labels of words reads other files",
        ),
    ):
        refused = cli(*arguments).with_code(2)
        assert what in refused.err.strip().splitlines()[-1]
    with pytest.raises(ConfigError, match="reads other files, and no audio"):
        featcache.extractor(featcache.open(cache))


def test_real_sentences_have_their_words(tmp_path, cli):
    """LJSpeech's words at even steps: what is read is what was written, and crops of frames
    and words are of the same time."""
    import csv

    import soundfile
    from real_speech import DATA

    if not (DATA / "ljspeech/wav.csv").exists():
        pytest.skip("no LJSpeech")
    table = csv.DictReader((DATA / "ljspeech/wav.csv").read_text().splitlines())
    rows = [row for row in table if row["text"]]
    written = {}
    lines = ["id,path"]
    for row in rows:
        path = DATA / "ljspeech" / row["path"]
        seconds = soundfile.info(path).duration
        words = row["text"].split()
        times = np.linspace(0, seconds, len(words) + 1).tolist()
        written[row["id"]] = [*map(Event, times, times[1:], words)]
        grid = long_textgrid(seconds, {"phones": [], "words": written[row["id"]]})
        (tmp_path / f"{row['id']}.TextGrid").write_text(grid)
        lines.append(f"{row['id']},{path}")
    manifest = tmp_path / "lj.csv"
    manifest.write_text("\n".join(lines) + "\n")
    made = config(tmp_path, "{id}.TextGrid", params={"tier": "words"})
    cli("extract", manifest, "-c", made, "-c", "fbank80", "-o", tmp_path / "cache").with_code(0)
    caches = {name: featcache.open(tmp_path / "cache", name) for name in ("fbank80", "words")}
    assert all_events(caches["words"]) == written
    dataset = featcache.FeatureDataset(caches, manifest, crop=featcache.Crop(seconds=1.0))
    for batch in featcache.DataLoader(dataset, batch_size=4):
        events = batch["features"]["words"]
        assert batch["features"]["fbank80"].shape[1] == 100
        assert events.lengths.tolist() == batch["lengths"]["words"].tolist()
        assert 0 <= events.times.min() <= events.times.max() <= 1
        for row, id_ in enumerate(batch["ids"]):
            labels = [
                label for at, label in zip(events.rows, events.labels, strict=True) if at == row
            ]
            text = " ".join(event.label for event in written[id_])
            assert " ".join(labels) in text


def test_parts_of_a_corpus_and_a_bucket_hold_labels(speech, tmp_path):
    """The parts have a manifest each; the bucket is in memory."""
    lines = (speech.folder / "train.csv").read_text().splitlines()
    for name, rows in (("a", lines[1:7]), ("b", lines[7:])):
        (speech.folder / f"{name}.csv").write_text("\n".join([lines[0], *rows]) + "\n")
    made = config(tmp_path)
    options = featcache.Options(device="cpu", threads=1)
    manifests = [speech.folder / "a.csv", speech.folder / "b.csv"]
    expected_events = {
        row["id"]: expected(number, row["duration"]) for number, row in enumerate(speech.rows)
    }
    for place in (str(tmp_path / "corpus"), f"memory://{uuid.uuid4()}/corpus"):
        for _ in range(2):  # the second time, nothing is to be done
            featcache.extract(manifests, made, place, options)
        corpus = featcache.open(place)
        assert {id_: corpus[id_] for id_ in corpus.ids} == expected_events
        assert corpus["b", 0] == expected_events["utt-06"]
        dataset = featcache.FeatureDataset(corpus, str(speech.folder / "[ab].csv"))
        batch = next(iter(featcache.DataLoader(dataset, batch_size=12, shuffle=False)))
        assert sum(batch["lengths"].tolist()) == 22
        events = corpus.batch(speech.ids, start=0.05, duration=0.1, check=True)[0]
        assert events.labels == [f"w{number}" for number in range(12) if number != 3]


def test_checked_events_have_checked_labels(speech, tmp_path, cli):
    made, cache = config(tmp_path, params={"tier": "words"}), tmp_path / "cache"
    cli("extract", speech.folder / "train.csv", "-c", made, "-o", cache).with_code(0)
    words = featcache.open(cache)
    expected_events = words.item("utt-07", check=True)
    name, _ = words.index.place(words.position("utt-07"))
    flip(words.version.path / "shards" / name / "side_labels/c/0", 1)
    again = featcache.open(cache)
    assert len(again.item("utt-07")) == len(expected_events)
    for read in (again.item, lambda id_, check: again.batch([id_], check=check)):
        with pytest.raises(DamagedError, match="side_labels"):
            read("utt-07", check=True)


def test_a_label_file_that_changes_while_it_is_read_is_read_again_later(
    speech, tmp_path, monkeypatch
):
    """An aligner that writes it just now may have written half of it."""
    manifest, cache = speech.folder / "train.csv", tmp_path / "cache"
    command = ("extract", manifest, "-c", config(tmp_path), "-o", cache, "--threads", 1)

    def opened(path, real=from_files.open_file):
        file, stamp = real(path)
        os.utime(path, ns=(1, 1))
        return file, stamp

    with monkeypatch.context() as patched:
        patched.setattr(from_files, "open_file", opened)
        assert "12 failed" in run_here(*command, code=3)
    assert {failure.message for failure in ledger(cache).values()} == {
        "the file changed while it was read"
    }
    run_here(*command)
    assert [*featcache.open(cache)] == speech.ids


def test_sources_of_labels_are_label_files_in_containers_too(tmp_path, cli):
    text = ctm_of("a", [(0, 1, "x")]) + ctm_of("b", [(0, 1, "y")])
    (tmp_path / "all.ctm").write_text(text)
    manifest, cache = tmp_path / "train.csv", tmp_path / "cache"
    manifest.write_text("id,path\na,a.wav\nb,b.wav\n")
    cli("extract", manifest, "-c", config(tmp_path, "all.ctm/{stem}"), "-o", cache).with_code(0)
    check = ("verify", cache, "--manifest", manifest)
    for how in ("stat", "content"):
        cli(*check, f"--sources={how}").with_code(0)
    (tmp_path / "all.ctm").write_text(text.replace("y", "z"))
    changed = cli(*check, "--sources=content").with_code(1)
    assert "b: " in changed.out
    assert "all.ctm/b" in changed.out
    assert "all.ctm/a" not in changed.out


def test_sources_of_labels_at_urls_are_asked_for_if_the_manifest_names_them(
    speech, tmp_path, cli, server
):
    pytest.importorskip("obstore")
    folder = speech.folder
    server.files = {
        f"/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*.*")
        if path.is_file()
    }
    manifest, cache, root = folder / "train.csv", tmp_path / "cache", ("--root", server.url("/"))
    made = config(tmp_path, params={"tier": "words"})
    cli("extract", manifest, "-c", made, "-o", cache, *root).with_code(0)
    unasked = cli("verify", cache, "--sources").with_code(0)
    assert "featcache asks only for URLs that --manifest has" in unasked.out
    check = ("verify", cache, "--manifest", manifest, *root)
    for how in ("stat", "content"):
        ended = cli(*check, f"--sources={how}").with_code(0)
        assert "asked for" not in ended.out
    server.files["/align/utt-02.TextGrid"] = b"changed"
    assert "utt-02" in cli(*check, "--sources=content").with_code(1).out
