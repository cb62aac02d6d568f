"""A bit flips in any file of a version: verify finds it, or nothing that anybody reads
changes; repair, or the next extraction, brings back what was there."""

import os
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zarr
from cache_contents import items, only_version, provenance
from damage import delete, empty, flip, replace_by_folder
from shim import STEP

import featcache
from featcache.care.verify import verify
from featcache.errors import FeatcacheError
from featcache.version.indexing import open_index
from featcache.version.ledger import read_failures
from featcache.version.records import read_probes, read_run, run_names, write_probe
from featcache.version.tags import make_tag, tags_to_show


@pytest.fixture(scope="module")
def full(faulty, from_nothing, kept) -> Path:
    """A cache with every kind of file that a version may have; a measurement of its
    extractor is among them."""
    cache = from_nothing.prepare(kept / "full")
    assert faulty(*from_nothing.arguments(cache)).code == 3
    write_probe(only_version(cache), {"device": "cpu", "measured": []})
    make_tag(only_version(cache), "paper", open_index(only_version(cache)))
    assert faulty("info", cache).code == 0
    return cache


def files_of(cache: Path) -> list[Path]:
    """All files of the cache's one version that hold anything."""
    return [
        path
        for path in sorted(only_version(cache).path.rglob("*"))
        if path.is_file() and path.stat().st_size
    ]


def kind_of(cache: Path, path: Path) -> str:
    """The file's place in a version, without names that differ from version to version."""
    parts = path.relative_to(only_version(cache).path).parts
    return "/".join(
        parts
        if len(parts) == 1 or parts == ("shards", "zarr.json")
        else [parts[0], "*", *parts[2:]]
    )


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
        stock |= {
            (shard, name): (array.dtype.str, array[...].tobytes()) for name, array in group.arrays()
        }
        stock[shard] = dict(group.attrs)
    failures = read_failures(version)
    records = failures, runs, read_probes(version), tags_to_show(version)
    return read, items(cache), provenance(cache), records, version.info, stock, len(told)


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


UNCHECKED = {"lock", "index/*/items/zarr.json", "index/*/text/zarr.json"}
"""What nothing is read from: who held the lock last, and what tells Zarr libraries of an
index, which is derived."""


@pytest.mark.parametrize("step", [None, pytest.param(STEP, marks=pytest.mark.slow)])
def test_bits_of_every_file(full, trials, tell, step):
    """The first byte, the last, and one at random; or every so-manyth."""
    seed = 5 if step is None else random.randrange(1 << 32)
    chance = random.Random(seed)
    cache = Path(shutil.copytree(full, trials / "cache"))
    clean = all_that_is_read(cache)
    assert findings(cache) is None
    found: dict[str, Counter] = {}
    for path in files_of(cache):
        kind, size = kind_of(cache, path), path.stat().st_size
        places = (
            {0, size - 1, chance.randrange(size)}
            if step is None
            else range(chance.randrange(step), size, step)
        )
        for at in places:
            found.setdefault(kind, Counter())[
                flipped(cache, path, at, chance.randrange(8), clean)
            ] += 1
    assert {kind for kind, counts in found.items() if counts["harmless"]} <= UNCHECKED, found
    for kind, counts in found.items():
        tell(
            f"bit flips: {kind}: {counts['found']} found, {counts['harmless']} harmless; "
            f"seed {seed}"
        )


SPOIL = {
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "empty": empty,
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "deleted": delete,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": replace_by_folder,
}


@pytest.mark.parametrize("are_all", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", SPOIL)
def test_a_spoilt_file_comes_back(faulty, full, from_nothing, trials, how, are_all, tell):
    """What is wanted, what has failed, and some other kinds of files, or all kinds: it is
    told, and repair and extract restore every item. Verify may find a tag then, one that
    was spoilt, or that repair says to be no longer whole."""
    kinds = sorted(
        {kind_of(full, path): path.relative_to(full) for path in files_of(full)}.values()
    )
    records = [file for file in kinds if file.parts[1] in ("wanted", "failures")]
    files = kinds if are_all else records + random.Random(how).sample(kinds, 2)
    for file in files:
        cache = Path(shutil.copytree(full, trials / "cache"))
        kind = kind_of(cache, cache / file)
        SPOIL[how](cache / file)
        assert findings(cache) is not None or kind in UNCHECKED or not (cache / file).exists(), file
        repaired = faulty("repair", cache, "--manifest", from_nothing.manifest, "--threads", 1)
        for ended in (repaired, faulty(*from_nothing.arguments(cache))):
            assert ended.code in (0, 3), f"{file}: {ended}"
        assert items(cache) == items(full), file
        report = verify(only_version(cache))
        is_told = kind == "tags/*" or "no longer whole: paper" in repaired.out
        assert {problem.kind for problem in report.problems} <= ({"tag"} if is_told else set()), (
            file
        )
        shutil.rmtree(cache)
    tell(f"spoilt files: {how}: all of {len(files)} came back")
