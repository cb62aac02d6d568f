"""The power fails at any call, and of what was not flushed anything may be gone: the same must hold as after a kill."""

import random
import shutil

import pytest
from power_loss import POLICIES, Disk
from promises import assert_finishes, assert_old_or_new, version_in
from shim import Faults, read_calls


@pytest.fixture
def recorded(faulty, scenario, trials) -> Disk:
    """What the undisturbed command did."""
    home = trials / "home"
    home.mkdir()
    cache = scenario.prepare(home / "cache")
    disk, record = Disk(home), trials / "record"
    faulty(*scenario.arguments(cache), faults=Faults(home, record=record, data=True)).with_code(scenario.code)
    disk.play(read_calls(record))
    assert disk.end > 20
    return disk


def lose_power(cli, scenario, disk, trials, seed) -> None:
    """One state, of one moment; a failure says the seed."""
    chance = random.Random(seed)
    moment = disk.end if chance.random() < 0.1 else chance.randrange(disk.end)
    policy = chance.choice(POLICIES)
    where = f"seed {seed}: {policy} at call {moment} of {disk.end}"
    home = trials / "home"
    shutil.rmtree(home)
    disk.cut(moment, chance, policy, home)
    cache = home / "cache"
    new = assert_old_or_new(scenario, cache, where)
    version = version_in(cache)
    there = set() if version is None else {*version.shard_names()}
    lasting = disk.lasting(moment, "shards") - {"zarr.json"}
    assert lasting <= there, f"{where}: the shards {lasting - there} were flushed, and are gone"
    if moment == disk.end:
        assert new == scenario.after.keys(), f"{where}: the command had ended"
    assert_finishes(cli, scenario, cache, where)


@pytest.mark.parametrize("states", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_some_states_after_a_power_cut(faulty, scenario, recorded, trials, tell, states):
    first = 0 if states == 8 else random.randrange(1 << 32)
    tell(f"{scenario.name}: seeds {first} to {first + states - 1}")
    for seed in range(first, first + states):
        lose_power(faulty, scenario, recorded, trials, seed)
