"""Hot utterances in memory: plain LRU under a limit that holds, safe with threads, forks and spawned processes."""

import gc
import os
import pickle
import threading
from collections import OrderedDict
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from forking import forked
from hypothesis import given
from make_cache import make_features, make_version
from processes import run_python

import featcache
from featcache.errors import ArgumentError
from featcache.loader.memory import GRAIN, Arena, Ram
from featcache.loader.tiers import Tiers, parse_size


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("4GB", 4_000_000_000),
            ("512MiB", 512 << 20),
            ("1.5 kB", 1500),
            ("2tib", 2 << 40),
            ("7", 7),
            ("8 b", 8),
            (" 3 gib ", 3 << 30),
            ("4G", 4_000_000_000),
            ("2Gi", 2 << 30),
            ("1e9", 10**9),
            (123, 123),
            (4e9, 4_000_000_000),
            (np.int64(5), 5),
        ],
    )
    def test_sizes(self, text, expected):
        assert parse_size("ram", text) == expected

    @pytest.mark.parametrize(
        "value", ["", "many", "4X", "4 GB!", "-1GB", "GB", True, None, "٤GB", b"4", np.inf, np.nan]
    )
    def test_what_is_no_size_is_refused_in_one_line(self, value):
        with pytest.raises(ArgumentError, match=r"ram is .*give a size like .4GB.") as caught:
            parse_size("ram", value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("value", [0, -5, "0", "0GB", "0.1B"])
    def test_nothing_is_no_size(self, value):
        with pytest.raises(ArgumentError, match=r"copy_limit is .*at least one byte"):
            parse_size("copy_limit", value)

    def test_a_folder_has_a_name(self):
        with pytest.raises(ArgumentError, match="copy_to is empty: give a folder"):
            Tiers.parse(None, "", None)

    def test_a_limit_needs_something_to_limit(self):
        with pytest.raises(ArgumentError, match=r"copy_limit is '1GB', but nothing is copied"):
            Tiers.parse(None, None, "1GB")
        with pytest.raises(ArgumentError, match="ram is 'x'"):
            featcache.open("nowhere", ram="x")


class TestArena:
    @given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=80), st.integers(0, 40 * GRAIN))
    def test_blocks_never_overlap_keep_what_they_hold_and_all_come_back(self, steps, num_bytes):
        arena, held = Arena(num_bytes), {}
        for number, (size, drops) in enumerate(steps):
            block = arena.take(size)
            if block is not None:
                held[number] = block.copy_of(np.full(size, number, np.uint8))
            assert sum(max(1, -(-len(array) // GRAIN)) * GRAIN for array in held.values()) <= num_bytes
            if drops and held:
                del held[min(held)]
            del block
        assert all((array == number).all() for number, array in held.items())
        held.clear()
        largest = num_bytes // GRAIN * GRAIN
        if largest:
            assert arena.take(largest) is not None  # one hole again

    def test_views_keep_a_block_alive_and_arrays_cannot_be_written(self):
        arena = Arena(4 * GRAIN)
        view = arena.take(4 * GRAIN).copy_of(np.arange(2 * GRAIN, dtype=np.uint16).reshape(-1, 4))[2:4, 1]
        gc.collect()
        assert arena.take(1) is None
        assert view.tolist() == [9, 13]
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        del view
        assert arena.take(4 * GRAIN) is not None


class Model:
    """The plainest LRU: so many slots."""

    def __init__(self, slots):
        self.slots, self.held = slots, OrderedDict()

    def read(self, key):
        hit = self.held.pop(key, None) is not None
        self.held[key] = True
        if len(self.held) > self.slots:
            self.held.popitem(last=False)
        return hit


def values_of(number, size):
    return np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)


class TestLeastRecentlyUsed:
    @given(st.lists(st.integers(0, 12), max_size=200), st.integers(1, 10))
    def test_arrays_of_one_size_are_kept_as_a_plain_model_keeps_them(self, reads, slots):
        size = 16 * GRAIN
        ram, model = Ram(slots * (size + 512), 13, 13 * size), Model(slots)
        for key in reads:
            found = ram.get(key)
            assert (found is not None) == model.read(key)
            if found is None:
                found = ram.keep(key, values_of(key, size))
            assert (found == values_of(key, size)).all()
        assert len(ram) == len(model.held)

    @given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 60_000))
    def test_whatever_the_sizes_it_is_the_latest_that_are_kept_and_they_hold_to_the_limit(self, reads, limit):
        sizes = [(number * number * 37) % 9000 for number in range(31)]
        ram, order = Ram(limit, 31, sum(sizes)), []
        for key in reads:
            if ram.get(key) is None:
                ram.keep(key, values_of(key, sizes[key]))
            order = [other for other in order if other != key] + [key]
            kept = [key for key in order if key in ram._arrays]
            assert list(ram._arrays) == kept
            fitting = [key for key in order if sizes[key] <= ram._arena.num_bytes]
            assert kept == fitting[len(fitting) - len(kept) :]
            assert sum(sizes[key] for key in kept) <= limit
            assert all((ram._arrays[key] == values_of(key, sizes[key])).all() for key in kept)

    def test_nothing_goes_for_what_can_never_fit(self):
        ram = Ram(4000, 3, 3900)
        for key in (0, 1):
            ram.keep(key, values_of(key, 200))
        assert ram._arena.num_bytes % GRAIN == 0
        large = values_of(2, ram._arena.num_bytes + 1)
        assert ram.keep(2, large) is large
        assert list(ram._arrays) == [0, 1]

    def test_of_random_permutations_as_many_are_hits_as_documented(self):
        count, size = 1000, GRAIN
        rng = np.random.default_rng(0)
        for fraction in (0.3, 0.5, 0.9):
            ram = Ram(int(fraction * count * (size + 512)), count, count * size)
            hits = 0
            for _ in range(6):
                hits_before = hits
                for key in rng.permutation(count).tolist():
                    if ram.get(key) is None:
                        ram.keep(key, values_of(0, size))
                    else:
                        hits += 1
            expected = fraction + (1 - fraction) * np.log(1 - fraction)
            assert (hits - hits_before) / count == pytest.approx(expected, abs=0.05)

    def test_what_is_in_use_stays_as_it_is_and_what_does_not_fit_is_handed_back(self):
        size = 4 * GRAIN
        ram = Ram(2 * (size + 512), 10, 10 * size)
        in_use = [ram.keep(key, values_of(key, size)) for key in range(2)]
        for key in range(2, 6):
            given_ = values_of(key, size)
            assert ram.keep(key, given_) is given_
        assert all((array == values_of(key, size)).all() for key, array in enumerate(in_use))
        in_use.clear()
        assert (ram.keep(7, values_of(7, size)) == values_of(7, size)).all()
        assert ram.get(7) is not None
        large = values_of(8, 3 * size)
        assert ram.keep(8, large) is large
        assert ram.get(7) is not None  # nothing went for what can never fit

    def test_more_than_the_machine_has_is_an_argument_error(self):
        with pytest.raises(ArgumentError, match=r"more than this machine has"):
            Ram(1 << 60, 1, 1 << 60)


class TestCache:
    @pytest.fixture
    def features(self):
        return make_features(40, max_frames=60)

    @pytest.fixture
    def version(self, tmp_path, features):
        first = dict(list(features.items())[:25])
        return make_version(tmp_path, first, {name: features[name] for name in features if name not in first})

    @pytest.mark.parametrize("ram", ["20kB", 60_000, "1GB"])
    def test_features_are_the_same(self, tmp_path, version, features, ram):
        plain, cache = featcache.open(tmp_path), featcache.open(tmp_path, ram=ram)
        rng = np.random.default_rng(0)
        for _ in range(30):
            rows = rng.integers(0, len(cache), 7)
            for got, expected in zip(cache.batch(rows), plain.batch(rows), strict=True):
                assert got.equal(expected)
            part = {"start": 0.005, "duration": 0.1}
            assert cache.batch(rows, **part)[0].equal(plain.batch(rows, **part)[0])
            row = int(rows[0])
            assert np.array_equal(cache[row], features[cache.ids[row]])
            assert not cache[row].flags.writeable
            assert np.array_equal(cache.item(row, check=True), plain[row])

    def test_a_hit_does_not_look_at_the_disk_any_more(self, tmp_path, version):
        cache = featcache.open(tmp_path, ram="1GB")
        before = [array.copy() for array in cache.values()]
        for name in version.shard_names():
            path = version.shard(name).folder / "features" / "c" / "0" / "0"
            path.write_bytes(bytes(path.stat().st_size))
        assert all(map(np.array_equal, cache.values(), before))
        batch, lengths = cache.batch(range(len(cache)))
        rows = (row[:length] for row, length in zip(batch, lengths.tolist(), strict=True))
        assert all(map(np.array_equal, rows, before))
        assert not featcache.open(tmp_path)[0].any()

    def test_threads_read_what_is_there(self, tmp_path, version):
        plain, cache = featcache.open(tmp_path), featcache.open(tmp_path, ram="60kB")
        wrong = []

        def read(seed):
            rng = np.random.default_rng(seed)
            for _ in range(150):
                rows = rng.integers(0, len(cache), 5)
                batch, _ = cache.batch(rows)
                expected, _ = plain.batch(rows)
                if not (batch.equal(expected) and np.array_equal(cache[rows[0]], plain[rows[0]])):
                    wrong.append(rows)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_a_forked_child_goes_on_by_itself_also_from_the_middle_of_reading(self, tmp_path, version):
        plain, cache = featcache.open(tmp_path), featcache.open(tmp_path, ram="60kB")
        goes_on = True

        def read():
            while goes_on:
                for row in range(len(cache)):
                    cache[row]

        def read_all():
            for _ in range(5):
                assert all(map(np.array_equal, cache.values(), plain.values()))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(20):
                with forked(read_all):
                    pass
        finally:
            goes_on = False
            reader.join()
        assert all(map(np.array_equal, cache.values(), plain.values()))

    def test_pickled_it_starts_empty_with_the_same_limit(self, tmp_path, version):
        cache = featcache.open(tmp_path, ram="60kB", copy_to=tmp_path / "copies", copy_limit="1MB")
        for row in range(len(cache)):
            cache[row]
        data = pickle.dumps(cache)
        assert len(data) < 2000
        again = pickle.loads(data)
        assert again._tiers == cache._tiers == Tiers(60_000, tmp_path / "copies", 1_000_000)
        assert len(again._reader._ram) == 0 < len(cache._reader._ram)
        assert all(map(np.array_equal, again.values(), cache.values()))

    @pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
    def test_memory_stays_within_the_limit(self):
        # In a new process: of a forked one, every page that Python's own counting touches would become private too.
        run_python(
            """
            import threading
            from pathlib import Path
            import numpy as np
            from featcache.loader.memory import Ram

            threading.stack_size(256 << 10)  # small, and no page of theirs is a huge one

            def private_bytes():
                lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
                return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))

            def work(seed):
                for key in np.random.default_rng(seed).integers(0, count, 5000).tolist():
                    if ram.get(key) is None:
                        ram.keep(key, source[: sizes[key]])

            limit, count = 30_000_000, 4000
            sizes = np.exp(np.random.default_rng(0).uniform(np.log(5000), np.log(300_000), count)).astype(int)
            source = np.ones(300_000, np.uint8)
            ram = Ram(limit, count, int(sizes.sum()))
            before = private_bytes()
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sum(array.nbytes for array in ram._arrays.values()) > 0.5 * limit
            assert private_bytes() - before < limit + 4_000_000, private_bytes() - before
            """,
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # no heap for each thread
        )
