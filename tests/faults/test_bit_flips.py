"""A bit flips in any file of a version: verify finds it, or nothing that anybody reads changes; repair, or the next
extraction, brings back what was there.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zarr
from cache_contents import items, only_version, provenance
from damage import flip
from shim import STEP

import featcache
from featcache.care.verify import verify
from featcache.errors import FeatcacheError
from featcache.version.ledger import read_failures
from featcache.version.records import read_probes, read_run, run_names


@pytest.fixture(scope="module")
def full(faulty, from_nothing, kept) -> Path:
    """A cache with every kind of file that a version may have; a measurement of its extractor is among them."""
    cache = from_nothing.prepare(kept / "full")
    assert faulty(*from_nothing.arguments(cache)).code == 3
    only_version(cache).write_probe({"device": "cpu", "measured": []})
    assert faulty("info", cache).code == 0
    return cache


@pytest.fixture
def spoilt(full, trials) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(full, trials / "cache"))


def files_of(cache: Path) -> list[Path]:
    """All files of the cache's one version that hold anything."""
    return [path for path in sorted(only_version(cache).path.rglob("*")) if path.is_file() and path.stat().st_size]


def kind_of(cache: Path, path: Path) -> str:
    """The file's place in a version, without names that differ from version to version."""
    parts = path.relative_to(only_version(cache).path).parts
    if parts[0] in ("shards", "runs", "index") and len(parts) > 2:
        return "/".join([parts[0], "*", *parts[2:]])
    return "/".join([parts[0], "*"]) if parts[0] == "probes" else "/".join(parts)


def findings(cache: Path) -> object:
    """What verify says; None if nothing."""
    try:
        report = verify(only_version(cache))
    except FeatcacheError as error:
        return str(error)
    return report.problems or report.notes or None


def all_that_is_read(cache: Path) -> object:
    """What featcache and stock Zarr read of a version, whether it is right or not."""
    version = only_version(cache)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opened = featcache.open(cache)
    read = {id_: np.asarray(opened[id_]).tobytes() for id_ in opened.ids}
    runs = [read_run(version.store, name) for name in run_names(version.store)]
    stock = {}
    for shard in version.shard_names():
        group = zarr.open_group(version.path / "shards" / shard, mode="r")
        stock |= {(shard, name): (array.dtype.str, array[...].tobytes()) for name, array in group.arrays()}
        stock[shard] = dict(group.attrs)
    failures = read_failures(version)
    return read, items(cache), provenance(cache), failures, runs, read_probes(version), version.info, stock, len(told)


def flipped(cache: Path, path: Path, at: int, bit: int, clean: object) -> str:
    """What becomes of one flip: `found`, or `harmless`."""
    flip(path, at, bit)
    try:
        if findings(cache) is not None:
            return "found"
        where = f"{kind_of(cache, path)}: bit {bit} of byte {at}"
        try:
            same = all_that_is_read(cache) == clean
        except FeatcacheError as error:
            raise AssertionError(f"{where}: not found by verify: {error}") from error
        assert same, f"{where}: not found by verify, and something else is read"
        return "harmless"
    finally:
        flip(path, at, bit)


def test_some_bits_of_every_file(spoilt):
    """The first byte, the last, and some at random."""
    chance, clean = random.Random(5), all_that_is_read(spoilt)
    assert findings(spoilt) is None
    found = Counter()
    for path in files_of(spoilt):
        size = path.stat().st_size
        for at in {0, size - 1, chance.randrange(size)}:
            found[flipped(spoilt, path, at, chance.randrange(8), clean)] += 1
    assert found["found"] > 0.9 * found.total()


@pytest.mark.slow
def test_every_byte_of_every_file(spoilt, tell):
    seed = random.randrange(1 << 32)
    chance, clean = random.Random(seed), all_that_is_read(spoilt)
    found: dict[str, Counter] = {}
    for path in files_of(spoilt):
        for at in range(chance.randrange(STEP), path.stat().st_size, STEP):
            kind = kind_of(spoilt, path)
            found.setdefault(kind, Counter())[flipped(spoilt, path, at, chance.randrange(8), clean)] += 1
    for kind, counts in found.items():
        tell(f"bit flips: {kind}: {counts['found']} found, {counts['harmless']} harmless; seed {seed}")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


SPOIL = {
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": halve,
    "deleted": Path.unlink,
}


def assert_comes_back(cli, scenario, full, trials, file, spoil) -> None:
    """One trial: repair and extract restore every item, and leave nothing that verify would find."""
    cache = Path(shutil.copytree(full, trials / "cache"))
    spoil(cache / file)
    for command in (("repair", cache, "--manifest", scenario.manifest, "--threads", 1), scenario.arguments(cache)):
        ended = cli(*command)
        assert ended.code in (0, 3), f"{file}: {ended}"
    assert items(cache) == items(full), file
    report = verify(only_version(cache))
    assert not report.problems, f"{file}: {report.problems}"
    shutil.rmtree(cache)


def of_each_kind(cache: Path) -> list[Path]:
    """A file of each kind."""
    return sorted({kind_of(cache, path): path.relative_to(cache) for path in files_of(cache)}.values())


@pytest.mark.parametrize("how", SPOIL)
def test_a_spoilt_file_comes_back(faulty, full, from_nothing, trials, how):
    """Some kinds of files."""
    for file in random.Random(how).sample(of_each_kind(full), 2):
        assert_comes_back(faulty, from_nothing, full, trials, file, SPOIL[how])


@pytest.mark.slow
@pytest.mark.parametrize("how", SPOIL)
def test_every_spoilt_file_comes_back(faulty, full, from_nothing, trials, how, tell):
    """All kinds of files."""
    files = of_each_kind(full)
    for file in files:
        assert_comes_back(faulty, from_nothing, full, trials, file, SPOIL[how])
    tell(f"spoilt files: {how}: all of {len(files)} kinds came back")
