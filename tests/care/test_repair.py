"""Repair takes nothing away that it does not bring back."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from cache_contents import check, items, only_version
from damage import CHUNKS, flip, mend, victim
from extractions import ONE_EACH, write_config
from hostile_caches import columns_of, rename_shard
from make_cache import add_shard

import featcache.care.repair
from featcache.format.group import CHECKSUM_BYTES
from featcache.manifest.read import read_manifest
from featcache.version.ledger import Failure, put_failures, read_failures, rewrite_failures


def test_repair_looks_for_all_that_it_needs_before_it_removes_anything(cli, plain, cache, scratch):
    """A row, a disk that is not mounted or a wrong --root, a device: it says so in one
    line, instead of failures."""
    shard, manifest = victim(cache), plain.manifest()
    flip(shard.folder / CHUNKS["features"], 100)
    lost = shard.table.ids[0]
    less = plain.manifest([row for row in plain.rows if row["id"] != lost], "less.csv")
    for options, words in (
        (("--manifest", less), (lost, "Nothing has been removed")),
        (("--manifest", manifest, "--root", scratch), ("Nothing has been removed", "--root")),
        (
            ("--manifest", manifest, "--device", "cuda:99"),
            ("'cuda:99': there is no such device; torch sees ",),
        ),
    ):
        refused = cli("repair", cache, *options)
        assert refused.code in (1, 2)
        (line,) = refused.err.splitlines()
        assert all(word in line for word in words), line
        assert len(list(cache.glob("*/shards/*/"))) == 3


@pytest.mark.parametrize("way", ["inside", "link"])
def test_a_version_may_be_named_by_any_path(cli, plain, sound, cache, scratch, way):
    """`featcache verify .` in its folder, or through a link."""
    path = only_version(cache).path
    (scratch / "link").symlink_to(path)
    name, cwd = (".", path) if way == "inside" else (scratch / "link", None)
    assert cli("verify", name, cwd=cwd).code == 0
    flip(victim(cache).folder / CHUNKS["features"], 100)
    assert cli("repair", name, "--manifest", plain.manifest(), cwd=cwd).code == 0
    assert items(cache) == items(sound)
    assert cli("verify", name, cwd=cwd).code == 0


def test_repair_says_paths_as_they_were_given(cli, plain, cache):
    flip(victim(cache).folder / CHUNKS["features"], 100)
    said = [
        cli("repair", cache.name, "--manifest", plain.manifest(), cwd=cache.parent)
        for _ in range(2)
    ]
    assert [repaired.code for repaired in said] == [0, 0]
    for repaired in said:
        assert f"{cache.name}/fbank80-" in repaired.out
        assert str(cache) not in repaired.out + repaired.err


def test_an_extractor_that_changes_the_current_folder_moves_no_repair(cli, plain, scratch):
    config = write_config(scratch, "Moving")
    cli(
        "extract", plain.manifest(), "-c", config, "-o", "c", "--shard-size", ONE_EACH, cwd=scratch
    ).with_code(0)
    before = items(scratch / "c")
    flip(victim(scratch / "c").folder / CHUNKS["features"], 100)
    job = ("repair", "c", "--manifest", plain.manifest(), "--trust-remote-code")
    document = cli(*job, "--json", cwd=scratch).with_code(0).json()
    name = only_version(scratch / "c").path.name
    (version,) = document["versions"]
    assert {version["path"], version["summary"]["versions"][0]["path"]} == {f"c/{name}"}
    assert items(scratch / "c") == before


def test_repair_brings_back_what_had_failed_once(cli, plain, scratch, written):
    """An old record in the ledger is no reason to leave out what was there."""
    config = written("name: limited\nextractor: fbank\naudio: {max_seconds: 0.5}\n", "limited.yaml")
    cache = scratch / "cache"
    job = ("extract", plain.manifest(), "-o", cache, "-c", config)
    assert cli(*job).code == 3
    config.write_text("name: limited\nextractor: fbank\n")
    assert cli(*job, "--retry-failed").code == 0
    expected = items(cache)
    for name in only_version(cache).shard_names():
        flip(only_version(cache).shard(name).folder / CHUNKS["features"], 100)
    assert cli("repair", cache, "--manifest", plain.manifest()).code in (0, 3)
    assert items(cache) == expected


def test_what_a_job_of_an_array_enters_in_the_ledger_meanwhile_stays(plain, cache, monkeypatch):
    """It takes no lock: what it has written has not been read, when damaged lines are
    removed."""
    first, second, late = (
        Failure(id=id_, path="b.wav", reason="empty", message="") for id_ in "abc"
    )
    version = only_version(cache)
    put_failures(version, "run 1", [first, second])
    flip(version.path / "failures" / "run 1", 5)

    def rewrite(*arguments: object) -> None:
        put_failures(version, "run 2", [late])
        rewrite_failures(*arguments)

    monkeypatch.setattr(featcache.care.repair, "rewrite_failures", rewrite)
    assert mend(cache, plain.manifest()).records == 1
    assert {*read_failures(version)} == {second, late}


def test_repair_of_what_is_sound_does_nothing(cli, plain, cache):
    version = only_version(cache).path

    def files():
        beside = {version, version / "lock", version / "work"}
        return {
            path: path.stat().st_mtime_ns
            for path in cache.rglob("*")
            if not beside & {path, path.parent}
        }

    before = files()
    assert (
        "no damage found" in cli("repair", cache, "--manifest", plain.manifest()).with_code(0).out
    )
    assert files() == before


@pytest.mark.parametrize("step", ["verify", "rewrite"])
def test_an_interrupt_before_anything_is_removed_leaves_the_damaged_shard(
    plain, cache, monkeypatch, step
):
    """While it still verifies, or in the middle of keeping what is sound."""
    flip(victim(cache).folder / CHUNKS["features"], 100)
    before, stop, original = (
        only_version(cache).shard_names(),
        threading.Event(),
        getattr(featcache.care.repair, step),
    )

    def interrupted(*given, **settings):
        stop.set()
        return original(*given, **settings)

    monkeypatch.setattr(featcache.care.repair, step, interrupted)
    assert mend(cache, plain.manifest(), stop=stop).interrupted
    assert {*before} <= {*only_version(cache).shard_names()}


def test_repairs_and_extractions_that_begin_together_do_no_harm(cli, plain, sound, cache):
    for name in only_version(cache).shard_names()[:2]:
        flip(only_version(cache).shard(name).folder / CHUNKS["features"], 9)
    jobs = [("repair", cache, "--manifest", plain.manifest())] * 3 + [
        ("extract", plain.manifest(), "-o", cache)
    ] * 2
    ended = [one.wait() for one in [cli.start(*job, "--threads", 1) for job in jobs]]
    assert {one.code for one in ended} <= {0, 1}, [one.err for one in ended]
    assert all("is in use by" in one.err for one in ended if one.code)
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert items(cache) == items(sound)
    assert check(cache, manifest=read_manifest(plain.manifest())).problems == []


def add_hollow_shard(cache: Path) -> Path:
    """Add a shard of 4 · 10^4 items of 10^5 frames each, whose bytes are a hole in the
    file: 640 GB for who reads it, and no space. Returns its chunk file."""
    version, count, times = only_version(cache), 40_000, 100_000
    shard = version.shard(
        add_shard(version, {f"item-{i}": np.zeros((1, 80), np.float16) for i in range(count)})
    )
    columns = columns_of(shard.folder)
    columns["frame_offset"] *= np.uint64(times)
    columns["num_samples"][:-1] = times * 160
    metadata = shard.folder / "features/zarr.json"
    metadata.write_bytes(metadata.read_bytes().replace(b"%d" % count, b"%d" % (count * times)))
    num_bytes, frames = count * times * 160 + CHECKSUM_BYTES, {"frames": count * times}
    folder = rename_shard(
        shard.folder, lambda it: it.update(frames), {CHUNKS["features"]: [num_bytes, 0]}
    )
    chunk = folder / CHUNKS["features"]
    chunk.write_bytes(b"")
    os.truncate(chunk, num_bytes)
    return chunk


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_an_interrupt_ends_verification_at_once(cli, plain, cache, command):
    """In the middle of a shard of 640 GB; nobody waits for the end of it."""
    chunk = add_hollow_shard(cache)
    more = ["--manifest", plain.manifest()] if command == "repair" else ["--json"]
    running = cli.start(command, cache, *more, "--threads", 2)

    def num_read() -> int:
        """How many bytes it has read of anything; 0 where the chunk is not open."""
        process = Path(f"/proc/{running.pid}")
        with suppress(FileNotFoundError):
            for opened in (process / "fd").iterdir():
                with suppress(FileNotFoundError):
                    if opened.readlink() == chunk:
                        return int((process / "io").read_text().split()[1])
        return 0

    running.wait_until(num_read)
    counts = [num_read()]
    running.send(signal.SIGINT)
    running.wait_until(lambda: counts.append(num_read()) or not counts[-1])
    assert max(counts) - counts[0] < chunk.stat().st_size / 4
    finished = running.wait().with_code(130)
    if command == "verify":
        (version,) = finished.json()["versions"]
        assert (version["interrupted"], version["shards"] + version["shards_left_out"]) == (True, 4)
    (line,) = finished.err.splitlines()
    assert ("interrupted" in line, "committing" in line) == (True, command == "repair")
    assert len(only_version(cache).shard_names()) == 4


def test_damage_in_one_version_leaves_the_others_usable(cli, plain, cache):
    """Extraction into, and verification of, a sound version go on; verify of the cache
    tells of both."""
    assert cli("extract", plain.manifest(), "-o", cache, "-c", "mfcc13").code == 0
    (spoilt,) = cache.glob("mfcc13-*")
    flip(spoilt / "zarr.json", 100)
    assert "nothing to do" in cli("extract", plain.manifest(), "-o", cache).out
    for command in ("verify", "info"):
        told = cli(command, cache).with_code(1)
        assert "mfcc13" in told.out + told.err
        assert "12 utterances" in told.out
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert cli("verify", cache).code == 0
