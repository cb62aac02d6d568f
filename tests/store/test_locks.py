"""Locks end with their process, a claim is one process's, and what nobody claims is swept."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from forking import forked, wait_for_word, wait_until
from small_shards import INFO, elsewhere, item, write

from featcache.store.index import open_index
from featcache.store.locks import Claim, _why_local, is_held, why_not_shared
from featcache.store.version import Version


def test_a_claim_is_one_processs(scratch):
    """Another process does not get it, until it is released or its holder is dead."""
    code = "claim = Claim(Path(sys.argv[1])); print(claim.take(wait=True), flush=True); sys.stdin.read()"
    ours = Claim(scratch / "x.lock")
    assert ours.take()
    assert ours.locked
    waiting = elsewhere(code, scratch / "x.lock")
    again = Claim(scratch / "x.lock")
    assert not again.take()
    ours.release()
    assert waiting.stdout.readline() == "True\n"
    assert not again.take()
    waiting.kill()
    waiting.communicate()
    assert again.take()
    again.release()
    assert not (scratch / "x.lock").exists()


def test_a_claim_of_a_file_that_was_removed_is_none(scratch):
    """Many threads take and release it, and no two ever hold it together."""
    held, most = [0], [0]

    def work():
        for _ in range(40):
            claim = Claim(scratch / "x.lock")
            while not claim.take():
                time.sleep(0.0001)
            held[0] += 1
            most[0] = max(most[0], held[0])
            time.sleep(0.0002)
            held[0] -= 1
            claim.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1


def test_a_claim_that_fails_holds_nothing(scratch, monkeypatch):
    """Not even where the lock was taken before: whoever asks next gets it."""
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "samestat", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        with pytest.raises(OSError, match="I/O error"):
            Claim(scratch / "x.lock").take()
    claim = Claim(scratch / "x.lock")
    assert claim.take()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
        claim.release()
    with Claim(scratch / "x.lock") as again:
        assert again.take()


def test_where_there_are_no_locks_every_claim_succeeds(scratch, monkeypatch):
    """Two runs may then do the same shard, and neither sweeps what it cannot know to be dead."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    version = Version.create(scratch, INFO)
    claim, other = version.claim("x"), version.claim("x")
    assert claim.take()
    assert other.take()
    assert not claim.locked
    left = version.work_folder("y")
    left.mkdir()
    version.sweep()
    assert left.is_dir()


def test_a_sweep_takes_what_the_dead_have_left_and_nobody_claims(version):
    """What a killed run left goes, unless another does the same work now; what a living one writes stays."""
    code = "print(*(Version.open(Path(sys.argv[1])).work_folder(work) for work in ('dead', 'done again')), sep='\\n')"
    child = elsewhere(code, version.path)
    dead, again = (Path(line) for line in child.communicate()[0].splitlines())
    living = version.work_folder("living")
    for folder in (dead, again, living):
        (folder / "features").mkdir(parents=True)
    (version.path / "work" / "dead.lock").write_text("")
    with version.claim("done again") as claim:
        assert claim.take()
        version.sweep()
        assert not dead.exists()
        assert living.is_dir()
        assert again.is_dir()
        assert [path.name for path in (version.path / "work").glob("*.lock")] == ["done again.lock"]
    version.sweep()
    assert list((version.path / "work").iterdir()) == [living]


def test_folders_that_are_no_shards_are_left_alone(version):
    """Snapshots of the file system, a copy put aside: they lie among the shards and are none."""
    shard = write(version, [item("a")])
    for name in (".snapshot", "lost+found", f"{shard.name}.bak", f".nfs{shard.name}", shard.name.upper() + "x"):
        (version.path / "shards" / name).mkdir()
    (version.path / "shards" / "0123456789ab").write_text("a file")
    assert version.shard_names() == [shard.name]
    assert list(open_index(version).ids) == ["a"]


def test_a_forked_child_holds_none_of_its_parents_claims(scratch):
    """Or those of a parent that is killed would last as long as its child; nor does it remove what they are about."""
    claim = Claim(scratch / "x.lock")
    assert claim.take()

    path, (reading, writing) = scratch / "x.lock", os.pipe()

    def child():
        claim.release()
        assert path.exists()
        assert is_held(path)
        os.write(writing, b".")
        wait_until(lambda: not path.exists())  # it lives on, and the claim is free all the same

    with forked(child):
        wait_for_word(reading)
        claim.release()
        with Claim(path) as again:
            assert again.take()
    os.close(reading)
    os.close(writing)


MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 27 0:50 / /scratch rw,noatime shared:9 - lustre 10.0.0.1@o2ib:/scratch rw,{lustre}
41 27 0:51 / /home/my\040data rw,relatime - nfs4 filer:/home rw,vers=4.2,local_lock={nfs}
42 27 0:52 / /old rw,relatime - nfs filer:/old rw,vers=3,{old}
43 40 0:53 / /scratch/here rw,relatime - xfs /dev/vdb rw,localflock
"""


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/scratch/a/features", "each machine has locks of its own (lustre is mounted with localflock)"),
        ("/scratch/here/features", None),
        ("/scratched", None),
        ("/home/my data/x", "each machine has locks of its own (nfs4 is mounted with local_lock=all)"),
        ("/old/x", "each machine has locks of its own (nfs is mounted with nolock)"),
        ("/elsewhere", None),
    ],
)
def test_mounts_on_which_each_machine_has_its_own_locks(path, said):
    assert (
        _why_local(Path(path), MOUNTS.format(lustre="checksum,localflock", nfs="all", old="nolock,proto=tcp")) == said
    )
    good = MOUNTS.format(lustre="checksum,flock", nfs="none", old="proto=tcp,local_lock=posix")
    assert _why_local(Path(path), good) is None


def test_real_locks_are_found_to_be_good(tmp_path):
    (tmp_path / "file").touch()
    assert why_not_shared(tmp_path / "file", mounts="") is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_missing_locks_are_told(tmp_path, monkeypatch, number):
    def none(*_):
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").touch()
    monkeypatch.setattr("fcntl.flock", none)
    assert why_not_shared(tmp_path / "file") == f"there are no locks ({os.strerror(number)})"


def test_locks_that_are_always_granted_are_told(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    assert why_not_shared(tmp_path / "file") == "every lock is granted"
