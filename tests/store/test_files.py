"""Nothing outside a cache is written or removed through a link inside it, whatever a user or a stranger put there; and
files appear whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from cache_contents import items, only_version
from damage import CHUNKS, flip

import featcache
from featcache.errors import DamagedError, StoreError
from featcache.store import zarr3
from featcache.store.files import WRITTEN, remove_from_version, write_file
from featcache.store.version import Version

NAMES = [*(f"{number:012x}" for number in range(6)), "index.00c0ffee", "repair.00c0ffee", "0123456789ab.00c0ffee"]
"""What featcache calls its own folders, in one place or another."""


@pytest.fixture
def victim(tmp_path) -> Path:
    """A tree outside of every cache, whose folders are called as featcache's are, and are old."""
    victim = tmp_path / "victim"
    for name in NAMES:
        (victim / name / "below").mkdir(parents=True)
        (victim / name / "below" / "thesis.txt").write_text("the only copy")
        (victim / name / "index.json").write_text("{}")
    for name in ("index.lock", "repair.lock", "0123456789ab.lock"):
        (victim / name).write_text("")
    for path in [victim, *victim.rglob("*")]:
        os.utime(path, (10**9, 10**9))
    return victim


def tree(folder: Path) -> dict[str, tuple]:
    """Everything below a folder: kind, content and time of the last change."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (content, path.lstat().st_mtime_ns)
    return found


def replace_by_link(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


def run_everything(cli, plain, cache: Path, there: str) -> dict[str, object]:
    """Every command that opens a version, and Python's way; `there` is the id of an utterance in it."""
    manifest = plain.manifest()
    commands = {
        "info": ("info", cache),
        "show": ("show", cache, there),
        "stats": ("stats", cache),
        "verify": ("verify", cache, "--manifest", manifest),
        "extract": ("extract", manifest, "-o", cache, "--shard-size", "0.04"),
        "repair": ("repair", cache, "--manifest", manifest),
        "probe": ("probe", "fbank80", manifest, "-o", cache, "--utterances", "2"),
    }
    with suppress(StoreError):
        list(featcache.open(cache).values())
    return {name: cli(*command) for name, command in commands.items()}


@pytest.fixture
def lacking(cache) -> Path:
    """A cache that lacks a shard, has a damaged one and more indexes than are kept: every command has work to do."""
    version = only_version(cache)
    gone, spoilt, _ = version.shard_names()
    shutil.rmtree(version.shard(gone).folder)
    flip(version.shard(spoilt).folder / CHUNKS["features"], 10)
    for number in range(5):
        (version.path / "index" / f"{number:012x}").mkdir(exist_ok=True)
    return cache


@pytest.mark.filterwarnings("ignore::featcache.errors.FeatcacheWarning")
@pytest.mark.parametrize("name", ["index", *WRITTEN])
def test_a_folder_that_is_a_link_is_not_written(cli, plain, lacking, victim, name):
    """Commands that write say so and stop; but for the index, which is then made in memory."""
    version = only_version(lacking)
    there = version.shard(version.shard_names()[-1]).ids[0]
    link = version.path / name
    replace_by_link(link, victim)
    before = tree(victim)
    told = run_everything(cli, plain, lacking, there)
    assert tree(victim) == before
    assert os.readlink(link) == str(victim)
    if name == "index":
        assert told["repair"].code == told["stats"].code == 0
        assert f"{link}: is a symbolic link, which is not followed" in told["verify"].out
        return
    for command in ("repair", "probe") if name == "shards" else ("extract", "repair", "probe"):
        assert told[command].code == 1
        (line,) = told[command].err.splitlines()[-1:]
        assert f"{link}: is a symbolic link to {victim}" in line
    if name != "shards":
        assert told["info"].code == told["show"].code == told["stats"].code == 0


@pytest.mark.filterwarnings("ignore::featcache.errors.FeatcacheWarning")
def test_links_in_the_place_of_what_is_removed_stay_and_what_they_lead_to(cli, plain, lacking, victim):
    """One level deeper: an index, leftovers of killed runs, locks, a damaged shard."""
    version = only_version(lacking)
    damaged, other = version.shard_names()
    there = version.shard(other).ids[0]
    links = [version.path / "work" / name for name in NAMES[6:]]
    links += [version.path / "work" / name for name in ("x.12345678", "index.lock", "repair.lock", "y.lock")]
    links += list((version.path / "index").iterdir())
    shard = version.shard(damaged).folder
    for link in [*links, shard]:
        target = victim / link.name if link.suffix == ".lock" else victim
        replace_by_link(link, target)  # what `y.lock` leads to is not there
    before = tree(victim)
    run_everything(cli, plain, lacking, there)
    assert tree(victim) == before
    assert all(link.is_symlink() for link in links)
    assert shard.is_symlink()  # to repair, it takes the lock `repair.lock`, which is a link
    (version.path / "work" / "repair.lock").unlink()
    assert cli("repair", lacking, "--manifest", plain.manifest()).code == 0
    assert tree(victim) == before
    assert not shard.exists()


def test_a_version_elsewhere_is_written_there(cli, plain, sound, lacking, tmp_path):
    """A user's own link to another disk: the version's whole folder."""
    path = only_version(lacking).path
    shutil.move(path, tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    manifest = plain.manifest()
    assert cli("repair", lacking, "--manifest", manifest).code == 0
    assert cli("extract", manifest, "-o", lacking, "--shard-size", "0.04").code == 0
    assert items(lacking) == items(sound)
    assert len(list((tmp_path / path.name / "index").iterdir())) == 3


def test_shards_behind_a_link_are_read_and_not_added_to(cli, plain, sound, lacking, tmp_path):
    """Though they are the version's own, a run does not write there."""
    shards = only_version(lacking).path / "shards"
    elsewhere = Path(shutil.move(shards, tmp_path / "elsewhere"))
    shards.symlink_to(elsewhere)
    before = tree(elsewhere)
    assert items(lacking).keys() < items(sound).keys()
    for command in (("extract", plain.manifest(), "-o"), ("repair", "--manifest", plain.manifest())):
        refused = cli(*command, lacking)
        assert refused.code == 1
        assert f"{shards}: is a symbolic link to {elsewhere}" in refused.err
    assert tree(elsewhere) == before


def test_a_shard_that_is_a_link_is_read(cli, plain, sound, cache, tmp_path):
    """And when it is damaged, the link goes, and what it leads to stays."""
    shard = only_version(cache).shard(only_version(cache).shard_names()[0])
    elsewhere = Path(shutil.move(shard.folder, tmp_path / "elsewhere"))
    shard.folder.symlink_to(elsewhere)
    assert items(cache) == items(sound)
    assert cli("verify", cache).code == 0
    flip(elsewhere / CHUNKS["features"], 10)
    before = tree(elsewhere)
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert tree(elsewhere) == before
    assert items(cache) == items(sound)


def test_only_folders_of_featcaches_own_naming_are_removed(version):
    """Whoever keeps something of his own in a version's `work` or `index` keeps it."""
    for place, own, others in (
        ("work", ["0123456789ab.00ff00ff", "index.12345678"], ["notes", "0123456789ab", ".nfs.12345678"]),
        ("index", ["0123456789ab"], ["notes", "0123456789AB", "0123456789ab.old"]),
    ):
        for name in [*own, *others]:
            (version.path / place / name).mkdir(parents=True)
            remove_from_version(version.path, place, name)
        assert sorted(os.listdir(version.path / place)) == sorted(others)


def test_a_versions_metadata_cannot_name_a_place_outside(version):
    """Local copies are named after it: a stranger's may not lead out of their folder."""
    path = version.path / "zarr.json"
    attributes = zarr3.read_group(version.path)
    for wrong in ({"name": "../../mine"}, {"name": ""}, {"fingerprint": "../" * 20}, {"fingerprint": "0" * 63}):
        path.write_bytes(zarr3.group_metadata({**attributes, **wrong}))
        with pytest.raises(DamagedError, match="not a version of format 1"):
            Version.open(version.path)


# Whole or not at all


def test_a_small_file_is_replaced_whole_or_stays(scratch, monkeypatch):
    """`write_file` leaves the old one, and no litter, where the disk is full."""
    write_file(scratch / "file", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="No space left"):
        write_file(scratch / "file", b"new")
    assert [path.name for path in scratch.iterdir()] == ["file"]
    assert (scratch / "file").read_bytes() == b"old"
