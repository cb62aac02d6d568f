"""The memory of batches: buffers that are used again, and tensors in them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ArgumentError, MissingDependencyError

if TYPE_CHECKING:
    import torch

_LARGEST_KEPT = 256 << 20
"""The most bytes of a batch whose memory is kept."""

_SLACK = 1.25
"""The memory taken for a batch, relative to its size: later batches may be longer."""

Memory: TypeAlias = "Callable[[int], memoryview | torch.Tensor]"
"""A function that returns a number of bytes in CPU memory, of any content, uint8."""


class Buffers:
    """Memory for batches, used again once they are gone, up to `kept` at a time. Safe to use
    from several threads.

    The kernel clears every page of new memory, which costs more than copying a batch into
    it, and `malloc` does not keep blocks as large as a batch."""

    def __init__(self, kept: int = 2) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=kept)

    def take(self, num_bytes: int) -> memoryview:
        """Return bytes of any content. They are free again once no array refers to them."""
        if num_bytes > _LARGEST_KEPT:
            return np.empty(num_bytes, np.uint8).data
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if len(memory) < num_bytes:
            # Unlike torch's, numpy's memory is in huge pages.
            memory = np.empty(int(num_bytes * _SLACK), np.uint8)
        held = memory[:num_bytes]
        weakref.finalize(held, self._free.append, memory).atexit = False
        # An array of a memoryview refers to it; one of an array would refer to `memory`.
        return held.data


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor in an array's memory. Raises MissingDependencyError without torch."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "a batch of tensors", "torch") from error
    return torch.from_numpy(array)


def as_bfloat16(bits: torch.Tensor) -> torch.Tensor:
    """View bits, uint16, as bfloat16."""
    from torch import bfloat16

    return bits.view(bfloat16)


def bits_of(out: torch.Tensor | Memory | None) -> Any:
    """View a tensor of bfloat16 as its bits. Raises ArgumentError if it has another dtype."""
    if out is None or callable(out):
        return out
    from torch import bfloat16, uint16

    if getattr(out, "dtype", bfloat16) != bfloat16:
        raise ArgumentError(f"out is {out.dtype}: it must be {bfloat16}")
    return out.view(uint16)


def tensor_in(
    out: torch.Tensor | Memory, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> torch.Tensor:
    """Return a tensor of any content: the beginning of `out`, or in memory that it gives.
    Raises ArgumentError if `out` is another kind of tensor, or too small."""
    needed = math.prod(shape)
    memory = out(needed * dtype.itemsize) if callable(out) else None
    # numpy keeps the interpreter's lock, which each operation of torch gives away.
    if isinstance(memory, memoryview):
        return tensor_of(np.frombuffer(memory, dtype).reshape(shape))
    wanted = tensor_of(np.empty(0, dtype))
    if memory is not None:
        return memory.view(wanted.dtype).view(shape)
    if not isinstance(out, type(wanted)):
        raise ArgumentError(f"out is a {type(out).__name__}: give a tensor")
    if (out.dtype, out.device.type, out.is_contiguous()) != (wanted.dtype, "cpu", True):
        raise ArgumentError(
            f"out is {out.dtype} on {out.device}: it must be {wanted.dtype}, contiguous, in "
            "CPU memory"
        )
    if out.numel() < needed:
        raise ArgumentError(
            f"out has room for {out.numel():,} values: this batch has {needed:,}, {list(shape)}"
        )
    return out.view(-1)[:needed].view(shape)


def pad_into(out: NDArray[Any], arrays: list[NDArray[Any]], value: ArrayLike) -> None:
    """Copy arrays `[frames, *item_shape]` into `out` `[batch, frames, *item_shape]`."""
    if not arrays:
        return
    padding = np.broadcast_to(np.array(value, out.dtype), out.shape[1:])
    pieces = []
    for array in arrays:
        pieces.append(array)
        if len(array) < len(padding):  # an empty piece would take time
            pieces.append(padding[len(array) :])
    # One call is faster than a loop over rows.
    np.concatenate(pieces, out=out.reshape(-1, *out.shape[2:]))
