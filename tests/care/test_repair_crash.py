"""Repair that meets a full disk, an interrupt or another repair loses nothing that was sound."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from cache_contents import check, items, only_version, provenance
from damage import CHUNKS, flip, mend, victim

import featcache.care.repair
from featcache.manifest import read_manifest
from featcache.version.index import open_index

FEATURES = CHUNKS["features"]


@pytest.fixture(scope="module")
def spoilt(sound, tmp_path_factory) -> tuple[Path, set[str]]:
    """A cache with an item damaged in each of two shards; and their ids."""
    cache = Path(shutil.copytree(sound, tmp_path_factory.mktemp("spoilt") / "cache"))
    version, hit = only_version(cache), set()
    for number, name in enumerate(open_index(version).shards[:2]):
        shard = version.shard(name)
        flip(shard.folder / FEATURES, int(shard.table.offsets("frame")[number]) * shard.features[:1].nbytes)
        hit.add(shard.table.ids[number])
    return cache, hit


def assert_sound_items_are_there(cache: Path, sound: Path, damaged: set[str]) -> None:
    """Bit for bit; readers find them."""
    there = items(cache)
    assert {id_: there.get(id_) for id_ in items(sound) if id_ not in damaged} == {
        id_: one for id_, one in items(sound).items() if id_ not in damaged
    }


def assert_whole(cache: Path, sound: Path, manifest: Path) -> None:
    assert items(cache) == items(sound)
    assert provenance(cache) == provenance(sound)
    report = check(cache, manifest=read_manifest(manifest))
    assert (report.problems, report.repeated) == ([], 0)


def test_on_a_full_disk_it_removes_nothing_that_was_sound(cli, plain, sound, spoilt, scratch):
    """At every 70th change of a file: one line, and the same command finishes once there is room."""
    spoilt_cache, damaged = spoilt
    operation, kept_all = 0, 0
    while True:
        cache = Path(shutil.copytree(spoilt_cache, scratch / "cache"))
        job = ("repair", cache, "--manifest", plain.manifest(), "--threads", 1)
        full = cli(*job, fault={"folder": str(cache), "before": operation, "error": errno.ENOSPC})
        assert_sound_items_are_there(cache, sound, damaged)
        if full.code == 0:  # all that could not be written is the index, which a cache can do without
            break
        assert full.code == 1
        (line,) = full.err.splitlines()
        assert "No space left on device" in line
        kept_all += {*only_version(spoilt_cache).shard_names()} <= {*only_version(cache).shard_names()}
        assert cli(*job).code == 0
        assert cli("extract", plain.manifest(), "-o", cache).code == 0
        assert_whole(cache, sound, plain.manifest())
        shutil.rmtree(cache)
        operation += 70
    assert kept_all


@pytest.mark.parametrize("step", ["verify", "rewrite"])
def test_an_interrupt_before_anything_is_removed_leaves_the_damaged_shard(plain, sound, cache, monkeypatch, step):
    """While it still verifies, or in the middle of keeping what is sound."""
    flip(victim(cache).folder / FEATURES, 100)
    before, stop, original = only_version(cache).shard_names(), threading.Event(), getattr(featcache.care.repair, step)

    def interrupted(*given, **settings):
        stop.set()
        return original(*given, **settings)

    monkeypatch.setattr(featcache.care.repair, step, interrupted)
    assert mend(cache, plain.manifest(), stop=stop).interrupted
    assert {*before} <= {*only_version(cache).shard_names()}


def test_one_repair_at_a_time(cli, plain, sound, spoilt, scratch):
    """The second one says so, and changes nothing."""
    cache = Path(shutil.copytree(spoilt[0], scratch / "cache"))
    version = only_version(cache)
    before = version.shard_names()
    with version.at_work("repair"):
        refused = cli("repair", cache, "--manifest", plain.manifest())
    assert refused.code == 1
    (line,) = refused.err.splitlines()
    assert "featcache repair" in line
    assert str(os.getpid()) in line
    assert version.shard_names() == before
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert_whole(cache, sound, plain.manifest())


def test_repairs_and_extractions_that_begin_together_do_no_harm(cli, plain, sound, spoilt, scratch):
    cache = Path(shutil.copytree(spoilt[0], scratch / "cache"))
    jobs = [("repair", cache, "--manifest", plain.manifest())] * 3 + [("extract", plain.manifest(), "-o", cache)] * 2
    ended = [one.wait() for one in [cli.start(*job, "--threads", 1) for job in jobs]]
    assert {one.code for one in ended} <= {0, 1}, [one.err for one in ended]
    assert all("is in use by" in one.err for one in ended if one.code)
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert items(cache) == items(sound)
    assert check(cache, manifest=read_manifest(plain.manifest())).problems == []
