"""Memory for batches.

New memory costs more than copying a batch into it: the kernel clears every page that is touched for the first time, and
a batch of speech is larger than what `malloc` keeps. So batches take turns in the same memory.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, MissingDependencyError

if TYPE_CHECKING:
    import torch

_LARGEST_KEPT = 256 << 20
"""Bytes of a batch beyond which its memory is given back: such batches are not those of training."""

_SLACK = 1.25
"""How much more memory is taken than a batch needs, since batches differ in length."""


class Buffers:
    """Hands out arrays, and takes their memory back when they are gone. Safe to use from several threads.

    Training drops each batch for the next one, so it is enough to keep the memory of two arrays that nobody has any
    more (`kept`), and they need not be returned explicitly."""

    def __init__(self, kept: int = 2) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=kept)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of any content.

        Its memory is free again when this very object is gone: what is to outlive it must hold it, as a tensor
        from `torch.from_numpy` does, and every view of that tensor; numpy's own views of it do not."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > _LARGEST_KEPT:
            return np.empty(shape, dtype)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if len(memory) < num_bytes:
            memory = np.empty(int(num_bytes * _SLACK), np.uint8)  # numpy's memory is in huge pages, torch's is not
        array: NDArray[Any] = np.ndarray(shape, dtype, memory)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """A tensor in the memory of an array, which it holds; MissingDependencyError without torch."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "a batch of tensors", "torch") from error
    return torch.from_numpy(array)


def tensor_in(out: torch.Tensor | Buffers, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
    """A tensor of any content: the beginning of `out`, or one in its memory.

    Raises:
        ArgumentError: `out` is not a contiguous tensor in CPU memory, of this dtype and large enough.
    """
    if isinstance(out, Buffers):
        return tensor_of(out.take(shape, dtype))
    wanted = tensor_of(np.empty(0, dtype))
    if not isinstance(out, type(wanted)):
        raise ArgumentError(f"out is a {type(out).__name__}: give a tensor")
    if (out.dtype, out.device.type, out.is_contiguous()) != (wanted.dtype, "cpu", True):
        raise ArgumentError(f"out is {out.dtype} on {out.device}: it must be {wanted.dtype}, contiguous, in CPU memory")
    needed = math.prod(shape)
    if out.numel() < needed:
        raise ArgumentError(f"out has room for {out.numel():,} values: this batch has {needed:,}, {list(shape)}")
    return out.view(-1)[:needed].view(shape)


def pad_into(out: NDArray[Any], arrays: list[NDArray[Any]], value: float) -> None:
    """Copy arrays `[frames, *item_shape]` into `out` `[batch, frames, *item_shape]`, with a value beyond their ends."""
    padding = np.broadcast_to(np.array(value, out.dtype), out.shape[1:])
    pieces = []
    for array in arrays:
        pieces.append(array)
        if len(array) < len(padding):
            pieces.append(padding[len(array) :])
    np.concatenate(pieces, out=out.reshape(-1, *out.shape[2:]))  # one call: a loop over rows takes longer
