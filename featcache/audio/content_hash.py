"""The state of an audio file and the hash of its bytes tell whether it has changed: XXH3-64
(https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), at the speed of memory. It does
not protect against an attacker."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

from featcache.audio.kept import Kept

UNKNOWN_HASH = 0  # stands for the hash of a file that was not hashed

_PIECE_BYTES = 256 << 10
_WAIT_BYTES = 64 << 20
_MOST_FILES = 1024  # with kept hashes: more than a run's threads decode at once


def state_of(status: os.stat_result) -> tuple[int, ...]:
    """Return values that differ once a file of this machine has changed."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def hash_of_content(descriptor: int, wait: Callable[[float], object] = lambda _: None) -> int:
    """Return XXH3-64 of all bytes of an open file; its position stays. `wait` is called now
    and then, and may raise to give up."""
    hashed = xxhash.xxh3_64()
    offset = 0
    while piece := os.pread(descriptor, _PIECE_BYTES, offset):
        hashed.update(piece)
        offset += len(piece)
        if offset % _WAIT_BYTES == 0:
            wait(0.0)
    return int(hashed.intdigest())


class ContentHashes:
    """A cache of files' hashes. A file is hashed once even if several threads ask for it."""

    def __init__(self, wait: Callable[[float], object] = lambda _: None) -> None:
        self._wait = wait
        self._hashes: Kept[int] = Kept(_MOST_FILES)

    def of(self, descriptor: int) -> int:
        """Return the hash of an open file. Raises OSError if it cannot be read."""
        state = state_of(os.fstat(descriptor))
        return self._hashes.get(state, lambda: hash_of_content(descriptor, self._wait))
