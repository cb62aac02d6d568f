"""Moves a batch to the device: any thread gathers it into reused memory, from which it is copied."""

from __future__ import annotations

import math
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from featcache.loader.buffers import Buffers
from featcache.loader.view import Part

__all__ = ["Transfer", "transfer_to"]

_SLACK = 1.25  # batches differ in length


class Transfer(Protocol):
    """Brings parts of versions to a device."""

    def bring(self, part: Part, dtype: torch.dtype | None) -> torch.Tensor:
        """Gather a part, and have it copied to the device, and converted there. For any thread.

        What comes back may still be on its way: `ready`, after the batch's last part, makes it usable.
        """

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a small tensor copied likewise."""

    def fence(self) -> Any:
        """A mark behind everything that this thread has sent on its way."""

    def ready(self, fence: Any, tensors: list[torch.Tensor]) -> None:
        """Have the caller's stream wait for a mark before it uses these tensors."""


def transfer_to(device: torch.device, batches: int) -> Transfer:
    """What brings batches to a device, of which so many are held at once, the training loop's among them."""
    return _ToCuda(device, batches) if device.type == "cuda" else _InMemory(device, batches)


class _InMemory:
    """Batches in CPU memory; to a device that is not CUDA, torch copies them, and waits."""

    def __init__(self, device: torch.device, batches: int) -> None:
        self._device = device
        self._gathered = Buffers(kept=batches)
        self._converted = Buffers(kept=batches)

    def bring(self, part: Part, dtype: torch.dtype | None) -> torch.Tensor:
        gathered = part.gather(self._gathered)
        if self._device.type != "cpu":
            return gathered.to(self._device, dtype)
        if dtype is None or dtype == gathered.dtype:
            return gathered
        count = gathered.numel()
        room = self._converted.take((max(1, count) * dtype.itemsize,), np.dtype(np.uint8))
        return torch.from_numpy(room).view(dtype)[:count].view(gathered.shape).copy_(gathered)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def fence(self) -> None:
        return None

    def ready(self, fence: None, tensors: list[torch.Tensor]) -> None:
        return None


class _Pinned:
    """Page-locked memory, and the mark behind the last copy from it."""

    def __init__(self) -> None:
        self.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits does not spin
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def room(self, num_bytes: int) -> torch.Tensor:
        """So many bytes, uint8, that nothing is being copied from any more."""
        self.copied.synchronize()
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(int(num_bytes * _SLACK), dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._memory[:num_bytes]


class _ToCuda:
    """Batches on a GPU, copied from page-locked memory on a stream of their own.

    The allocator must not give a batch's memory to others while the training's stream still works on it, although it
    was taken on the copies' stream: hence `record_stream`.
    """

    def __init__(self, device: torch.device, batches: int) -> None:
        # "cuda" is the current device, but of this thread: another one's would be the first.
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._free: SimpleQueue[_Pinned] = SimpleQueue()
        for _ in range(batches):
            self._free.put(_Pinned())

    def bring(self, part: Part, dtype: torch.dtype | None) -> torch.Tensor:
        pinned = self._free.get()
        raw = part.is_quantized  # a quarter of the bytes make the way, and become values there
        try:
            stored_dtype = torch.from_numpy(np.empty(0, part.dtype(raw))).dtype
            room = pinned.room(math.prod(part.shape) * stored_dtype.itemsize).view(stored_dtype)
            stored = part.gather(room, raw)
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                features = stored.to(self._device, non_blocking=True)
                pinned.copied.record(self._stream)
                if raw:
                    counts = torch.from_numpy(part.counts)
                    return part.dequantize(features, self.move(part.parameters()), self.move(counts), dtype)
                return features if dtype is None else features.to(dtype)
        finally:
            self._free.put(pinned)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # From memory that is not page-locked, the copy would first wait for all others on the stream.
            return tensor.pin_memory().to(self._device, non_blocking=True)

    def fence(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def ready(self, fence: torch.cuda.Event, tensors: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(fence)
        for tensor in tensors:
            tensor.record_stream(stream)
