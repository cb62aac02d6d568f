"""Connections to object stores and web servers, one for each bucket or host, and process;
and requests to stores.

obstore runs its requests in threads, which a forked process does not have: its calls
would wait for ever. torch's DataLoader forks. So a child whose parent has used obstore
loads a second copy, from a copy of its files (20 ms, 15 MB).

obstore repeats a request until the answer begins, for two minutes or
`FEATCACHE_STORE_SECONDS`. If the answer breaks off or stops, `asked` repeats the request."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from featcache.errors import (
    ArgumentError,
    DamagedError,
    FeatcacheError,
    MissingDependencyError,
    StoreError,
    first_line,
    listing,
)
from featcache.storage.location import ObjectPath

_ENDPOINTS = ("AWS_ENDPOINT", "AZURE_", "GOOGLE_")
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""The beginnings of the variables that obstore reads, by the scheme of URLs."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MOST_CLIENTS = 64

_SECONDS = "FEATCACHE_STORE_SECONDS"
_STALLED = 0.25
"""The part of these seconds after which an answer that stops is asked for again."""

_RETRIES = 10_000  # so that only the time ends them
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 15.0  # seconds between obstore's
_PAUSES = (0.1, 0.2, 0.4, 0.8)
"""Seconds before a request whose answer broke off is made again."""

_SILENT_SECONDS = 3.0
"""Seconds without an answer after which the user is told of the wait."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_said: set[str] = set()
"""The buckets and servers that the user has been told of."""

_UNUSABLE = re.compile(
    r"Unable to \w+ service account file|Invalid Access Key|Missing component in SAS"
    r"|failed to parse"
)
"""obstore's words for an environment that makes no sense, before it quotes some of it."""

_STATUS = re.compile(r"status code: (\d{3})( [A-Za-z' -]{1,40}[a-z])?")
_KEY = re.compile(r'Path "(.{1,1024}?)"(?: contained|:)', re.DOTALL)
_NO_CREDENTIALS = re.compile(
    r"(?i)Missing AccessKeyId|169\.254\.169\.254|token request|metadata\.google|Account must"
)
_WORDS = (
    ("NoSuchBucket", "there is no such bucket"),
    ("dns error", "its host is not known"),
    ("Connection refused", "its host refuses the connection"),
    ("kind: Connect,", "its host cannot be reached"),
    ("Timeout|timed out", "the server does not answer in time"),
    ("kind: Interrupted|kind: Body|ConnectionReset|IncompleteMessage", "the connection breaks off"),
    ("Content-Length", "the server does not say how long the file is"),
    ("certificate", "the server's certificate is not valid"),
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a "
    "public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

_lock = threading.RLock()  # held for a moment, and while the process forks
_of_parent: list[Any] = []
"""The parent's library and connections. To close them here would break them there."""

_used_by_parent = False


def client(base: str, *, retries: bool = True, writes: bool = False) -> Any:
    """Connect to a bucket or a web server, by the beginning of its URLs, such as
    `s3://bucket` or `https://host`. The environment gives credentials, region and
    endpoint. With `retries`, obstore repeats requests that fail. Only a connection that
    `writes` waits long for the first byte of an answer.

    Raises StoreError if the URL or the environment makes no sense, with obstore's error
    as its cause; MissingDependencyError if obstore is not installed."""
    writes &= not base.startswith("memory:")  # where the connection is the store
    with _lock:
        return _connected(base, retries, writes)


def _connect(base: str, retries: bool, writes: bool = False) -> Any:
    stores = library().store
    _check_environment(base)
    if base.startswith("memory://"):
        return stores.MemoryStore()
    seconds = seconds_to_wait()
    # `timeout` is for a whole file
    options: Any = {"connect_timeout": "10s", "timeout": "10m"}
    repeating: Any = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE),
            "max_backoff": timedelta(seconds=min(_LONGEST_PAUSE, seconds / 4)),
            "base": 4,
        },
    }
    if not retries:
        options |= {"read_timeout": "30s", "timeout": "1d"}
        repeating = {"max_retries": 0}
    elif _SECONDS in os.environ:
        options = {"connect_timeout": f"{min(10.0, seconds)}s", "timeout": f"{seconds}s"}
    if retries and not writes:  # it would end long uploads
        options["read_timeout"] = f"{seconds * _STALLED}s"
    addresses = [base]
    if not base.startswith("https://"):
        addresses += [os.environ[name] for name in os.environ if name.startswith(_ENDPOINTS)]
    if any(address.startswith("http://") for address in addresses):
        options["allow_http"] = True
    open_store = stores.HTTPStore.from_url if base.startswith("http") else stores.from_url
    try:
        return panics_raised(open_store, base, client_options=options, retry_config=repeating)
    except Exception as error:  # each of obstore's errors is a class of its own
        raise StoreError(f"{base}: cannot be opened: {_why_unusable(base, error)}") from error


def _check_environment(base: str) -> None:
    """Refuse values at which obstore panics: with a line end, or no URL."""
    begin = _VARIABLES.get(base.partition("://")[0], "\0")
    for name in filter(lambda name: name.startswith(begin), os.environ):
        value, fault = os.environ[name], ""
        has_lines = value.lstrip().startswith(("{", "-----"))  # JSON, a PEM
        if _CONTROL.search(value) and not has_lines:
            fault = "has a line end or another control character in it: set it without"
        elif "_ENDPOINT" in name and value and not re.match(r"https?://[^\s/]", value):
            fault = "is no URL: it begins with http:// or https://"
        if fault:
            raise StoreError(f"{base}: cannot be opened: {name} {fault}")


def _why_unusable(base: str, error: BaseException) -> str:
    if has_no_credentials(error):
        return in_words(base, error)
    fault, begin = _UNUSABLE.search(str(error)), _VARIABLES.get(base.partition("://")[0])
    if fault is None or begin is None:
        return first_line(error)
    return f"{fault[0]} (set: {listing(name for name in os.environ if name.startswith(begin))})"


class PanickedError(Exception):
    """A panic of obstore, which has trusted what it was given."""


def panics_raised(call: Callable[..., _T], *given: Any, **options: Any) -> _T:
    """Call obstore. Raises PanickedError for its panics, which pyo3 does not derive from
    `Exception`."""
    try:
        return call(*given, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise PanickedError(str(error)) from None


_connected = lru_cache(_MOST_CLIENTS)(_connect)


def seconds_to_wait() -> float:
    """Return the seconds to wait for a store that does not answer. Raises ArgumentError
    if the environment names no number."""
    text = os.environ.get(_SECONDS, "120")
    with suppress(ValueError):
        if 0 < (seconds := float(text)) <= 86400:
            return seconds
    raise ArgumentError(f"{_SECONDS} is {text!r}: give a number of seconds, up to 86400")


def awaited(base: str, request: Callable[[], _T]) -> _T:
    """Make a small request to a bucket or server, and return its result. In the main
    thread, an interrupt ends it, which obstore does not heed; and if it takes long, the
    user is told, once a bucket."""
    if threading.current_thread() is not threading.main_thread():
        return request()
    answer: Future[_T] = Future()
    threading.Thread(
        target=_ask, args=(request, answer), name="featcache-asks", daemon=True
    ).start()
    if not wait([answer], _SILENT_SECONDS).done and base not in _said:
        _said.add(base)
        _log.info(
            f"{base} does not answer: waiting up to {seconds_to_wait():,.0f} s ({_SECONDS} "
            "sets another time)"
        )
    try:
        return answer.result()
    finally:
        # else its error, which has this frame, would keep what its callers hold: locks
        del answer


def _ask(request: Callable[[], _T], answer: Future[_T]) -> None:
    try:
        answer.set_result(request())
    except BaseException as error:  # noqa: BLE001 (it is raised in the main thread)
        answer.set_exception(error)
    finally:
        del answer  # as above


def library() -> Any:
    """Import obstore as this process may use it. Raises MissingDependencyError if it is
    not installed; StoreError if a forked process cannot copy it."""
    global _used_by_parent
    with _lock:
        if _used_by_parent:
            try:
                _load_copy()
            except OSError as error:  # never that an object is gone
                what = f"obstore cannot be copied for a forked process: {error.strerror or error}"
                raise StoreError(f"{what}: set TMPDIR to another folder") from error
            _used_by_parent = False
        try:
            return _imported()
        except ImportError as error:
            raise MissingDependencyError("obstore", "what is at a URL", "cloud") from error


def _imported() -> Any:
    package, *_ = (
        importlib.import_module(name) for name in ("obstore", "obstore.store", "obstore.exceptions")
    )
    return package


def _load_copy() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        _of_parent.append(sys.modules.pop(name))
    installed: Any = importlib.util.find_spec("obstore")
    with tempfile.TemporaryDirectory(prefix="featcache-") as folder:
        shutil.copytree(Path(installed.origin).parent, Path(folder, "obstore"))
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            _imported()
        finally:
            sys.path.remove(folder)


def _in_child() -> None:
    global _used_by_parent, _connected
    # a copy that failed is not in `sys.modules`
    _used_by_parent = _used_by_parent or "obstore" in sys.modules
    _of_parent.append(_connected)
    _connected = lru_cache(_MOST_CLIENTS)(_connect)
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)


def asked(
    place: ObjectPath,
    request: Callable[[Any, str], _T],
    *,
    is_long: bool = False,
    writes: bool = False,
) -> _T:
    """Make a request about a file, with the connection and the file's key, and return its
    result. A request that `is_long` sends or fetches much; one that `writes` changes what
    is stored. Raises what `Store` does."""
    given_up_at = time.monotonic() + seconds_to_wait()
    pauses = iter(_PAUSES)
    while True:
        try:
            connection = client(place.root, writes=writes)
            ask = partial(panics_raised, request, connection, place.key)
            return ask() if is_long else awaited(place.root, ask)
        except FeatcacheError:
            raise
        except Exception as error:
            fault, may_pass = _fault(place, error)
            pause = next(pauses, None)
            if pause is None or not may_pass or time.monotonic() > given_up_at:
                raise fault from error
        time.sleep(pause)


# Errors of obstore in plain words. It quotes addresses, to which a server may have
# redirected the request with signatures in them, and whole documents of XML. In a forked
# process its errors are other classes: so only their names are compared.


def _fault(place: ObjectPath, error: Exception) -> tuple[Exception, bool]:
    """Return the error to raise for one of obstore's, and whether it may pass."""
    kind, text = type(error).__name__, str(error)
    has_bucket = "NoSuchBucket" not in text
    if has_bucket and (isinstance(error, FileNotFoundError) or kind == "NotFoundError"):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place)), False
    if status_of(error) == 416 or "Invalid range" in text:
        return DamagedError(f"{place}: damaged: it ends before what is to be read"), False
    what = f"{place}: cannot be read or written: {in_words(place.root, error)} ({kind})"
    if place.root.startswith("s3:") and status_of(error) == 400:  # a HEAD gets no more than that
        what += ": if the credentials have expired, set new ones, and start the program again"
    fault = StoreError(what)
    return fault, kind == "GenericError" and has_bucket and not has_no_credentials(error)


def has_no_credentials(error: BaseException | None) -> bool:
    """Tell whether the environment has no credentials for the store."""
    return _NO_CREDENTIALS.search(str(error)) is not None


def status_of(error: BaseException) -> int:
    """Return the HTTP status that the server answered, or 0."""
    status = _STATUS.search(str(error))
    return int(status[1]) if status else 0


def in_words(url: str, error: BaseException) -> str:
    """Describe an error of the store or server of a URL, without what the error quotes."""
    scheme = url.partition("://")[0].lower()
    if has_no_credentials(error):
        hint = f": {_CREDENTIALS[scheme]}" if scheme in _CREDENTIALS else ""
        return f"there are no credentials{hint}"
    kind, text = type(error).__name__, str(error)
    refused = {"PermissionDeniedError": 403, "UnauthenticatedError": 401}
    if kind in refused:
        return f"the server forbids it ({refused[kind]})"
    if isinstance(error, PanickedError):
        return "obstore panics: is a value of the environment malformed?"
    if kind == "InvalidPathError" and (key := _KEY.search(text)) is not None:
        return f"the bucket holds {key[1]}, which is no path: remove that object, or rename it"
    if "NoSuchBucket" not in text and (status := _STATUS.search(text)) is not None:
        return f"the server answers {status[1]}{status[2] or ''}"
    return next((words for signs, words in _WORDS if re.search(signs, text)), "the request fails")
