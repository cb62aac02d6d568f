"""`featcache extract` once more: only what is missing or has changed is done, and nothing is lost."""

import os

import pytest
import soundfile
from cache_contents import check, items, only_version, versions_in
from corpora import Corpus, speech
from extractions import extracted
from processes import run_python

from featcache.config import load_config
from featcache.errors import DamagedError
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest import read_manifest


def test_again_does_nothing_and_says_so(cli, corpus, reference):
    """The second run opens no audio, makes no shard and no record of a run."""
    before = sorted(reference.rglob("*"))
    again = cli("extract", corpus.manifest(), "-o", reference)
    assert (again.code, again.err) == (0, "")
    assert f"nothing to do: all {len(corpus.rows)} utterances are already there" in again.out
    assert sorted(reference.rglob("*")) == before


def test_torch_is_loaded_only_by_what_extracts(plain, scratch):
    """A run that finds nothing to do loads none, nor if failures stand. A device that is not there is refused."""
    script = """
    import sys
    from featcache.cli import main
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        print("code", end.code, "torch" if "torch._C" in sys.modules else "no torch")
    """
    manifest = plain.manifest([*plain.rows[:2], {"id": "gone", "path": "gone.wav"}], "gone.csv")
    cache = scratch / "c"

    def extract(*options):
        return run_python(script, "extract", manifest, "-o", cache, *options).splitlines()

    assert extract("--device", "meta") == ["code 2 torch"]
    assert not cache.exists()
    assert extract()[-1] == "code 3 torch"
    assert [extract(*options)[-1] for options in ((), ("--device", "cpu"))] == ["code 3 no torch"] * 2
    assert extract("--dry-run")[-1] == "code 0 no torch"
    assert extract("--dry-run", "-c", "fbank80", "-c", "mfcc13")[-1] == "code 0 torch"
    assert extract("--retry-failed", "--device", "cpu,cpu")[-1] == "code 3 torch"
    assert check(cache).problems == []


def test_another_config_is_another_version_and_says_what_differs(cli, plain, scratch):
    """Nothing is reused that another config made; one line names the keys."""
    (scratch / "a.yaml").write_text("name: mine\nextractor: fbank\n")
    (scratch / "b.yaml").write_text("name: mine\nextractor: fbank\nparams: {low_freq: 0, num_mel_bins: 40}\n")
    cache = scratch / "c"
    first = cli("extract", plain.manifest(), "-o", cache, "-c", scratch / "a.yaml")
    second = cli("extract", plain.manifest(), "-o", cache, "-c", scratch / "b.yaml")
    assert (first.code, first.err) == (0, "")
    assert second.code == 0
    (line,) = second.err.splitlines()
    assert "params.low_freq: 20.0 -> 0.0" in line
    assert "params.num_mel_bins: 80 -> 40" in line
    assert "params.high_freq" not in line
    assert len(versions_in(cache)) == 2
    again = cli("extract", plain.manifest(), "-o", cache, "-c", scratch / "b.yaml")
    assert "nothing to do" in again.out
    assert again.err == ""


def test_what_decides_no_value_makes_no_version(cli, plain, scratch):
    """A default spelt out, another order of keys or a limit of seconds is the same version."""
    (scratch / "a.yaml").write_text("name: mine\nextractor: fbank\n")
    (scratch / "b.yaml").write_text(
        "audio: {max_seconds: 100, sample_rate: 16000}\nparams: {num_mel_bins: 80}\nextractor: fbank\nname: mine\n"
    )
    cli("extract", plain.manifest(), "-o", scratch / "c", "-c", scratch / "a.yaml")
    again = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", scratch / "b.yaml")
    assert "nothing to do" in again.out
    assert len(versions_in(scratch / "c")) == 1


def test_rows_removed_are_surplus(cli, plain, scratch):
    """What a manifest no longer names stays, and verify counts it."""
    cli("extract", plain.manifest(), "-o", scratch)
    fewer = plain.manifest(plain.rows[:-3], "fewer.csv")
    assert "nothing to do: all 9 utterances are already there" in cli("extract", fewer, "-o", scratch).out
    verified = cli("verify", scratch, "--manifest", fewer)
    assert verified.code == 0
    assert "3 utterances are not in the manifest" in verified.out


@pytest.mark.parametrize(
    "changed",
    [{"path": "stereo.wav"}, {"start": 0.1}, {"duration": 0.3}, {"channel": 1}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_row_that_changed_is_extracted_again(cli, scratch, changed):
    """The new one counts from then on, and its neighbours are left alone."""
    corpus = Corpus(scratch / "corpus")
    corpus.folder.mkdir()
    for i in range(4):
        soundfile.write(corpus.folder / f"{i}.wav", speech(0.5, channels=2, seed=i), 16000)
        corpus.add(f"utt-{i}", f"{i}.wav", start=0.0, duration=0.4, channel=0)
    soundfile.write(corpus.folder / "stereo.wav", speech(0.6, channels=2, seed=9), 16000)
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    before = items(cache)
    corpus.rows[2] |= changed
    verified = cli("verify", cache, "--manifest", corpus.manifest())
    assert verified.code == 1
    assert "utt-2: its row is not the one that was extracted" in verified.out
    planned = cli("extract", corpus.manifest(), "-o", cache, "--dry-run").out
    assert "1 of 4 utterances to extract, 1 of them changed" in planned
    made = cli("extract", corpus.manifest(), "-o", cache, "--json")
    assert (made.code, extracted(made)) == (0, 1)
    after = items(cache)
    assert {name for name in after if after[name] != before[name]} == {"utt-2"}
    assert "1 older item of utterances that were extracted again: not read, but not removed" in cli("info", cache).out
    fresh = scratch / "fresh"
    cli("extract", corpus.manifest(), "-o", fresh)
    assert after == items(fresh)
    report = check(cache, manifest=read_manifest(corpus.manifest()))
    assert (report.problems, report.utterances, report.repeated, report.surplus) == ([], 4, 0, 0)


def test_a_row_that_changes_back_and_forth_gives_what_the_last_run_asked_for(cli, plain, scratch):
    """Of a chain of items, the latest one counts."""
    rows = [dict(row) for row in plain.rows[:3]]
    duration, seen = rows[1]["duration"], {}
    for step, seconds in enumerate((duration, 0.2, duration, 0.3, 0.2, duration)):
        rows[1]["duration"] = seconds
        assert cli("extract", plain.manifest(rows, "chain.csv"), "-o", scratch).code == 0
        features = items(scratch)["utt-01"]
        assert seen.setdefault(seconds, features) == features, step
        assert check(scratch, manifest=read_manifest(plain.manifest(rows, "chain.csv"))).problems == []
    assert len(set(seen.values())) == 3


def test_a_changed_file_is_extracted_again_when_asked(cli, plain, scratch):
    """`--check-sources` notices another size or mtime; without it nobody looks at the audio."""
    corpus = plain.copy(scratch / "corpus")
    cache = scratch / "c"
    cli("extract", corpus.manifest(), "-o", cache)
    before = items(cache)
    soundfile.write(corpus.folder / "03.wav", speech(0.46, seed=99), 16000)  # same size, other mtime and sound
    os.utime(corpus.folder / "05.wav", ns=(1, 1))  # touched, and the same
    assert "nothing to do" in cli("extract", corpus.manifest(), "-o", cache).out
    made = cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--json")
    assert (made.code, extracted(made)) == (0, 2)
    after = items(cache)
    assert {name for name in after if after[name] != before[name]} == {"utt-03"}
    assert "nothing to do" in cli("extract", corpus.manifest(), "-o", cache, "--check-sources").out
    assert check(cache, manifest=read_manifest(corpus.manifest())).problems == []


def test_only_shards_that_hold_the_rows_are_asked_for_their_files(cli, plain, scratch):
    """A part of the manifest concerns a part of the shards: of others, what files they were made of is not read."""
    assert cli("extract", plain.manifest(), "-o", scratch, "--shard-size", "0.02").code == 0
    version, part = only_version(scratch), read_manifest(plain.manifest(plain.rows[:3], "part.csv"))
    for name in version.shard_names():
        if not {*version.shard(name).table.ids} & {*part.ids}:
            (version.shard(name).folder / "items" / "c" / "0" / "0").unlink()
    extraction = plan_extraction(part, [load_config("fbank80")], scratch, Options("cpu", 1, check_sources=True))
    assert extraction.versions[0].num_missing == 0
    whole = read_manifest(plain.manifest())
    with pytest.raises(DamagedError, match=r"items.*missing"):
        plan_extraction(whole, [load_config("fbank80")], scratch, Options("cpu", 1, check_sources=True))


def test_a_file_that_is_gone_is_no_reason_to_drop_its_features(cli, plain, scratch):
    """`--check-sources` after the audio was tidied away: what cannot be extracted again stays."""
    corpus = plain.copy(scratch / "corpus")
    cache = scratch / "c"
    cli("extract", corpus.manifest(), "-o", cache)
    before = items(cache)
    (corpus.folder / "03.wav").unlink()
    os.utime(corpus.folder / "05.wav", ns=(1, 1))
    made = cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--json")
    assert (made.code, extracted(made)) == (0, 1)
    assert items(cache) == before


def test_another_corpus_with_the_same_ids_and_paths_is_refused(cli, plain, scratch):
    """ "Nothing to do" would hand training the other corpus's features. A corpus that was merely moved is fine."""
    cache = scratch / "c"
    cli("extract", plain.manifest(), "-o", cache)
    moved, other = plain.copy(scratch / "moved"), plain.copy(scratch / "other")
    assert "nothing to do" in cli("extract", moved.manifest(), "-o", cache).out
    soundfile.write(other.folder / "03.wav", speech(0.7, seed=99), 16000)
    refused = cli("extract", other.manifest(), "-o", cache)
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert "1 of 12 files" in line
    assert "03.wav" in line
    assert "another corpus" in line
    made = cli("extract", other.manifest(), "-o", cache, "--check-sources", "--json")
    assert (made.code, extracted(made)) == (0, 1)


def test_what_replaces_an_item_and_fails_leaves_it_there_and_verify_says_so(cli, plain, scratch):
    """Whether or not a neighbour in the same run has been replaced."""
    cache = scratch / "c"
    cli("extract", plain.manifest(), "-o", cache)
    before = items(cache)
    rows = [dict(row) for row in plain.rows]
    rows[3]["path"], rows[5]["duration"] = "gone.wav", 0.3
    changed = plain.manifest(rows, "changed.csv")
    assert cli("extract", changed, "-o", cache).code == 3
    assert {name for name, found in items(cache).items() if found != before[name]} == {rows[5]["id"]}
    (problem,) = check(cache, manifest=read_manifest(changed)).problems
    assert (problem.kind, problem.id) == ("changed", rows[3]["id"])


def test_recompute_finds_the_audio_of_every_run(cli, plain, corpus, scratch):
    """Manifests of several folders fill one cache; each utterance comes from below its own, whatever is to be there."""
    rows = [row for row in corpus.rows if row["id"].startswith("plain")]
    for manifest in (plain.manifest(), corpus.manifest(rows, "plain.csv")):
        assert cli("extract", manifest, "-o", scratch).code == 0
    for options in ((), ("--manifest", plain.manifest())):
        verified = cli("verify", scratch, "--recompute", 100, *options)
        assert verified.code == 0, verified.out
        assert "extracted 24 again: 24 bit-identical" in verified.out
