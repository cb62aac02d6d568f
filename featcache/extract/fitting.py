"""Work that does not fit into a device's memory: in smaller batches, and then alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from featcache.device import Device
from featcache.errors import AudioError, Reason
from featcache.extractors import Extractor, Params
from featcache.extractors.rows import RowExtractor

T = TypeVar("T")

_OUT_OF_MEMORY = ("_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
"""What messages of cuBLAS and cuDNN, and of torch on the CPU, hold then."""


class DoesNotFitError(AudioError):
    """A clip, or a chunk of one, that a device's memory does not hold though nothing is beside it."""

    def __init__(self, seconds: float, device: Device) -> None:
        super().__init__(
            Reason.TOO_LONG,
            f"{seconds:.0f} s do not fit on {device.label} at once: params.chunk of the config would cut them",
        )


class Fitting:
    """Computes batches of rows of one length, as many rows at once as fit on the device.

    Args:
        extractor: whose batches become smaller, from now on and for every thread, where one does not fit. One that
            takes no rows is given one clip at a time.
        num_samples: of a row, with its padding.
        device: where they are computed.
    """

    def __init__(self, extractor: Extractor[Params], num_samples: int, device: Device) -> None:
        self._extractor = extractor
        self._num_samples = num_samples
        self._device = device
        self._alone = False

    def run(self, compute: Callable[[int, bool], T]) -> T:
        """Call `compute` until what it does fits, and return what it returns.

        Args:
            compute: is given the number of rows of a batch, and whether to have the device for itself; it may be
                called several times.

        Raises:
            DoesNotFitError: a single row does not.
        """
        while True:
            rows = self._rows()
            try:
                return compute(rows, self._alone)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # What the batch held is free by now, as the exception is.
            torch.cuda.empty_cache()
            if self._shrink(rows):
                continue
            if self._alone:
                raise DoesNotFitError(self._num_samples / self._extractor.spec.sample_rate, self._device)
            self._alone = True

    def _rows(self) -> int:
        if not isinstance(self._extractor, RowExtractor):
            return 1
        return self._extractor.rows(self._num_samples, self._device.torch_device)

    def _shrink(self, rows: int) -> bool:
        if not isinstance(self._extractor, RowExtractor):
            return False
        return self._extractor.shrink(rows, self._num_samples, self._device.torch_device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out, of the device or of the machine: torch's libraries say so in words of their own."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
