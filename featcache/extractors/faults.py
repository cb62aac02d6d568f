"""Errors about mistakes in the code of an extractor: they name its class and file."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from featcache.errors import ExtractorError, FeatcacheError, listing

_BELOW_EXTRACTORS = ("featcache", "torch", "contextlib", "enum", "importlib")


def fault(extractor: object, what: str) -> ExtractorError:
    """Make the error about an extractor, or its class."""
    kind = extractor if isinstance(extractor, type) else type(extractor)
    file = getattr(sys.modules.get(kind.__module__), "__file__", kind.__module__)
    return ExtractorError(f"{kind.__name__} ({file}): {what}")


def lacking(extractor: object, names: Sequence[str]) -> ExtractorError:
    """Make the error about missing attributes."""
    return fault(extractor, f"lacks {listing(names)}: see docs/extractors.md, Your own")


def require_tensor(extractor: Any, method: str, returned: object, shape: Sequence[int]) -> None:
    """Raise ExtractorError unless a method has returned a tensor of that shape."""
    import torch

    what = type(returned).__name__
    if isinstance(returned, torch.Tensor):
        if returned.shape == tuple(shape):
            return
        what = f"a tensor {[*returned.shape]}"
    expected = f"its num_frames and spec say a tensor {[*shape]}"
    raise fault(extractor, f"{method} returned {what}; {expected}")


def text_of(error: BaseException) -> str:
    """Return an exception's text; its class may fail to give one."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (it is somebody's code)
        return "it has no text"


def describe_raised(error: BaseException) -> str:
    """Describe an exception in one line, with the extractor's line that raised it."""
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _BELOW_EXTRACTORS:
            code = frame.f_code
            file = "/".join(Path(code.co_filename).parts[-2:])
            where = f" ({file}:{frame.f_lineno}, in {code.co_name})"
    message = " ".join(text_of(error).split())
    if message:
        message = f": {message}"
    return f"{type(error).__name__}{message}{where}"


@contextmanager
def keeping_folder() -> Iterator[None]:
    """Restore the current folder, which somebody's code may change."""
    folder = os.open(".", os.O_PATH)
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)


@contextmanager
def blamed_on(kind: type) -> Iterator[None]:
    """Turn what somebody's class raises into an ExtractorError, except errors of
    featcache, of parameters and of memory."""
    try:
        yield
    except (FeatcacheError, ValidationError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise fault(kind, describe_raised(error)) from error
