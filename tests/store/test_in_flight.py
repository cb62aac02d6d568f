"""Marks of what was in flight in a run that has died are removed once it is known what became of it."""

from __future__ import annotations

import pytest
from small_shards import item, write

from featcache.store.in_flight import InFlight, forget_suspects
from featcache.store.index import open_index
from featcache.store.runs import Run


@pytest.mark.parametrize("is_done", [True, False])
def test_what_a_worker_had_in_flight_another_may_have_done_whose_run_has_an_earlier_name(version, is_done):
    driver = Run(version, {"only": False})
    early, late = (Run(version, {"only": True, "part_of": driver.id}, after=[driver.id]) for _ in range(2))
    assert driver.id < early.id < late.id
    with InFlight([late.folder], 1) as in_flight, in_flight.working_on(0, ["b"]):
        mark = (late.folder / "in_flight.0").read_bytes()
    (late.folder / "in_flight.0").write_bytes(mark)  # as a kill leaves it
    late._lock.release()
    write(version, [item("b" if is_done else "a")], run=early.id)
    forget_suspects(version, open_index(version))
    assert any(late.folder.glob("in_flight.*")) != is_done
