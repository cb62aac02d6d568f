"""What `verify` says of a damaged version, and of one that lacks rows of a manifest: how much, and what to do."""

import pytest
from cache_contents import only_version
from damage import CHUNKS, flip, victim


def test_utterances_of_a_damaged_shard_are_counted_apart(cli, plain, cache):
    """They are not lost: most of them are sound, and repair keeps those."""
    utterances = len(plain.rows)
    assert f": 3 shards, {utterances} utterances, " in cli("verify", cache).out
    assert cli("verify", cache, "--json").json()["versions"][0]["damaged_utterances"] == 0
    shard = victim(cache)
    inside = shard.info.items
    flip(shard.folder / CHUNKS["features"], 0)
    told = cli("verify", cache)
    assert told.code == 1
    assert f": 3 shards, 1 of them damaged; the others hold {utterances - inside} utterances, " in told.out
    assert f"  the damaged shard holds {inside} utterances: repair keeps the sound ones\n" in told.out
    ended = cli("verify", cache, "--json")
    (version,) = ended.json()["versions"]
    (problem,) = version["problems"]
    assert (ended.code, ended.json()["ok"]) == (1, False)
    assert (version["utterances"], version["damaged_utterances"]) == (utterances - inside, inside)
    assert (problem["shard"], problem["id"], problem["kind"]) == (shard.name, shard.table.ids[0], "checksum")


def test_where_every_shard_is_damaged_none_is_counted_as_sound(cli, cache):
    version = only_version(cache)
    for name in version.shard_names():
        flip(version.shard(name).folder / CHUNKS["features"], 10)
    assert ": 3 shards, all damaged; every byte read\n" in cli("verify", cache).out


def test_a_shard_that_does_not_say_how_many_it_holds_is_not_counted(cli, cache):
    (victim(cache).folder / "zarr.json").write_text("{}")
    told = cli("verify", cache)
    assert "1 of them damaged" in told.out
    assert "the damaged shard holds" not in told.out
    (version,) = cli("verify", cache, "--json").json()["versions"]
    assert version["damaged_utterances"] is None


def test_a_fault_is_said_once(cli, plain, cache):
    """In its own words, not behind another word for them."""
    shard = victim(cache)
    flip(shard.folder / CHUNKS["features"], 10)
    rows = [*plain.rows, {"id": "new", "path": "new.wav"}]
    told = cli("verify", cache, "--manifest", plain.manifest(rows, "longer.csv"))
    faults = [line for line in told.out.splitlines()[2:] if line.startswith("  ")]
    assert any(line.startswith("  new: is in no shard") for line in faults)
    assert not any(line.startswith(("  checksum: ", "  missing: ")) for line in faults)


@pytest.mark.parametrize("config", ["fbank80", "mfcc13"])
def test_missing_rows_are_summed_up_with_what_extracts_them(cli, plain, scratch, config):
    """Not only the first of them listed; changed rows too, which the same command extracts."""
    cache = scratch / "my features"
    first = [row for number, row in enumerate(plain.rows) if number % 2]
    assert cli("extract", plain.manifest(first, "half.csv"), "-o", cache, "-c", config).code == 0
    rows = [dict(row) for row in plain.rows] + [{"id": f"more-{i}", "path": "00.wav"} for i in range(40)]
    rows[1]["start"] = 0.1
    rows[1]["duration"] = 0.2
    manifest = plain.manifest(rows, "whole.csv")
    told = cli("verify", cache, "--manifest", manifest, "--root", plain.folder)
    assert told.code == 1
    given = {"fbank80": "", "mfcc13": " -c CONFIG"}[config]
    command = f"featcache extract {manifest} --root {plain.folder}{given} -o '{cache}'"
    assert told.err == f"46 missing, 1 changed: {command}\n"
    assert "… and 27 more: --json has them all" in told.out


def test_hints_name_the_manifest_that_was_given(cli, plain, cache):
    flip(victim(cache).folder / CHUNKS["features"], 10)
    path = only_version(cache).path
    assert cli("verify", cache).err == f"1 shard is damaged: featcache repair {path} --manifest MANIFEST\n"
    told = cli("verify", cache, "--manifest", plain.manifest()).err
    assert f"1 shard is damaged: featcache repair {path} --manifest {plain.manifest()}\n" in told
