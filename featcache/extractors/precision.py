"""The precision of a model: plain float32, TF32, or torch's autocast."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

_switching = threading.RLock()


@contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute what is inside at a precision; inside another one's, instead of at that."""
    with torch.autocast(device.type, _AUTOCAST.get(precision), enabled=precision in _AUTOCAST):
        if device.type == "cuda" and (precision == "tf32" or _allowed() != (False, False)):
            with _tf32(precision == "tf32"):
                yield
        else:
            yield


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Let a GPU round to ten bits what is multiplied inside, or not.

    The switches are the process's: they are looked at when a kernel is launched, so one thread at a time launches.
    An extractor that never rounds does not wait for them, and is not run beside one that does.
    """
    with _switching:
        before = _allowed()
        _allow(allowed, allowed)
        try:
            yield
        finally:
            _allow(*before)


def _allowed() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _allow(products: bool, convolutions: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = products
    torch.backends.cudnn.allow_tf32 = convolutions
