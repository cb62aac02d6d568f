"""A prune that is killed at any call, or of which a call fails, or whose machine loses power, loses nothing that stays,
and the same command does the rest.
"""

from __future__ import annotations

import errno
import random
import shutil
import signal
from collections import Counter

import pytest
from cache_contents import check, items, only_version
from power_loss import POLICIES, Disk
from processes import Cli
from promises import CACHE, assert_no_leftovers
from shim import CHANGES, GROWS, STEP, Faults, Strike, read_calls, spread_kills

import featcache
from featcache.version.index import open_index
from featcache.version.tags import at_tag, make_tag

SAMPLE = 6
FAULTS = {
    "no space once": ("error", GROWS, errno.ENOSPC, 1),
    "no space from then on": ("error", GROWS, errno.ENOSPC, -1),
    "broken once": ("error", CHANGES, errno.EIO, 1),
    "a read that fails once": ("error", ("read", "read_open", "list"), errno.EIO, 1),
    "not allowed from then on": ("error", ("open", "rename", "mkdir", "unlink", "rmdir"), errno.EACCES, -1),
}
SAMPLED = ("no space from then on", "broken once", "not allowed from then on")


@pytest.fixture(scope="session")
def pruning(faulty, small, extraction_of_more, kept):
    """Four shards, of which one is tagged; the command removes an item that was replaced, and two utterances."""
    base = kept / "to-prune"
    shutil.copytree(kept / "extract", base)
    version = only_version(base)
    make_tag(version, "paper", open_index(version))
    assert faulty(*extraction_of_more.arguments(base)).code == 3
    manifest = small.manifest([small.rows[number] for number in (0, 1, 2, 5)], "fewer.csv")
    command = ("prune", CACHE, "--manifest", manifest, "--force", "--yes")
    done = shutil.copytree(base, kept / "pruned")
    assert run(faulty, command, done).code == 0
    assert items(base).keys() - items(done).keys()
    return base, command, outcome(done)


def outcome(cache) -> tuple:
    """The items, those of the tag, and how many the shards hold in all."""
    version = only_version(cache)
    tagged = open_index(at_tag(version, "paper"))
    shards = [version.shard(name).info.items for name in version.shard_names()]
    return items(cache), [*tagged.ids], tagged.shards, sum(shards)


def run(cli: Cli, command, cache, **options):
    return cli.start(*(cache if part == CACHE else part for part in command), **options).wait()


def kill(cli, pruning, trials, strike) -> bool:
    """One trial; returns whether the command was killed."""
    base, command, _ = pruning
    cache = trials / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(base, cache)
    ended = run(cli, command, cache, faults=Faults(cache, strike))
    assert ended.code in (-signal.SIGKILL, 0), f"{strike}: {ended}"
    assert_goes_on(cli, pruning, cache, strike)
    return ended.code == -signal.SIGKILL


def assert_goes_on(cli, pruning, cache, where) -> None:
    """What was to stay is there, and the same command does the rest."""
    base, command, after = pruning
    there = items(cache)
    assert there.items() <= items(base).items(), f"{where}: something is neither as it was nor gone"
    assert {"utt-0", "utt-2", "utt-5"} <= there.keys(), f"{where}: {there.keys()}"
    assert check(cache).problems == [], where
    featcache.open(cache, strict=True)
    again = run(cli, command, cache)
    assert again.code == 0, f"{where}: {again}"
    assert outcome(cache) == after, where
    report = check(cache)
    assert (report.problems, report.failed) == ([], 1), where
    featcache.open(cache, strict=True, check=True)
    assert_no_leftovers(cache, where)


def fail(cli, pruning, trials, fault, at, folder="") -> bool:
    """One trial in which a call fails, in all of the cache or a folder of its version; returns whether the command
    noticed.
    """
    base, command, after = pruning
    action, kinds, error, times = fault
    cache = trials / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(base, cache)
    watched = only_version(cache).path / folder if folder else cache
    ended = run(cli, command, cache, faults=Faults(watched, Strike(at, action, kinds, error, times)))
    where = f"{errno.errorcode[error]} at call {at} of {', '.join(kinds)}, {times} times"
    assert ended.code in (0, 1), f"{where}: {ended}"
    assert "Traceback" not in ended.err, f"{where}: {ended}"
    if ended.code == 1:
        (line,) = ended.err.splitlines()
        assert line.startswith(("featcache: ", f"{only_version(cache).path}: ")), f"{where}: {line}"
    else:
        assert outcome(cache) == after, where
    assert_goes_on(cli, pruning, cache, where)
    return ended.code == 1


def count_calls(cli, pruning, trials) -> Counter[str]:
    base, command, _ = pruning
    cache = shutil.copytree(base, trials / "counted")
    assert run(cli, command, cache, faults=Faults(cache, record=trials / "record")).code == 0
    return Counter(call.kind for call in read_calls(trials / "record"))


def test_killed_at_some_calls(faulty, pruning, trials):
    calls = count_calls(faulty, pruning, trials)
    killed = sum(kill(faulty, pruning, trials, strike) for strike in spread_kills(calls, SAMPLE))
    assert killed > SAMPLE // 2


@pytest.mark.parametrize("folder", ["wanted", "failures"])
def test_a_disk_that_refuses_to_read_a_record_once_costs_none(faulty, pruning, trials, folder):
    for at in range(12):
        fail(faulty, pruning, trials, ("error", ("read",), errno.EIO, 1), at, folder)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_call_fails(faulty, pruning, trials, name):
    chance = random.Random(name)
    for _ in range(2):
        fail(faulty, pruning, trials, FAULTS[name], chance.randrange(80))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_call_fails(faulty, pruning, trials, name, tell):
    total = count_calls(faulty, pruning, trials).total()
    noticed = sum(fail(faulty, pruning, trials, FAULTS[name], at) for at in range(0, total, STEP))
    tell(f"prune: {name}: at {total} calls, every {STEP}., noticed {noticed} times")


@pytest.mark.slow
def test_killed_at_every_call(faulty, pruning, trials, tell):
    total = count_calls(faulty, pruning, trials).total()
    killed = sum(kill(faulty, pruning, trials, Strike(at, "kill")) for at in range(0, total, STEP))
    tell(f"prune: killed {killed} times, at {total} calls, every {STEP}.")
    assert killed > total // STEP * 0.9


@pytest.mark.slow
def test_many_states_after_a_power_cut(faulty, pruning, trials, tell):
    base, command, _ = pruning
    home, record = trials / "home", trials / "record"
    home.mkdir()
    cache = shutil.copytree(base, home / "cache")
    disk = Disk(home)
    assert run(faulty, command, cache, faults=Faults(home, record=record, data=True)).code == 0
    disk.play(read_calls(record))
    assert disk.end > 20
    first = random.randrange(1 << 32)
    tell(f"prune: seeds {first} to {first + 99}")
    for seed in range(first, first + 100):
        chance = random.Random(seed)
        moment, policy = chance.randrange(disk.end + 1), chance.choice(POLICIES)
        shutil.rmtree(home)
        disk.cut(moment, chance, policy, home)
        assert_goes_on(faulty, pruning, cache, f"seed {seed}: {policy} at call {moment} of {disk.end}")
