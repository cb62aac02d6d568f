"""What `export` writes, as the other tools' own readers read it: the same ids and values, in
the same number; and it is there whole, or not at all."""

import csv
import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile

import dataset_hub
import numpy as np
import pytest
from make_cache import made_cache, make_features
from pages import blocks_of
from processes import commands, run_python, run_script

import featcache
from featcache.errors import ArgumentError, ManifestError, StoreError
from featcache.export import FORMATS, export
from featcache.manifest.read import manifest_of, read_manifest
from featcache.manifest.write import to_jsonl
from featcache.spec import Clip, Events, Frames, Track

TEXTS = {"a.b-1": "hello, you", "x/y": "good\nnight", "utt 2": "kettle", "z": ""}


def renamed(features, ids=("a.b-1", "x/y", "u2", "z")):
    return dict(zip(ids, features.values(), strict=True))


@pytest.fixture
def floats(tmp_path):
    """Two shards of float16 `[frames, 80]`."""
    features = renamed(make_features(4))
    first, *others = features.items()
    return features, made_cache(tmp_path / "c", dict([first]), dict(others))


@pytest.fixture
def codes(tmp_path):
    features = renamed(make_features(4, (16,), "uint16", max_frames=9))
    return features, made_cache(tmp_path / "codes", features, name="codes", frame_rate=12.5)


def table(features, **columns):
    rows = [{"id": id_, "path": f"audio/{id_}.wav"} for id_ in features]
    return manifest_of([{**row, **{n: v[row["id"]] for n, v in columns.items()}} for row in rows])


def assert_same(found, features, dtype=None):
    assert found.keys() == features.keys()
    for id_, values in features.items():
        expected = values if dtype is None else values.astype(dtype)
        assert found[id_].dtype == expected.dtype
        np.testing.assert_array_equal(found[id_], expected)


# Each format, as its tool reads it


def test_kaldi_as_kaldiio_and_lhotse_read_it(tmp_path, floats):
    kaldiio = pytest.importorskip("kaldiio")
    features, cache = floats
    speakers = dict.fromkeys(features, "anna smith")
    texts = {id_: f" said\n{id_} " for id_ in features}
    done = export(cache, "kaldi", tmp_path / "data", table(features, text=texts, speaker=speakers))
    assert_same(dict(kaldiio.load_scp(str(tmp_path / "data/feats.scp"))), features, "f4")
    ids = [line.split()[0] for line in (tmp_path / "data/feats.scp").read_text().splitlines()]
    assert ids == sorted(features, key=str.encode)
    expected = [f"{id_} said {id_}" for id_ in ids]
    assert (tmp_path / "data/text").read_text().splitlines() == expected
    expected = [f"{id_} anna_smith" for id_ in ids]
    assert (tmp_path / "data/utt2spk").read_text().splitlines() == expected
    assert done.notes == [
        "columns left out: 'path'",
        "speakers have _ in the place of white space",
        "float16 is stored as float32, which holds every value exactly",
    ]


def test_kaldi_says_that_float64_is_rounded(tmp_path):
    cache = made_cache(tmp_path / "c", make_features(2, dtype="float64"))
    assert export(cache, "kaldi", tmp_path / "data").notes == ["float64 is rounded to float32"]


@pytest.mark.parametrize("speakers", [("19", "026", "", "1.50"), ("19", "2", "", "4")])
def test_texts_are_those_of_the_manifest_even_if_all_of_them_are_numbers(
    tmp_path, floats, speakers
):
    features, cache = floats
    texts = ("true", "false", "true", "")
    rows = zip(features, texts, speakers, strict=True)
    lines = "".join(f"{id_},{text},{speaker}\n" for id_, text, speaker in rows)
    (tmp_path / "m.csv").write_text(f"id,text,speaker\n{lines}")
    manifest = read_manifest(tmp_path / "m.csv", audio=False)
    export(cache, "kaldi", tmp_path / "data", manifest)
    for file, cells in (("text", texts), ("utt2spk", speakers)):
        found = [line.split() for line in (tmp_path / "data" / file).read_text().splitlines()]
        expected = sorted([id_, *cell.split()] for id_, cell in zip(features, cells, strict=True))
        assert found == [row for row in expected if row[1:] or file == "text"]
    export(cache, "lhotse", tmp_path / "cuts.jsonl", manifest)
    cuts = [json.loads(line) for line in (tmp_path / "cuts.jsonl").read_text().splitlines()]
    said = [(cut["supervisions"][0]["text"], cut["supervisions"][0]["speaker"]) for cut in cuts]
    assert said == [*zip(texts, speakers, strict=True)]


@pytest.mark.parametrize("kind", ["lhotse", "shar", "webdataset", "numpy"])
def test_an_infinite_number_is_null_as_json_has_none(tmp_path, floats, kind):
    """Also inside a list. (NaN is a missing value.)"""
    features, cache = floats
    scores = dict(zip(features, (1.5, math.inf, -math.inf, math.nan), strict=True))
    lists = {id_: [1, {"x": score}] for id_, score in scores.items()}
    target = tmp_path / "out.jsonl"
    export(cache, kind, target, table(features, score=scores, list=lists))
    text = ""
    for file in [target] if kind == "lhotse" else target.rglob("*"):
        if file.suffix in (".jsonl", ".gz", ".tar"):
            data = file.read_bytes()
            text += (gzip.decompress(data) if file.suffix == ".gz" else data).decode("latin-1")
    assert "Infinity" not in text
    assert "NaN" not in text
    assert text.count('"score": null') == 2
    assert text.count('"list": [1, {"x": null}]') == 3


def test_an_infinite_number_of_a_manifest_is_null_in_json_lines(floats):
    scores = dict.fromkeys(floats[0], math.inf)
    for line in to_jsonl(table(floats[0], score=scores)).splitlines():
        assert json.loads(line, parse_constant=pytest.fail)["score"] is None


def test_kaldi_vectors_and_codes(tmp_path, codes):
    kaldiio = pytest.importorskip("kaldiio")
    features, cache = codes
    export(cache, "kaldi", tmp_path / "codes-kaldi")
    read = kaldiio.load_scp(str(tmp_path / "codes-kaldi/feats.scp"))
    assert_same(dict(read), features, "f4")
    vectors = {f"v{n}": np.full((1, 5), n, np.float32) for n in range(3)}
    cache = made_cache(tmp_path / "v", vectors, axis=Clip())
    export(cache, "kaldi", tmp_path / "vectors")
    read = kaldiio.load_scp(str(tmp_path / "vectors/feats.scp"))
    assert_same(dict(read), {id_: vector[0] for id_, vector in vectors.items()})


def test_lhotse_s_cuts_are_those_of_the_adapter_and_read_the_shards(tmp_path, floats):
    lhotse = pytest.importorskip("lhotse")
    from featcache.adapters.lhotse import cuts

    features, cache = floats
    rows = table(features, text=TEXTS | {"u2": "kettle"}, n=dict.fromkeys(features, 3))
    export(cache, "lhotse", tmp_path / "cuts.jsonl.gz", rows)
    read = lhotse.CutSet.from_file(tmp_path / "cuts.jsonl.gz")
    theirs = cuts(featcache.FeatureDataset(cache, rows))
    assert [cut.to_dict() for cut in read] == [cut.to_dict() for cut in theirs]
    lhotse.validate(read, read_data=True)
    assert_same({cut.id: cut.load_features() for cut in read}, features, "f4")


def test_lhotse_s_cuts_of_a_track_read_the_track(tmp_path):
    lhotse = pytest.importorskip("lhotse")
    from featcache.adapters.lhotse import cuts

    side = (Track("slow", (2,), "float32", "every third frame", Frames(100 / 3)),)
    features = {f"u{frames}": np.zeros((frames, 4), "f4") for frames in (9, 31)}
    track = made_cache(tmp_path / "c", features, side=side).track("slow")
    export(track, "lhotse", tmp_path / "cuts.jsonl")
    read = lhotse.CutSet.from_file(tmp_path / "cuts.jsonl")
    assert [cut.to_dict() for cut in read] == [cut.to_dict() for cut in cuts(track)]
    assert_same({cut.id: cut.load_features() for cut in read}, dict(track.items()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
def test_shar_as_lhotse_reads_it(tmp_path, floats, monkeypatch):
    lhotse = pytest.importorskip("lhotse")
    monkeypatch.setattr("featcache.export.lhotse.FILE_BYTES", 5000)  # several tars
    features, cache = floats
    done = export(cache, "shar", tmp_path / "shar", table(features, text=TEXTS | {"u2": "é"}))
    read = [*lhotse.CutSet.from_shar(in_dir=tmp_path / "shar")]
    assert_same({cut.id: cut.load_features() for cut in read}, features)
    assert [cut.supervisions[0].text for cut in read] == ["hello, you", "good\nnight", "é", ""]
    assert done.files > 2
    assert [cut.num_frames for cut in read] == [len(values) for values in features.values()]


@pytest.mark.parametrize("shape", [(80,), (), (2, 3)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "uint16"])
def test_parquet_as_datasets_reads_it(tmp_path, shape, dtype, monkeypatch):
    datasets = pytest.importorskip("datasets")
    features = make_features(5, shape, dtype, max_frames=6)
    cache = made_cache(tmp_path / "c", features)
    numbers = {id_: number for number, id_ in enumerate(features)}
    rows = table(features, n=numbers, tags={id_: [id_] for id_ in features})
    monkeypatch.setattr("featcache.export.huggingface._GROUP_BYTES", 700)
    export(cache, "datasets", tmp_path / "out", rows)
    read = datasets.load_dataset(
        "parquet", data_files=f"{tmp_path}/out/*.parquet", cache_dir=str(tmp_path / "hf")
    )["train"].with_format("numpy")
    assert_same({row["id"]: np.asarray(row["features"], dtype) for row in read}, features)
    assert read.features["n"].dtype == "int64"
    array_types = {1: datasets.List, 2: datasets.Array2D, 3: datasets.Array3D}
    assert type(read.features["features"]) is array_types[1 + len(shape)]
    assert [row["tags"] for row in read] == [json.dumps([id_]) for id_ in features]


def test_tars_are_filled_in_order_and_then_the_next_begins(tmp_path, monkeypatch, floats):
    monkeypatch.setattr("featcache.export.webdataset.FILE_BYTES", 5000)
    features, cache = floats
    export(cache, "webdataset", tmp_path / "out")
    ids = []
    tars = sorted((tmp_path / "out").iterdir())
    assert [tar.name for tar in tars] == [f"features-{n:06d}.tar" for n in range(len(tars))]
    for path in tars:
        with tarfile.open(path) as tar:
            inside = [json.load(tar.extractfile(name))["id"] for name in tar.getnames()[1::2]]
        assert sum(features[id_].nbytes for id_ in inside[:-1]) < 5000, "the last is one too many"
        ids += inside
    assert len(tars) > 1
    assert ids == [*features]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a tar left open
def test_webdataset_as_its_own_reader_reads_it(tmp_path, floats):
    webdataset = pytest.importorskip("webdataset")
    features, cache = floats
    done = export(
        cache,
        "webdataset",
        tmp_path / "out",
        table(features, n=dict(zip(features, "1234", strict=True))),
    )
    (tar,) = (tmp_path / "out").iterdir()
    samples = [*webdataset.WebDataset(str(tar), shardshuffle=False).decode()]
    assert_same({sample["json"]["id"]: sample["npy"] for sample in samples}, features)
    assert [sample["__key__"] for sample in samples] == ["a_b-1", "x/y", "u2", "z"]
    assert done.notes == ["1 key with _ in the place of dots or marks; .json has the ids"]
    clash = made_cache(tmp_path / "d", renamed(make_features(4), ("a.b", "a_b", "c", "d")))
    with pytest.raises(ArgumentError, match=r"'a\.b', 'a_b' differ only in dots"):
        export(clash, "webdataset", tmp_path / "clash")
    assert not (tmp_path / "clash").exists()


def test_numpy_files_are_called_after_ids_and_stay_below_the_folder(tmp_path, floats):
    features, cache = floats
    done = export(cache, "numpy", tmp_path / "out")
    index = [json.loads(line) for line in (tmp_path / "out/index.jsonl").read_text().splitlines()]
    found = {entry["id"]: np.load(tmp_path / "out" / entry["file"]) for entry in index}
    assert_same(found, features)
    assert (done.utterances, done.files) == (4, 5)
    for number, id_ in enumerate(("../up", "/root", "a//b", "a/../../b", "x" * 300)):
        hostile = made_cache(tmp_path / f"h{number}", {id_: features["z"]})
        with pytest.raises(ArgumentError, match="ids are names of files here; 1 id does not fit"):
            export(hostile, "numpy", tmp_path / "hostile")
        assert not list(tmp_path.glob("*hostile*"))


@pytest.mark.parametrize("below", ["a.npy/b", "a.npy/b/c", "index.jsonl/x"])
@pytest.mark.parametrize("step", [1, -1])
def test_a_numpy_file_that_would_be_a_folder_too_is_refused(tmp_path, below, step):
    features = renamed(make_features(2), ("a", below)[::step])
    cache = made_cache(tmp_path / "c", features)
    with pytest.raises(ArgumentError, match=f"below another file; 1 id does not fit: '{below}'"):
        export(cache, "numpy", tmp_path / "out")


def test_codes_as_qwen3_tts_has_them(tmp_path, codes):
    features, cache = codes
    columns = {
        "text": dict.fromkeys(features, "good"),
        "ref_audio": dict.fromkeys(features, "r.wav"),
    }
    export(cache, "qwen3-tts", tmp_path / "q.jsonl", table(features, **columns))
    lines = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert_same({line["id"]: np.array(line["audio_codes"], np.uint16) for line in lines}, features)
    first = {name: lines[0][name] for name in ("audio", "text", "ref_audio")}
    assert first == {"audio": "audio/a.b-1.wav", "text": "good", "ref_audio": "r.wav"}
    with pytest.raises(ArgumentError, match="needs a manifest with 'text', 'ref_audio'"):
        export(cache, "qwen3-tts", tmp_path / "no.jsonl", table(features))
    segments = {id_: {"start": 1.5} for id_ in features}
    cache = made_cache(tmp_path / "segments", features, rows=segments)
    rows = table(features, start=dict.fromkeys(features, 1.5), **columns)
    with pytest.raises(ArgumentError, match="rows are parts of files, by 'start'"):
        export(cache, "qwen3-tts", tmp_path / "no.jsonl", rows)
    mimi = made_cache(tmp_path / "mimi", make_features(1, (8,), "uint16"), name="mimi")
    with pytest.raises(ArgumentError, match="Qwen3-TTS needs 16 codes a frame"):
        export(mimi, "qwen3-tts", tmp_path / "no.jsonl")
    assert not (tmp_path / "no.jsonl").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a tar left open
def test_no_key_of_webdataset_is_one_that_its_reader_skips(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    ids = ("__a__/b", "__a__/__b__/c", "/", "__z__")
    features = renamed(make_features(4), ids)
    export(made_cache(tmp_path / "c", features), "webdataset", tmp_path / "out")
    (tar,) = (tmp_path / "out").iterdir()
    samples = webdataset.WebDataset(str(tar), shardshuffle=False).decode()
    assert_same({sample["json"]["id"]: sample["npy"] for sample in samples}, features)


def test_one_number_for_each_utterance(tmp_path):
    datasets = pytest.importorskip("datasets")
    numbers = {f"n{n}": np.array([n], np.float32) for n in range(3)}
    cache = made_cache(tmp_path / "c", numbers, axis=Clip())
    export(cache, "datasets", tmp_path / "out")
    read = datasets.load_dataset(
        "parquet", data_files=f"{tmp_path}/out/*.parquet", cache_dir=str(tmp_path / "hf")
    )["train"]
    assert read.features["features"] == datasets.Value("float32")
    assert {row["id"]: row["features"] for row in read} == {"n0": 0.0, "n1": 1.0, "n2": 2.0}


@pytest.mark.parametrize(
    ("kind", "column"), [("numpy", "file"), ("qwen3-tts", "audio_codes"), ("qwen3-tts", "audio")]
)
def test_a_column_that_would_hide_ours_is_refused(tmp_path, codes, kind, column):
    features, cache = codes
    cells = {"text": "x", "ref_audio": "x", column: "x"}
    rows = manifest_of([{"id": id_, "path": f"audio/{id_}.wav", **cells} for id_ in features])
    with pytest.raises(ArgumentError, match=f"the manifest's '{column}' would hide ours"):
        export(cache, kind, tmp_path / "out.jsonl", rows)
    assert not (tmp_path / "out.jsonl").exists()


# Hugging Face's own code pushes and loads an export, by the commands of docs/export.md

PUSH, UPLOAD, LOAD = (
    block.text for block in blocks_of("docs/export.md", "text") if "me/features" in block.text
)
RUN_UPLOAD = f"""
import sys
from huggingface_hub.cli.hf import main
sys.argv = {UPLOAD.split()}
main()
"""
ALONE = """
import datasets, loopback
datasets.config.USE_PARQUET_EXPORT = False  # it would ask the host datasets-server.127.0.0.1
loopback.stay_on_loopback()
"""
PRINT = """
import json
type_of_features = str(features.features["features"])
print(json.dumps([type_of_features, [*features.with_format(None)]]))
"""


@pytest.fixture
def hub():
    """A hub on loopback, without datasets."""
    with dataset_hub.serve() as hub:
        yield hub


@pytest.fixture
def shell(cli, hub, tmp_path):
    """Runs scripts with this hub, where a folder `out` may lie."""
    pytest.importorskip("datasets")
    with commands(
        env=dataset_hub.environment(hub, tmp_path / "home"), modules=["datasets"], beside=cli
    ) as started:
        theirs = ["Use 'content=<...>' to upload"]  # huggingface_hub's use of httpx
        yield lambda script: run_script(started, ALONE + script, cwd=tmp_path, ignore=theirs)


@pytest.mark.parametrize(
    ("publish", "file"),
    [(PUSH, "data/train-00000-of-00001.parquet"), (RUN_UPLOAD, "data.parquet")],
    ids=["push_to_hub", "hf upload"],
)
def test_a_dataset_on_a_hub_has_what_the_cache_has(tmp_path, floats, hub, shell, publish, file):
    features, cache = floats
    texts = TEXTS | {"u2": "kettle"}
    numbers = {id_: number for number, id_ in enumerate(features)}
    export(cache, "datasets", tmp_path / "out", table(features, text=texts, n=numbers))
    shell(publish)
    assert len(hub.datasets["me/features"][file]) > 1000
    type_of_features, rows = json.loads(shell(LOAD + PRINT))
    assert type_of_features == "Array2D(shape=(None, 80), dtype='float16')"
    assert [row["id"] for row in rows] == [*features]
    assert_same({row["id"]: np.array(row["features"], "f2") for row in rows}, features)
    columns = {row["id"]: (row["text"], row["n"]) for row in rows}
    assert columns == {id_: (texts[id_], numbers[id_]) for id_ in features}


# What is lost is said, and nothing is lost in silence


def test_quantised_features_and_other_tracks_are_said(tmp_path):
    side = (Track("energy", (), "float32", "energy"),)
    cache = made_cache(tmp_path / "c", make_features(3), side=side, quantized=True)
    done = export(cache, "numpy", tmp_path / "out")
    assert done.notes == [
        "quantised features are float32, as they are read",
        "tracks left out: energy",
    ]
    assert_same({id_: np.load(tmp_path / f"out/{id_}.npy") for id_ in cache}, dict(cache.items()))


def test_utterances_that_the_version_lacks_are_counted(tmp_path, floats):
    features, cache = floats
    rows = manifest_of([{"id": id_} for id_ in ["gone", *features]])
    done = export(cache, "numpy", tmp_path / "out", rows)
    assert (done.utterances, done.missing, done.failed) == (4, ["gone"], {})


@pytest.mark.parametrize("kind", [*FORMATS])
def test_events_and_rows_of_another_file_are_refused(tmp_path, kind, floats):
    features, cache = floats
    events = made_cache(tmp_path / "e", {"u": np.array([[0.0, 1.0]])}, axis=Events())
    with pytest.raises(ArgumentError, match="holds events, which no format here has"):
        export(events, kind, tmp_path / "out.jsonl")
    rows = manifest_of([{"id": id_, "path": "other.wav"} for id_ in features])
    with pytest.raises(ManifestError, match="another row or file"):
        export(cache, kind, tmp_path / "out.jsonl", rows)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("kind", ["kaldi", "lhotse", "shar", "qwen3-tts"])
def test_a_refusal_names_the_track_that_does_not_fit(tmp_path, kind):
    side = (Track("wide", (2, 3), "float32", "two rows", Frames(100 / 3)),)
    cache = made_cache(tmp_path / "c", make_features(3, max_frames=9), side=side)
    what = f"{cache.version.path}: track wide: has features [frames, 2, 3], "
    with pytest.raises(ArgumentError, match=re.escape(what)):
        export(cache.track("wide"), kind, tmp_path / "out.jsonl")


def test_a_row_that_repeats_an_utterance_is_refused(tmp_path, floats):
    features, cache = floats
    rows = manifest_of([{"id": id_} for id_ in [*features, "z"]])
    with pytest.raises(ArgumentError, match="z: in several rows or parts: give one row for each"):
        export(cache, "numpy", tmp_path / "out", rows)


# Whole, or not at all


@pytest.mark.parametrize("kind", ["kaldi", "shar", "datasets", "webdataset", "numpy"])
def test_a_folder_that_is_not_empty_is_refused_and_an_error_leaves_nothing(tmp_path, kind, floats):
    _, cache = floats
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="must be new or empty"):
        export(cache, kind, full)
    shard = cache.version.path / "shards" / cache.index.shards[-1] / "features/c/0"
    file = next(path for path in shard.rglob("*") if path.is_file()) if shard.is_dir() else shard
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        export(cache, kind, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "full"]


def test_an_empty_folder_is_filled_behind_a_link_but_never_the_current_one(
    tmp_path, floats, monkeypatch
):
    features, cache = floats
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ArgumentError, match="the current one: name a new one in it"):
        export(cache, "numpy", tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    export(cache, "numpy", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    np.testing.assert_array_equal(np.load(tmp_path / "empty/z.npy"), features["z"])


def test_a_killed_export_leaves_nothing_that_looks_whole(tmp_path):
    cache = made_cache(tmp_path / "c", make_features(400))
    script = (
        "import sys, featcache, time; from featcache.export import export; from pathlib import Path\n"
        "cache = featcache.open(sys.argv[1])\n"
        "def slowly(_):\n    print(flush=True); time.sleep(0.01)\n"
        "export(cache, 'numpy', Path(sys.argv[2]), report=slowly)"
    )
    command = [sys.executable, "-c", script, str(cache.version.path), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        running.stdout.readline()
        os.kill(running.pid, signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    export(cache, "numpy", tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 401


def test_nothing_is_imported_while_there_is_a_hidden_output(tmp_path, floats):
    """An interrupt of an import ends the process at once, and would leave the output."""
    pytest.importorskip("pyarrow")
    script = """
        import sys
        from pathlib import Path
        import featcache
        from featcache.export import FORMATS, export

        def watch(kind, write):
            def watched(*args):
                before = {*sys.modules}
                notes = write(*args)
                print(kind, *({*sys.modules} - before))
                return notes
            return watched

        cache = featcache.open(sys.argv[1])
        for kind in sys.argv[3:]:
            FORMATS[kind] = FORMATS[kind]._replace(write=watch(kind, FORMATS[kind].write))
            export(cache, kind, Path(sys.argv[2], kind + ".jsonl"))
    """
    _, cache = floats
    kinds = [kind for kind in FORMATS if kind != "qwen3-tts"]
    assert run_python(script, cache.version.path, tmp_path, *kinds).split() == kinds


@pytest.mark.parametrize("kind", ["lhotse", "shar"])
def test_packed_cuts_do_not_tell_their_time_and_hidden_name(tmp_path, floats, kind):
    _, cache = floats
    export(cache, kind, tmp_path / "cuts.jsonl.gz")
    (packed,) = [path for path in tmp_path.rglob("*.gz") if path.is_file()]
    flags_and_time = packed.read_bytes()[3:8]
    assert flags_and_time == bytes(5)


def test_the_command_prints_what_it_wrote_and_what_is_missing(cli, tmp_path, floats):
    features, cache = floats
    with (tmp_path / "m.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *([id_, "t"] for id_ in [*features, "gone"])])
    arguments = ("export", "--to", "kaldi", cache.version.path, "--manifest", tmp_path / "m.csv")
    ended = cli(*arguments, "-o", tmp_path / "out")
    assert ended.code == 1
    assert f"{tmp_path}/out: 4 utterances as kaldi, 3 files" in ended.out
    assert "1 utterance missing in the version: gone" in ended.out
    document = json.loads(cli(*arguments, "-o", tmp_path / "again", "--json").out)
    assert (document["utterances"], document["missing"]) == (4, ["gone"])
    refused = cli(*arguments, "-o", tmp_path / "out")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    unknown = cli("export", "--to", "kaldo", cache.version.path, "-o", tmp_path / "x")
    assert (unknown.code, "choose lhotse, shar, kaldi" in unknown.err) == (2, True)
