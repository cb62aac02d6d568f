"""A store in a folder: kills, failing calls and power cuts, locks, links, and whatever
else lies where files should."""

import ctypes
import errno
import fcntl
import operator
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import shim
import store_trials
from forking import fork, join, run_forked, wait_for_word
from store_trials import FILES, TRIALS

from featcache.errors import DamagedError, LockedError, StoreError
from featcache.storage import directory, files
from featcache.storage.base import MARK
from featcache.storage.directory import Directory
from featcache.storage.files import enter_cached, map_file


@pytest.fixture
def store(scratch) -> Directory:
    return Directory(scratch / "version")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("trial", TRIALS)
def test_each_promise_holds_whatever_happens_at_any_call(library, scratch, trial):
    """Kills, failing and short calls, lost flushes, power cuts: each promise is in
    `store_trials.py`."""
    command = [sys.executable, store_trials.__file__, scratch, trial]
    ended = subprocess.run(
        command, env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 4


# What is being written


def swept(store: Directory, name: str, age: float = 0) -> bool:
    """Whether what has this name in `work/` is a leftover; everything in it was last
    changed so many seconds ago."""
    folder = store.location / "work" / name
    (folder / "shard").mkdir(parents=True, exist_ok=True)
    (folder / "shard" / "0").write_text("features")
    for path in (folder / "shard" / "0", folder / "shard", folder):
        os.utime(path, (time.time() - age,) * 2)
    left = store.sweep(remove=False)
    assert folder.exists()
    assert store.sweep() == left
    assert folder.exists() == (left == [])
    assert left in ([], [f"work/{name}"])
    return left != []


DAY = 86400
OURS, THEIRS = f"{directory._boot()}-0123456789abcdef", "00000000-0123456789abcdef"
SWEPT = "removed-0123456789abcdef"


def test_what_is_swept_is_of_the_dead(store, monkeypatch):
    """By its lock if it is of this boot, by age if it is not; and nothing of names that
    are not given here."""
    assert swept(store, OURS)
    assert swept(store, SWEPT)
    assert swept(store, THEIRS, DAY + 60)
    assert not swept(store, THEIRS, DAY - 60)
    for name in ("notes", "desk", OURS + "0", THEIRS.upper().replace("0", "A"), f"{THEIRS}.old"):
        assert not swept(store, name, 30 * DAY)
    other = store.location / "work" / f"{THEIRS[:-1]}0"
    other.mkdir()
    (other / "0").write_text("more")
    os.utime(other, (time.time() - 3 * DAY,) * 2)
    assert store.sweep() == []  # the youngest file in it decides how old it is
    # it is the file system's clock that counts
    monkeypatch.setattr(time, "time", lambda: time.monotonic() + 10**10)
    store.put("a", b"")
    assert store.sweep() == []


@pytest.mark.parametrize("answer", [None, OSError(errno.ENOLCK, "No locks available")])
def test_where_locks_are_granted_or_missing_only_age_tells(store, monkeypatch, answer):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=answer))
    assert not swept(store, OURS)
    assert swept(store, OURS, DAY + 60)
    store.publish(FILES, "shards/ab")
    with store.lock("one"), store.lock("another"):
        pass
    assert store.names("shards") == ["ab"]


def test_what_a_living_process_writes_is_not_swept_and_what_a_killed_one_wrote_is(store):
    """Also if the killed one has forked: a child does not keep its parent's lock."""
    begun, say = os.pipe()
    (store.location / "work").mkdir(parents=True)

    def write():
        with directory.in_work(store.location / "work"):
            child = fork(lambda: signal.pause())
            os.write(say, str(child).encode() + b".")
            signal.pause()

    writer = fork(write)
    child = b""
    while not child.endswith(b"."):
        child += os.read(begun, 1)
    (name,) = store.names("work")
    assert store.sweep() == []
    os.kill(writer, signal.SIGKILL)
    assert join(writer) == -signal.SIGKILL
    assert store.sweep(remove=False) == store.sweep() == [f"work/{name}"]
    os.kill(int(child[:-1]), signal.SIGKILL)


@pytest.mark.parametrize(
    "path", [path for path, data in FILES.items() if data]
)  # an empty file says nothing
@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (lambda folder, path: (folder / path).unlink(), []),
        (lambda folder, path: os.truncate(folder / path, 1), []),
        (lambda folder, _: folder.parent.rename(folder.parent.with_name(SWEPT)), [SWEPT]),
    ],
    ids=["removed", "cut off", "swept"],
)
def test_a_folder_of_which_something_is_gone_is_not_published(
    store, monkeypatch, path, spoil, left
):
    """A writer that has slept for a day fails; the one that swept removes nothing that
    has been published."""
    write_folder = directory._write_folder
    monkeypatch.setattr(
        directory, "_write_folder", lambda *given: (write_folder(*given), spoil(given[0], path))
    )
    with pytest.raises(
        StoreError, match=r"shards/ab/.*: has [01] of the \d+ bytes that were written"
    ):
        store.publish(FILES, "shards/ab")
    assert store.names("shards") == []
    assert store.names("work") == left
    assert store.sweep() == [f"work/{name}" for name in left]


def test_what_a_killed_removal_of_a_store_has_left_beside_it_is_swept(store):
    """By the store itself, which is gone, or by another one there; and nothing of another
    name."""
    other = Directory(store.location.with_name("other"))
    for each in (store, other):
        each.publish(FILES, "shards/ab")

    def destroy() -> None:
        shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        store.destroy()

    for each in (other, store):
        assert join(fork(destroy)) == -signal.SIGKILL
        assert not store.exists("")
        (left,) = store.location.parent.glob(".*")
        left.with_name(".removed-mine").mkdir()
        assert each.sweep(remove=False) == [f"../{left.name}"]
        assert left.exists()
        assert each.sweep() == [f"../{left.name}"]
        assert sorted(path.name for path in left.parent.iterdir()) == [".removed-mine", "other"]
        left.with_name(".removed-mine").rmdir()
        store.publish(FILES, "shards/ab")


def test_a_removal_of_a_store_that_a_sweep_is_faster_with_is_done(store, monkeypatch):
    store.publish(FILES, "shards/ab")
    remove = shutil.rmtree

    def overtaken(folder: Path, **options: bool) -> None:
        remove(folder)
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", overtaken)
    store.destroy()
    assert list(store.location.parent.iterdir()) == []


# The lock of a run


def test_a_second_run_is_told_who_has_the_lock_until_that_is_killed(store):
    begun = os.pipe()

    def hold():
        with store.lock("run 7\nof\x1b[31m node1"):
            os.write(begun[1], b".")
            signal.pause()

    holder = fork(hold)
    wait_for_word(begun[0])
    with (
        pytest.raises(LockedError, match=r"version: is in use by run 7of\[31m node1$"),
        store.lock("other"),
    ):
        pass
    os.kill(holder, signal.SIGKILL)
    assert join(holder) == -signal.SIGKILL
    with store.lock("another run"):
        assert (store.location / "lock").read_text() == "another run"
    with store.lock("again"):
        pass


# Links, and what is no file


@pytest.fixture
def victim(tmp_path) -> Path:
    """A folder outside of the store, which nothing may change."""
    victim = tmp_path / "victim"
    for name in ("shards/ab", "work/removed-0123456789abcdef", OURS, "desk"):
        (victim / name).mkdir(parents=True)
        (victim / name / "thesis.txt").write_text("the only copy")
    (victim / "lock").write_text("mine")
    return victim


def tree(folder: Path) -> dict[str, object]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["shards", "work", "lock", "tags"])
def test_nothing_is_written_or_removed_behind_a_link(store, victim, name):
    store.location.mkdir()
    link = store.location / name
    link.symlink_to(victim / name if name == "lock" else victim)
    before = tree(victim)
    uses = {
        "shards": [
            lambda: store.publish(FILES, "shards/cd"),
            lambda: store.remove("shards/shards"),
            None,
        ],
        "tags": [lambda: store.put("tags/a/b", b""), lambda: store.remove("tags/desk"), None],
        "work": [lambda: store.put("a", b""), store.sweep, lambda: store.marks_folder],
        "lock": [lambda: store.lock("me").__enter__()],
    }
    for use in filter(None, uses[name]):
        with pytest.raises(StoreError, match=f"{link}: is a symbolic link to {victim}"):
            use()
    assert tree(victim) == before
    assert link.is_symlink()


def test_a_link_in_the_place_of_what_is_removed_goes_and_what_it_leads_to_stays(store, victim):
    store.put("tags/a", b"")
    for key in ("shard", "work/removed-0123456789abcdef", f"work/{OURS}", "tags/b"):
        (store.location / key).symlink_to(victim)
    before = tree(victim)
    store.sweep()
    store.remove("shard")
    store.remove("tags/b")
    store.publish({**FILES, "c": b""}, "shards/ab")
    (store.location / "shards" / "ab" / "inside").symlink_to(victim)
    store.remove("shards/ab")
    assert tree(victim) == before
    assert not os.path.lexists(store.location / "shard")
    assert store.names("shards") == store.names("tags")[1:] == []


def test_a_folder_that_a_link_leads_to_is_read(store, tmp_path):
    """The store's own may be a link, and so may a shard, which then stays."""
    elsewhere = Directory(tmp_path / "elsewhere")
    elsewhere.publish(FILES, "ab")
    store.location.symlink_to(tmp_path / "elsewhere")
    store.put("tags/a", b"")
    (store.location / "cd").symlink_to(store.location / "ab")
    assert store.read(f"cd/{MARK}", 10) == FILES[MARK]
    store.publish({**FILES, "more": b""}, "cd")
    assert (store.location / "cd").is_symlink()
    assert store.location.resolve().name == "elsewhere"
    assert store.names("") == ["ab", "cd", "tags", "work"]


def test_what_is_no_regular_file_is_damaged(store):
    store.put("folder/a", b"")
    os.mkfifo(store.location / "pipe")
    (store.location / "circle").symlink_to("circle")
    (store.location / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(store.location / "socket"))
        for key in ("folder", "pipe", "circle", "device", "socket"):
            for read in (lambda key=key: store.read(key, 10), lambda key=key: store.map(key, 1)):
                with pytest.raises(DamagedError, match=f"{key}: damaged: not a regular file"):
                    read()
    with pytest.raises(DamagedError, match="cannot be read: "):
        store.read("folder/a/b", 1)
    with pytest.raises(DamagedError, match="folder/a: damaged: not a folder: move it away"):
        store.names("folder/a")
    with pytest.raises(StoreError, match="x: cannot be read: File name too long") as caught:
        store.read("x" * 300, 1)  # which no file of a cache is called
    assert not isinstance(caught.value, DamagedError)
    os.mkfifo(store.location / "lock")
    with store.lock("me"):
        pass


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, DamagedError),
        (errno.EACCES, StoreError),
        (errno.EMFILE, StoreError),
        (errno.ESTALE, StoreError),
    ],
)
def test_what_cannot_be_read_now_is_not_damage(store, monkeypatch, number, kind):
    store.put("a", b"data")
    opened = store.open("a", 4)
    with monkeypatch.context() as patched:
        for name in ("open", "preadv", "listdir", "scandir"):
            patched.setattr(os, name, Mock(side_effect=OSError(number, os.strerror(number))))
        for read in (
            lambda: store.read("a", 4),
            lambda: opened.read_ranges([0], [4]),
            lambda: store.names(""),
            lambda: store.exists("a"),
            lambda: list(store.walk()),
        ):
            with pytest.raises(
                StoreError, match=f"cannot be read: {os.strerror(number)}"
            ) as caught:
                read()
            assert type(caught.value) is kind
    assert store.read("a", 4) == b"data"


class TestBlocks:
    """A file is mapped where the page cache has it, and read elsewhere."""

    DATA = random.Random(1).randbytes((3 << 20) + 5)

    def blocks(self, store):
        return store.blocks("a", len(self.DATA))

    @pytest.fixture
    def store(self, tmp_path):
        """A store on a disk, where there is one."""
        store = Directory(tmp_path / "version")
        store.put("a", self.DATA)
        return store

    def test_all_ways_give_the_same_bytes(self, store, monkeypatch):
        entered = []
        monkeypatch.setattr(directory, "enter_cached", lambda block: entered.append(0) or False)
        assert b"".join(map(bytes, self.blocks(store))) == self.DATA
        assert len(entered) == 4
        monkeypatch.undo()
        assert b"".join(map(bytes, self.blocks(store))) == self.DATA

    def test_what_the_page_cache_has_is_not_copied(self, store, monkeypatch):
        monkeypatch.setattr(os, "preadv", Mock(side_effect=AssertionError))
        assert b"".join(map(bytes, self.blocks(store))) == self.DATA

    def test_the_rest_is_read(self, store, monkeypatch):
        path = store.location / "a"
        with path.open() as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            is_in_memory = enter_cached(map_file(file.fileno(), len(self.DATA)))
        if is_in_memory:
            pytest.skip("this file system keeps all files in memory")
        failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(DamagedError, match="a: damaged: cannot be read: Input/output error"):
            list(self.blocks(store))

    def test_without_room_for_a_map_it_is_read(self, store, monkeypatch):
        failing = Mock(side_effect=OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
        monkeypatch.setattr(directory, "map_file", failing)
        assert b"".join(map(bytes, self.blocks(store))) == self.DATA

    @pytest.mark.parametrize("left", [0, 1 << 20, (1 << 20) + 1])
    def test_a_file_cut_off_meanwhile_is_damage(self, store, left):
        blocks = self.blocks(store)
        next(blocks)
        os.truncate(store.location / "a", left)
        with pytest.raises(DamagedError, match=r"a: damaged: it ends before byte [\d,]+"):
            list(blocks)


def test_an_interrupt_while_a_map_ends_is_not_lost(store):
    store.put("a", b"data")
    maps = [store.map("a", 4)]
    raise_signal = partial(ctypes.CDLL(None)["raise"], signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        # no code of Python runs between the signal and the end of the map
        deque(map(operator.call, [raise_signal, maps.clear]), maxlen=0)
    assert not maps
    assert str(store.location) not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_written_is_one_line(store):
    (store.location.parent / "file").write_text("")
    for location in (store.location.parent / "file", store.location.parent / "file" / "below"):
        for use in (lambda other: other.put("a", b""), lambda other: other.lock("me").__enter__()):
            with pytest.raises(StoreError, match=r"^/[^\n]*: cannot be written: [^\n]*$"):
                use(Directory(location))
    assert store.names("work") == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "a bad sector"), KeyboardInterrupt()])
def test_a_file_that_is_not_finished_leaves_the_older_one_and_nothing_beside_it(
    scratch, monkeypatch, error
):
    (scratch / "a").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    with pytest.raises((StoreError, KeyboardInterrupt)):
        files.write_file(scratch / "a", b"new")
    assert (scratch / "a").read_bytes() == b"old"
    assert os.listdir(scratch) == ["a"]


def test_a_file_takes_the_place_of_a_folder_where_a_file_belongs(store):
    store.put("folder/a", b"")
    store.put("folder", b"file")
    assert store.read("folder", 4) == b"file"
    assert store.names("work") == []


def test_a_folder_in_the_place_of_the_lock_goes_if_it_is_empty(store):
    place = store.location / "lock"
    place.mkdir(parents=True)
    with store.lock("me"):
        assert place.is_file()
    place.unlink()
    (place / "kept").mkdir(parents=True)
    with (
        pytest.raises(StoreError, match="lock: cannot be written: Directory not empty"),
        store.lock("me"),
    ):
        pass
    assert (place / "kept").is_dir()


def test_a_lock_is_closed_in_a_forked_child(scratch):
    (scratch / "x").write_text("")
    lock = files.Lock(scratch / "x")
    inherited = files.Lock(scratch / "x", is_inherited=True)

    def look():
        assert lock.descriptor == -1
        assert inherited.descriptor >= 0

    run_forked(look)
    assert lock.take()
    assert files.is_held(scratch / "x")
