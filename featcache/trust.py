"""The permissions that data from elsewhere needs: to run code that it names, and to download
weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_remote_code_is_allowed = False
_may_download: ContextVar[bool] = ContextVar("_may_download", default=True)


def allow_remote_code() -> None:
    """Let models run Python code that they bring, and caches name any extractor, for the
    rest of the process, as `--trust-remote-code` does."""
    global _remote_code_is_allowed
    _remote_code_is_allowed = True


def remote_code_is_allowed() -> bool:
    """Tell whether `allow_remote_code` was called."""
    return _remote_code_is_allowed


@contextmanager
def without_downloads(is_recorded: bool = True) -> Iterator[None]:
    """Within the block, look for weights on this machine only, if the config `is_recorded`
    in a cache."""
    before = _may_download.set(may_download() and not is_recorded)
    try:
        yield
    finally:
        _may_download.reset(before)


def may_download() -> bool:
    """Tell whether weights that are not on this machine may be downloaded."""
    return _may_download.get()
