"""A file in an object store, read by ranges of its bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from featcache.errors import DamagedError
from featcache.storage.base import in_parallel, require_size, require_within
from featcache.storage.clients import asked
from featcache.storage.location import ObjectPath

__all__ = ["ObjectFile"]

_BLOCK_BYTES = 8 << 20
_BLOCKS = 8
"""All of a file is fetched in blocks of that size, so many of them at once."""

_GAP_BYTES = 64 << 10
"""To read on over a gap of this size takes less time than another request."""

_END_BYTES = 64
"""What is read of a file when it is opened: its end, where a chunk has its checksum."""


class ObjectFile:
    """An opened file; see `featcache.storage.base.Opened`. Opening it reads its end, which tells its size.

    Args:
        place: Where it is.
        num_bytes: Its size, if that is known.

    Raises:
        FileNotFoundError: From every method: it is not there, or not any more.
    """

    def __init__(self, place: ObjectPath, num_bytes: int | None) -> None:
        self._place = place

        def fetch(connection: Any, path: str) -> tuple[int, memoryview]:
            if not num_bytes:
                return int(connection.head(path)["size"]), memoryview(b"")
            response = connection.get(path, options={"range": (max(0, num_bytes - _END_BYTES), num_bytes)})
            return int(response.meta["size"]), memoryview(response.bytes())

        self._num_bytes, self._end = asked(place, fetch)
        require_size(self._num_bytes, num_bytes, place)

    def read_into(self, out: memoryview, start: int) -> None:
        """Fill `out` with the file's bytes from `start` on."""
        out[:] = self.read_ranges([start], [len(out)])[0]

    def fetched(self) -> Iterator[memoryview]:
        """All of its bytes, in blocks, some of which are fetched side by side."""
        firsts = range(0, self._num_bytes, _BLOCK_BYTES)

        def fetch(first: int) -> memoryview:
            return self.read_ranges([first], [min(_BLOCK_BYTES, self._num_bytes - first)])[0]

        for number in range(0, len(firsts), _BLOCKS):
            yield from in_parallel(fetch, firsts[number : number + _BLOCKS])

    def read_ranges(self, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Some ranges of the file's bytes, neighbours in one request, and all side by side."""
        require_within(starts, sizes, self._num_bytes, self._place)
        end = self._num_bytes - len(self._end)
        spans: list[tuple[int, int]] = []
        for first, last in sorted((start, start + size) for start, size in zip(starts, sizes, strict=True)):
            if first < end and first < last:
                if spans and first - spans[-1][1] <= _GAP_BYTES:
                    first, last = spans[-1][0], max(last, spans.pop()[1])
                spans.append((first, last))
        parts = [*self._of_spans(spans), self._end]
        firsts = [*(first for first, _ in spans), end]
        ranges = []
        for start, size in zip(starts, sizes, strict=True):
            number = max(0, bisect_right(firsts, start) - 1)
            ranges.append(parts[number][start - firsts[number] :][:size])
        return ranges

    def _of_spans(self, spans: list[tuple[int, int]]) -> list[memoryview]:
        if not spans:
            return []
        starts = [first for first, _ in spans]
        sizes = [last - first for first, last in spans]

        def fetch(connection: Any, path: str) -> list[memoryview]:
            # obstore must not join them itself: it ends the process if such a range is beyond the end of the file.
            parts = connection.get_ranges(path, starts=starts, lengths=sizes, coalesce=0)
            return [memoryview(part) for part in parts]

        parts = asked(self._place, fetch)
        if [len(part) for part in parts] != sizes:
            raise DamagedError(f"{self._place}: damaged: it ends before what is to be read")
        return parts
