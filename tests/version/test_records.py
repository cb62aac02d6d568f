"""What runs and probes leave in a version, for people: nothing follows from it, and what
is damaged is passed over."""

from itertools import chain

import pytest
from damage import each_cut, each_flip

from featcache.errors import StoreError
from featcache.version.ledger import Failure, read_failures
from featcache.version.records import (
    Run,
    began,
    manifest_roots,
    new_name,
    probe_names,
    read_probes,
    read_run,
    run_names,
    write_probe,
)
from featcache.version.version import Version

TRIAL = {"policy": "padded", "precision": "fp32", "error": None, "times_real_time": 7.5}
TRIAL |= {"mismatch": 0.25, "disturbed": 0.5}
PROBE = {"device": "cpu", "measured": [TRIAL], "fastest": TRIAL}


def test_a_run_says_what_was_asked_and_what_came_of_it(version, clock):
    run = Run(version, {"threads": 2, "root": "/audio"})
    first = read_run(version.store, run.id)
    assert (first.asked, first.finished, first.outcome) == (
        {"threads": 2, "root": "/audio"},
        None,
        {},
    )
    run.finish({"extracted": 5})
    record = read_run(version.store, run.id)
    assert (record.name, record.asked, record.outcome) == (run.id, first.asked, {"extracted": 5})
    assert record.started < record.finished
    assert began(run.id).isoformat() == record.started
    assert manifest_roots(version) == {"/audio"}


def test_runs_are_in_the_order_of_time(version, clock):
    runs = [Run(version, {"number": number}) for number in range(3)]
    assert run_names(version.store) == [run.id for run in runs]
    assert read_run(version.store, "another") is None
    assert began("not a run") is None
    assert began(new_name()) is not None


def test_failures_of_a_run_are_in_the_ledger_under_its_name(version, clock):
    failures = [Failure(id=id_, path=f"{id_}.wav", reason="empty", message="seen") for id_ in "abc"]
    first, second = Run(version, {}), Run(version, {})
    second.fail(failures[2:])
    first.fail(failures[:1])
    first.fail(failures[1:2])
    assert read_failures(version) == failures
    assert read_failures(version, run=first.id) == failures[:2]


def test_what_probes_found_comes_back_in_the_order_of_time(version, clock):
    """Documents of any form, with whatever else they say."""
    assert read_probes(version) == []
    documents = [PROBE, {}, {"policies": [{"name": "p\u00e4dded"}], "checksum": "00000000"}]
    for document in documents:
        write_probe(version, document)
    assert read_probes(Version.open(version.path)) == documents
    assert len(probe_names(version)) == 3


def test_a_probe_that_is_damaged_is_left_out(version):
    """A flipped bit in any byte of it, half a file, another file, a folder: the others
    count."""
    write_probe(version, PROBE)
    (path,) = (version.path / "probes").iterdir()
    for _ in chain(each_flip(path), each_cut(path)):
        assert read_probes(version) == []
    # none of which a batching can be chosen by
    for odd in ({"mismatch": 2}, {"disturbed": None}, {"error": 1}):
        write_probe(version, {"measured": [TRIAL | odd]})
    write_probe(version, {"measured": [{"policy": "padded", "precision": "fp32"}]})
    for name, text in (
        ("a.json", "[]"),
        ("b.json", '{"checksum": 1}'),
        (".c.json.12345678", "{}"),
        ("notes.txt", ""),
    ):
        (path.parent / name).write_text(text)
    (path.parent / "d.json").mkdir()
    assert read_probes(version) == [PROBE]


def test_a_probe_that_cannot_be_written_is_one_clear_line(version):
    (version.path / "probes").write_text("")
    with pytest.raises(
        StoreError, match=r"^\S*probes\S*: cannot be written: not a folder: move it away"
    ):
        write_probe(version, PROBE)
