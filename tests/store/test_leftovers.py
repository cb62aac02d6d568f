"""What killed processes leave is swept, and nothing that a living one writes, on whatever machine that is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import astuple, replace

import numpy as np
import pytest
from small_shards import INFO, elsewhere, item, write

from featcache.errors import StoreError
from featcache.store import files, zarr3
from featcache.store.index import open_index
from featcache.store.leftovers import Owner, leftovers, temporary_name, what_of
from featcache.store.shard_writer import ShardWriter
from featcache.store.version import Version

DAY = 86400
HERE = Owner.here()


def name_of(owner: Owner) -> str:
    return f"task.{owner}.00ff00ff"


@pytest.fixture
def ended() -> Owner:
    """A process that ran here and has ended."""
    code = "from featcache.store.leftovers import Owner; print(Owner.here())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Owner(*done.stdout.strip().split("-"))


def make(parent, name: str, age: float = 0) -> None:
    """A folder with a file in a folder; each was last changed so many seconds ago."""
    (parent / name / "features").mkdir(parents=True)
    (parent / name / "features" / "0").write_text("features")
    for path in (parent / name / "features" / "0", parent / name / "features", parent / name):
        os.utime(path, (time.time() - age,) * 2)


def swept(parent, name: str, age: float = 0) -> bool:
    make(parent, name, age)
    found = leftovers(parent, lambda other: other == name)
    shutil.rmtree(parent / name)
    return found == [name]


def test_what_is_swept_is_of_the_dead(tmp_path, ended):
    """By process here, by boot on this machine, by age elsewhere."""
    assert swept(tmp_path, name_of(ended))
    assert not swept(tmp_path, name_of(HERE))
    assert not swept(tmp_path, name_of(HERE), 30 * DAY)
    assert swept(tmp_path, name_of(replace(HERE, start="1")))  # its number has been given again

    another_boot = replace(HERE, boot="00000000")
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert not swept(tmp_path, name_of(another_boot))
    assert not swept(tmp_path, name_of(another_boot), since_boot / 2)
    assert swept(tmp_path, name_of(another_boot), since_boot + 60)

    for other in (replace(ended, host="node7_01234567"), replace(ended, namespace="1")):
        assert not swept(tmp_path, name_of(other))
        assert not swept(tmp_path, name_of(other), DAY - 60)
        assert swept(tmp_path, name_of(other), DAY + 60)
    assert not swept(tmp_path, "0123456789ab.00ff00ff", DAY - 60)  # as earlier featcache named it
    assert swept(tmp_path, "0123456789ab.00ff00ff", DAY + 60)
    assert not swept(tmp_path, "notes", 30 * DAY)
    assert os.listdir(tmp_path) == []


def test_the_youngest_file_decides_how_old_it_is(tmp_path):
    """A shard's folder is as old as its beginning, while its features grow."""
    name = name_of(replace(HERE, host="node7_01234567"))
    make(tmp_path, name, 3 * DAY)
    (tmp_path / name / "features" / "0").write_text("more")
    os.utime(tmp_path / name / "features", (time.time() - 3 * DAY,) * 2)
    assert leftovers(tmp_path, lambda _: True) == []


def test_a_clock_in_the_future_does_not_make_work_old(tmp_path, monkeypatch):
    """Ages are told by the file system's clock, which all machines share."""
    monkeypatch.setattr(time, "time", lambda: time.monotonic() + 10**10)
    name = name_of(replace(HERE, host="node7_01234567"))
    (tmp_path / name).mkdir()
    assert leftovers(tmp_path, lambda _: True) == []


def test_a_process_that_is_dead_and_not_yet_reaped_is_dead(tmp_path):
    """As in a container whose first process reaps nobody."""
    code = "from featcache.store.leftovers import Owner; print(Owner.here(), flush=True); sys.stdin.read()"
    child = elsewhere(code)
    owner = Owner(*child.stdout.readline().strip().split("-"))
    assert not swept(tmp_path, name_of(owner))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert swept(tmp_path, name_of(owner))
    child.communicate()


def test_names_say_what_they_are_for_and_who_writes(monkeypatch):
    """Whatever the machine is called; what is in its name does not end up in a path."""
    for node in ("node-17.cluster/é", "a" * 64, ""):
        monkeypatch.setattr(os, "uname", lambda node=node: os.uname_result(("Linux", node, "", "", "")))
        monkeypatch.setattr("featcache.store.leftovers._owner", lambda pid: Owner(_host(), *astuple(HERE)[1:]))
        name = temporary_name("fbank80-0123456789ab")
        assert what_of(name) == "fbank80-0123456789ab"
        assert len(name) < 120
        assert name.replace(".", "").replace("-", "").replace("_", "").isascii()
        assert "/" not in name
    assert what_of("notes") == "notes"


def _host() -> str:
    from featcache.store import leftovers

    return leftovers._host()


def test_a_version_sweeps_what_its_dead_runs_were_writing(version, ended):
    """Shards, the index, small files of it and of its runs; in the cache, versions that were being made."""
    cache = version.path.parent
    dead = [
        version.path / "work" / name_of(ended),
        version.path / "work" / f"index.{ended}.00ff00ff",
        version.path / "runs" / "20261120T092846.468009Z-1177" / f".run.json.{ended}.00ff00ff",
        version.path / f".zarr.json.{ended}.00ff00ff",
        version.path / "shards" / f".zarr.json.{ended}.00ff00ff",
        cache / f".mine-0123456789ab.{ended}.00ff00ff",
    ]
    living = [path.with_name(path.name.replace(str(ended), str(HERE))) for path in dead]
    for path in (*dead, *living):
        path.parent.mkdir(exist_ok=True)
        if ".json." in path.name:
            path.write_text("{}")
        else:
            path.mkdir()
    Version.create(cache, INFO).sweep()
    assert [path for path in dead if path.exists()] == []
    assert all(path.exists() for path in living)
    assert version.shard_names() == []


def test_what_is_removed_is_renamed_first(version, monkeypatch):
    """So a removal never follows a shard to its place: whoever writes it can no longer rename it."""
    work = version.work_folder("task")
    make(work.parent, work.name)
    seen = []

    def rmtree(name, **_):
        seen.append((work.exists(), name != work.name))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    files.remove_from_version(version.path, "work", work.name)
    assert seen == [(False, True)]


@pytest.mark.parametrize("name", ["offsets/c/0", "features/c/0/0", "ids/zarr.json", "zarr.json"])
@pytest.mark.parametrize("is_removed", [True, False])
def test_a_shard_of_which_something_is_gone_is_not_committed(version, monkeypatch, name, is_removed):
    """Somebody has removed a file of it, or cut it off, before it was renamed."""
    sync_tree = files.sync_tree

    def spoil(folder):
        sync_tree(folder)
        path = folder / name
        path.unlink() if is_removed else os.truncate(path, path.stat().st_size - 1)

    monkeypatch.setattr(files, "sync_tree", spoil)
    writer = ShardWriter(version.work_folder("x"), version.info.spec)
    writer.append([item("a")], np.ones((3, 2), version.dtype), [3])
    with pytest.raises(StoreError, match=rf"{name}: has \d+ of the \d+ bytes that were written"):
        writer.commit(version.path / "shards", sample_rate=16000, row=0, supersedes={}, made_by={})
    assert version.shard_names() == []


def test_what_is_made_stays_after_a_power_cut(scratch, monkeypatch):
    """Each new folder is flushed in the one that it is in: of the cache, the version, the index."""
    synced = []
    sync = files.sync
    monkeypatch.setattr(files, "sync", lambda path: (synced.append(path), sync(path)))
    version = Version.create(scratch / "a" / "b", INFO)
    assert {scratch, scratch / "a", scratch / "a" / "b"} <= {*synced}
    write(version, [item("a")])
    synced.clear()
    open_index(version)
    assert synced.index(version.path) < synced.index(version.path / "index")
    assert zarr3.read_group(version.path)
