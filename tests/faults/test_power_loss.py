"""The power fails at any call, and of what was not flushed anything may be gone: the same
must hold as after a kill."""

import random
import shutil

import pytest
from power_loss import POLICIES, Disk
from promises import assert_finishes, assert_old_or_new, version_in
from shim import Faults, read_calls


@pytest.mark.parametrize("states", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_some_states_after_a_power_cut(faulty, scenario, trials, tell, states):
    """The undisturbed command is recorded; then, the power fails at some moment of it,
    and a failure says the seed."""
    home, record = trials / "home", trials / "record"
    home.mkdir()
    cache = scenario.prepare(home / "cache")
    disk = Disk(home)
    faulty(*scenario.arguments(cache), faults=Faults(home, record=record, data=True)).with_code(
        scenario.code
    )
    disk.play(read_calls(record))
    assert disk.end > 20
    first = 0 if states == 8 else random.randrange(1 << 32)
    tell(f"{scenario.name}: seeds {first} to {first + states - 1}")
    for seed in range(first, first + states):
        chance = random.Random(seed)
        moment = disk.end if chance.random() < 0.1 else chance.randrange(disk.end)
        policy = chance.choice(POLICIES)
        where = f"seed {seed}: {policy} at call {moment} of {disk.end}"
        shutil.rmtree(home)
        disk.cut(moment, chance, policy, home)
        new = assert_old_or_new(scenario, cache, where)
        version = version_in(cache)
        there = set() if version is None else {*version.shard_names()}
        lasting = disk.lasting(moment, "shards") - {"zarr.json"}
        assert lasting <= there, f"{where}: the shards {lasting - there} were flushed, and are gone"
        if moment == disk.end:
            assert new == scenario.after.keys(), f"{where}: the command had ended"
        assert_finishes(faulty, scenario, cache, where)
