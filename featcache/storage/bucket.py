"""A store in an object store: S3, Google's, Azure's and compatible ones, by obstore.

Nothing here needs renames or conditional requests. A folder is published by its `MARK`,
which is written last. Whoever publishes a folder completes what others have begun, and
lists it afterwards, since somebody may have removed some of it meanwhile. While a folder
is written, `work/` has a note of it: so what killed writers have left is found without a
listing of everything, and removed after a day."""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import stat
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError, is_url
from featcache.storage.base import (
    DAY_SECONDS,
    MARK,
    Buffer,
    Store,
    checked_key,
    in_parallel,
    require_at_most,
    require_size,
    require_within,
    tidying,
)
from featcache.storage.clients import asked
from featcache.storage.files import map_file
from featcache.storage.location import ObjectPath

_PART_BYTES = 32 << 20
_PARTS = 4
"""A larger file is written in parts, so many at once."""

_MAPPED_BYTES = 8 << 20
"""A larger file is fetched to disk and mapped; a smaller one stays in memory."""

_STREAMED_BYTES = 1 << 20

_ATTEMPTS = 8
"""The tries to complete a folder of which somebody removes files; one removal takes fewer
steps."""

_PAGE = 1000
"""The files of one answer to a listing."""

_PAGES = 4
_SLICES = 256
"""A longer listing of evenly spread names is read in slices of about so many pages, side
by side."""

_SPREAD_EVENLY = re.compile(r"[0-9a-f]{12,}")
_NOTE = re.compile(r"work/(.+)/[0-9a-f]{16}")

_FETCHED_BYTES = 8 << 20
_FETCHED_AT_ONCE = 8
"""A whole file is fetched in blocks, so many at once."""

_GAP_BYTES = 64 << 10
"""Reading on over such a gap takes less time than another request."""

_END_BYTES = 64
"""The bytes that opening a file reads: its end, where a chunk has its checksum."""


class Bucket(Store):
    """The store below a place in an object store."""

    def __init__(self, location: ObjectPath) -> None:
        self.location = location

    def read(self, key: str, at_most: int) -> bytes:

        def fetch(connection: Any, path: str) -> bytes:
            response = connection.get(path)
            require_at_most(response.meta["size"], at_most, self._place(key))
            return bytes(response.bytes())

        return asked(self._place(key), fetch)

    def open(self, key: str, num_bytes: int | None) -> _ObjectFile:
        return _ObjectFile(self._place(key), num_bytes)

    def blocks(self, key: str, num_bytes: int) -> Iterator[memoryview]:
        """See `Store`; the blocks are those of one answer."""
        answer: Iterator[Any] | None = None
        done = 0

        def following(connection: Any, path: str) -> memoryview:
            nonlocal answer
            try:
                if answer is None:
                    rest = {"range": {"offset": done}}
                    response = connection.get(path, options=rest if done else None)
                    require_size(response.meta["size"], num_bytes, self._place(key))
                    answer = iter(response.stream(min_chunk_size=_STREAMED_BYTES))
                return memoryview(next(answer, b""))
            except Exception:
                answer = None  # the next one begins here
                raise

        while block := asked(self._place(key), following, is_long=True):
            done += len(block)
            yield block
            if done >= num_bytes:
                return
        require_size(done, num_bytes, self._place(key))

    def map(
        self, key: str, num_bytes: int, passed: Callable[[memoryview], object] | None = None
    ) -> NDArray[np.uint8]:
        """See `Store`. A large file is fetched to one without a name on this machine."""
        if num_bytes <= _MAPPED_BYTES:
            data = self.read(key, num_bytes)
            require_size(len(data), num_bytes, self._place(key))
            if passed is not None:
                passed(memoryview(data))
            return np.frombuffer(data, np.uint8)
        opened = self.open(key, num_bytes)
        with _of_this_machine(), tempfile.TemporaryFile() as file:
            for block in opened.fetched():
                if passed is not None:
                    passed(block)
                file.write(block)
            file.flush()
            return map_file(file.fileno(), num_bytes)

    def exists(self, key: str) -> bool:
        return self._is_file(key) or bool(self._listed(key, at_most=1))

    def _is_file(self, key: str) -> bool:
        with suppress(FileNotFoundError):
            if self._place(key).key:
                self._head(key)
                return True
        return False

    def _head(self, key: str) -> Any:
        return asked(self._place(key), lambda connection, path: connection.head(path))

    def names(self, folder: str) -> list[str]:
        if folder:
            inside = Bucket(self._place(folder))
            files = inside.walk("", lambda key: key.partition("/")[2] in ("", MARK))
            names = [key.partition("/")[0] for key, _ in files]
        else:  # of versions, which may have many files
            prefix = f"{self.location.key}/" if self.location.key else None
            listing = asked(self.location, lambda store, _: store.list_with_delimiter(prefix))
            folders = [path.rstrip("/").rpartition("/")[2] for path in listing["common_prefixes"]]
            marks = in_parallel(lambda name: self._is_file(f"{name}/{MARK}"), folders)
            names = [*compress(folders, marks), *map(self._key, listing["objects"])]
        return sorted(name for name in {*names} if name and not name.startswith("."))

    def walk(
        self, folder: str = "", is_wanted: Callable[[str], bool] = bool
    ) -> Iterator[tuple[str, int]]:
        """See `Store`; only of files whose keys `is_wanted`."""
        first = self._listed(folder, at_most=_PAGE)
        spans: list[tuple[str, str]] = []
        if len(first) >= _PAGE:
            paths = [entry["path"] for entry in first]
            if paths == sorted(paths):
                spans = [*pairwise([paths[-1], *self._bounds(folder, paths[-1]), ""])]
            else:  # such a store cannot begin in the middle
                first, spans = [], [("", "")]

        def sizes_in(entries: list[Any]) -> list[tuple[str, int]]:
            sizes = [(self._key(entry), int(entry["size"])) for entry in entries]
            return [(key, size) for key, size in sizes if is_wanted(key)]

        listed = in_parallel(lambda span: sizes_in(self._listed(folder, *span)), spans)
        return chain(sizes_in(first), *listed)

    def put(self, key: str, data: Buffer) -> None:

        def send(connection: Any, path: str) -> None:
            connection.put(path, data, chunk_size=_PART_BYTES, max_concurrency=_PARTS)

        is_long = len(data) > _STREAMED_BYTES
        asked(self.location / checked_key(key), send, is_long=is_long, writes=True)

    def publish(self, files: Mapping[str, Buffer], folder: str) -> None:
        lacking = self._lacking(files, folder)
        if not lacking:
            return
        note = f"work/{checked_key(folder)}/{secrets.token_hex(8)}"
        self.put(note, b"")
        for _ in range(_ATTEMPTS):
            others = [path for path in lacking if path != MARK]
            in_parallel(lambda path: self.put(f"{folder}/{path}", files[path]), others, _PARTS)
            if MARK in lacking:
                self.put(f"{folder}/{MARK}", files[MARK])
            lacking = self._lacking(files, folder)
            if not lacking:
                with tidying(self.location):
                    self._delete([note])
                return
        what = "somebody removes what is written of it: run the same command again"
        raise StoreError(f"{self._place(folder)}: {what}")

    def _lacking(self, files: Mapping[str, Buffer], folder: str) -> list[str]:
        """List the files of a folder that are missing or cut off. Documents may have other
        sizes, since they name their writer."""
        sizes = {key.removeprefix(f"{folder}/"): size for key, size in self.walk(folder)}
        written = {checked_key(path): len(data) for path, data in files.items()}
        written[MARK] = sizes.get(MARK, -1)
        return [path for path, size in written.items() if sizes.get(path) != size]

    def remove(self, key: str) -> None:
        mark = f"{checked_key(key)}/{MARK}"
        self._delete([key])
        # twice, for what a writer adds meanwhile, who then begins again
        for _ in range(2):
            self._delete([mark])
            keys = [below for below, _ in self.walk(key)]
            if not keys:
                return
            self._delete(keys)
        self._delete([mark])

    def _delete(self, keys: list[str]) -> None:
        paths = [self._place(key).key for key in keys]
        # some stores say so, and then may have left out others
        with suppress(FileNotFoundError):
            what = paths[0] if len(paths) == 1 else paths
            place = self._place(keys[0])
            asked(place, lambda connection, _: connection.delete(what), writes=True)

    def destroy(self) -> None:
        self._delete([MARK])
        while keys := [key for key, _ in self.walk()]:
            self._delete(keys)

    def lock(self, who: str) -> AbstractContextManager[None]:
        return nullcontext()

    def sweep(self, *, remove: bool = True) -> list[str]:
        written: dict[str, dict[str, float]] = defaultdict(dict)
        for entry in self._listed("work"):
            note = _NOTE.fullmatch(self._key(entry))
            if note:
                written[note[1]][note[0]] = entry["last_modified"].timestamp()
        if not written:
            return []
        now, left = self._now(), []
        for folder, notes in written.items():
            if now - max(notes.values()) <= DAY_SECONDS:
                continue
            is_left = not self.exists(f"{folder}/{MARK}")
            left += [folder] if is_left else []
            with tidying(self.location):
                if remove and is_left:
                    self.remove(folder)
                if remove:
                    self._delete([*notes])
        return left

    def _now(self) -> float:
        """Ask for the store's time, in seconds since 1970, by writing a file."""
        key = f"work/clock/{secrets.token_hex(8)}"
        self.put(key, b"")
        try:
            return float(self._head(key)["last_modified"].timestamp())
        finally:
            with tidying(self.location):
                self._delete([key])

    @property
    def marks_folder(self) -> Path:
        """See `Store`. It is below `TMPDIR`, and this user's alone."""
        name = hashlib.sha256(str(self.location).encode()).hexdigest()[:16]
        with _of_this_machine(f"featcache-{os.getuid()}/{name}") as folder:
            mine = folder.parent
            mine.mkdir(mode=0o700, exist_ok=True)
            status = mine.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                remedy = "set TMPDIR to a folder of your own"
                raise StoreError(f"{mine}: is not this user's folder: {remedy}")
            folder.mkdir(exist_ok=True)
        return folder

    def _key(self, entry: Any) -> str:
        folder = f"{self.location.key}/" if self.location.key else ""
        return str(entry["path"])[len(folder) :]

    def _bounds(self, folder: str, last: str) -> list[str]:
        """List the paths at which to divide the rest of a listing, whose first page ends
        with `last`."""
        prefix = f"{self._place(folder).key}/"
        name = last.removeprefix(prefix).partition("/")[0]
        if not _SPREAD_EVENLY.fullmatch(name):
            return []
        pages = 16**8 / (int(name[:8], 16) + 1)
        slices = min(_SLICES, math.ceil(pages / _PAGES))
        bounds = [f"{prefix}{16**8 * number // slices:08x}" for number in range(1, slices)]
        return [bound for bound in bounds if bound > last]

    def _listed(
        self, folder: str, after: str = "", until: str = "", at_most: float = math.inf
    ) -> list[Any]:
        """List the files below a folder with paths after one and up to another, if these
        are given. May stop at `at_most` files."""

        def fetch(connection: Any, path: str) -> list[Any]:
            entries: list[Any] = []
            prefix = f"{path}/" if path else None
            for page in connection.list(prefix, offset=after or None, chunk_size=_PAGE):
                entries += page
                if len(entries) >= at_most or (until and entries[-1]["path"] > until):
                    break
            return [entry for entry in entries if not until or entry["path"] <= until]

        return asked(self._place(folder), fetch)


class _ObjectFile:
    """An `Opened` file. Opening reads its end, and with it the size."""

    def __init__(self, place: ObjectPath, num_bytes: int | None) -> None:
        self.path = place

        def fetch(connection: Any, path: str) -> tuple[int, memoryview]:
            if not num_bytes:
                return int(connection.head(path)["size"]), memoryview(b"")
            response = connection.get(
                path, options={"range": (max(0, num_bytes - _END_BYTES), num_bytes)}
            )
            return int(response.meta["size"]), memoryview(response.bytes())

        self.num_bytes, self._end = asked(place, fetch)
        require_size(self.num_bytes, num_bytes, place)

    def read_into(self, out: memoryview, start: int) -> None:
        out[:] = self.read_ranges([start], [len(out)])[0]

    def fetched(self) -> Iterator[memoryview]:
        """Yield the whole file in blocks, some of which are fetched side by side."""
        firsts = range(0, self.num_bytes, _FETCHED_BYTES)

        def fetch(first: int) -> memoryview:
            return self.read_ranges([first], [min(_FETCHED_BYTES, self.num_bytes - first)])[0]

        for number in range(0, len(firsts), _FETCHED_AT_ONCE):
            yield from in_parallel(fetch, firsts[number : number + _FETCHED_AT_ONCE])

    def read_ranges(self, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """See `Opened`. Neighbours are read by one request."""
        require_within(starts, sizes, self.num_bytes, self.path)
        end = self.num_bytes - len(self._end)
        wanted = zip(starts, sizes, strict=True)
        spans = _joined((start, start + size) for start, size in wanted if start < end and size)
        parts = [*self._of_spans(spans), self._end]
        firsts = [*(first for first, _ in spans), end]
        places = [max(0, bisect_right(firsts, start) - 1) for start in starts]
        ranges = zip(places, starts, sizes, strict=True)
        return [parts[place][start - firsts[place] :][:size] for place, start, size in ranges]

    def _of_spans(self, spans: list[tuple[int, int]]) -> list[memoryview]:
        if not spans:
            return []
        starts, sizes = [first for first, _ in spans], [last - first for first, last in spans]

        def fetch(connection: Any, path: str) -> list[memoryview]:
            # obstore's own joining ends the process if a range is beyond the end of the file
            parts = connection.get_ranges(path, starts=starts, lengths=sizes, coalesce=0)
            return [memoryview(part) for part in parts]

        parts = asked(self.path, fetch)
        if [len(part) for part in parts] != sizes:
            raise DamagedError(f"{self.path}: damaged: it ends before what is to be read")
        return parts


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort spans, and join neighbours."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first - joined[-1][1] <= _GAP_BYTES:
            first, before = joined.pop()
            last = max(last, before)
        joined.append((first, last))
    return joined


@contextmanager
def _of_this_machine(name: str = "") -> Iterator[Path]:
    """Write within to a place below the temporary folder. Raises StoreError if that fails;
    a FileNotFoundError of an object stays."""
    path: object = "a temporary folder"
    try:
        path = Path(tempfile.gettempdir(), name)
        yield path
    except OSError as error:
        if is_url(str(error.filename)):
            raise
        raise StoreError(
            f"{path}: cannot be written: {error.strerror}: set TMPDIR to another folder"
        ) from error
