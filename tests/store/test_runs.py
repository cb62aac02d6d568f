"""What runs and probes leave in a version: the ledger of failures, what each did, what was measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scratch import scratch_folder
from small_shards import INFO, item, write

from featcache.errors import StoreError
from featcache.store.index import open_index
from featcache.store.ledger import Failure, latest_failures, outdated_items, standing_failures
from featcache.store.run_records import request_of
from featcache.store.runs import Run
from featcache.store.version import Version


def failure(id_: str, reason: str = "empty") -> Failure:
    return Failure(id=id_, path=f"{id_}.wav", duration=1.5, channel=0, reason=reason, message="what was seen")


def test_the_latest_record_of_an_utterance_counts(version, clock):
    """Over all runs, in the order of time; a record torn by a kill is none."""
    first = Run(version, {"manifest": "a.csv"})
    first.fail([failure("a"), failure("b")])
    first.fail([])
    second = Run(version, {"manifest": "b.csv"})
    second.fail([failure("b", "truncated"), failure("c")])
    with (second.folder / "failures.jsonl").open("a") as file:
        file.write(json.dumps({"id": "a", "path": "a.w"})[:-3])
    found = latest_failures(version)
    assert {id_: failure.reason for id_, failure in found.items()} == {"a": "empty", "b": "truncated", "c": "empty"}
    assert found["c"] == failure("c")
    assert request_of(version, first.id) == {"manifest": "a.csv"}
    (second.folder / "run.json").write_text("{")
    assert request_of(version, second.id) == request_of(version, "none") == {}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True, min_size=1, max_size=5))
def test_the_ledger_keeps_any_text(names):
    """Ids, paths and messages of whatever characters, one record a line."""
    failures = [replace(failure(name), path=name, message=name) for name in names]
    with scratch_folder() as folder:
        version = Version.create(folder, INFO)
        Run(version, {}).fail(failures)
        assert latest_failures(version) == {failure.id: failure for failure in failures}


def test_a_failure_stands_until_something_newer_is_extracted(version, clock):
    """In no shard; or with an item that is still the one that was to be replaced, wherever repair has put it."""
    shard = write(version, [item("a"), item("b")], run="first")
    index = open_index(version)
    places = {id_: index.place(index.find_one(id_)) for id_ in "ab"}
    run = Run(version, {})
    run.fail([failure("a"), failure("b"), failure("c")], {"a": places["a"]})
    assert set(standing_failures(version, index)) == {"a", "c"}
    assert set(outdated_items(version, index)) == {"a"}
    older = standing_failures(version, index)["a"].replaces
    assert older is not None
    assert (older.run, int(older.row_hash, 16)) == ("first", places["a"].row_hash)

    moved = write(version, [item("a")], supersedes={shard.name: [0]}, run="first")
    assert set(standing_failures(version, open_index(version))) == {"a", "c"}
    index = open_index(version)
    sealed = (moved.folder / "zarr.json").read_text()
    (moved.folder / "zarr.json").write_text(sealed.replace("first", "other"))  # damaged: it does not say
    assert set(standing_failures(version, index)) == {"a", "c"}
    (moved.folder / "zarr.json").write_text(sealed)

    write(version, [item("a")], supersedes={moved.name: [0]}, run="second")  # of the very same row and file
    assert set(standing_failures(version, open_index(version))) == {"c"}
    assert outdated_items(version, open_index(version)) == {}


def test_records_of_other_versions_of_featcache_are_read(version):
    """Unsealed, without `replaces`, and with keys that are not known yet; what is no record is none."""
    run = Run(version, {})
    run.fail([failure("a")])
    (run.folder / "run.json").write_text(json.dumps({"started": "2026", "asked": {}}))
    ledger = run.folder / "failures.jsonl"
    record = json.loads(ledger.read_text())
    assert "replaces" not in record
    del record["checksum"]
    lines = [{**record, "id": "b", "signal": 11}, {**record, "id": 5}, {**record, "id": "c", "replaces": "x"}, 5, []]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in [record, *lines]))
    assert latest_failures(version) == {id_: replace(failure("a"), id=id_) for id_ in "ab"}


def test_what_probes_found_comes_back_in_the_order_of_time(version, clock):
    """Documents of any form; the store does not ask what is in them."""
    assert version.probes() == []
    documents = [{"device": "cpu", "checksum": "00000000"}, {}, {"policies": [{"name": "pädded \udc80", "wrong": 0.5}]}]
    for document in documents:
        version.write_probe(document)
    assert Version.open(version.path).probes() == documents
    assert len(list((version.path / "probes").iterdir())) == 3
    with pytest.raises(ValueError, match="JSON"):
        version.write_probe({"largest": math.nan})
    assert version.probes() == documents


def test_a_probe_that_is_damaged_is_left_out(version):
    """A flipped bit in any byte of it, half a file, another file, a folder: the others count."""
    version.write_probe({"wrong": 0.25, "policy": "padded"})
    (path,) = (version.path / "probes").iterdir()
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert version.probes() == []
        path.write_bytes(data[:at])
        assert version.probes() == []
    path.write_bytes(data)
    for name, text in (("a.json", "[]"), ("b.json", '{"checksum": 1}'), (".c.json.12345678", "{}"), ("notes.txt", "")):
        (path.parent / name).write_text(text)
    (path.parent / "d.json").mkdir()
    assert version.probes() == [{"wrong": 0.25, "policy": "padded"}]
    assert version.shard_names() == []


def test_a_probe_that_cannot_be_written_is_one_clear_line(version):
    """Where, and why."""
    (version.path / "probes").write_text("")
    with pytest.raises(StoreError, match="probes: cannot be written: Not a directory"):
        version.write_probe({})


def test_a_run_says_what_came_of_it(version):
    """What was asked, when, and the outcome."""
    run = Run(version, {"threads": 2})
    run.finish({"extracted": 5})
    record = json.loads((run.folder / "run.json").read_text())
    assert record["asked"] == {"threads": 2}
    assert record["outcome"] == {"extracted": 5, "lines": {"failures": 0, "shards": 0}}
    assert record["started"] <= record["finished"]
