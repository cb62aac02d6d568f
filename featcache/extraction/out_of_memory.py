"""What happens if memory runs out: padded rows are computed in smaller batches, and then alone on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from featcache.device import Device
from featcache.errors import AudioError, Reason
from featcache.extractors import Extractor, Params

T = TypeVar("T")


_OUT_OF_MEMORY = (
    "ALLOC_FAILED",  # cuBLAS, cuFFT, and cuDNN before version 9
    "ALLOCATION_FAILED",  # cuDNN
    "error: out of memory",  # CUDA itself, as it makes a stream, loads a kernel or locks pages
    "DefaultCPUAllocator",
)
"""Parts of the messages when memory runs out; what torch says of its own memory on a GPU has a class."""

_PERHAPS_OUT_OF_MEMORY = (
    "unable to find an engine",  # cuDNN: nothing that fits can compute a convolution
    "STATUS_NOT_INITIALIZED",  # cuBLAS and cuDNN have no room for a thread's handle
)
"""Parts of messages that may have other causes: with nothing else on the device, memory is not the cause."""


class DoesNotFitError(AudioError):
    """A clip, or a chunk of a clip, does not fit into the device's memory even with nothing beside it."""

    def __init__(self, seconds: float, device: Device) -> None:
        super().__init__(
            Reason.TOO_LONG,
            f"{seconds:.0f} s do not fit on {device.label} at once: params.chunk of the config would cut them",
        )


class OutOfMemoryRetry:
    """Computes batches again that did not fit into memory: in smaller batches, and at last with nothing beside them.

    Args:
        extractor: The extractor. If a batch of rows does not fit, its batches are smaller from then on, in all threads.
            An extractor that takes no rows gets one clip at a time.
        lengths: The numbers of samples of the rows, with their padding. Batches of the shortest rows have the most:
            once these have one row, no other batch has more.
        device: The device that computes.
    """

    def __init__(self, extractor: Extractor[Params], lengths: Collection[int], device: Device) -> None:
        self._row_extractor = extractor.as_row_extractor()
        self._sample_rate = extractor.spec.sample_rate
        self._lengths = lengths
        self._device = device
        self._alone = False

    def run(self, compute: Callable[[int, bool], T]) -> T:
        """Call `compute` until it fits into memory, and return its result.

        Args:
            compute: Gets the number of rows of a batch of the shortest, and whether to have the device for itself. It
                may be called several times.

        Raises:
            DoesNotFitError: A single row does not fit.
        """
        rows, device, shortest = self._row_extractor, self._device.torch_device, min(self._lengths)
        while True:
            count = 1 if rows is None else rows.rows(shortest, device)
            try:
                return compute(count, self._alone)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error, self._alone):
                    raise
            # The exception is gone by now, and with it what the batch held.
            torch.cuda.empty_cache()
            if rows is not None and rows.shrink(count, shortest, device):
                continue
            if self._alone:
                raise DoesNotFitError(max(self._lengths) / self._sample_rate, self._device)
            self._alone = True


def is_out_of_memory(error: BaseException, alone: bool = True) -> bool:
    """Whether the memory of the device or of the machine has run out; torch's libraries say so in different words.

    `alone` if nothing else was on the device: then what may have other causes has one of them."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    all_words = _OUT_OF_MEMORY if alone else (*_OUT_OF_MEMORY, *_PERHAPS_OUT_OF_MEMORY)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in all_words)
