"""Memory for batches, which is reused when nothing refers to its content any more.

New memory costs more than copying a batch into it: the kernel clears every page that is touched for the first
time, and a batch of speech is larger than what `malloc` keeps. Training drops each batch for the next one, so two
buffers are enough, and they need not be returned explicitly.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGEST = 256 << 20  # bytes; beyond that it is not training, and memory had better be given back
_SLACK = 1.25  # batches differ in length


class Buffers:
    """Hands out arrays, and takes their memory back when they are gone. For any thread.

    Args:
        kept: arrays' memory to keep while nobody has it.
    """

    def __init__(self, kept: int = 2) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=kept)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of any content.

        Its memory is free again when this very object is gone: what is to outlive it must hold it, as a tensor
        from `torch.from_numpy` does, and every view of that tensor; numpy's own views of it do not.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > _LARGEST:
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
