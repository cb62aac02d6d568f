"""Object stores, as a store: S3, Google's, Azure's and whatever speaks like them, by the library obstore.

obstore repeats requests that fail on the way to the answer, with backoff. If the connection breaks while a body comes,
it is repeated here. Many small files are fetched side by side with `read_ahead`: then what reads one after the other,
as everything in `featcache.store` does, waits for none of them.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, TypeVar

from featcache.errors import FeatcacheError, StoreError
from featcache.storage.clients import awaited, client, seconds_to_wait
from featcache.storage.faults import has_no_credentials, in_words
from featcache.storage.location import Location, ObjectPath

__all__ = ["REQUESTS", "Objects", "fetched", "in_parallel", "read_ahead", "require_put_if_absent"]

REQUESTS = 64
"""How many requests one call makes at once."""

_ATTEMPTS = 5
_FINAL = ("PermissionDeniedError", "UnauthenticatedError", "NotSupportedError", "InvalidPathError")
_GIVEN_UP = re.compile(r"after ([1-9]\d*) retries, max_retries: \1\b")
"""What obstore says of a request that it has repeated as often as it may."""

_AHEAD_BYTES = 16 << 20
"""The largest file that is fetched ahead; others are when they are asked for, and have been held against their size."""

_PART_BYTES = 8 << 20
_PARTS = 4
"""A larger file is written in parts of that size, so many of them at once."""

_PROBE = re.compile(r"\.(clock|put-if-absent)\.[0-9a-f]{16}")
_PAGE = 1000
_S = TypeVar("_S")
_T = TypeVar("_T")
_ahead = threading.local()
_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


class Objects:
    """The store that all object stores are; see `featcache.storage.store.Store`. Locations are `ObjectPath`."""

    def get(self, location: Any, check: Callable[[int], None]) -> bytes:
        """All bytes of a file, once `check` has accepted their number."""
        if (data := fetched(location)) is not None:
            check(len(data))
            return data

        def fetch() -> bytes:
            response = client(location.root).get(location.key)
            check(response.meta["size"])
            return bytes(response.bytes())

        return _repeated(location, fetch)

    def get_ranges(self, location: Any, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Some ranges of a file's bytes."""
        if not starts:
            return []

        def fetch() -> list[memoryview]:
            # A gap of 64 kB takes less time than another request.
            parts = client(location.root).get_ranges(location.key, starts=starts, lengths=sizes, coalesce=64 << 10)
            return [memoryview(part) for part in parts]

        return _repeated(location, fetch, is_long=sum(sizes) > _PART_BYTES)

    def size(self, location: Any) -> int:
        """The number of bytes of a file."""
        return int(_repeated(location, lambda: client(location.root).head(location.key))["size"])

    def size_and_range(self, location: Any, start: int, size: int) -> tuple[int, bytes]:
        """The number of bytes of a file, and some of them, in one request."""

        def fetch() -> tuple[int, bytes]:
            store = client(location.root)
            try:
                response = store.get(location.key, options={"range": (start, start + size)})
                return int(response.meta["size"]), bytes(response.bytes())
            except Exception:  # of a range beyond the end, stores say this and that
                if (found := int(store.head(location.key)["size"])) > start:
                    raise
                return found, b""

        return _repeated(location, fetch)

    def exists(self, location: Any) -> bool:
        """Whether there is a file or a folder."""
        try:
            self.size(location)
        except FileNotFoundError:
            # One page of the listing, however much there is.
            prefix = f"{location.key}/" if location.key else None
            return bool(_repeated(location, lambda: next(iter(client(location.root).list(prefix)), None)))
        return True

    def names(self, location: Any) -> list[str]:
        """The names in a folder."""
        found = self._list(location)
        prefix = f"{location.key}/" if location.key else ""
        objects = [entry["path"].removeprefix(prefix) for entry in found["objects"]]
        return [name for name in objects if name] + _last_parts(found["common_prefixes"])

    def folders(self, location: Any) -> list[str]:
        """The names of the folders in a folder."""
        return _last_parts(self._list(location)["common_prefixes"])

    def _list(self, location: ObjectPath) -> Any:
        prefix = f"{location.key}/" if location.key else None
        found = _repeated(location, lambda: client(location.root).list_with_delimiter(prefix))
        if not found["objects"] and not found["common_prefixes"]:
            raise _not_found(location)
        return found

    def walk(self, location: Any) -> Iterator[tuple[str, int]]:
        """All files below a folder, each with its size."""
        for entry in self._entries(location):
            yield entry["path"].removeprefix(f"{location.key}/" if location.key else ""), int(entry["size"])

    def _entries(self, location: ObjectPath) -> Iterator[Any]:
        prefix = f"{location.key}/" if location.key else None
        return chain(*_repeated(location, lambda: [*client(location.root).list(prefix, chunk_size=_PAGE)]))

    def put(self, location: Any, data: bytes) -> None:
        """Write a file, whole or not at all."""
        in_parts = len(data) > _PART_BYTES
        _repeated(
            location, lambda: client(location.root).put(location.key, data, use_multipart=in_parts), is_long=in_parts
        )

    def put_blocks(self, location: Any, blocks: Callable[[], Iterator[memoryview]]) -> int:
        """Write a file, whole or not at all, of blocks; returns its size."""
        failures: list[BaseException] = []
        sizes: list[int] = []

        def read() -> Iterator[memoryview]:
            sizes.clear()
            try:
                for block in blocks():
                    sizes.append(block.nbytes)
                    yield block
            except BaseException as error:
                failures.append(error)
                raise

        def send() -> None:
            parts = read()
            first = bytearray()
            while len(first) < _PART_BYTES and (block := next(parts, None)) is not None:
                first += block
            store = client(location.root)
            if len(first) < _PART_BYTES:
                store.put(location.key, bytes(first), use_multipart=False)
            else:
                rest = chain([bytes(first)], map(bytes, parts))
                store.put(location.key, rest, use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_PARTS)

        try:
            _repeated(location, send, is_long=True)
        except StoreError:
            if failures:
                raise failures[-1] from None
            raise
        return sum(sizes)

    def put_if_absent(self, location: Any, data: bytes) -> bool:
        """Write a file unless there is one; whether it was written."""
        for wait in (0.1, 0.5, 2.0, None):
            try:
                _repeated(
                    location,
                    lambda: client(location.root).put(location.key, data, mode="create", use_multipart=False),
                    creates=True,
                )
                return True
            except FileExistsError as error:
                # After an attempt whose answer was lost, what is there may be what was just written; and after a
                # conflict (409), it may be nothing.
                try:
                    return self.get(location, lambda size: None) == data
                except FileNotFoundError:
                    if wait is None:
                        raise StoreError(f"{location}: the store says that it is there, and that it is not") from error
            time.sleep(wait)
        raise AssertionError

    def tag(self, location: Any) -> dict[str, str] | None:
        """What tells a file's content from what it may have later; None if there is no such file."""
        try:
            found = _repeated(location, lambda: client(location.root).head(location.key))
        except FileNotFoundError:
            return None
        return {name: found[name] for name in ("e_tag", "version") if found[name] is not None}

    def put_if_unchanged(self, location: Any, data: bytes, tag: dict[str, str] | None) -> bool:
        """Write a file if it still has that tag; whether it is there as written."""
        if tag is None:
            return self.put_if_absent(location, data)

        def send() -> bool:
            try:
                client(location.root).put(location.key, data, mode=tag, use_multipart=False)
            except Exception as error:  # obstore's errors, which in a forked process are other classes
                if type(error).__name__ != "PreconditionError":
                    raise
                return self.get(location, lambda size: None) == data  # by an attempt whose answer was lost
            return True

        return _repeated(location, send)

    def delete(self, location: Any) -> None:
        """Remove a file, if it is there."""
        try:
            _repeated(location, lambda: client(location.root).delete(location.key))
        except FileNotFoundError:
            return

    def delete_folder(self, location: Any) -> None:
        """Remove all files below a folder."""
        in_parallel(self.delete, [location / name for name, _ in self.walk(location)])

    def last_change(self, location: Any) -> float | None:
        """When a file below a folder was last written, in seconds since 1970 by the store's clock; None without one."""
        return max((entry["last_modified"].timestamp() for entry in self._entries(location)), default=None)

    def now(self, location: Any) -> float:
        """The store's clock: seconds since 1970. A file is written in this folder for that, and removed."""
        probe = location / f".clock.{secrets.token_hex(8)}"
        self.put(probe, b"")
        try:
            found = _repeated(probe, lambda: client(probe.root).head(probe.key))
            return float(found["last_modified"].timestamp())
        finally:
            self.delete(probe)

    def sweep_probes(self, location: Any, seconds: float) -> None:
        """Remove from a folder what killed processes have left there of `now` and `require_put_if_absent` that long
        ago.
        """
        with suppress(FileNotFoundError):
            written = {entry["path"]: entry["last_modified"].timestamp() for entry in self._list(location)["objects"]}
            probes = [path for path in written if _PROBE.fullmatch(path.rpartition("/")[2])]
            now = self.now(location) if probes else 0.0
            for path in probes:
                if now - written[path] > seconds:
                    self.delete(ObjectPath(location.root, path))


def require_put_if_absent(location: ObjectPath) -> None:
    """Refuse an object store that replaces a file which was to be written only if there is none.

    Args:
        location: A folder, in which a file is written for that, and removed.

    Raises:
        StoreError: It is such a store, or cannot be written.
    """
    store, probe = Objects(), location / f".put-if-absent.{secrets.token_hex(8)}"
    try:
        is_kept = store.put_if_absent(probe, b"first") and not store.put_if_absent(probe, b"second")
    finally:
        store.delete(probe)
    if not is_kept:
        raise StoreError(
            f"{location}: this object store replaces a file even if it is to be written only where there is none "
            "(If-None-Match: *), and without that, two runs could damage each other's work: extract into a folder, and "
            "`featcache copy` it there"
        )


@contextmanager
def read_ahead(locations: Iterable[Location]) -> Iterator[None]:
    """The context to read these files in, and no others need be: those in object stores are fetched before, at once."""
    known: tuple[dict[ObjectPath, Any], ...] = getattr(_ahead, "files", ())
    wanted = [
        location
        for location in dict.fromkeys(locations)
        if isinstance(location, ObjectPath) and not any(location in files for files in known)
    ]
    if not wanted:
        yield
        return
    with ThreadPoolExecutor(REQUESTS, "featcache-objects") as pool:
        files = {location: data for location, data in pool.map(_small, wanted) if data is not _TOO_LARGE}
    _ahead.files = (files, *known)
    try:
        yield
    finally:
        _ahead.files = known


def in_parallel(work: Callable[[_S], _T], items: Sequence[_S]) -> list[_T]:
    """What `work` returns for each item, at once in several threads, which only wait. `work` does not call this."""
    global _pool
    if len(items) < 2:
        return [work(item) for item in items]
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(REQUESTS, "featcache-objects")
        pool = _pool
    return list(pool.map(work, items))


def _in_child() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()  # its threads are the parent's, and one of them may hold the lock


os.register_at_fork(after_in_child=_in_child)


def fetched(location: ObjectPath) -> bytes | None:
    """The bytes of a file that `read_ahead` has fetched; None if it has not.

    Raises:
        FileNotFoundError: It has found that there is none.
    """
    for files in getattr(_ahead, "files", ()):
        if location in files:
            if files[location] is None:
                raise _not_found(location)
            return bytes(files[location])
    return None


_TOO_LARGE = object()


def _small(location: ObjectPath) -> tuple[ObjectPath, Any]:
    """A file's bytes; None if there is none."""

    def fetch() -> Any:
        response = client(location.root).get(location.key)
        return response.bytes() if response.meta["size"] <= _AHEAD_BYTES else _TOO_LARGE

    try:
        return location, _repeated(location, fetch)
    except FileNotFoundError:
        return location, None


def _repeated(location: ObjectPath, request: Callable[[], _T], *, creates: bool = False, is_long: bool = False) -> _T:
    """What a request returns, which is made again if the connection breaks while the answer comes.

    One that `is_long` sends or fetches so much that it may take a while.

    Raises:
        FileNotFoundError: There is no such file.
        FileExistsError: The request `creates` a file, and there is one already.
        StoreError: It cannot be read or written.
    """
    wait = 0.1
    given_up_at = time.monotonic() + seconds_to_wait()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return request() if is_long else awaited(location.root, request)
        except FeatcacheError:
            raise
        except FileNotFoundError as error:
            raise _not_found(location) from error
        except Exception as error:  # obstore's errors, which in a forked process are other classes
            kind = type(error).__name__
            if creates and kind == "AlreadyExistsError":  # else it is a conflict (409) with a request that is under way
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(location)) from error
            if kind == "NotFoundError":
                raise _not_found(location) from error
            is_final = kind in _FINAL
            has_been_repeated = _GIVEN_UP.search(str(error)) is not None or time.monotonic() > given_up_at
            if attempt == _ATTEMPTS or is_final or has_been_repeated or has_no_credentials(error):
                words = f"{in_words(location.root, error)} ({kind})"
                raise StoreError(f"{location}: cannot be read or written: {words}") from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError


def _not_found(location: ObjectPath) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(location))


def _last_parts(prefixes: Iterable[str]) -> list[str]:
    return [prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes]
