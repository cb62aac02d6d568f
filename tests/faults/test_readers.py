"""Readers, trainers and verify while repair takes shards away and extract adds some: they
get what was written, or an error that says what to do. Local copies on a disk that fails:
they get what was written."""

import errno
import json
import random
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cache_contents import check
from promises import TRIAL_SECONDS, assert_finishes
from reading import REMEDY, Reading
from shim import STEP, Faults, Strike
from torch.utils.data import DataLoader

import featcache
from featcache.errors import FeatcacheWarning


def opened(cache: Path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatcacheWarning)
        return featcache.open(cache, **options)


def count(scenario, read, where: object) -> Counter:
    """How many of what was read is right, and how many are errors; nothing else is
    possible."""
    found = Counter()
    for id_, data, message in read:
        if message:
            assert REMEDY.search(message), f"{where}: {message}"
            found["errors"] += 1
        else:
            allowed = [items[id_][2] for items in (scenario.before, scenario.after) if id_ in items]
            assert data in allowed, f"{where}: {id_} is neither old nor new"
            found["right"] += 1
    return found


def epochs(cache, scenario, method: str | None):
    """Endless epochs of a DataLoader, by `method`: fork, spawn, or None for this process."""
    ids = [id_ for id_ in cache.ids if id_ not in scenario.damaged]
    options = (
        {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
        if method
        else {}
    )
    loader = DataLoader(Reading(cache, ids), batch_size=2, collate_fn=list, **options)
    while True:
        yield [item for batch in loader for item in batch]


def read_during(cli, scenario, trials, method, tier) -> Counter:
    """Read from before the command until after it."""
    cache = scenario.prepare(trials / "cache")
    options = {} if tier is None else {tier: trials / "disk" if tier == "copy_to" else "1MB"}
    with closing(epochs(opened(cache, **options), scenario, method)) as reads:
        found = count(scenario, next(reads), "before")
        assert not found["errors"]
        running = cli.start(*scenario.arguments(cache))
        while running.poll() is None:
            found += count(scenario, next(reads), "during")
        assert running.wait(TRIAL_SECONDS).code == scenario.code
        found += count(scenario, next(reads), "after")
    with closing(epochs(opened(cache), scenario, None)) as reads:
        again = count(scenario, next(reads), "opened again")
    assert not again["errors"]
    assert_finishes(cli, scenario, cache)
    return found


OFTEN = [
    pytest.param(method, tier, 3 if method == "spawn" else 10, marks=pytest.mark.slow)
    for method in (None, "fork", "spawn")
    for tier in (None, "copy_to", "ram")
]


@pytest.mark.parametrize(("method", "tier", "times"), [(None, None, 1), ("fork", None, 1), *OFTEN])
@pytest.mark.parametrize("name", ["extraction_of_more", "repair"])
def test_reading_while_shards_come_and_go(faulty, request, trials, name, method, tier, times, tell):
    scenario, found = request.getfixturevalue(name), Counter()
    for _ in range(0, times, STEP):
        found += read_during(faulty, scenario, trials, method, tier)
    reader = method or "this process"
    tell(
        f"{name} while {reader} reads, tier {tier}: {found['right']} right, "
        f"{found['errors']} errors"
    )
    assert found["right"]


def open_all(scenario, cache) -> None:
    """Whoever opens the cache sees all that was there, old or new, and nothing else."""
    version = opened(cache)
    ids = [id_ for id_ in version.ids if id_ not in scenario.damaged]
    assert {*scenario.before} - scenario.damaged <= {*ids}
    count(scenario, [Reading(version, ids)[number] for number in range(len(ids))], scenario.name)


def verify_all(scenario, cache) -> None:
    """Verify finds no damage but what there is; a shard that is being taken away is not
    missing."""
    damaged = [problem for problem in check(cache).problems if problem.shard]
    assert {problem.id for problem in damaged} <= scenario.damaged, damaged


@pytest.mark.parametrize("look", [open_all, verify_all])
@pytest.mark.parametrize("scenario", ["extraction_of_more", "repair"], indirect=True)
def test_looking_while_shards_come_and_go(faulty, scenario, trials, look):
    cache = scenario.prepare(trials / "cache")
    running = faulty.start(*scenario.arguments(cache))
    while running.poll() is None:
        look(scenario, cache)
    assert running.wait().code == scenario.code


# Local copies

WRITES = ("open", "write", "allocate", "mkdir", "rename", "sync", "truncate")
COPY_FAULTS = [
    Strike(0, "error", WRITES, errno.ENOSPC, -1),
    Strike(0, "error", (*WRITES, "unlink"), errno.EIO),
    Strike(0, "error", ("open", "write", "mkdir", "rename", "unlink"), errno.EROFS, -1),
    Strike(0, "error", ("open", "read_open", "list"), errno.EMFILE),
    Strike(0, "error", ("lock",), errno.ENOLCK, -1),
    Strike(0, "short", ("write",), times=-1),
    Strike(0, "lost", ("sync",), errno.EIO),
]


def copy(cli, scenario, trials, fault, at) -> None:
    """One trial: everything is read, and read right, and so it is by whoever comes next."""
    expected = trials / "expected.json"
    expected.write_text(
        json.dumps({id_: data.hex() for id_, (_, _, data) in scenario.before.items()})
    )
    disk = trials / f"disk-{at}-{id(fault)}"
    disk.mkdir()
    for faults in (Faults(disk, replace(fault, at=at)), None):
        running = cli.start(
            scenario.base, disk, expected, faults=faults, entry="reading:read_with_local_copies"
        )
        ended = running.wait(TRIAL_SECONDS)
        assert (ended.code, ended.err) == (0, ""), f"{fault} at call {at}: {ended}"


@pytest.mark.parametrize("is_every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", COPY_FAULTS, ids=str)
def test_a_call_fails_on_the_disk_of_local_copies(
    faulty, extraction_of_more, trials, fault, is_every, tell
):
    calls = range(0, 40, STEP) if is_every else [random.Random(str(fault)).randrange(6)]
    for at in calls:
        copy(faulty, extraction_of_more, trials, fault, at)
    tell(
        f"local copies: {fault.action} {errno.errorcode.get(fault.error, '')}: at "
        f"{len(calls)} calls: all right"
    )
