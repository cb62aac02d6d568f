"""Clocks that are years ahead or behind, or jump: which item counts, and whether a
version is whole, do not depend on them."""

from dataclasses import replace

import pytest
from promises import assert_finishes, assert_is_after, assert_old_or_new
from shim import Faults, Strike

YEAR = 365.25 * 86400
CLOCKS = {
    "from the future to now": ((10 * YEAR, 0.0), (0.0, 0.0)),
    "from now to the past": ((0.0, 0.0), (-10 * YEAR, 0.0)),
    "from the past to the future": ((-10 * YEAR, 0.0), (10 * YEAR, 0.0)),
    "jumping": ((0.0, 5 * YEAR), (0.0, 5 * YEAR)),
}
"""The clock of a first extraction, and that of a second one; each as `Faults.clock`."""


@pytest.mark.parametrize("name", CLOCKS)
def test_what_counts_is_what_was_extracted_last(
    faulty, from_nothing, extraction_of_more, trials, name
):
    """A first extraction with one clock, a second with another; the second is killed on
    its way, and again done."""
    first, second = CLOCKS[name]
    base = trials / "base"
    faulty(*from_nothing.arguments(base), faults=Faults(base, clock=first)).with_code(
        from_nothing.code
    )
    assert_is_after(from_nothing, base, name)
    scenario = replace(extraction_of_more, base=base)
    for at in (40, 110, 10**6):
        cache = scenario.prepare(trials / "cache")
        ended = faulty(
            *scenario.arguments(cache), faults=Faults(cache, Strike(at, "kill"), clock=second)
        )
        assert (ended.code == scenario.code) == (at == 10**6), ended
        assert_old_or_new(scenario, cache, f"{name}, killed at call {at}")
        assert_finishes(faulty, scenario, cache, f"{name}, killed at call {at}")


def test_repair_with_another_clock_brings_back_what_was_there(faulty, repair, trials):
    for clock in ((-20 * YEAR, 0.0), (20 * YEAR, 0.0), (0.0, YEAR)):
        cache = repair.prepare(trials / "cache")
        faulty(*repair.arguments(cache), faults=Faults(cache, clock=clock)).with_code(0)
        assert_is_after(repair, cache, clock)


def test_whether_a_failure_stands_is_not_up_to_the_clock(
    faulty, from_nothing, small, config, trials
):
    """Failed in a run of the future, extracted now; then its file is gone, and it fails
    in a run of the past."""
    corpus = small.copy(trials / "audio")
    manifest = corpus.manifest(corpus.rows[:4], "four.csv")
    cache = trials / "cache"
    command = ("extract", manifest, "-c", config, "-o", cache, "--threads", 1)

    def failed(clock, *options) -> list[str]:
        ended = faulty(*command, *options, faults=Faults(cache, clock=(clock, 0.0)))
        found = faulty("info", cache, "--json").json()["versions"][0]["failures"]
        assert ended.code == (3 if found else 0), ended
        return [failure["id"] for failure in found]

    missing = corpus.folder / "nowhere.wav"
    assert failed(10 * YEAR) == ["utt-1"]
    (corpus.folder / "5.wav").rename(missing)
    assert failed(0.0) == []
    missing.write_bytes(b"no audio")
    assert failed(-10 * YEAR, "--check-sources") == ["utt-1"]
    (corpus.folder / "0.wav").replace(missing)
    assert failed(-20 * YEAR) == []
