"""Files read from beginning to end: those in object stores in blocks, some of which are fetched ahead."""

from __future__ import annotations

import io
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

from featcache.storage.folder import open_file
from featcache.storage.location import Location, ObjectPath
from featcache.storage.objects import fetched
from featcache.storage.store import store_of

__all__ = ["ObjectFile", "open_stream"]

_BLOCK_BYTES = 8 << 20
_BLOCKS_AHEAD = 4


class ObjectFile(io.RawIOBase):
    """A file in an object store, to be read from its beginning.

    Args:
        location: The file.
        size: Its size, if that is known already.

    Raises:
        FileNotFoundError: There is none.
        StoreError: From every method: it cannot be read.
    """

    def __init__(self, location: ObjectPath, size: int | None = None) -> None:
        self.name = str(location)
        self._place = location
        self._pool = ThreadPoolExecutor(_BLOCKS_AHEAD, "featcache-objects")  # which `close` ends, whatever fails
        self.size = store_of(location).size(location) if size is None else size
        self._begin(0)

    def _begin(self, at: int) -> None:
        self._asked = at  # up to where blocks have been asked for
        self._at = at
        self._blocks: deque[Future[memoryview]] = deque()
        self._block = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next bytes are read."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go on reading at another byte, counted from the beginning."""
        if whence:
            raise io.UnsupportedOperation("only from the beginning")
        if offset != self._at:
            self._begin(offset)
        return offset

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        if not self._block:
            while self._asked < self.size and len(self._blocks) < _BLOCKS_AHEAD:
                count = min(_BLOCK_BYTES, self.size - self._asked)
                self._blocks.append(self._pool.submit(self._fetch, self._asked, count))
                self._asked += count
            if not self._blocks:
                return 0
            self._block = self._blocks.popleft().result()
        count = min(len(view), len(self._block))
        view[:count], self._block = self._block[:count], self._block[count:]
        self._at += count
        return count

    def _fetch(self, at: int, count: int) -> memoryview:
        (block,) = store_of(self._place).get_ranges(self._place, [at], [count])
        return block

    def close(self) -> None:
        """End; nothing more is fetched."""
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()


def open_stream(location: Location, size: int | None = None) -> FileIO | ObjectFile | io.BytesIO:
    """Open a file to be read from its beginning; with its size, if that is known already.

    Raises:
        DamagedError: It is no regular file.
        FileNotFoundError: There is none.
        OSError, StoreError: It cannot be opened.
    """
    if isinstance(location, Path):
        return open_file(location)
    data = fetched(location)
    return ObjectFile(location, size) if data is None else io.BytesIO(data)
