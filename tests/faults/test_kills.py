"""Killed at any call that changes a file, at any other, and at any moment: what is there is old or new, and a second
run of the command ends as if nothing had happened.
"""

import random
import signal
from collections import Counter

import pytest
from promises import assert_finishes, assert_is_after, assert_old_or_new
from shim import CHANGES, STEP, Faults, Strike, read_calls, spread_kills

SAMPLE = 4
"""Kills of a scenario in CI."""


def count_calls(cli, scenario, trials) -> Counter[str]:
    """How many calls of each kind that changes something the undisturbed command makes; at least."""
    cache = scenario.prepare(trials / "counted")
    record = trials / "record"
    assert cli(*scenario.arguments(cache), faults=Faults(cache, record=record)).code == scenario.code
    return Counter(call.kind for call in read_calls(record))


def kill(cli, scenario, trials, strike) -> bool:
    """One trial; returns whether the command was killed: it may have ended before."""
    cache = scenario.prepare(trials / "cache")
    ended = cli.start(*scenario.arguments(cache), faults=Faults(cache, strike)).wait()
    assert ended.code in (-signal.SIGKILL, scenario.code), f"{strike}: {ended}"
    assert_old_or_new(scenario, cache, strike)
    assert_finishes(cli, scenario, cache, strike)
    return ended.code == -signal.SIGKILL


def test_killed_at_some_calls(faulty, scenario, trials):
    """Spread over the command, before a call, or in the middle of a write."""
    calls = count_calls(faulty, scenario, trials)
    killed = sum(kill(faulty, scenario, trials, strike) for strike in spread_kills(calls, SAMPLE))
    assert killed > SAMPLE // 2


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "torn"])
def test_killed_at_every_call(faulty, scenario, trials, tell, action):
    """Before each call; or in the middle of every write."""
    calls = count_calls(faulty, scenario, trials)
    kinds, total = (["write"], calls["write"]) if action == "torn" else (CHANGES, calls.total())
    killed = sum(kill(faulty, scenario, trials, Strike(at, action, kinds)) for at in range(0, total, STEP))
    tell(f"{scenario.name}: {action}: killed {killed} times, at {total} calls, every {STEP}.")
    assert killed > total // STEP * 0.9  # the last calls are those of the index, or of threads that are ending


def kill_from_outside(cli, scenario, trials, chance) -> bool:
    """A trial in which the kill does not wait for a call: it comes when so much is recorded, or a little later."""
    cache, record = scenario.prepare(trials / "cache"), trials / "record"
    recorded = record.stat().st_size if record.exists() else 0
    whole = recorded or count_calls(cli, scenario, trials).total() * 200  # nothing, if the last kill came so early
    moment = chance.randrange(whole)
    record.unlink(missing_ok=True)
    running = cli.start(*scenario.arguments(cache), faults=Faults(cache, record=record))
    running.wait_until(lambda: running.poll() is not None or record.stat().st_size >= moment)
    running.send(signal.SIGKILL)
    ended = running.wait()
    assert_old_or_new(scenario, cache, moment)
    assert_finishes(cli, scenario, cache, moment)
    return ended.code == -signal.SIGKILL


def two_runs(cli, scenario, trials, strike) -> bool:
    """Two runs of the command at once, of which one is killed; the other, which waits for it, does it all."""
    cache = scenario.prepare(trials / "cache")
    command = (*scenario.arguments(cache), "--wait")
    running = [cli.start(*command, faults=Faults(cache, one)) for one in (strike, None)]
    killed, other = (one.wait() for one in running)
    assert killed.code in (-signal.SIGKILL, 0, scenario.code), f"{strike}: {killed}"
    assert other.code in (0, scenario.code), f"{strike}: {other}"
    assert_is_after(scenario, cache, strike)
    assert_finishes(cli, scenario, cache, strike)
    return killed.code == -signal.SIGKILL


def test_killed_from_outside_at_some_moments(faulty, from_nothing, trials):
    chance = random.Random(4)
    killed = [kill_from_outside(faulty, from_nothing, trials, chance) for _ in range(3)]
    assert any(killed)


@pytest.mark.slow
def test_killed_from_outside_at_any_moment(faulty, scenario, trials, tell):
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    killed = sum(kill_from_outside(faulty, scenario, trials, chance) for _ in range(60))
    tell(f"{scenario.name}: killed {killed} times in 60 trials, seed {seed}")
    assert killed > 30


def test_one_of_two_runs_is_killed_at_some_calls(faulty, from_nothing, trials):
    killed = [two_runs(faulty, from_nothing, trials, Strike(at, "kill")) for at in (20, 80, 150)]
    assert any(killed)


@pytest.mark.slow
def test_one_of_two_runs_is_killed_at_every_third_call(faulty, from_nothing, extraction_of_more, trials, tell):
    for scenario in (from_nothing, extraction_of_more):
        total = count_calls(faulty, scenario, trials).total()
        killed = [two_runs(faulty, scenario, trials, Strike(at, "kill")) for at in range(0, total, 3 * STEP)]
        tell(f"{scenario.name}: killed {sum(killed)} of two runs in {len(killed)} trials")
        assert sum(killed) > len(killed) // 3
