"""What data may make this process do: run Python code that it brings or names, and download weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_remote_code_is_allowed = False
_downloads_are_allowed: ContextVar[bool] = ContextVar("_downloads_are_allowed", default=True)


def allow_remote_code() -> None:
    """Let models run Python code that they bring, and caches name extractors that are not registered.

    This holds for the rest of the process. On the command line, `--trust-remote-code` says it.
    """
    global _remote_code_is_allowed
    _remote_code_is_allowed = True


def remote_code_is_allowed() -> bool:
    """Whether `allow_remote_code` was called."""
    return _remote_code_is_allowed


@contextmanager
def without_downloads() -> Iterator[None]:
    """Within the block, look for weights on this machine only. Weights that only a cache names are loaded like this."""
    before = _downloads_are_allowed.set(False)
    try:
        yield
    finally:
        _downloads_are_allowed.reset(before)


def downloads_are_allowed() -> bool:
    """Whether weights that are not on this machine may be downloaded."""
    return _downloads_are_allowed.get()
