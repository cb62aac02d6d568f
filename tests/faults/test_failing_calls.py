"""Any call of the file system fails: one clear line and exit code 1, what was committed
is good, and the same command finishes when the fault is gone. Faults that callers are to
get over, such as short writes, are not noticed at all."""

import errno
import random

import pytest
from cache_contents import only_version
from promises import CACHE, TRIAL_SECONDS, assert_finishes, assert_is_after, assert_old_or_new
from shim import CHANGES, GROWS, KINDS, STEP, Faults, Strike

OPENS = ("open", "read_open", "list")

FAULTS = {
    "no space from then on": ("error", GROWS, errno.ENOSPC, -1),
    "no space once": ("error", GROWS, errno.ENOSPC, 1),
    "no quota from then on": ("error", GROWS, errno.EDQUOT, -1),
    "read-only from then on": (
        "error",
        ("open", "write", "rename", "mkdir", "unlink", "rmdir"),
        errno.EROFS,
        -1,
    ),
    "broken once": ("error", CHANGES, errno.EIO, 1),
    "broken from then on": ("error", KINDS, errno.EIO, -1),
    "a read that fails once": ("error", ("read", "read_open", "list"), errno.EIO, 1),
    "a flush that fails once and loses the bytes": ("lost", ("sync",), errno.EIO, 1),
    "too many files once": ("error", OPENS, errno.EMFILE, 1),
    "not allowed from then on": (
        "error",
        ("open", "rename", "mkdir", "unlink", "rmdir"),
        errno.EACCES,
        -1,
    ),
    "no memory once": ("error", ("mkdir", "rename", "read", *OPENS), errno.ENOMEM, 1),
}
"""By name: what happens, to which calls, with which errno, and how often."""

UNNOTICED = {
    "interrupted once": (
        "error",
        ("open", "read_open", "read", "sync", "truncate"),
        errno.EINTR,
        1,
    ),
    "writes interrupted once": ("error", ("write",), errno.EINTR, 1),
    "every write is short": ("short", ("write",), 0, -1),
}


def fail(cli, scenario, trials, fault, at, folder="") -> str:
    """One trial; returns the line on stderr, empty if the command did everything. Calls
    count in all of the cache, or in a folder of its version."""
    action, kinds, error, times = fault
    strike = Strike(at, action, kinds, error, times)
    where = (
        f"{errno.errorcode.get(error, 'short')} at call {at} of {', '.join(kinds)}, {times} "
        f"times {folder}"
    )
    cache = scenario.prepare(trials / "cache")
    watched = only_version(cache).path / folder if folder else cache
    ended = cli.start(*scenario.arguments(cache), faults=Faults(watched, strike)).wait(
        TRIAL_SECONDS
    )
    assert "Traceback" not in ended.err, f"{where}: {ended.err}"
    if ended.code == scenario.code:
        assert not scenario.complaints(ended), f"{where}: {ended.err}"
        assert_is_after(scenario, cache, where)
    else:
        assert ended.code == 1, f"{where}: {ended}"
        (line,) = scenario.complaints(ended)
        # prune names what it leaves, and why
        assert line.startswith(("featcache: ", f"{cache}/")), f"{where}: {line}"
    assert_old_or_new(scenario, cache, where)
    assert_finishes(cli, scenario, cache, where)
    return "\n".join(scenario.complaints(ended))


def count_calls(cli, scenario, trials, kinds, folder="", at_most=4096) -> int:
    """How many such calls the undisturbed command makes, in all of the cache, or in a
    folder of its version: the first one that nothing would strike."""
    low, high = 0, at_most
    while low < high:  # a call that is struck kills
        at = (low + high) // 2
        cache = scenario.prepare(trials / "cache")
        watched = only_version(cache).path / folder if folder else cache
        ended = cli(*scenario.arguments(cache), faults=Faults(watched, Strike(at, "kill", kinds)))
        low, high = (at + 1, high) if ended.code < 0 else (low, at)
    return low


@pytest.mark.parametrize("name", FAULTS)
def test_a_call_fails(faulty, from_nothing, repair, pruning, indexing, trials, name):
    chance = random.Random(name)
    for scenario, calls in ((from_nothing, 300), (repair, 300), (pruning, 80), (indexing, 40)):
        fail(
            faulty,
            scenario,
            trials,
            FAULTS[name],
            chance.randrange(calls // (1 + 2 * (FAULTS[name][0] == "lost"))),
        )


@pytest.mark.parametrize("name", UNNOTICED)
def test_what_callers_get_over_is_not_noticed(faulty, from_nothing, repair, trials, name):
    for scenario in (from_nothing, repair):
        assert not fail(faulty, scenario, trials, UNNOTICED[name], 5)


@pytest.mark.parametrize("folder", ["wanted", "failures"])
def test_a_record_that_cannot_be_read_once_costs_none(
    faulty, repair, extraction_of_more, pruning, trials, folder
):
    """Of what is wanted and has failed nothing is forgotten."""
    for scenario in (repair, extraction_of_more, pruning):
        count = count_calls(faulty, scenario, trials, ("read",), folder, at_most=12)
        assert count or (scenario, folder) == (repair, "failures")  # where nothing has failed
        for at in range(count):
            fail(faulty, scenario, trials, ("error", ("read",), errno.EIO, 1), at, folder)


READ_ERRORS = (errno.EIO, errno.EMFILE, errno.ENOMEM)


def fail_to_read(cli, scenario, trials, command, error, at) -> bool:
    """One trial; returns whether the command noticed. The cache stays what it is."""
    cache = trials / "read"
    strike = Strike(at, "error", ("read", *OPENS), error)
    ended = cli.start(*scenario.arguments(cache, command), faults=Faults(cache, strike)).wait(
        TRIAL_SECONDS
    )
    where = f"{command[0]}, {errno.errorcode[error]} at call {at}"
    assert ended.code in (0, 1, 3), f"{where}: {ended}"
    assert len(ended.err.splitlines()) <= 1, f"{where}: {ended.err}"
    # verify finds what a disk cannot read
    if ended.code == 1 and (command[0] != "verify" or error != errno.EIO):
        assert ended.err.startswith("featcache: "), f"{where}: {ended}"
    assert_is_after(scenario, cache, where)
    return ended.code == 1


@pytest.mark.parametrize(
    "error", [None, *(pytest.param(error, marks=pytest.mark.slow) for error in READ_ERRORS)]
)
@pytest.mark.parametrize("name", ["verify", "info", "stats", "show"])
def test_a_read_fails(faulty, from_nothing, trials, name, error, tell):
    """At two calls, with one of the errors; or with a certain one at every so-manyth."""
    command, chance = (name, CACHE, *(["utt-0"] if name == "show" else [])), random.Random(name)
    calls = [0, chance.randrange(40)] if error is None else range(0, 200, STEP)
    error = error or chance.choice(READ_ERRORS)
    cache = from_nothing.prepare(trials / "read")
    assert faulty(*from_nothing.arguments(cache)).code == from_nothing.code
    noticed = sum(fail_to_read(faulty, from_nothing, trials, command, error, at) for at in calls)
    tell(f"{name}: {errno.errorcode[error]} once: at {len(calls)} calls, noticed in {noticed}")
    assert noticed


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS | UNNOTICED)
def test_every_call_fails(faulty, scenario, trials, name, tell):
    """One after another, until none is left that would fail."""
    fault = (FAULTS | UNNOTICED)[name]
    total = count_calls(faulty, scenario, trials, fault[1]) + 1
    noticed = sum(bool(fail(faulty, scenario, trials, fault, at)) for at in range(0, total, STEP))
    tell(f"{scenario.name}: {name}: {total} calls, every {STEP}., noticed in {noticed}")
    assert not noticed or name in FAULTS
