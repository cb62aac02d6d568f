"""Trials of a store in a folder, in a process with the shim: `python store_trials.py
FOLDER TRIAL` forks a process for each call that changes something, strikes it there, and
looks at what is left. It fails if a promise is broken, and writes how many trials there
were."""

import errno
import os
import random
import shutil
import sys
from pathlib import Path

from forking import fork, join
from power_loss import POLICIES, Disk
from shim import CHANGES, GROWS, Faults, Strike, become, read_calls

from featcache.errors import StoreError
from featcache.storage.base import MARK
from featcache.storage.directory import Directory

FILES = {MARK: b"{}", "features/c/0": b"0123456789" * 1000, "text/c/0": b""}
ACTS = {
    "put": lambda store: store.put("tags/a", b"new"),
    "publish": lambda store: store.publish(FILES, "shards/new"),
    "replace": lambda store: store.publish(FILES, "shards/halved"),
    "remove": lambda store: store.remove("shards/old"),
    "begin": lambda store: beside(store).put("tags/a", b"new"),
}
REFUSED = 3


def beside(store: Directory) -> Directory:
    """A store that is not there yet."""
    return Directory(store.location.parent / "new" / "version")


def prepare(home: Path) -> Directory:
    """A store with a tag, two shards, and one that has lost its mark."""
    shutil.rmtree(home, ignore_errors=True)
    store = Directory(home / "cache")
    store.put("tags/a", b"old")
    for name in ("old", "halved"):
        store.publish(FILES, f"shards/{name}")
    store.remove(f"shards/halved/{MARK}")
    return store


def check(store: Directory, where: str, done: str | None = None) -> None:
    """Everything is there whole or not at all; the act has been done, if it must have
    been."""
    tag, shards = store.read("tags/a", 3), store.names("shards")
    assert tag in (b"old", b"new"), where
    contents = {key: store.read(key, size) for key, size in store.walk("shards")}
    for name in shards:
        files = {
            key.removeprefix(f"shards/{name}/"): data
            for key, data in contents.items()
            if f"/{name}/" in key
        }
        halved = {path: data for path, data in FILES.items() if path != MARK}
        assert files == FILES or (name == "halved" and files == halved), (
            f"{where}: {name}: {files.keys()}"
        )
    assert "old" in shards or "remove" in where, where
    ended = {
        "put": tag == b"new",
        "publish": "new" in shards,
        "replace": store.exists(f"shards/halved/{MARK}"),
        "remove": "old" not in shards,
        "begin": beside(store).exists("tags/a") and beside(store).read("tags/a", 3) == b"new",
    }
    assert done is None or ended[done], f"{where}: it had ended"


def check_again(store: Directory, act: str, where: str) -> None:
    """A sweep leaves nothing, and doing it again does it."""
    for each in (store, beside(store)):
        each.sweep()
        assert each.names("work") == [], where
    ACTS[act](store)
    check(store, where, act)
    assert store.names("work") == beside(store).names("work") == [], where


def attempt(store: Directory, act: str, faults: Faults) -> int:
    """How a forked process ends that does it with these faults: 0, `REFUSED`, or by a
    signal."""

    def run() -> None:
        become(faults.request())
        try:
            ACTS[act](store)
        except StoreError as error:
            if "cannot be" not in str(error) or "\n" in str(error):
                raise
            os._exit(REFUSED)

    return join(fork(run))


def strikes(action: str, error: int, times: int, kinds: tuple[str, ...], folder: Path) -> int:
    """Every call of each act is struck, one after the other."""
    trials, home, record = 0, folder / "home", folder / "record"
    for act in ACTS:
        store = prepare(home)
        assert attempt(store, act, Faults(home, record=record)) == 0
        total = sum(call.kind in kinds for call in read_calls(record))
        for at in range(total):
            store = prepare(home)
            code = attempt(store, act, Faults(home, Strike(at, action, kinds, error, times)))
            where = f"{act}: {action} {error} at call {at} of {total}: ends with {code}"
            assert code in ((-9,) if action in ("kill", "torn") else (0, REFUSED)), where
            check(store, where, act if code == 0 else None)
            check_again(store, act, where)
            trials += 1
    return trials


def cuts(folder: Path, states: int) -> int:
    """States that a power cut may leave."""
    home, record, cut = folder / "home", folder / "record", folder / "cut"
    for act in ACTS:
        store = prepare(home)
        disk = Disk(home)
        assert attempt(store, act, Faults(home, record=record, data=True)) == 0
        disk.play(read_calls(record))
        for seed in range(states):
            chance = random.Random(seed)
            is_end = seed < len(POLICIES)
            moment = disk.end if is_end else chance.randrange(disk.end)
            policy = POLICIES[seed] if is_end else chance.choice(POLICIES)
            shutil.rmtree(cut, ignore_errors=True)
            disk.cut(moment, chance, policy, cut)
            where = f"{act}: {policy} at call {moment} of {disk.end}, seed {seed}"
            check(Directory(cut / "cache"), where, act if moment == disk.end else None)
            check_again(Directory(cut / "cache"), act, where)
    return states * len(ACTS)


TRIALS = {
    "kill": lambda folder: strikes("kill", 0, 1, CHANGES, folder),
    "torn": lambda folder: strikes("torn", 0, 1, ("write",), folder),
    "full": lambda folder: strikes("error", errno.ENOSPC, -1, GROWS, folder),
    "error": lambda folder: strikes("error", errno.EIO, 1, CHANGES, folder),
    "lost": lambda folder: strikes("lost", errno.EIO, 1, ("sync",), folder),
    "short": lambda folder: strikes("short", 0, 1, ("write",), folder),
    "cut": lambda folder: cuts(folder, 40),
}

if __name__ == "__main__":
    sys.stdout.write(str(TRIALS[sys.argv[2]](Path(sys.argv[1]))))
