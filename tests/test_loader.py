import errno
import gc
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from make_cache import add_shard, made_up_side, make_features, make_version
from torch.utils.data import ConcatDataset, DataLoader, Subset

import featcache
from featcache.errors import (
    ConfigError,
    DamagedError,
    FeatcacheError,
    ManifestError,
    MissingDependencyError,
    MissingItemError,
    Reason,
    StoreError,
)
from featcache.spec import SideSpec
from featcache.store import zarr3
from featcache.store.index import index_folder
from featcache.store.runs import Failure, Run
from featcache.strings import Strings, hash_of


def run_python(code, *arguments, **options):
    """Run a script in a new process with warnings as errors; returns what it prints."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def padded_reference(arrays, padding_value=0):
    """The slow and obvious way."""
    longest = max(len(array) for array in arrays)
    rows = []
    for array in arrays:
        padding = np.full((longest - len(array), *array.shape[1:]), padding_value, array.dtype)
        rows.append(np.concatenate([array, padding]))
    return np.stack(rows)


def flip_bit(path, at=100):
    data = bytearray(path.read_bytes())
    data[at] ^= 8
    path.write_bytes(data)


@pytest.fixture(scope="module")
def features():
    return make_features(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, features):
    """A cache of one version of three shards; nobody changes it."""
    folder = tmp_path_factory.mktemp("features")
    items = list(features.items())
    make_version(folder, dict(items[:7]), dict(items[7:8]), dict(items[8:]))
    return folder


@pytest.fixture
def cache(folder):
    return featcache.open(folder)


class TestCache:
    def test_holds_every_utterance_in_the_order_of_the_manifest(self, cache, features):
        assert len(cache) == 20
        assert list(cache.ids) == list(features)
        assert cache.lengths.dtype == np.int64
        assert cache.lengths.tolist() == [len(array) for array in features.values()]
        assert cache.spec.item_shape == (80,)
        assert cache.config["extractor"] == "made_up"

    def test_gives_what_was_stored_by_id_and_by_position(self, cache, features):
        for position, (name, array) in enumerate(features.items()):
            for key in (name, position, np.int32(position), np.uint64(position), torch.tensor(position), position - 20):
                assert cache[key].dtype == array.dtype
                assert np.array_equal(cache[key], array)
        assert all(map(np.array_equal, cache, features.values()))

    def test_an_array_is_a_view_that_nobody_can_write_to(self, cache):
        array = cache[3]
        assert not array.flags.owndata
        assert array.base is not None
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            cache.lengths[0] = 1

    def test_an_array_outlives_the_cache(self, folder, features):
        arrays = [featcache.open(folder)[name] for name in features]
        gc.collect()
        assert all(map(np.array_equal, arrays, features.values()))

    def test_ids_are_in_it_and_positions_are_not(self, cache):
        assert "utt-3" in cache
        assert "utt-30" not in cache
        assert 3 not in cache

    def test_find_gives_positions(self, cache):
        assert cache.find(["utt-5", "utt-0", "utt-5"]).tolist() == [5, 0, 5]
        assert cache.find([]).tolist() == []
        with pytest.raises(TypeError, match="give a list"):
            cache.find("utt-5")

    @given(st.text())
    def test_the_hash_of_one_string_is_that_of_many(self, string):
        assert hash_of(string) == Strings.of(["", string]).hashes()[1]

    def test_ids_are_found_also_where_all_hashes_collide(self, tmp_path, features, monkeypatch):
        monkeypatch.setattr("featcache.store.index.hash_of", lambda string: 7)
        monkeypatch.setattr(Strings, "hashes", lambda self: np.full(len(self), 7, np.uint64))
        make_version(tmp_path, features)
        cache = featcache.open(tmp_path)
        assert [cache.index.find_one(name) for name in features] == list(range(20))
        assert cache.find(features).tolist() == list(range(20))
        assert "utt-20" not in cache

    def test_its_repr_says_what_it_is(self, cache):
        hours = cache.lengths.sum() / 100 / 3600
        assert cache.version.path.name in repr(cache)
        assert f"20 utterances, {hours:.2f} h" in repr(cache)
        assert "float16 [frames, 80] at 100 Hz" in repr(cache)

    @pytest.mark.parametrize("key", [20, -21, 10**12])
    def test_a_position_outside_is_an_index_error(self, cache, key):
        for read in (cache.__getitem__, lambda key: cache.batch([0, key])):
            with pytest.raises(IndexError, match=f"no utterance at {key}: .* holds 20"):
                read(key)

    @pytest.mark.parametrize("key", [1.0, None, b"utt-1", slice(2), [1]])
    def test_a_key_that_is_neither_id_nor_position_is_a_type_error(self, cache, key):
        with pytest.raises(TypeError):
            cache[key]

    def test_an_empty_version_can_be_opened(self, tmp_path):
        make_version(tmp_path)
        cache = featcache.open(tmp_path)
        assert len(cache) == 0
        assert list(cache) == []
        assert "0 utterances" in repr(cache)
        with pytest.raises(MissingItemError):
            cache["utt-1"]

    def test_is_a_snapshot_also_where_it_is_unpickled(self, tmp_path):
        version = make_version(tmp_path, make_features(3))
        cache = featcache.open(tmp_path, check=True)
        again = make_features(2, seed=1)
        add_shard(version, again, row=0, supersedes={cache.index.shards[0]: [0, 1]})
        add_shard(version, make_features(3, prefix="new"), row=7)
        copy = pickle.loads(pickle.dumps(cache))
        assert copy.check
        assert list(copy.ids) == list(cache.ids) == ["utt-0", "utt-1", "utt-2"]
        assert np.array_equal(copy["utt-0"], cache["utt-0"])
        now = featcache.open(tmp_path)
        assert len(now) == 6
        assert np.array_equal(now["utt-0"], again["utt-0"])

    def test_pickles_as_paths(self, cache, features):
        cache.batch(list(features))
        assert len(pickle.dumps(cache)) < 1000

    def test_survives_a_change_of_the_working_directory(self, folder, features, monkeypatch):
        monkeypatch.chdir(folder.parent)
        cache = featcache.open(folder.name)
        monkeypatch.chdir("/")
        assert np.array_equal(cache["utt-3"], features["utt-3"])


KINDS = [
    *[((80,), "float16"), ((80,), "float32"), ((2, 3), "float16")],
    *[((8,), "uint16"), ((8,), "uint8"), ((), "uint32"), ((), "int64")],
]


class TestBatch:
    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_equals_the_reference(self, data, tmp_path_factory):
        shape, dtype = data.draw(st.sampled_from(KINDS), "item shape and dtype")
        folder = tmp_path_factory.getbasetemp() / f"reference-{len(shape)}-{sum(shape)}-{dtype}"
        shards = [make_features(6, shape, dtype, seed=n, prefix=f"é{n}") for n in range(2)]
        stored = [array for shard in shards for array in shard.values()]
        if not folder.exists():
            make_version(folder, *shards)
        cache = featcache.open(folder)
        positions = data.draw(st.lists(st.integers(-12, 11), min_size=1, max_size=20), "positions")
        padding_value = data.draw(st.integers(0, 100), "padding")
        ids = [cache.ids[position] for position in positions]
        keys = data.draw(st.sampled_from([positions, np.array(positions), torch.tensor(positions), ids, np.array(ids)]))
        padded, lengths = cache.batch(keys, padding_value=padding_value, check=True)
        expected = [stored[position] for position in positions]
        assert padded.is_contiguous()
        assert np.array_equal(padded.numpy(), padded_reference(expected, padding_value))
        assert padded.numpy().dtype == np.dtype(dtype)
        assert lengths.dtype == torch.int64
        assert lengths.tolist() == [len(array) for array in expected]

    def test_is_the_callers_own(self, cache, features):
        padded, lengths = cache.batch([0, 1])
        padded.zero_()
        lengths.zero_()
        assert np.array_equal(cache[0], features["utt-0"])
        assert cache.lengths[0] == len(features["utt-0"])

    def test_uses_memory_again_when_nobody_looks_at_it(self, folder):
        cache = featcache.open(folder)
        expected = [padded_reference([cache[2 * n], cache[2 * n + 1]]) for n in range(6)]
        addresses = {cache.batch([2 * n, 2 * n + 1])[0].data_ptr() for n in range(6) for _ in range(3)}
        assert len(addresses) < 6
        tensors = [cache.batch([2 * n, 2 * n + 1])[0] for n in range(6)]
        seen = [[tensor[1:, :1], tensor.numpy()[:, 0], tensor.view(-1)][n % 3] for n, tensor in enumerate(tensors)]
        del tensors
        for n in range(6):
            cache.batch([2 * n, 2 * n + 1])[0].fill_(-1)
        views = [[array[1:, :1], array[:, 0], array.reshape(-1)][n % 3] for n, array in enumerate(expected)]
        assert all(map(np.array_equal, seen, views))

    @pytest.mark.parametrize("shape", [(2 * 40 * 80,), (5, 40, 80), (100_000,)])
    def test_gathers_into_a_given_tensor(self, cache, shape):
        out = torch.full(shape, 7, dtype=torch.float16)
        padded, _ = cache.batch([2, 4], out=out)
        assert padded.data_ptr() == out.data_ptr()
        assert torch.equal(padded, cache.batch([2, 4])[0])

    @pytest.mark.parametrize(
        ("out", "what"),
        [
            (torch.empty(10, dtype=torch.float16), "room for 10 values; this batch has"),
            (torch.empty(10_000, dtype=torch.float32), "must be torch.float16"),
            (torch.empty(10_000, 2, dtype=torch.float16)[:, 0], "contiguous"),
            (torch.empty(10_000, dtype=torch.float16, device="meta"), "CPU memory"),
        ],
    )
    def test_a_tensor_that_does_not_do_is_a_value_error(self, cache, out, what):
        with pytest.raises(ValueError, match=what):
            cache.batch([0, 1], out=out)

    @pytest.mark.parametrize("keys", [[], np.array([]), torch.tensor([])])
    def test_of_nothing_is_a_value_error(self, cache, keys):
        with pytest.raises(ValueError, match="keys is empty"):
            cache.batch(keys)

    @pytest.mark.parametrize(
        "keys", ["utt-1", ["utt-1", 2], [1, "utt-2"], [1.0], [True, False], [[1], [2]], [None], torch.ones(2)]
    )
    def test_of_what_is_neither_ids_nor_positions_is_a_type_error(self, cache, keys):
        with pytest.raises(TypeError):
            cache.batch(keys)


SIDE = SideSpec("scales", (), "float32", "loudness"), SideSpec("marks", (2,), "uint16", "where from and where to")


@pytest.fixture(scope="module")
def sided(tmp_path_factory, features):
    """The same with side arrays; nobody changes it."""
    folder = tmp_path_factory.mktemp("sided")
    items = list(features.items())
    make_version(folder, dict(items[:7]), dict(items[7:8]), dict(items[8:]), side=SIDE)
    return folder


class TestSide:
    @pytest.mark.parametrize("check", [False, True])
    def test_gives_the_entries_of_an_utterance_by_id_and_by_position(self, sided, features, check):
        cache = featcache.open(sided, check=check)
        counts = set()
        for position, (name, array) in enumerate(features.items()):
            for spec in cache.spec.side:
                expected = made_up_side(spec, array)
                for key in (name, position, position - 20, np.int32(position)):
                    found = cache.side(spec.name, key)
                    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                    assert np.array_equal(found, expected)
                    assert not found.flags.writeable
                counts.add(len(expected))
        assert {0, 13} <= counts  # none of a short one
        assert all(map(np.array_equal, cache, features.values()))

    def test_goes_with_a_pickled_cache(self, sided, features):
        cache = featcache.open(sided)
        expected = cache.side("scales", "utt-3")
        assert np.array_equal(pickle.loads(pickle.dumps(cache)).side("scales", "utt-3"), expected)

    def test_names_those_that_there_are(self, sided, cache):
        with pytest.raises(StoreError, match="has no side array 'scale'; it has scales, marks"):
            featcache.open(sided).side("scale", 0)
        with pytest.raises(StoreError, match="has no side array 'scales'; it has none"):
            cache.side("scales", 0)

    def test_an_utterance_that_is_not_there_is_told_as_ever(self, sided):
        cache = featcache.open(sided)
        with pytest.raises(MissingItemError, match="nobody"):
            cache.side("scales", "nobody")
        with pytest.raises(IndexError, match="no utterance at 20"):
            cache.side("scales", 20)

    @pytest.mark.parametrize("name", ["side_marks/zarr.json", "side_marks_offsets/c/0", "side_marks/c/0/0"])
    def test_a_missing_file_is_damage(self, tmp_path, features, name):
        version = make_version(tmp_path, features, side=SIDE)
        (version.shard(version.shard_names()[0]).folder / name).unlink()
        with pytest.raises(DamagedError, match=f"{name}.*missing.*featcache repair"):
            featcache.open(tmp_path).side("marks", 0)

    def test_a_flipped_bit_is_found_when_asked_for_and_in_offsets_always(self, tmp_path, features):
        version = make_version(tmp_path, features, side=SIDE)
        folder = version.shard(version.shard_names()[0]).folder
        flip_bit(folder / "side_marks" / "c" / "0" / "0")
        flip_bit(folder / "side_scales_offsets" / "c" / "0")
        featcache.open(tmp_path).side("marks", 0)
        with pytest.raises(DamagedError, match=r"side_marks: damaged.*featcache repair"):
            featcache.open(tmp_path, check=True).side("marks", 0)
        with pytest.raises(DamagedError, match="side_scales_offsets: damaged"):
            featcache.open(tmp_path).side("scales", 0)


class TestMissing:
    @pytest.fixture
    def cache(self, tmp_path):
        """20 utterances; bad-0 … bad-2 have failed."""
        version = make_version(tmp_path, make_features(20))
        Run(version, {}).fail(
            Failure(f"bad-{n}", "a.wav", None, None, None, Reason.TOO_SHORT if n else Reason.EMPTY, f"seen {n}", 1, 1)
            for n in range(3)
        )
        return featcache.open(tmp_path)

    @pytest.mark.parametrize("read", [lambda cache, key: cache[key], lambda cache, key: cache.batch(["utt-0", key])])
    def test_says_that_an_utterance_failed_and_why(self, cache, read):
        with pytest.raises(MissingItemError, match=r"^bad-1: failed in extraction: seen 1 \(too_short\)"):
            read(cache, "bad-1")

    def test_says_that_an_utterance_is_unknown_and_how_ids_look(self, cache):
        with pytest.raises(KeyError, match=r"^'utt-20': no such utterance in .* holds 20, like 'utt-0'$") as caught:
            cache["utt-20"]
        assert isinstance(caught.value, FeatcacheError)

    def test_names_up_to_ten_together(self, cache):
        ids = [*(f"bad-{n}" for n in range(3)), *(f"utt-{n}" for n in range(15, 30))]
        with pytest.raises(MissingItemError) as caught:
            cache.batch(ids)
        message = str(caught.value)
        assert message.startswith("13 of 18 utterances are not in ")
        assert "bad-0, bad-1, bad-2, utt-20, utt-21, utt-22, utt-23, utt-24, utt-25, utt-26 … and 3 more" in message
        assert message.endswith("3 of them failed in extraction (too_short 2, empty 1)")

    def test_needs_no_ledger(self, cache):
        (cache.version.path / "runs").rename(cache.version.path / "gone")
        with pytest.raises(MissingItemError, match="no such utterance"):
            cache["bad-1"]


@dataclass(frozen=True)
class FakeConfig:
    name: str
    params: dict

    def resolved(self):
        return {"name": self.name, "extractor": "made_up", "params": self.params}

    def fingerprint(self):
        return make_fingerprint(self.params)


def make_fingerprint(params):
    return f"{params['low_freq']:02x}" * 32


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A cache of fbank80 with low_freq 0 and 20, and mfcc with 3."""
    folder = tmp_path_factory.mktemp("versions")
    for name, low_freq in (("fbank80", 0), ("fbank80", 20), ("mfcc", 3)):
        params = {"low_freq": low_freq}
        features = make_features(low_freq + 1)
        make_version(folder, features, name=name, params=params, fingerprint=make_fingerprint(params))
    return folder


class TestOpen:
    def test_by_name_or_by_folder(self, versions):
        assert len(featcache.open(versions, "mfcc")) == 4
        assert len(featcache.open(str(versions), f"fbank80-{make_fingerprint({'low_freq': 20})[:12]}")) == 21
        assert len(featcache.open(versions / f"fbank80-{make_fingerprint({'low_freq': 20})[:12]}")) == 21

    def test_by_config(self, versions):
        assert len(featcache.open(versions, config=FakeConfig("fbank80", {"low_freq": 20}))) == 21
        assert len(featcache.open(versions, config=FakeConfig("renamed", {"low_freq": 20}))) == 21

    def test_two_versions_of_a_name_are_told_apart_by_their_configs_keys(self, versions):
        with pytest.raises(StoreError, match=r"2 versions: .*params\.low_freq: 0 -> 20"):
            featcache.open(versions, "fbank80")

    @pytest.mark.parametrize("name", ["", "mfcc-" + make_fingerprint({"low_freq": 3})[:12]])
    def test_another_config_is_refused_by_its_keys(self, versions, name):
        with pytest.raises(StoreError, match=r"made by another config .*params\.low_freq: 3 -> 4"):
            featcache.open(versions / name, config=FakeConfig("mfcc", {"low_freq": 4}))

    def test_a_config_that_made_nothing_here_is_refused(self, versions):
        with pytest.raises(StoreError, match=r"no version of this config, which would be other-.*; it holds fbank80-"):
            featcache.open(versions, config=FakeConfig("other", {"low_freq": 4}))
        with pytest.raises(StoreError, match="no version of this config"):
            featcache.open(versions, "unknown", config=FakeConfig("mfcc", {"low_freq": 3}))

    def test_a_config_may_be_a_file_or_a_packaged_ones_name(self, tmp_path):
        from featcache.config import load_config

        config = load_config("fbank80")
        make_version(tmp_path / "features", make_features(3), fingerprint=config.fingerprint())
        text = "name: mine\nextractor: fbank\nparams: {num_mel_bins: 23}\n"
        (tmp_path / "mine.yaml").write_text(text)
        assert len(featcache.open(tmp_path / "features", config="fbank80")) == 3
        with pytest.raises(StoreError, match="made by another config"):
            featcache.open(tmp_path / "features", config=tmp_path / "mine.yaml")
        with pytest.raises(ConfigError, match="cannot be read"):
            featcache.open(tmp_path / "features", config="nothing.yaml")

    def test_a_config_file_needs_the_extra(self, versions, monkeypatch):
        monkeypatch.setitem(sys.modules, "featcache.config", None)
        with pytest.raises(MissingDependencyError, match=r"featcache\[extract\]"):
            featcache.open(versions, config="fbank80")

    @pytest.mark.parametrize(("path", "name"), [("nowhere", None), ("", "nothing"), ("empty", None)])
    def test_what_is_not_there_is_a_store_error(self, versions, path, name):
        (versions / "empty").mkdir(exist_ok=True)
        with pytest.raises(StoreError):
            featcache.open(versions / path, name)


class TestDamage:
    @pytest.fixture
    def version(self, tmp_path):
        return make_version(tmp_path, make_features(5, max_frames=9), make_features(5, prefix="new"))

    def test_a_flipped_bit_is_found_by_checking(self, tmp_path, version):
        shard = version.shard(featcache.open(tmp_path).index.shards[0])
        flip_bit(shard.folder / "features" / "c" / "0" / "0")  # in the first utterance's features
        cache, checking = featcache.open(tmp_path), featcache.open(tmp_path, check=True)
        for read in (
            lambda: cache.item("utt-0", check=True),
            lambda: cache.batch([0, 1], check=True),
            lambda: checking[0],
            lambda: checking.batch(["utt-1", "utt-0"]),
            lambda: list(checking),
        ):
            with pytest.raises(DamagedError, match=rf"utt-0: damaged: .*{shard.name}.*featcache repair {version.path}"):
                read()
        assert cache[0].shape == checking.item(0, check=False).shape == checking.batch([0], check=False)[0][0].shape
        checking.batch(range(1, 10))

    @pytest.mark.parametrize("name", ["features/zarr.json", "features/c/0/0", "crc32c/c/0"])
    @pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-5])])
    def test_a_damaged_shard_names_the_remedy(self, tmp_path, version, name, harm):
        cache = featcache.open(tmp_path)
        harm(version.shard(cache.index.shards[0]).folder / name)
        with pytest.raises(DamagedError, match=r"damaged.*featcache repair"):
            cache.item(0, check=True)
        assert len(cache[7])

    def test_features_of_another_shape_are_damaged(self, tmp_path, version):
        cache = featcache.open(tmp_path)
        path = version.shard(cache.index.shards[0]).folder / "features" / "zarr.json"
        path.write_text(path.read_text().replace("float16", "uint16"))
        with pytest.raises(DamagedError, match="features are uint16"):
            cache[0]

    def test_a_damaged_shard_is_named_when_the_index_is_built(self, tmp_path, version):
        (version.shard(version.shard_names()[0]).folder / "zarr.json").write_text("{}")
        with pytest.raises(DamagedError, match=r"damaged.*featcache repair"):
            featcache.open(tmp_path)

    @pytest.mark.parametrize(
        "harm",
        [
            lambda folder: (folder / "index.json").unlink(),
            lambda folder: (folder / "index.json").write_text("{"),
            lambda folder: (folder / "shard.npy").unlink(),
            lambda folder: (folder / "ids.npy").write_bytes(b""),
            lambda folder: np.save(folder / "item.npy", np.zeros(3, np.uint32)),
            lambda folder: np.save(folder / "first_frame.npy", np.zeros(10, np.int32)),
            lambda folder: [path.unlink() for path in folder.iterdir()],
            lambda folder: [*map(Path.unlink, folder.iterdir()), folder.rmdir(), folder.parent.rmdir()],
        ],
    )
    def test_an_index_that_is_damaged_or_gone_is_built_again(self, tmp_path, version, harm):
        expected = list(featcache.open(tmp_path))
        folder = index_folder(version, version.shard_names())
        harm(folder)
        assert all(map(np.array_equal, featcache.open(tmp_path), expected))
        inode = folder.stat().st_ino
        assert all(map(np.array_equal, featcache.open(tmp_path), expected))
        assert folder.stat().st_ino == inode  # kept this time

    def test_an_index_that_points_elsewhere_is_not_believed(self, tmp_path, version):
        expected = list(featcache.open(tmp_path))
        path = index_folder(version, version.shard_names()) / "first_frame.npy"
        for shift in (1, 1000):  # into a neighbour's frames; beyond the shard
            np.save(path, np.load(path) + shift)
            assert all(map(np.array_equal, featcache.open(tmp_path), expected))

    def test_a_shard_that_ends_before_an_item_is_damage(self, tmp_path, version):
        cache = featcache.open(tmp_path)
        features = version.shard(cache.index.shards[0]).folder / "features"
        shutil.rmtree(features)
        zarr3.write_array(features, np.zeros((1, *cache.spec.item_shape), version.dtype))
        with pytest.raises(DamagedError, match=r"ends before frame.*featcache repair"):
            list(cache)

    def test_a_shard_that_cannot_be_mapped_is_a_store_error(self, tmp_path, version, monkeypatch):
        def map_file(descriptor, num_bytes):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        monkeypatch.setattr("featcache.store.zarr3.map_file", map_file)
        cache = featcache.open(tmp_path)
        with pytest.raises(StoreError, match=f"{cache.index.shards[0]}: cannot be read: Cannot allocate memory"):
            cache[0]


@pytest.fixture
def manifest(tmp_path):
    """Six of the utterances, in another order, with columns."""
    path = tmp_path / "train.csv"
    rows = [f"utt-{n},{n}.wav,{n / 2 if n else ''},spk{n % 2},hello {n}" for n in (4, 2, 11, 0, 19, 7)]
    path.write_text("\n".join(["ID,wav,start,speaker,text", *rows]), encoding="utf-8")
    return path


class TestFeatureDataset:
    def test_without_a_manifest_is_the_cache(self, cache, features):
        dataset = featcache.FeatureDataset(cache)
        assert len(dataset) == 20
        assert list(dataset.ids) == list(features)
        for item, (name, array) in zip(dataset, features.items(), strict=True):
            assert item.keys() == {"id", "features"}
            assert item["id"] == name
            assert np.array_equal(item["features"].numpy(), array)

    def test_joins_a_manifests_columns_in_its_order(self, cache, features, manifest):
        dataset = featcache.FeatureDataset(cache, manifest)
        assert list(dataset.ids) == ["utt-4", "utt-2", "utt-11", "utt-0", "utt-19", "utt-7"]
        assert dataset.lengths.tolist() == [len(features[name]) for name in dataset.ids]
        item = dataset[2]
        assert torch.equal(item.pop("features"), torch.from_numpy(features["utt-11"]))
        assert item == {"id": "utt-11", "path": "11.wav", "start": 5.5, "speaker": "spk1", "text": "hello 11"}
        assert np.isnan(dataset[3]["start"])
        assert dataset[-1]["id"] == dataset[np.int64(5)]["id"] == "utt-7"
        for row in (6, -7):
            with pytest.raises(IndexError):
                dataset[row]

    def test_carries_the_columns_that_are_asked_for(self, cache, manifest):
        assert dataset_keys(cache, manifest, columns=["text"]) == {"id", "features", "text"}
        assert dataset_keys(cache, manifest, columns=()) == {"id", "features"}
        assert dataset_keys(cache, featcache.manifest.read_manifest(manifest), columns=["start"]) == {
            "id",
            "features",
            "start",
        }
        with pytest.raises(ManifestError, match=r"train.csv: has no column 'txt'; it has 'path', 'start', 'speaker'"):
            featcache.FeatureDataset(cache, manifest, columns=["txt"])

    def test_an_item_is_the_callers_own(self, cache, features):
        dataset = featcache.FeatureDataset(cache)
        dataset[0]["features"].zero_()
        assert np.array_equal(dataset[0]["features"].numpy(), features["utt-0"])

    def test_names_the_utterances_that_the_cache_has_not(self, tmp_path, manifest):
        make_version(tmp_path / "features", make_features(8))
        with pytest.raises(MissingItemError, match=r"train.csv: 2 of 6 utterances are not in .*: utt-11, utt-19; 0 of"):
            featcache.FeatureDataset(featcache.open(tmp_path / "features"), manifest)

    def test_goes_without_them_where_that_is_asked_for(self, tmp_path, manifest):
        features = make_features(8)
        make_version(tmp_path / "features", features)
        cache = featcache.open(tmp_path / "features")
        dataset = featcache.FeatureDataset(cache, manifest, skip_missing=True)
        assert list(dataset.ids) == ["utt-4", "utt-2", "utt-0", "utt-7"]
        assert dataset.skipped == ["utt-11", "utt-19"]
        batch = dataset.collate([dataset[row] for row in range(4)])
        assert batch["ids"] == list(dataset.ids)
        assert batch["lengths"].tolist() == dataset.lengths.tolist() == [len(features[name]) for name in dataset.ids]
        assert [text.split()[-1] for text in batch["text"]] == [name.split("-")[1] for name in dataset.ids]
        others = tmp_path / "others.csv"
        others.write_text("id\nelse-1\nelse-2\n")
        with pytest.raises(MissingItemError, match="2 of 2 utterances"):  # another corpus, surely
            featcache.FeatureDataset(cache, others, skip_missing=True)

    @pytest.mark.parametrize("name", ["ids", "features", "lengths"])
    def test_a_column_that_clashes_is_refused_unless_left_out(self, cache, tmp_path, name):
        manifest = tmp_path / "clash.tsv"
        manifest.write_text(f"id\t{name}\nutt-1\tx")
        with pytest.raises(ManifestError, match=rf"clash.tsv: the column '{name}' would hide"):
            featcache.FeatureDataset(cache, manifest)
        assert dataset_keys(cache, manifest, columns=[]) == {"id", "features"}

    def test_batches_in_a_data_loader(self, cache, features, manifest):
        dataset = featcache.FeatureDataset(cache, manifest, padding_value=9)
        first, last = DataLoader(dataset, batch_size=4, collate_fn=dataset.collate)
        expected = padded_reference([features[name] for name in ("utt-4", "utt-2", "utt-11", "utt-0")], 9)
        assert first["ids"] == ["utt-4", "utt-2", "utt-11", "utt-0"]
        assert np.array_equal(first["features"].numpy(), expected)
        assert first["lengths"].tolist() == dataset.lengths[:4].tolist()
        assert first["text"] == ["hello 4", "hello 2", "hello 11", "hello 0"]
        assert last["start"].tolist() == [9.5, 3.5]

    def test_is_gathered_in_one_call(self, cache, monkeypatch):
        dataset = featcache.FeatureDataset(cache)
        calls = []
        gather = type(cache).gather
        monkeypatch.setattr(type(cache), "gather", lambda *args, **options: calls.append(1) or gather(*args, **options))
        list(DataLoader(Subset(dataset, range(3, 9)), batch_size=3, collate_fn=dataset.collate))
        assert len(calls) == 2

    def test_a_batch_of_items_is_the_batch_that_is_gathered(self, cache, manifest):
        dataset = featcache.FeatureDataset(cache, manifest, padding_value=9)
        rows = [3, 1, 5]
        gathered, looked_at = dataset.collate(dataset.__getitems__(rows)), dataset.__getitems__(rows)
        assert looked_at[0]["id"] == "utt-0"
        for batch in (dataset.collate([dataset[row] for row in rows]), dataset.collate(looked_at)):
            assert list(batch) == list(gathered)
            for name, column in batch.items():
                if isinstance(column, torch.Tensor):
                    torch.testing.assert_close(column, gathered[name], rtol=0, atol=0, equal_nan=True)
                else:
                    assert column == gathered[name]

    def test_a_collate_of_the_users_own_gets_a_list_of_items(self, cache):
        def longest_first(items):
            items.sort(key=lambda item: len(item["features"]), reverse=True)
            return dataset.collate(items)

        dataset = featcache.FeatureDataset(cache)
        for batch in DataLoader(dataset, batch_size=7, collate_fn=longest_first):
            lengths = batch["lengths"].tolist()
            assert lengths == sorted(lengths, reverse=True)
            assert torch.equal(batch["features"], cache.batch(batch["ids"])[0])

    def test_can_be_concatenated(self, cache, manifest):
        dataset = featcache.FeatureDataset(cache, manifest)
        both = ConcatDataset([dataset, dataset])
        ids = []
        for batch in DataLoader(both, batch_size=5, collate_fn=dataset.collate):
            ids += batch["ids"]
        assert ids == [*dataset.ids, *dataset.ids]

    def test_works_with_workers_under_every_start_method(self, folder, manifest):
        script = manifest.with_name("train.py")
        script.write_text(
            textwrap.dedent("""
            import sys
            import torch
            import featcache
            from torch.utils.data import DataLoader

            if __name__ == "__main__":
                cache = featcache.open(sys.argv[1])
                dataset = featcache.FeatureDataset(cache, sys.argv[2])
                expected = [dataset.collate(dataset.__getitems__([n, n + 1])) for n in (0, 2, 4)]
                for method in ("fork", "spawn", "forkserver"):
                    loader = DataLoader(
                        dataset, 2, collate_fn=dataset.collate, num_workers=2, multiprocessing_context=method
                    )
                    for batch, other in zip(loader, expected, strict=True):
                        assert batch["ids"] == other["ids"]
                        assert batch["text"] == other["text"]
                        assert torch.equal(batch["features"], other["features"])
                        assert torch.equal(batch["lengths"], other["lengths"])
            """)
        )
        # Python 3.12 warns of any fork of a process that has threads, and torch has some.
        warnings = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
        command = [sys.executable, *warnings, script, folder, manifest]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def dataset_keys(cache, manifest, **options):
    return featcache.FeatureDataset(cache, manifest, **options)[0].keys()


class TestResources:
    def test_needs_no_descriptor_for_an_open_shard(self, tmp_path):
        make_version(tmp_path, *(make_features(2, prefix=f"shard{n}") for n in range(200)))
        run_python(
            """
            import resource, sys
            import featcache

            resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            cache = featcache.open(sys.argv[1], check=True)  # builds the index
            arrays = list(cache)
            assert len(arrays) == 400
            features, lengths = cache.batch(range(400))
            assert all((row[:len(array)].numpy() == array).all() for row, array in zip(features, arrays))
            """,
            tmp_path,
        )

    def test_stands_alone(self, folder, manifest):
        run_python(
            """
            import sys

            for name in ("pydantic", "yaml", "soundfile", "soxr", "torchaudio", "zarr", "click", "tqdm"):
                sys.modules[name] = None  # importing it is an ImportError
            import featcache

            assert "torch" not in sys.modules
            cache = featcache.open(sys.argv[1])
            assert len(cache.batch(["utt-1", "utt-2"], check=True)[0]) == 2
            dataset = featcache.FeatureDataset(cache, sys.argv[2])
            assert dataset.collate([dataset[0], dataset[1]])["ids"] == ["utt-4", "utt-2"]
            try:
                featcache.open(sys.argv[1], config="fbank80")
            except featcache.FeatcacheError as error:
                assert "featcache[extract]" in str(error)
            """,
            folder,
            manifest,
        )


def test_what_the_loader_page_shows_runs(tmp_path, monkeypatch):
    from featcache.config import load_config

    page = Path(__file__).parents[1] / "docs" / "loader.md"
    make_version(tmp_path / "features", make_features(100), fingerprint=load_config("fbank80").fingerprint())
    (tmp_path / "train.csv").write_text("".join(["id,speaker\n", *(f"utt-{n},spk\n" for n in range(100))]))
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), namespace)
    assert namespace["batch"]["features"].shape[0] == len(namespace["batch"]["speaker"]) == 100
    assert namespace["sampler"].epoch == 9
