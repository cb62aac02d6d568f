"""Brings batches to a device: to CPU memory, or to a GPU from page-locked memory, on a stream of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from featcache.device import PinnedMemory, on_this_device
from featcache.loader.buffers import Buffers
from featcache.loader.dataset import FrameRanges
from featcache.quantize import dequantize


def transfer_to(device: torch.device, num_batches: int) -> Transfer:
    """What brings batches to a device, of which there are so many at a time."""
    return (_CudaTransfer if device.type == "cuda" else Transfer)(device, num_batches)


class Transfer:
    """Brings batches to CPU memory; to a device that is not CUDA, torch copies them, and waits. That to a GPU returns
    tensors that may still be on their way. Safe to use from several threads.
    """

    def __init__(self, device: torch.device, num_batches: int) -> None:
        self._device = device
        self._gathered = Buffers(kept=num_batches)
        self._converted = Buffers(kept=num_batches)

    def gather(self, ranges: FrameRanges, dtype: torch.dtype | None) -> torch.Tensor:
        """Gather the padded frames of a batch, and have them copied to the device and converted there."""
        gathered = ranges.gather(self._gathered)
        if self._device.type != "cpu":
            return gathered.to(self._device, dtype)
        if dtype is None or dtype == gathered.dtype:
            return gathered
        count = gathered.numel()
        room = self._converted.take((max(1, count) * dtype.itemsize,), np.dtype(np.uint8))
        return torch.from_numpy(room).view(dtype)[:count].view(gathered.shape).copy_(gathered)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a small tensor copied to the device."""
        return tensor.to(self._device)

    def begin(self) -> None:
        """Have the work on batches wait for what the caller's stream has been given before."""

    def working(self) -> AbstractContextManager[Any]:
        """The context to work on batches in, before the mark."""
        return nullcontext()

    def mark(self) -> Any:
        """A mark after everything that this thread has sent on its way."""

    def make_ready(self, mark: Any, batch: Any) -> None:
        """Have the caller's stream wait for a mark before it uses the tensors of a batch."""


class _CudaTransfer(Transfer):
    """Batches on a GPU, copied from page-locked memory on a stream of their own.

    The allocator must not give a batch's memory to others while the training's stream still works on it, although it
    was taken on the copies' stream: hence `record_stream`.
    """

    def __init__(self, device: torch.device, num_batches: int) -> None:
        self._device = on_this_device(device)
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._free: SimpleQueue[PinnedMemory] = SimpleQueue()
        for _ in range(num_batches):
            self._free.put(PinnedMemory())

    def gather(self, ranges: FrameRanges, dtype: torch.dtype | None) -> torch.Tensor:
        version, counts = ranges.version, ranges.counts
        cache = version.cache
        raw = cache.spec.is_quantized  # a quarter of the bytes are copied, and become values on the GPU
        item_shape = cache.spec.item_shape if version.codebooks is None else (version.codebooks,)
        num_values = len(counts) * int(counts.max(initial=0)) * math.prod(item_shape)
        pinned = self._free.get()
        try:
            stored_dtype = torch.from_numpy(np.empty(0, cache.version.dtype if raw else cache.spec.dtype)).dtype
            memory = pinned.take(num_values * stored_dtype.itemsize).view(stored_dtype)
            stored = ranges.gather(memory, raw)
            with self.working():
                features = stored.to(self._device, non_blocking=True)
                pinned.copied.record(self._stream)
                if not raw:
                    return features if dtype is None else features.to(dtype)
                return dequantized(features, ranges, dtype, self.move)
        finally:
            self._free.put(pinned)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.working():
            # From memory that is not page-locked, the copy would first wait for all others on the stream.
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
                tensor.record_stream(stream)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, also in dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each)


def dequantized(
    levels: torch.Tensor,
    ranges: FrameRanges,
    dtype: torch.dtype | None,
    move: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The values of levels, uint8 `[batch, frames, *item_shape]`, on their device; `move` copies to that."""
    quantization = move(ranges.version.cache.quantization(ranges.positions))
    lengths = move(torch.from_numpy(ranges.counts))
    values_dtype = torch.float32 if dtype is None else dtype
    return dequantize(levels, quantization, values_dtype, lengths=lengths, padding_value=ranges.version.padding_value)
