"""Files at URLs: fetched whole, with retries, from object stores and web servers.

One request fetches an audio file, so that all its bytes are of one moment; several requests
at once fetch a container. obstore's own retries are turned off: they leave out what breaks
off in the middle. Its messages quote redirected addresses, with signatures, and are not
passed on."""

from __future__ import annotations

import io
import os
import random
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote

import xxhash

from featcache.errors import AudioError, ManifestError, Reason, StoreError
from featcache.manifest.audio_locations import Url
from featcache.storage.base import in_parallel
from featcache.storage.clients import (
    PanickedError,
    client,
    has_no_credentials,
    in_words,
    library,
    panics_raised,
    status_of,
)

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore

TRIES = 8  # requests for a file before it fails, in about 25 seconds
FEW_TRIES = 3  # for what a command can do without, in about a second
_FIRST_WAIT = 0.2  # seconds
_LONGEST_WAIT = 15.0  # seconds

IN_MEMORY = 32 << 20  # the most bytes of a file that is kept in memory
_BEGINNING = 64 << 10  # bytes in which headers are
_PIECE = 4 << 20

_RANGE = 8 << 20  # bytes of a container that a request asks for
_RANGES_AT_ONCE = 8  # a connection to an object store gives 50 to 100 MB a second

_HEAD_REFUSED = (403, 405, 501)  # of servers that may answer GET
_NO_PATH = "not a valid path in a store"

URLS_AT_ONCE, FILES_AT_ONCE = 64, 16  # questions at a time, at URLs and on this machine

Wait = Callable[[float], object]
"""A function that waits for some seconds before another try. It is also called with 0 while
something takes long, and may raise to give up."""

_Result = TypeVar("_Result")
_Given = TypeVar("_Given")


class FileStamp(NamedTuple):
    """The size and time of a file: if either differs, the file has changed."""

    size: int
    """The size, in bytes."""
    mtime_ns: int
    """The time of the last change, in nanoseconds since the epoch; of a file at a URL with
    an ETag, `negative_hash` of the ETag."""


class Fetched:
    """A fetched file, or its beginning: the bytes, or a `file` without a name."""

    def __init__(self, stamp: FileStamp, data: Any = None, file: io.FileIO | None = None) -> None:
        self.stamp = stamp
        self._data = data
        self._file = file
        if file is not None:  # several recordings may share it, so none of them closes it
            weakref.finalize(self, file.close)

    def open(self) -> io.FileIO:
        """Open it as a file with its own position; bytes not fetched are zeros. Raises
        AudioError if it does not fit into memory."""
        if self._file is not None:
            return io.FileIO(f"/proc/self/fd/{self._file.fileno()}")
        with os_errors_as("it does not fit into memory", Reason.OUT_OF_MEMORY):
            file = io.FileIO(os.memfd_create("featcache-audio"), "r+")
            try:
                _write(file, self._data)
                file.truncate(self.stamp.size)
                file.seek(0)
                return file
            except BaseException:
                file.close()
                raise


def require(url: Url) -> None:
    """Check that URLs like this one can be fetched. Raises MissingDependencyError, or
    ManifestError if its store cannot be opened."""
    try:
        _address(url)
    except AudioError as error:
        if error.reason != Reason.FILE_MISSING:  # a fault of one row
            raise ManifestError(f"{url}: {error}") from error


def fetch(url: Url, wait: Wait = time.sleep) -> Fetched:
    """Fetch a file, with several tries. Raises AudioError if it cannot be fetched, or is
    empty."""

    def get(store: ObjectStore, key: str) -> Fetched:
        result = store.get(key)
        stamp = _stamp(result.meta)
        if stamp.size == 0:
            raise AudioError(Reason.EMPTY, "the file holds 0 bytes")
        if stamp.size > IN_MEMORY:
            return Fetched(stamp, file=kept_on_disk(result.stream(_PIECE), stamp.size))
        data = result.bytes()
        if len(data) != stamp.size:
            raise _BrokenOffError
        return Fetched(stamp, data)

    return _try(url, TRIES, get, wait)


def fetch_to_disk(url: Url, stamp: FileStamp, wait: Wait) -> Fetched:
    """Fetch a container to the disk of `TMPDIR`, by several requests at once. Raises
    AudioError also if its stamp has changed, or the disk is full."""

    def checked(result: GetResult) -> GetResult:
        if _stamp(result.meta) != stamp:
            raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was fetched")
        return result

    def get_whole(store: ObjectStore, key: str) -> Fetched:
        pieces = (wait(0.0) or piece for piece in checked(store.get(key)).stream(_PIECE))
        return Fetched(stamp, file=kept_on_disk(pieces, stamp.size))

    def get_range(first: int) -> None:
        wait(0.0)
        stop = min(first + _RANGE, stamp.size)

        def request(store: ObjectStore, key: str) -> None:
            try:
                result = store.get(key, options={"range": (first, stop)})
            except library().exceptions.NotSupportedError:
                raise _NoRangesError from None
            data = memoryview(checked(result).bytes())
            if len(data) != stop - first:
                raise _BrokenOffError
            with _disk_may_fail():
                while data:
                    data = data[os.pwrite(file.fileno(), data, stop - len(data)) :]

        _try(url, TRIES, request, wait)

    file = kept_on_disk(())
    try:
        with _disk_may_fail():
            os.posix_fallocate(file.fileno(), 0, stamp.size)
        in_parallel(get_range, range(0, stamp.size, _RANGE), _RANGES_AT_ONCE)
    except BaseException as error:
        file.close()
        if not isinstance(error, _NoRangesError):
            raise
        return _try(url, TRIES, get_whole, wait)
    return Fetched(stamp, file=file)


def fetch_beginning(url: Url) -> Fetched:
    """Fetch the bytes of a file's header. Raises AudioError also if the server gives only
    whole files."""

    def get(store: ObjectStore, key: str) -> Fetched:
        result = store.get(key, options={"range": (0, _BEGINNING)})
        return Fetched(_stamp(result.meta), result.bytes())

    return _try(url, FEW_TRIES, get)


def stamp_of(url: Url, tries: int = FEW_TRIES, wait: Wait = time.sleep) -> FileStamp:
    """Ask for the size and ETag of a file. Raises AudioError if it does not exist, or the
    server does not answer."""

    def head(store: ObjectStore, key: str) -> FileStamp:
        try:
            return _stamp(store.head(key))
        except (library().exceptions.BaseError, FileNotFoundError) as error:
            if status_of(error) not in _HEAD_REFUSED:
                raise
            return _stamp(store.get(key).meta)  # nothing more is read of the answer

    return _try(url, tries, head, wait)


def each_at_once(ask: Callable[[_Given], _Result], locations: Sequence[_Given]) -> list[_Result]:
    """Ask something about many files at a time, since servers are slow to answer."""
    containers = [getattr(location, "container", location) for location in locations]
    are_at_urls = any(isinstance(container, Url) for container in containers)
    return in_parallel(ask, locations, URLS_AT_ONCE if are_at_urls else FILES_AT_ONCE)


class TriedInVainError(AudioError):
    """A file cannot be fetched now, after many tries. Later it may."""


class StoppedError(Exception):
    """The run is being stopped. This is not a failure of the audio."""


class _BrokenOffError(Exception):
    """Fewer bytes have come than were promised."""


class _NoRangesError(Exception):
    """The server gives only whole files."""


def kept_on_disk(pieces: Iterable[Any], size: int | None = None) -> io.FileIO:
    """Write pieces, of `size` bytes if known, to a file without a name on the disk of
    `TMPDIR`. Raises AudioError if the disk cannot be written, or is full."""
    with _disk_may_fail():
        file: io.FileIO = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the caller closes it)
    try:
        held = 0
        for piece in pieces:
            with _disk_may_fail():
                held += _write(file, piece)
        if size is not None and held != size:
            raise _BrokenOffError
        return file
    except BaseException:
        file.close()
        raise


def _disk_may_fail() -> AbstractContextManager[None]:
    return os_errors_as(f"a copy cannot be kept in {tempfile.tempdir or 'TMPDIR'}")


@contextmanager
def os_errors_as(what: str, reason: Reason = Reason.FILE_UNREADABLE) -> Iterator[None]:
    """Raise an AudioError instead of an OSError; its message begins with `what`."""
    try:
        yield
    except OSError as error:
        raise AudioError(reason, f"{what}: {error.strerror}") from error


def _write(file: io.FileIO, data: Any) -> int:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    return len(data)


def _try(
    url: Url, tries: int, request: Callable[[ObjectStore, str], _Result], wait: Wait = time.sleep
) -> _Result:
    store, key = _address(url)
    base_error = library().exceptions.BaseError
    for number in range(1, tries + 1):
        try:
            return panics_raised(request, store, key)
        except (base_error, OSError, ValueError, _BrokenOffError, PanickedError) as error:
            fault, may_pass = _fault(url, error)
            if not may_pass:
                raise fault from None
            if number == tries:
                raise TriedInVainError(fault.reason, f"{fault} ({tries} tries)") from None
        wait(min(_FIRST_WAIT * 2 ** (number - 1), _LONGEST_WAIT) * random.uniform(0.75, 1.25))
    raise AssertionError


def _fault(url: Url, error: Exception) -> tuple[AudioError, bool]:
    """Say what is wrong, and whether it may pass."""
    if isinstance(error, FileNotFoundError) and status_of(error) != 405:  # which obstore confuses
        return AudioError(Reason.FILE_MISSING, "there is no such file"), False
    if isinstance(error, ValueError):
        return AudioError(Reason.FILE_MISSING, _NO_PATH), False
    words = "the connection breaks off"
    if not isinstance(error, _BrokenOffError):
        words = in_words(url, error)
    faults = library().exceptions
    refusals = faults.PermissionDeniedError, faults.UnauthenticatedError, faults.NotSupportedError
    code = status_of(error)
    is_final = (
        isinstance(error, (PanickedError, *refusals))
        or (400 <= code < 500 and code not in (408, 425, 429))
        or has_no_credentials(error)
    )
    return AudioError(Reason.FILE_UNREADABLE, f"cannot be fetched: {words}"), not is_final


def _stamp(meta: ObjectMeta) -> FileStamp:
    etag = meta["e_tag"]
    if etag:
        return FileStamp(meta["size"], negative_hash(etag.encode()))
    # HTTP tells seconds
    return FileStamp(meta["size"], round(meta["last_modified"].timestamp()) * 10**9)


def negative_hash(data: bytes) -> int:
    """Return a number below 0 that follows from bytes, and so is no time."""
    return -(xxhash.xxh3_64_intdigest(data) >> 1) - 1


def _address(url: Url) -> tuple[ObjectStore, str]:
    """Open the store of a URL, and return the file's key in it. Raises AudioError if it
    cannot be opened."""
    scheme, _, rest = url.partition("://")
    host, _, key = rest.partition("/")
    scheme = scheme.lower()
    try:
        if not scheme.startswith("http"):
            if not key or key.startswith("/"):  # which a store would leave out
                raise AudioError(Reason.FILE_MISSING, _NO_PATH)
            return client(f"{scheme}://{host}", retries=False), key
        # not a path that a store knows
        if "?" in key or "#" in key or "//" in f"/{key}" or "/." in f"/{key}":
            return client(str(url), retries=False), ""
        return client(f"{scheme}://{host}", retries=False), unquote(key)
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) or has_no_credentials(cause):
            raise _fault(url, cause if isinstance(cause, Exception) else error)[0] from None
        what = str(error).removeprefix(f"{scheme}://{host}: cannot be opened: ")
        raise AudioError(Reason.FILE_UNREADABLE, f"cannot be fetched: {what}") from None
