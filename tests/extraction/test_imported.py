"""Features that other tools wrote become a version like any other: with the values that
their own readers give, by id, verified and repaired from their source; and damaged files
are failures."""

import json
import os
import pickle
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from cache_contents import ledger
from damage import flip
from make_cache import make_features
from processes import run_here

import featcache
from featcache.errors import AudioError, ConfigError, Reason
from featcache.extractors.imported import Imported, ImportedParams, read_array

_ARRAYS = make_features(3, dtype="float32").values()
FEATURES = dict(zip(("a", "x/b.1", "c"), _ARRAYS, strict=True))


def write_files(folder, features=FEATURES, suffix=".npy"):
    for id_, values in features.items():
        path = folder / f"{id_}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".npy":
            np.save(path, values)
        else:
            torch.save(torch.from_numpy(values), path)
    return folder


def write_ark(folder, features=FEATURES, **how):
    kaldiio = pytest.importorskip("kaldiio")
    folder.mkdir()
    with kaldiio.WriteHelper(f"ark,scp:{folder}/f.ark,{folder}/feats.scp", **how) as writer:
        for id_, values in features.items():
            writer(id_, values)
    return folder / "feats.scp"


def import_into(cli, cache, source, *more, name="theirs", rate=100):
    return cli(
        *(
            "import",
            source,
            "-o",
            cache,
            "--name",
            name,
            "--made-by",
            "a test",
            "--frame-rate",
            rate,
        ),
        *more,
    )


def assert_holds(path, features, dtype=None):
    cache = featcache.open(path)
    assert set(cache) == set(features)
    for id_, values in features.items():
        expected = values if dtype is None else values.astype(dtype)
        assert cache[id_].dtype == expected.dtype
        np.testing.assert_array_equal(cache[id_], expected)
    return cache


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_a_folder_of_files_is_a_version_that_verifies(cli, tmp_path, suffix):
    source = write_files(tmp_path / "theirs", suffix=suffix)
    assert import_into(cli, tmp_path / "c", source).code == 0
    cache = assert_holds(tmp_path / "c", FEATURES)
    assert cache.config["params"]["made_by"] == "a test"
    assert cache.spec.axis.exact_rate == 100
    again = import_into(cli, tmp_path / "c", source)
    assert (again.code, "nothing to do" in again.out) == (0, True)
    # an audio manifest is compared by ids, and the source by its files too
    (tmp_path / "m.csv").write_text(
        "id,path,text\n" + "".join(f"{i},{i}.wav,hi\n" for i in FEATURES)
    )
    assert cli("verify", tmp_path / "c", "--manifest", tmp_path / "m.csv").code == 0
    as_source = ("--manifest", source, "--format", "features")
    assert cli("verify", tmp_path / "c", *as_source, "--sources=content").code == 0
    assert featcache.FeatureDataset(cache, tmp_path / "m.csv")[1]["text"] == "hi"
    named = tmp_path / f"theirs/c{suffix}"
    named.write_bytes(named.read_bytes() + b"more")
    changed = cli("verify", tmp_path / "c", *as_source, "--sources")
    assert (changed.code, "has changed since" in changed.out) == (1, True)


def test_repair_imports_damaged_utterances_again_and_never_from_audio(cli, tmp_path):
    source = write_files(tmp_path / "theirs")
    import_into(cli, tmp_path / "c", source)
    shard = next((featcache.open(tmp_path / "c").version.path / "shards").glob("*/features/c/0/0"))
    flip(shard, 5)
    (tmp_path / "m.csv").write_text("id,path\n" + "".join(f"{i},{i}.wav\n" for i in FEATURES))
    refused = cli("repair", tmp_path / "c/theirs", "--manifest", tmp_path / "m.csv")
    assert refused.code == 1
    assert "made by a test), and cannot be extracted from audio. Nothing has been" in refused.err
    assert "--manifest SOURCE --format features" in refused.err
    done = cli("repair", tmp_path / "c/theirs", "--manifest", source, "--format", "features")
    assert done.code == 0, done.err
    assert_holds(tmp_path / "c", FEATURES)


@pytest.mark.parametrize("method", [None, 1, 2, 3, 5])
def test_kaldi_s_archives_as_kaldiio_reads_them(cli, tmp_path, method):
    features = {id_: values for id_, values in FEATURES.items() if len(values) > 1}
    scp = write_ark(tmp_path / "k", features, compression_method=method)
    assert import_into(cli, tmp_path / "c", scp).code == 0
    kaldiio = pytest.importorskip("kaldiio")
    cache = featcache.open(tmp_path / "c")
    for id_, values in kaldiio.load_scp(str(scp)).items():
        # of compressed values, the last bit of a float32 depends on the order of operations
        np.testing.assert_allclose(cache[id_], values, rtol=0, atol=0 if method is None else 2e-6)


def test_vectors_and_codes(cli, tmp_path):
    vectors = {f"v{number}": np.full(5, number, np.float64) for number in range(3)}
    source = write_files(tmp_path / "v", vectors)
    options = ("-o", tmp_path / "c", "--name", "xvector", "--made-by", "x")
    done = cli("import", source, *options)
    assert (done.code, "float64 is stored as float32" in done.err) == (0, True)
    assert_holds(tmp_path / "c", vectors, "float32")
    frames = cli("import", write_files(tmp_path / "f"), *options)
    assert (frames.code, "give --frame-rate" in frames.err) == (2, True)
    codes = make_features(3, (8,), "int64")
    source = write_files(tmp_path / "codes", codes, ".pt")
    assert import_into(cli, tmp_path / "d", source, "--codebook-size", 1024, rate=12.5).code == 0
    cache = assert_holds(tmp_path / "d", codes, "uint16")
    assert cache.spec.codebook_sizes == (1024,) * 8
    beyond = import_into(cli, tmp_path / "e", source, "--codebook-size", 100, rate=12.5)
    assert (beyond.code, "not_features 3" in beyond.err + beyond.out) == (3, True)


@pytest.mark.parametrize("values", [np.full((2, 8), -1), np.full((2, 8), 1 + 1j)])
def test_padding_among_codes_and_complex_numbers_are_refused(tmp_path, values):
    np.save(tmp_path / "a.npy", values)
    params = ImportedParams(
        made_by="x", item_shape=(8,), dtype="int64", frame_rate=12.5, codebook_sizes=(1024,) * 8
    )
    imported = Imported(params, 16000, torch.device("cpu"))
    with pytest.raises(AudioError, match=r"beyond the codebooks|no real numbers"):
        imported.read(str(tmp_path / "a.npy"), "")


class TestLhotse:
    """Each storage, and cuts that are parts of their features."""

    @pytest.fixture(
        params=[
            "LilcomChunky",
            "LilcomFiles",
            "LilcomHdf5",
            "ChunkedLilcomHdf5",
            "NumpyFiles",
            "NumpyHdf5",
        ]
    )
    def cuts(self, tmp_path, request):
        lhotse = pytest.importorskip("lhotse")
        pytest.importorskip("lilcom")
        if "Hdf5" in request.param:
            pytest.importorskip("h5py")
        cuts = []
        writer = getattr(lhotse, f"{request.param}Writer")(tmp_path / "store")
        features = make_features(3, dtype="float32", max_frames=1200, seed=3)
        with writer as storage:
            for id_, values in features.items():
                seconds = len(values) / 100
                manifest = lhotse.Features(
                    type="fbank",
                    num_frames=len(values),
                    num_features=80,
                    frame_shift=0.01,
                    sampling_rate=16000,
                    start=0,
                    duration=seconds,
                    recording_id=id_,
                    channels=0,
                    storage_type=storage.name,
                    storage_path=str(storage.storage_path),
                    storage_key=storage.write(id_, values),
                )
                cut = lhotse.MonoCut(
                    id=f"cut-{id_}", start=0, duration=seconds, channel=0, features=manifest
                )
                cuts += [cut]
                if seconds > 2:
                    cuts += [cut.truncate(offset=0.5, duration=1.25).with_id(f"part-{id_}")]
        cuts = lhotse.CutSet.from_cuts(cuts)
        cuts.to_file(tmp_path / "cuts.jsonl.gz")
        return cuts

    def test_features_are_those_of_lhotse_s_own_readers(self, cli, tmp_path, cuts):
        options = ("-o", tmp_path / "c", "--name", "l", "--made-by", "Lhotse")
        done = cli("import", tmp_path / "cuts.jsonl.gz", *options)
        assert done.code == 0, done.err
        assert_holds(tmp_path / "c", {cut.id: cut.load_features() for cut in cuts})
        source = ("--manifest", tmp_path / "cuts.jsonl.gz", "--format", "features")
        assert cli("verify", tmp_path / "c", *source, "--sources").code == 0


def write_cuts(folder, rates, num_frames=300):
    """Write features of Lhotse's, one for each pair of a frame shift and a sample rate.
    Returns its cuts."""
    lhotse = pytest.importorskip("lhotse")
    cuts = []
    values = np.arange(num_frames * 2, dtype=np.float32).reshape(-1, 2)
    with lhotse.NumpyFilesWriter(folder / "store") as storage:
        for number, (shift, sample_rate) in enumerate(rates):
            seconds = round(num_frames * shift, 9)
            features = lhotse.Features(
                type="fbank",
                num_frames=num_frames,
                num_features=2,
                frame_shift=shift,
                sampling_rate=sample_rate,
                start=0,
                duration=seconds,
                recording_id=f"r{number}",
                channels=0,
                storage_type=storage.name,
                storage_path=str(storage.storage_path),
                storage_key=storage.write(f"r{number}", values),
            )
            cut = lhotse.MonoCut(f"c{number}", start=0, duration=seconds, channel=0)
            cut.features = features
            cuts.append(cut)
    return cuts


@pytest.mark.parametrize(("shift", "rate"), [(0.01, 16000), (256 / 22050, 22050), (0.0125, 16000)])
def test_parts_of_lhotse_s_features_have_the_frames_that_it_reads(cli, tmp_path, shift, rate):
    lhotse = pytest.importorskip("lhotse")
    (whole,) = write_cuts(tmp_path, [(shift, rate)])
    rng = np.random.default_rng(0)
    cuts = [whole]
    for number in range(80):
        first, count = rng.uniform(0, 200), rng.uniform(1, 80)
        if number % 2:  # half a frame is rounded up
            first, count = int(first) + 0.5, int(count) + 0.5
        part = whole.truncate(offset=first * shift, duration=count * shift)
        cuts.append(part.with_id(f"part-{number}"))
    lhotse.CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl")
    done = cli(
        "import", tmp_path / "cuts.jsonl", "-o", tmp_path / "c", "--name", "l", "--made-by", "L"
    )
    assert done.code == 0, done.err
    assert_holds(tmp_path / "c", {cut.id: cut.load_features() for cut in cuts})


@pytest.mark.parametrize(
    ("rates", "what"),
    [
        ([(0.01, 16000), (0.02, 16000)], "a frame rate of 50 and of 100 Hz"),
        ([(0.01, 16000), (0.01, 8000)], "a sample rate of 8000 and of 16000 Hz"),
    ],
)
def test_features_of_two_rates_are_no_version(cli, tmp_path, rates, what):
    lhotse = pytest.importorskip("lhotse")
    lhotse.CutSet.from_cuts(write_cuts(tmp_path, rates)).to_file(tmp_path / "cuts.jsonl")
    done = cli(
        "import", tmp_path / "cuts.jsonl", "-o", tmp_path / "c", "--name", "l", "--made-by", "L"
    )
    assert (done.code, what in done.err) == (2, True)


# Files that are damaged, or from a stranger


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def refused(path, inside=""):
    with pytest.raises(AudioError) as caught:
        read_array(str(path), inside)
    return caught.value.reason, str(caught.value)


def test_nothing_in_a_file_is_executed(tmp_path, capsys):
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"weights": Evil()}, tmp_path / "b.pt")
    np.save(tmp_path / "c.npy", np.array([Evil()], object), allow_pickle=True)
    for name in ("a.pt", "b.pt", "c.npy"):
        reason, message = refused(tmp_path / name)
        assert reason == Reason.NOT_FEATURES
        assert not re.search("False|allow_pickle", message), message
    torch.save({"x": torch.zeros(3)}, tmp_path / "d.pt")
    assert "holds a dict, and not one tensor" in refused(tmp_path / "d.pt")[1]
    assert "executed" not in capsys.readouterr().out


def test_damaged_files_are_failures_that_take_no_memory(tmp_path):
    huge = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 80), }"
    (tmp_path / "a.npy").write_bytes(huge.ljust(128) + b"\n")
    assert refused(tmp_path / "a.npy")[0] == Reason.NOT_FEATURES
    (tmp_path / "b.ark").write_bytes(b"b \0BFM \x04\xff\xff\xff\x7f\x04\xff\xff\xff\x7f")
    reason, message = refused(tmp_path / "b.ark", "2")
    assert (reason, "bytes too early" in message) == (Reason.TRUNCATED, True)
    (tmp_path / "c.ark").write_bytes(b"c  [ 1 2 ]")
    assert "copy-feats makes them" in refused(tmp_path / "c.ark", "2")[1]
    torch.save(torch.zeros(1).expand(1 << 40, 80), tmp_path / "d.pt")
    assert "repeats values of a smaller one" in refused(tmp_path / "d.pt")[1]
    for name in ("gone.npy", "gone.ark", "gone.pt"):
        assert refused(tmp_path / name)[0] == Reason.FILE_MISSING
    assert "none of the endings" in refused(tmp_path / "a.wav")[1]


def test_an_entry_of_hdf5_takes_no_memory_and_never_leads_to_another_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "secret").write_bytes(bytes(80))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros((3, 80), np.float32)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.ones((3, 80), np.float32)
        file["linked"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
        file.create_dataset("raw", (80,), "u1", external=[(str(tmp_path / "secret"), 0, 80)])
        layout = h5py.VirtualLayout((3, 80), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (3, 80))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("huge", (1 << 40, 80), "f4", chunks=(1, 80))
    assert read_array(str(tmp_path / "a.h5"), "x").shape == (3, 80)
    for name in ("linked", "raw", "virtual"):
        assert "leads to another file" in refused(tmp_path / "a.h5", name)[1]
    assert "would unpack to" in refused(tmp_path / "a.h5", "huge")[1]


NUMPY = {
    **{"storage_type": "numpy_files", "storage_path": "/c", "storage_key": "k"},
    **{"start": 0, "duration": 1, "frame_shift": 0.01, "sampling_rate": 16000},
}


@pytest.mark.parametrize(
    "cut",
    [
        {"features": {}},
        {"features": [1]},
        {"features": {"storage_type": "numpy_files"}},
        {"features": NUMPY, "duration": float("inf")},
        {"features": {**NUMPY, "sampling_rate": "1_6000"}},
    ],
)
def test_a_cut_that_is_none_of_lhotse_s_is_named_by_its_line(cli, tmp_path, cut):
    (tmp_path / "cuts.jsonl").write_text(json.dumps({"id": "a", "start": 0, "duration": 1, **cut}))
    done = import_into(cli, tmp_path / "c", tmp_path / "cuts.jsonl")
    assert (done.code, "line 1: " in done.err, "Traceback" in done.err) == (2, True, False)


def test_a_manifest_of_audio_is_no_source(cli, tmp_path):
    (tmp_path / "m.csv").write_text("id,path\na,a.wav\n")
    (tmp_path / "m.jsonl").write_text('{"id": "a", "path": "a.wav"}\n')
    for name in ("m.csv", "m.jsonl"):
        refused = import_into(cli, tmp_path / "c", tmp_path / name)
        assert (refused.code, "import reads a folder of .npy" in refused.err) == (2, True)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("storage", "remedy"),
    [("featcache", "are in the cache /c already"), ("shar", "unpack"), ("x", "is none of lilcom")],
)
def test_cuts_whose_features_import_does_not_read(cli, tmp_path, storage, remedy, count):
    features = {"storage_type": storage, "storage_path": "/c", "storage_key": "k"}
    cut = json.dumps({"id": "a", "start": 0, "duration": 1, "features": features})
    (tmp_path / "cuts.jsonl").write_text(f"{cut}\n" * count)
    done = import_into(cli, tmp_path / "c", tmp_path / "cuts.jsonl")
    assert (done.code, remedy in done.err, "--format" in done.err) == (2, True, False)
    assert "line 1" in done.err


def test_a_folder_without_features_is_named(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    done = import_into(cli, tmp_path / "c", tmp_path / "empty")
    assert (done.code, "no files .npy or .pt below it" in done.err) == (2, True)


def test_one_number_for_each_utterance_is_shown_and_summed(cli, tmp_path):
    numbers = write_files(tmp_path / "n", {"a": np.float32(1), "b": np.float32(3)})
    cli("import", numbers, "-o", tmp_path / "c", "--name", "snr", "--made-by", "x").with_code(0)
    assert "mean         3\n" in cli("show", tmp_path / "c", "b").with_code(0).out
    assert "dimensions from 2 to 2" in cli("stats", tmp_path / "c").with_code(0).out


def test_files_tell_by_their_size_how_long_their_features_are(cli, tmp_path):
    """So that shards are of the same size as others, and `--dry-run` counts the hours."""
    values = np.random.default_rng(1).standard_normal((2000, 80)).astype("float32")
    features = {str(number): values + number for number in range(20)}
    source = write_files(tmp_path / "long", features)
    planned = import_into(cli, tmp_path / "c", source, "--dry-run", "--json", rate=1).json()
    (version,) = planned["versions"]
    assert version["audio_seconds"] == pytest.approx(20 * 2000, rel=0.01)
    import_into(cli, tmp_path / "c", source, rate=1).with_code(0)
    assert len([*tmp_path.glob("c/*/shards/*/zarr.json")]) > 10
    assert_holds(tmp_path / "c", features)


def test_units_are_made_from_the_version_and_never_from_files_or_audio(cli, tmp_path):
    source, cache = write_files(tmp_path / "theirs"), tmp_path / "c"
    import_into(cli, cache, source).with_code(0)
    cli("fit-kmeans", cache, "-k", "3", "-o", tmp_path / "u.safetensors").with_code(0)
    config = tmp_path / "u.yaml"
    config.write_text("name: u\nextractor: units\nparams: {weights: u.safetensors}\n")
    options = ("extract", source, "--format", "features", "-c", config, "-o", cache)
    refused = cli(*options).with_code(2)
    assert "u: its features are made from those of another version, and not" in refused.err
    assert [path.name[:6] for path in cache.iterdir()] == ["theirs"]
    cli(*options, "--from", f"{cache}/theirs").with_code(0)
    units = featcache.open(cache, "u")
    assert {id_: len(units[id_]) for id_ in units} == {i: len(x) for i, x in FEATURES.items()}
    with pytest.raises(ConfigError, match="u: units reads other files, and no audio"):
        featcache.extractor(units, device="cpu")
    (shard,) = cache.glob("u-*/shards/????????????????")
    flip(shard / "features/c/0/0", 0)
    manifest = ("--manifest", source, "--format", "features")
    told = cli("verify", f"{cache}/u", *manifest).with_code(1).err
    assert f"--manifest {source} --format features\n" in told
    repaired = cli.refused("repair", f"{cache}/u", *manifest, code=2)
    assert "audio: nothing has been removed: `featcache rm` it, and extract" in repaired
    assert shard.exists()
    shutil.rmtree(shard)
    assert "name that version, --from" in cli(*options).with_code(2).err
    assert not [*cache.glob("u-*/failures/*")]
    cli(*options, "--from", f"{cache}/theirs").with_code(0)
    cli("verify", f"{cache}/u").with_code(0)


def test_repair_goes_on_after_a_version_that_it_cannot_repair(cli, tmp_path):
    source, cache = write_files(tmp_path / "theirs"), tmp_path / "c"
    import_into(cli, cache, source).with_code(0)
    cli("fit-kmeans", cache, "-k", "3", "-o", tmp_path / "u.safetensors").with_code(0)
    config = tmp_path / "a.yaml"
    config.write_text("name: a\nextractor: units\nparams: {weights: u.safetensors}\n")
    read = ("--format", "features")
    cli("extract", source, *read, "-c", config, "-o", cache, "--from", cache).with_code(0)
    for chunk in cache.glob("*/shards/*/features/c/0/0"):
        flip(chunk, 0)
    done = cli("repair", cache, "--manifest", source, *read).with_code(2)
    (line,) = done.err.splitlines()
    assert line.startswith(f"featcache: {cache}/a-")
    assert "theirs-" in done.out
    cli("verify", f"{cache}/theirs").with_code(0)
    told = cli("repair", cache, "--manifest", source, *read, "--json").with_code(2).json()
    refused, sound = told["versions"]
    assert (refused["error"]["exit_code"], sound["removed"]) == (2, [])


def test_recompute_goes_on_after_a_version_that_it_cannot_extract_again(cli, plain, tmp_path):
    source, cache = write_files(tmp_path / "theirs"), tmp_path / "c"
    import_into(cli, cache, source, name="first").with_code(0)
    cli("fit-kmeans", cache, "-k", "3", "-o", tmp_path / "u.safetensors").with_code(0)
    config = tmp_path / "u.yaml"
    config.write_text("name: second\nextractor: units\nparams: {weights: u.safetensors}\n")
    options = ("--format", "features", "-c", config, "--from", cache / "first")
    cli("extract", source, *options, "-o", cache).with_code(0)
    cli("extract", plain.manifest(), "-c", "fbank80", "-o", cache).with_code(0)
    import_into(cli, cache, source, name="third", rate=50).with_code(0)
    done = cli("verify", cache, "--recompute", "9").with_code(2)
    (line,) = done.err.splitlines()
    assert "second-" in line
    assert line.endswith("--recompute is not for this version")
    assert done.out.count("no damage found") == 4
    assert done.out.count("extracted 3 again: 3 bit-identical") == 2
    told = cli("verify", cache, "--recompute", "1", "--json").with_code(2).json()
    assert not told["ok"]
    assert [version["recomputed"] is None for version in told["versions"]] == [
        "error" in version for version in told["versions"]
    ]


def test_means_over_time_are_made_from_the_version(cli, tmp_path):
    """Though a file has changed since it was imported."""
    source, cache = write_files(tmp_path / "theirs"), tmp_path / "c"
    import_into(cli, cache, source).with_code(0)
    config = tmp_path / "theirs.yaml"
    config.write_text(cli("configs", "--from", f"{cache}/theirs").with_code(0).out)
    np.save(source / "c.npy", FEATURES["c"] + 1)
    options = ("--set", "name=means", "--set", "store.pool=mean", "--from", f"{cache}/theirs")
    extract = ("extract", source, "--format", "features", "-c", config, "-o", cache)
    cli(*extract, *options).with_code(0)
    means = {id_: x.astype(np.float64).mean(0).astype(np.float32) for id_, x in FEATURES.items()}
    assert_holds(cache / "means", means)


def test_units_of_imported_features_refuse_a_manifest_of_audio(cli, tmp_path):
    """Before anything is written, in one line that names the right manifest."""
    source, cache = write_files(tmp_path / "theirs"), tmp_path / "c"
    import_into(cli, cache, source).with_code(0)
    cli("fit-kmeans", cache, "-k", "3", "-o", tmp_path / "u.safetensors").with_code(0)
    (tmp_path / "u.yaml").write_text(
        "name: u\nextractor: units\nparams: {weights: u.safetensors}\n"
    )
    options = ("-c", tmp_path / "u.yaml", "-o", tmp_path / "u", "--from", cache)
    audio = tmp_path / "audio.csv"
    remedy = f"; that was made from {source}: give that manifest, with --format features"
    for ids, count, what in (
        ("dc", "2 utterances", "c is not in theirs-"),
        ("d", "1 utterance", "d is not in theirs-"),
    ):
        audio.write_text("id,path\n" + "".join(f"{id_},{id_}.wav\n" for id_ in ids))
        (line,) = cli("extract", audio, *options).with_code(2).err.splitlines()
        assert f"{audio}: --from has none of its {count}: {what}" in line
        assert ("of another row or file: path " in line) == (ids == "dc")
        assert line.endswith(remedy)
        assert not (tmp_path / "u").exists()
    cli("extract", source, "--format", "features", *options).with_code(0)


def test_no_length_is_shown_of_vectors_whose_audio_is_unknown(cli, tmp_path):
    vectors = {f"v{number}": np.full(5, number, np.float32) for number in range(3)}
    source = write_files(tmp_path / "v", vectors)
    options = (source, "-o", tmp_path / "c", "--name", "xvector", "--made-by", "x")
    assert "of audio" not in cli("import", *options, "--dry-run").out
    cli("import", *options)
    (row,) = cli("ls", tmp_path / "c").out.splitlines()[1:]
    assert row.split()[1:3] == ["3", "-"]
    assert "3 utterances, 0.06 kB of features" in cli("info", tmp_path / "c").out
    assert "duration" not in cli("show", tmp_path / "c", "v1").out
    assert "of audio" not in cli("report", tmp_path / "c", "-o", tmp_path / "r.html").out
    again = cli("import", *options).out
    assert "3 already there: their files were not checked for changes (--check-sources)" in again


def test_files_that_have_changed_are_imported_again_if_asked(cli, tmp_path):
    source = write_files(tmp_path / "theirs")
    import_into(cli, tmp_path / "c", source)
    changed = FEATURES | {"c": FEATURES["c"] + 1}
    np.save(source / "c.npy", changed["c"])
    assert "nothing to do" in import_into(cli, tmp_path / "c", source).out
    assert import_into(cli, tmp_path / "c", source, "--check-sources").code == 0
    assert_holds(tmp_path / "c", changed)


def test_a_file_that_the_dtype_would_round_is_in_the_ledger(cli, tmp_path):
    features = {"a": np.ones((3, 2), np.float16), "b": np.full((3, 2), 1.5, np.float32)}
    source = write_files(tmp_path / "theirs", features | {"c": np.full((3, 2), 0.1, np.float32)})
    done = import_into(cli, tmp_path / "c", source, "--json")
    assert json.loads(done.out)["failed_by_reason"] == {"not_features": 1}
    assert_holds(tmp_path / "c", features, np.float16)
    features = {"a": np.ones((3, 2), np.float32), "b": np.full((3, 2), 1 << 24)}
    source = write_files(tmp_path / "whole", features | {"c": features["b"] + 1})
    done = import_into(cli, tmp_path / "d", source, "--json")
    assert json.loads(done.out)["failed_by_reason"] == {"not_features": 1}
    assert_holds(tmp_path / "d", features, np.float32)


def test_a_damaged_file_among_others_is_in_the_ledger(cli, tmp_path):
    source = write_files(tmp_path / "theirs")
    data = (source / "c.npy").read_bytes()
    (source / "c.npy").write_bytes(data[:-7])
    nan = FEATURES["a"].copy()
    nan[0, 0] = np.nan
    np.save(source / "nan.npy", nan)
    np.save(source / "wide.npy", np.zeros((3, 81), np.float32))
    np.save(source / "complex.npy", FEATURES["a"] * 1j)
    np.save(source / "overflow.npy", FEATURES["a"].astype(np.float64) * 1e300)
    done = import_into(cli, tmp_path / "c", source, "--json")
    assert done.code == 3
    assert json.loads(done.out)["failed_by_reason"] == {"non_finite_features": 2, "not_features": 3}
    assert set(featcache.open(tmp_path / "c")) == {"a", "x/b.1"}


@pytest.mark.parametrize("write", [write_files, write_ark])
def test_a_file_that_changes_while_it_is_read_is_read_again_later(tmp_path, monkeypatch, write):
    """Otherwise the values are of one file, and its time of another: nothing finds that."""
    source = write(tmp_path / "theirs")
    folder = source if source.is_dir() else source.parent

    def read(*args, real=Imported.read):
        values = real(*args)
        for path in folder.rglob("*.*"):
            os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
        return values

    def run(*args, code):
        return import_into(partial(run_here, code=code), tmp_path / "cache", source, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Imported, "read", read)
        assert "3 failed" in run("--threads", 1, code=3)
    assert {failure.reason for failure in ledger(tmp_path / "cache").values()} == {
        Reason.FILE_UNREADABLE
    }
    run(code=0)
    assert_holds(tmp_path / "cache", FEATURES)
