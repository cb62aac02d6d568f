"""Connections to object stores and web servers: one for each bucket or host, and process.

obstore, the library, runs its requests in threads of its own, which a forked process does not have, and it cannot be
told to start others: in a child, its calls wait for ever. torch's DataLoader forks. So a child whose parent has used
obstore loads a second copy of it, from a copy of its files: a library of another file begins anew. (20 ms, 15 MB.)
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

from featcache.errors import MissingDependencyError, StoreError

__all__ = ["client", "library"]

_TIMEOUTS = {  # by whether obstore repeats requests; `timeout` is for the whole of a file, and 30 s by default
    True: {"connect_timeout": "10s", "timeout": "10m"},  # a `read_timeout` would end what is sent for longer
    False: {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "1d"},
}
_ENDPOINTS = ("AWS_ENDPOINT", "AZURE_", "GOOGLE_")
_MOST_CLIENTS = 64
_RETRIES: Any = {
    "max_retries": 12,
    # Each pause is drawn between the first and so many times the last one: a minute, all in all.
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=15), "base": 4},
    "retry_timeout": timedelta(seconds=120),
}

_lock = threading.RLock()  # held for a moment, and while the process forks
_clients: OrderedDict[tuple[str, bool], Any] = OrderedDict()  # those used last are at the end
_of_parent: list[Any] = []
"""What a forked process has of its parent's library. It is kept: to close a connection here would break it there."""

_used_by_parent = False
_package: Path | None = None
"""Where obstore is installed, once it has been loaded."""


def client(base: str, *, retries: bool = True) -> Any:
    """The connection to a bucket or a web server, by the beginning of its URLs.

    Credentials, region and endpoint are those of the environment; an endpoint without TLS is used if it is written so.

    Args:
        base: `s3://bucket`, `https://host`.
        retries: Whether obstore is to repeat requests that fail.

    Raises:
        StoreError: The URL, or what the environment says of it, makes no sense; obstore's error is its cause.
        MissingDependencyError: obstore is not installed.
    """
    with _lock:
        if (base, retries) not in _clients:
            _clients[base, retries] = _connect(base, retries)
            if len(_clients) > _MOST_CLIENTS:
                _clients.popitem(last=False)
        _clients.move_to_end((base, retries))
        return _clients[base, retries]


def _connect(base: str, retries: bool) -> Any:
    stores = library().store
    if base.startswith("memory://"):
        return stores.MemoryStore()
    has_plain_endpoint = any(
        value.startswith("http://") for name, value in os.environ.items() if name.startswith(_ENDPOINTS)
    )
    options: Any = dict(_TIMEOUTS[retries])
    if base.startswith("http://") or (has_plain_endpoint and not base.startswith("https://")):
        options["allow_http"] = True
    open_store = stores.HTTPStore.from_url if base.startswith("http") else stores.from_url
    try:
        return open_store(base, client_options=options, retry_config=_RETRIES if retries else {"max_retries": 0})
    except Exception as error:  # each of obstore's errors is a class of its own
        raise StoreError(f"{base}: cannot be opened: {error}") from error


def library() -> Any:
    """The package obstore, as this process may use it.

    Raises:
        MissingDependencyError: It is not installed.
    """
    global _package, _used_by_parent
    with _lock:
        if _package is not None and not _used_by_parent:
            return sys.modules["obstore"]
        if _package is not None:
            _load_copy(_package)
            _used_by_parent = False
            return sys.modules["obstore"]
        try:
            obstore = importlib.import_module("obstore")
            importlib.import_module("obstore.store")
            importlib.import_module("obstore.exceptions")
        except ImportError as error:
            raise MissingDependencyError("obstore", "what is at a URL", "cloud") from error
        _package = Path(str(obstore.__file__)).parent
        return obstore


def _load_copy(package: Path) -> None:
    """Load a second copy of obstore, and let it take the first one's location."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        _of_parent.append(sys.modules.pop(name))
    with tempfile.TemporaryDirectory(prefix="featcache-") as folder:
        shutil.copytree(package, Path(folder, "obstore"))
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            importlib.import_module("obstore")
            importlib.import_module("obstore.store")
            importlib.import_module("obstore.exceptions")
        finally:
            sys.path.remove(folder)


def _in_child() -> None:
    global _used_by_parent
    _used_by_parent = _package is not None
    _of_parent.append(_clients.copy())
    _clients.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
