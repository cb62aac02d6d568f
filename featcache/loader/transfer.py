"""The way of batches from mapped files to the device that training runs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from featcache.device import PinnedMemory, on_this_device
from featcache.loader.buffers import Buffers, Memory
from featcache.loader.dataset import FrameRanges, Move
from featcache.loader.utterances import DatasetVersion
from featcache.spec.quantize import dequantize


class Gathered(Protocol):
    """Frames of a version that become one tensor, see `FrameRanges`."""

    @property
    def version(self) -> DatasetVersion:
        """The version."""

    @property
    def levels(self) -> FrameRanges | None:
        """The ranges, if `gather` can return levels."""

    def gather(self, out: Memory | None = None, raw: bool = False) -> torch.Tensor:
        """Return the tensor."""


class Transfer:
    """The way of batches to CPU memory, or to a device other than CUDA, where torch copies
    them and waits. Safe to use from several threads."""

    def __init__(self, device: torch.device, num_batches: int) -> None:
        self._device = device
        self._gathered = Buffers(kept=num_batches)
        self._converted = Buffers(kept=num_batches)

    def gather(self, ranges: Gathered, dtype: torch.dtype | None) -> torch.Tensor:
        """Gather padded frames; copy them to the device and convert them."""
        gathered = ranges.gather(self._gathered.take)
        if self._device.type != "cpu":
            return gathered.to(self._device, dtype)
        if dtype is None or dtype == gathered.dtype:
            return gathered
        memory = self._converted.take(gathered.numel() * dtype.itemsize)
        converted = torch.from_numpy(np.asarray(memory))
        return converted.view(dtype).view(gathered.shape).copy_(gathered)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a small tensor to the device."""
        return tensor.to(self._device)

    def begin(self) -> None:
        """Let work on batches wait for earlier work on the caller's stream."""

    def working(self) -> AbstractContextManager[Any]:
        """Return the context for changes of batches."""
        return nullcontext()

    def mark(self) -> Any:
        """Return a mark after the work that this thread has begun."""

    def make_ready(self, mark: Any, batch: Any) -> None:
        """Let the caller's stream wait for a mark before it uses a batch."""


class _CudaTransfer(Transfer):
    """The way of batches to a GPU, from page-locked memory on a stream of its own. Tensors
    may still be on their way until `make_ready`."""

    def __init__(self, device: torch.device, num_batches: int) -> None:
        self._device = on_this_device(device)
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._free: SimpleQueue[PinnedMemory] = SimpleQueue()
        for _ in range(num_batches):
            self._free.put(PinnedMemory())

    def gather(self, ranges: Gathered, dtype: torch.dtype | None) -> torch.Tensor:
        # Levels have a quarter of the bytes, and become values on the GPU.
        levels = ranges.levels
        pinned = self._free.get()
        try:
            stored = ranges.gather(pinned.take, levels is not None)
            with self.working():
                features = stored.to(self._device, non_blocking=True)
                pinned.copied.record(self._stream)
                if levels is None:
                    return features if dtype is None else features.to(dtype)
                return dequantized(features, levels, dtype, self.move)
        finally:
            self._free.put(pinned)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.working():
            # A copy from other memory would wait for all others on the stream.
            return tensor.pin_memory().to(self._device, non_blocking=True)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def working(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        return self._stream.record_event()

    def make_ready(self, mark: Any, batch: Any) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark)
        for tensor in _tensors_in(batch):
            if tensor.is_cuda:
                # Its memory must not be used again while training's stream works on it.
                tensor.record_stream(stream)


def transfer_to(device: torch.device, num_batches: int) -> Transfer:
    """Return the way of batches to a device, in memory for so many."""
    transfer = _CudaTransfer if device.type == "cuda" else Transfer
    return transfer(device, num_batches)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, also in dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in([*value.values()])
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors_in(element)


def dequantized(
    levels: torch.Tensor, ranges: FrameRanges, dtype: torch.dtype | None, move: Move
) -> torch.Tensor:
    """Return the values of levels `[batch, frames, *item_shape]` on their device, to which
    `move` copies."""
    quantization = move(ranges.version.cache.quantization(ranges.positions))
    lengths = move(torch.from_numpy(ranges.counts))
    return dequantize(
        levels,
        quantization,
        torch.float32 if dtype is None else dtype,
        lengths=lengths,
        padding_value=ranges.version.padding_value,
    )
