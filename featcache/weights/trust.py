"""Whether Python code that data names may run: the word of `--trust-remote-code`."""

from __future__ import annotations

_allowed = False


def allow_remote_code() -> None:
    """Let models bring their own Python code, and caches name extractors that are not registered, for the rest of the
    process.
    """
    global _allowed
    _allowed = True


def remote_code_is_allowed() -> bool:
    """Whether `allow_remote_code` was called."""
    return _allowed
