"""A limit on the decoded audio that worker threads hold at once, for long recordings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SMALL_BYTES = 64 << 20
"""Decoded audio that a worker may hold without asking."""


class AudioMemory:
    """Makes what takes more than `SMALL_BYTES` wait until there is room for it, or nothing else is so large.

    Args:
        limit: bytes of large recordings, of all workers together.
    """

    def __init__(self, limit: int = 2 << 30) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def lease(self) -> Iterator[Callable[[int], None]]:
        """Yields one worker's `reserve(num_bytes)`: it gives back what it got last, and waits for that many."""
        held = 0

        def reserve(num_bytes: int) -> None:
            nonlocal held
            wanted = num_bytes if num_bytes > SMALL_BYTES else 0
            if held or wanted:
                with self._changed:
                    self._used -= held
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not wanted or not self._used or self._used + wanted <= self._limit)
                    self._used += wanted
                    held = wanted

        try:
            yield reserve
        finally:
            reserve(0)
