"""Whatever happens to the records of runs, `verify` says it, readers take no wrong value, and `repair` mends it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress

import pytest
from cache_contents import items, only_version
from hypothesis import given
from hypothesis import strategies as st
from scratch import scratch_folder

import featcache
from featcache.errors import DamagedError, StoreError
from featcache.health.records import check_records
from featcache.store.index import open_index
from featcache.store.ledger import latest_failures
from featcache.store.records import read_document, read_lines, write_document
from featcache.store.run_records import read_run, request_of, run_names
from featcache.store.selection import select_version

RECORDS = ("run.json", "failures.jsonl", "shards.jsonl")
EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def made(cli, plain, tmp_path_factory):
    """A version of three shards and two failures, made by one run."""
    cache = tmp_path_factory.mktemp("made") / "cache"
    rows = [{**row, "path": "nowhere.wav"} if i in (0, 11) else row for i, row in enumerate(plain.rows)]
    manifest = plain.manifest(rows, "two-fail.csv")
    assert cli("extract", manifest, "-o", cache, "--shard-size", "0.04").code == 3
    return cache, manifest


@pytest.fixture
def spoilt(made, scratch):
    """A copy of it, to spoil: its only version, its run's folder, and the manifest."""
    cache, manifest = made
    shutil.copytree(cache, scratch / "cache")
    version = select_version(scratch / "cache", None)
    (run,) = run_names(version)
    return version, version.path / "runs" / run, manifest


def told(version) -> list[str]:
    """What `verify` says of the records."""
    found, _ = check_records(version, open_index(version), has_damaged_shards=False, has_manifest=False)
    return [problem.message for problem in found]


def flips(data: bytes, every: bool) -> Iterator[bytes]:
    """The data with each bit flipped in turn; unless `every` is wanted, one of every 31, and those of the end."""
    for bit in range(8 * len(data)):
        if every or bit % 31 == 0 or bit >= 8 * (len(data) - 4):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            yield bytes(flipped)


def facts(version):
    """What readers take from the records."""
    (run,) = run_names(version)
    record = read_run(version, run)
    events = [] if record is None else [*record.events()]
    return latest_failures(version), request_of(version, run), events


@pytest.mark.parametrize("name", RECORDS)
@EVERY
def test_every_flipped_bit_is_told_and_none_is_believed(spoilt, name, every):
    """Of a run that has ended; also in the keys of the seals, and in line breaks."""
    version, folder, _ = spoilt
    failures, asked, events = facts(version)
    assert (len(failures), len(events), asked["utterances"]) == (2, 2, 12)
    assert told(version) == []
    path = folder / name
    data = path.read_bytes()
    for flipped in flips(data, every):
        path.write_bytes(flipped)
        (message, *_) = told(version)
        assert str(path) in message
        assert "damaged" in message
        now_failures, now_asked, now_events = facts(version)
        assert now_failures.items() <= failures.items()
        assert now_asked in ({}, asked)
        assert set(now_events) <= set(events)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_a_run_that_has_ended_is_not_cut_off_unnoticed(spoilt, name):
    """Anywhere, or gone."""
    version, folder, _ = spoilt
    data = (folder / name).read_bytes()
    for end in (*range(0, len(data), 53), len(data) - 2, len(data) - 1):
        (folder / name).write_bytes(data[:end])
        assert told(version)
    (folder / name).unlink()
    assert told(version)


def as_if_killed(folder) -> None:
    """The record of a run as it was before it ended."""
    document = read_document(folder / "run.json")
    kept = {key: document[key] for key in ("started", "asked")}
    write_document(folder / "run.json", kept)


@pytest.mark.parametrize("name", ["failures.jsonl", "shards.jsonl"])
@EVERY
def test_of_a_run_that_was_killed_only_the_end_may_be_torn(spoilt, name, every):
    """A last line without its end is what a kill leaves; a flipped bit is damage, in the last line too."""
    version, folder, _ = spoilt
    as_if_killed(folder)
    path = folder / name
    data = path.read_bytes()
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    unnoticed = 0
    for end in (*range(last, len(data), 53), len(data) - 1):
        path.write_bytes(data[:end])
        assert not [message for message in told(version) if str(path) in message]
    for flipped in flips(data, every):
        path.write_bytes(flipped)
        unnoticed += not [message for message in told(version) if str(path) in message]
    assert unnoticed == 0
    path.write_bytes(data[:last] + bytes(len(data) - last) + b"\n")  # a power cut has kept the size
    assert not [message for message in told(version) if str(path) in message]


def test_ledgers_of_an_earlier_featcache_are_read_as_they_were(spoilt):
    """Without seals, and without records of shards; a line that is no JSON is passed over."""
    version, folder, _ = spoilt
    failures, asked, _ = facts(version)
    for name in ("run.json", "failures.jsonl"):
        documents = (folder / name).read_text().split("\n") if name != "run.json" else [(folder / name).read_text()]
        old = [json.loads(text) for text in documents if text]
        for document in old:
            del document["checksum"]
        if name == "run.json":
            del old[0]["sealed"]
            del old[0]["outcome"]["lines"]
        (folder / name).write_text("".join(json.dumps(document) + "\n" for document in old) + '{"id": "x", "pa\n')
    (folder / "run.json").write_text((folder / "run.json").read_text().split("\n")[0])
    (folder / "shards.jsonl").unlink()
    assert facts(version) == (failures, asked, [])
    assert told(version) == []


def test_verify_says_what_is_lacking(cli, plain, spoilt):
    """A run was to add twelve, and a disk was full: its shards are not there, and nothing else tells."""
    version, folder, manifest = spoilt
    lost = version.shard_names()[0]
    as_if_killed(folder)
    lines = (folder / "shards.jsonl").read_text().splitlines(keepends=True)
    (folder / "shards.jsonl").write_text("".join(line for line in lines if lost not in line))
    count = version.shard(lost).info.items
    shutil.rmtree(version.shard(lost).folder)
    found = cli("verify", version.path)
    assert found.code == 1
    assert f"{count} of the 12 utterances of {manifest} are missing, 2 failed: extraction was interrupted" in found.out
    assert "no damage found" not in found.out
    assert cli("extract", manifest, "-o", version.path.parent, "--shard-size", "0.04").code == 3
    assert cli("verify", version.path).code == 3


@pytest.mark.parametrize("name", RECORDS)
def test_repair_removes_what_is_damaged_and_the_next_run_makes_up_for_it(cli, plain, spoilt, name):
    """What is sound stays; until then the version does not pass for whole."""
    version, folder, manifest = spoilt
    cache = version.path.parent
    before = items(cache)
    data = bytearray((folder / name).read_bytes())
    data[30] ^= 4
    (folder / name).write_bytes(data)
    assert cli("verify", cache).code == 1
    repaired = cli("repair", cache, "--manifest", manifest)
    assert repaired.code == 0, repaired.err
    assert "1 record of runs mended" in repaired.out
    found = cli("verify", cache, "--json").json()["versions"][0]
    expected = {"run.json": ["record"], "failures.jsonl": ["unfinished"], "shards.jsonl": []}[name]
    assert [problem["kind"] for problem in found["problems"]] == expected
    if expected:
        with pytest.raises(StoreError, match="run the same `featcache extract` again"):
            featcache.open(cache, strict=True)
    assert cli("extract", manifest, "-o", cache).code == 3
    assert cli("verify", cache).code == 3
    assert featcache.open(cache, strict=True).version.path == version.path
    assert items(cache) == before
    assert len(latest_failures(only_version(cache))) == 2


@given(st.binary(max_size=200))
def test_any_bytes_in_place_of_a_record_are_damage_or_nothing(data):
    """Nothing else is raised."""
    with scratch_folder() as folder:
        path = folder / "x"
        path.write_bytes(data)
        assert read_lines(path, sealed=True).records == []
        read_lines(path, sealed=False)
        with suppress(DamagedError):  # an object without a seal is one of an earlier featcache
            read_document(path)


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_no_file_in_place_of_one_is_told_and_mended(cli, spoilt, name):
    """A pipe, which nobody writes into."""
    version, folder, manifest = spoilt
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for command in ("info", "verify"):
        ended = cli(command, version.path)
        assert "Traceback" not in ended.err
    assert ended.code == 1
    assert str(folder / name) in ended.out
    assert "featcache repair" in ended.out
    assert cli("repair", version.path, "--manifest", manifest).code in (0, 3)
    assert cli("extract", manifest, "-o", version.path.parent, "--shard-size", "0.04").code == 3
    assert told(version) == []
    assert len(latest_failures(version)) == 2
