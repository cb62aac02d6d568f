"""Two runs at once where locks do not work as they should: missing, always granted, or
those of each host alone."""

import errno
import random
from dataclasses import replace

import pytest
from promises import TRIAL_SECONDS, assert_is_after, assert_no_leftovers, assert_old_or_new
from shim import Faults

LOCKS = {
    "real": {},
    "of each host": {"locks": "host"},
    "always granted": {"locks": "granted"},
    "none (ENOLCK)": {"locks": "fail", "lock_error": errno.ENOLCK},
    "none (ENOSYS)": {"locks": "fail", "lock_error": errno.ENOSYS},
}


def two_hosts(cli, scenario, trials, name, chance) -> bool:
    """One trial; the second run starts somewhere in the first. Returns whether it did:
    the first may have ended."""
    cache, record = scenario.prepare(trials / "cache"), trials / "record"
    record.unlink(missing_ok=True)
    moment = chance.randrange(30_000)
    locks, command = {"shared": str(trials), **LOCKS[name]}, (*scenario.arguments(cache), "--wait")
    first = cli.start(*command, faults=Faults(cache, record=record, host="a", **locks))
    first.wait_until(
        lambda: first.poll() is not None or (record.exists() and record.stat().st_size >= moment)
    )
    is_together = first.poll() is None
    second = cli.start(*command, faults=Faults(cache, host="b", **locks))
    for one in (first, second):
        ended = one.wait(TRIAL_SECONDS)
        where = f"second begins at byte {moment} of the first's record: {ended}"
        assert ended.code in (0, scenario.code), where
        assert [
            line
            for line in scenario.complaints(ended)
            if "this run waits until that has ended" not in line
        ] == []
    assert_old_or_new(scenario, cache, where)
    assert_is_after(scenario if name == "real" else replace(scenario, is_once=False), cache, where)
    assert_no_leftovers(cache, where)
    return is_together


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOCKS)
def test_two_runs_at_once_do_no_harm(
    faulty, from_nothing, extraction_of_more, trials, name, count, tell
):
    seed = 3 if count == 3 else random.randrange(1 << 32)
    chance = random.Random(seed)
    for scenario in (from_nothing,) if count == 3 else (from_nothing, extraction_of_more):
        together = [two_hosts(faulty, scenario, trials, name, chance) for _ in range(count)]
        tell(
            f"{scenario.name}: locks {name}: {len(together)} trials, together in "
            f"{sum(together)}, seed {seed}"
        )
        assert any(together)


def test_partitions_beside_a_run_over_all_of_it_lose_nothing(faulty, extraction_of_more, trials):
    """Partitions that overlap, in shards of several sizes: each utterance is there, once
    or alike."""
    cache = trials / "cache"
    job = extraction_of_more.arguments(cache)
    in_small_shards = ["0.0003" if argument == "0.001" else argument for argument in job]
    started = [
        faulty.start(*job, "--partition", "0/2"),
        faulty.start(*in_small_shards, "--partition", "1/2"),
        faulty.start(*job, "--partition", "1/3"),
        faulty.start(*job, "--wait"),
    ]
    for ended in [one.wait(TRIAL_SECONDS) for one in started]:
        assert ended.code in (0, 3), ended
    assert faulty(*job).code == 3
    assert_is_after(replace(extraction_of_more, is_once=False), cache)
    assert_no_leftovers(cache)
