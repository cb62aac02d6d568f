"""Killed at any call that changes a file, at any other, and at any moment: what is there
is old or new, and a second run of the command ends as if nothing had happened."""

import random
import signal
from collections import Counter

import pytest
from promises import assert_finishes, assert_is_after, assert_old_or_new
from shim import CHANGES, STEP, Faults, Strike, read_calls, spread_kills

SAMPLE = 4
"""Kills of a scenario in CI."""


def count_calls(cli, scenario, trials) -> Counter[str]:
    """How many calls of each kind that changes something the undisturbed command makes;
    at least."""
    cache = scenario.prepare(trials / "counted")
    record = trials / "record"
    assert (
        cli(*scenario.arguments(cache), faults=Faults(cache, record=record)).code == scenario.code
    )
    return Counter(call.kind for call in read_calls(record))


def kill(cli, scenario, trials, strike) -> bool:
    """One trial; returns whether the command was killed: it may have ended before."""
    cache = scenario.prepare(trials / "cache")
    ended = cli.start(*scenario.arguments(cache), faults=Faults(cache, strike)).wait()
    assert ended.code in (-signal.SIGKILL, scenario.code), f"{strike}: {ended}"
    assert_old_or_new(scenario, cache, strike)
    assert_finishes(cli, scenario, cache, strike)
    return ended.code == -signal.SIGKILL


@pytest.mark.parametrize(
    "action", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("kill", "torn"))]
)
def test_killed_at_calls(faulty, scenario, trials, tell, action):
    """Some, spread over the command; or before each call; or in the middle of every write."""
    calls = count_calls(faulty, scenario, trials)
    kinds = ["write"] if action == "torn" else CHANGES
    every = [Strike(at, action, kinds) for at in range(0, sum(calls[kind] for kind in kinds), STEP)]
    strikes = every if action else list(spread_kills(calls, SAMPLE))
    killed = sum(kill(faulty, scenario, trials, strike) for strike in strikes)
    tell(f"{scenario.name}: {action or 'some'}: killed {killed} times, in {len(strikes)} trials")
    # the last calls are those of the index, or of threads that are ending
    assert killed > len(strikes) * (0.9 if action else 0.5)


def kill_from_outside(cli, scenario, trials, chance) -> bool:
    """A trial in which the kill does not wait for a call: it comes when so much is
    recorded, or a little later."""
    cache, record = scenario.prepare(trials / "cache"), trials / "record"
    recorded = record.stat().st_size if record.exists() else 0
    # nothing, if the last kill came so early
    whole = recorded or count_calls(cli, scenario, trials).total() * 200
    moment = chance.randrange(whole)
    record.unlink(missing_ok=True)
    running = cli.start(*scenario.arguments(cache), faults=Faults(cache, record=record))
    running.wait_until(lambda: running.poll() is not None or record.stat().st_size >= moment)
    running.send(signal.SIGKILL)
    ended = running.wait()
    assert_old_or_new(scenario, cache, moment)
    assert_finishes(cli, scenario, cache, moment)
    return ended.code == -signal.SIGKILL


SLOW = ["from_nothing", "extraction_of_more", "repair", "pruning", "indexing"]
OFTEN = [
    ("from_nothing", 3, 1),
    *(pytest.param(name, 60, 31, marks=pytest.mark.slow) for name in SLOW),
]
"""A scenario, how many trials, and how many of these must kill the command, which ends
before some."""


@pytest.mark.parametrize(("scenario", "times", "least"), OFTEN, indirect=["scenario"])
def test_killed_from_outside_at_any_moment(faulty, scenario, trials, tell, times, least):
    seed = 4 if times == 3 else random.randrange(1 << 32)
    chance = random.Random(seed)
    killed = sum(kill_from_outside(faulty, scenario, trials, chance) for _ in range(times))
    tell(f"{scenario.name}: killed {killed} times in {times} trials, seed {seed}")
    assert killed >= least


EVERY_THIRD = [pytest.param(name, None, marks=pytest.mark.slow) for name in SLOW[:2]]


@pytest.mark.parametrize(
    ("scenario", "calls"), [("from_nothing", (20, 80, 150)), *EVERY_THIRD], indirect=["scenario"]
)
def test_one_of_two_runs_is_killed(faulty, scenario, trials, tell, calls):
    """The other, which waits for it, does it all."""
    struck_at = calls or range(0, count_calls(faulty, scenario, trials).total(), 3 * STEP)
    killed = 0
    for strike in (Strike(at, "kill") for at in struck_at):
        cache = scenario.prepare(trials / "cache")
        command = (*scenario.arguments(cache), "--wait")
        running = [faulty.start(*command, faults=Faults(cache, one)) for one in (strike, None)]
        struck, other = (one.wait() for one in running)
        assert struck.code in (-signal.SIGKILL, 0, scenario.code), f"{strike}: {struck}"
        assert other.code in (0, scenario.code), f"{strike}: {other}"
        assert_is_after(scenario, cache, strike)
        assert_finishes(faulty, scenario, cache, strike)
        killed += struck.code == -signal.SIGKILL
    tell(f"{scenario.name}: killed {killed} of two runs in {len(struck_at)} trials")
    assert killed > (0 if calls else len(struck_at) // 3)
