"""Two caches of one manifest, whatever is done to them: what is wanted is served with the
features of its newest audio, or reported missing; and a run ends that."""

import pytest
from histories import History

SEEDS = (13, 31, 104, 139, 163, 177, 191)
"""Histories that an earlier featcache did not survive."""


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(200, 500))]
)
def test_whatever_the_history_what_is_served_is_of_the_newest_audio(seed, scratch, trusted):
    history = History(scratch, seed)
    for _ in range(15):
        history.step()
