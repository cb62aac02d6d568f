"""Batches made ahead of training: gathered by threads, copied to the device while it works on the previous batch."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np
import torch

from featcache.arguments import require_int
from featcache.device import parse_device
from featcache.errors import ArgumentError, FeatcacheError
from featcache.loader.buffers import Buffers
from featcache.loader.dataset import FeatureDataset, FrameRanges
from featcache.loader.utterances import DatasetVersion, by_version
from featcache.quantize import dequantize

__all__ = ["DataLoader"]

_SLACK = 1.25
"""How much more page-locked memory is taken than a batch needs, since batches differ in length."""


class DataLoader:
    """The batches of a dataset, in a sampler's order, on a device; each is a dictionary, see `FeatureDataset`.

    There is nothing to decode, so there are no worker processes: threads gather each batch straight into a reused,
    padded buffer. For a GPU, buffers are page-locked, and copied on a stream of their own. Features, lengths and
    numeric columns are tensors on the device. On the CPU, a batch's memory is reused once nothing refers to its
    tensors.

    Random crops follow the sampler's epoch. The loader can be iterated over repeatedly. Simultaneous iterations do not
    affect each other, but `state_dict` and `waited` are those of the latest.

    Args:
        dataset: The dataset to read.
        sampler: Yields a list of positions in the dataset for each batch: a `BucketBatchSampler`, a
            `torch.utils.data.BatchSampler`, or a list of lists.
        device: The device for the batches.
        prefetch: How many batches to prepare while training works on one; with as many threads, at most one per core.
        dtype: Converts features to this dtype, on the device; by default, they keep their stored dtype. With several
            versions, a dictionary by name, or one dtype for all versions that it fits: a float dtype leaves codes as
            they are.

    Attributes:
        dataset, sampler, device, prefetch: As given.

    Raises:
        ArgumentError: The dataset is not a `FeatureDataset`, or the arguments do not fit it.
    """

    def __init__(
        self,
        dataset: FeatureDataset,
        sampler: Iterable[Iterable[int]],
        *,
        device: str | torch.device = "cpu",
        prefetch: int = 2,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    ) -> None:
        if not isinstance(dataset, FeatureDataset):
            raise ArgumentError(
                f"dataset is a {type(dataset).__name__}: featcache.DataLoader takes a FeatureDataset; "
                "torch.utils.data.DataLoader takes any"
            )
        if not isinstance(sampler, Iterable):
            raise ArgumentError(f"sampler is {sampler!r}: give a BucketBatchSampler, or lists of positions")
        self.dataset = dataset
        self.sampler = sampler
        try:
            self.device = parse_device(device)
        except ValueError as error:
            raise ArgumentError(f"device is {device!r}: {error}") from error
        self.prefetch = require_int("prefetch", prefetch, 1)
        self._dtypes = _dtypes(dataset, dtype)
        self._threads = min(self.prefetch, len(os.sched_getaffinity(0)))
        self._transfer = self._new_transfer()
        self._latest = _Progress()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_transfer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._transfer = self._new_transfer()

    def __repr__(self) -> str:
        return f"DataLoader({self.dataset!r}, {self.sampler!r}, device={str(self.device)!r}, prefetch={self.prefetch})"

    @property
    def batch_sampler(self) -> Iterable[Iterable[int]]:
        """The sampler, by the name that torch has for one of batches: Lightning asks for it."""
        return self.sampler

    def __len__(self) -> int:
        """How many batches there are, if the sampler knows."""
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch = getattr(self._with("epoch"), "epoch", None)
        if epoch is not None:
            self.dataset.set_epoch(epoch)
        self._latest = _Progress()
        return self._batches(iter(self.sampler), self.dataset.epoch, self._latest)

    @property
    def waited(self) -> float:
        """Seconds that the training loop has waited for batches in the current or latest iteration."""
        return self._latest.waited

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, for new batches and new random crops. An iteration in progress keeps its epoch."""
        sampler = self._with("set_epoch")
        if sampler is not None:
            sampler.set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state of training in the epoch: after the batches that it has received, not after those made ahead.

        Raises:
            ArgumentError: The sampler keeps no state.
        """
        sampler = self._stateful()
        # as the sampler counts: it may be in another pass by now
        return {"sampler": sampler.state_dict(consumed=max(0, sampler.given - self._latest.ahead))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration yield what was left when the state was taken; see `BucketBatchSampler`.

        Raises:
            ArgumentError: `state` is not such a state, or the sampler keeps no state.
        """
        try:
            inner = state["sampler"]
        except (KeyError, TypeError) as error:
            raise ArgumentError("this is not the state of a DataLoader: give what its state_dict returned") from error
        self._stateful().load_state_dict(inner)

    def _with(self, name: str) -> Any:
        """The sampler, or the one that it makes batches of, if it has an attribute; a `BatchSampler` has no epochs."""
        samplers = (self.sampler, getattr(self.sampler, "sampler", None))
        return next((sampler for sampler in samplers if hasattr(sampler, name)), None)

    def _new_transfer(self) -> _MemoryTransfer | _CudaTransfer:
        num_batches = self.prefetch + 2  # training has one, and holds it while it asks for the next
        kind = _CudaTransfer if self.device.type == "cuda" else _MemoryTransfer
        return kind(self.device, num_batches)

    def _stateful(self) -> Any:
        if not hasattr(self.sampler, "load_state_dict"):
            name = type(self.sampler).__name__
            raise ArgumentError(f"the sampler, a {name}, keeps no state: featcache.BucketBatchSampler does")
        return self.sampler

    def _batches(self, batches: Iterator[Iterable[int]], epoch: int, progress: _Progress) -> Iterator[dict[str, Any]]:
        started, process = perf_counter(), os.getpid()
        ahead: deque[Future[_BatchUnderWay]] = deque()
        with ThreadPoolExecutor(self._threads, "featcache-loader") as threads:

            def ask(count: int) -> None:
                try:
                    for batch in islice(batches, count):
                        ahead.append(threads.submit(self._make, _rows(batch), epoch))
                        progress.ahead += 1
                except Exception as error:  # noqa: BLE001 - raised where the batch would have come
                    ahead.append(Future())
                    ahead[-1].set_exception(error)

            try:
                ask(self.prefetch)
                while ahead:
                    under_way = ahead.popleft().result()
                    ask(1)
                    progress.ahead -= 1
                    batch = under_way.hand_over(self._transfer)
                    del under_way  # nobody but training holds its memory
                    progress.waited += perf_counter() - started
                    yield batch
                    if os.getpid() != process:
                        raise FeatcacheError("an iteration cannot continue in a forked process: begin a new one there")
                    started = perf_counter()
                    del batch
            finally:
                for future in ahead:
                    future.cancel()

    def _make(self, rows: list[int], epoch: int) -> _BatchUnderWay:
        """Gather a batch and send it on its way."""
        ranges, ids, selected = self.dataset.select(rows, epoch)
        gather, move = self._transfer.gather, self._transfer.move
        features = [gather(each, self._dtypes.get(each.version.name)) for each in ranges]
        lengths = [move(torch.from_numpy(each.counts)) for each in ranges]
        columns = {
            name: move(column) if isinstance(column, torch.Tensor) else column for name, column in selected.items()
        }
        batch = {
            "ids": ids,
            "features": self.dataset.named(features),
            "lengths": self.dataset.named(lengths),
            **columns,
        }
        tensors = [*features, *lengths, *(column for column in columns.values() if isinstance(column, torch.Tensor))]
        return _BatchUnderWay(batch, tensors, self._transfer.mark())


def _dtypes(dataset: FeatureDataset, dtype: torch.dtype | Mapping[str, torch.dtype] | None) -> dict[str, torch.dtype]:
    """The dtypes to convert the versions' features to, by name. One dtype for all is for those that it fits.

    Raises:
        ArgumentError: It is not a dtype; or features cannot be converted to it without loss.
    """
    dtypes = by_version(dataset.cache, "dtype", dtype)
    faults = {}
    for version in dataset.versions:
        if version.name in dtypes and (fault := _fault(dtypes[version.name], version)) is not None:
            faults[version.name] = fault
    if faults and (isinstance(dtype, Mapping) or len(faults) == len(dtypes)):
        raise ArgumentError(next(iter(faults.values())))
    return {name: wanted for name, wanted in dtypes.items() if name not in faults}


def _fault(dtype: object, version: DatasetVersion) -> str | None:
    """Why a version's features cannot be converted to a dtype."""
    if not isinstance(dtype, torch.dtype):
        return f"dtype is {dtype!r}: give one of torch's, such as torch.float32"
    spec = version.cache.spec
    stored = np.dtype(spec.dtype)
    if stored.kind == "f":
        if dtype.is_floating_point:
            return None
        return f"dtype is {dtype}, which would cut off fractions: these features are {stored}"
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return f"dtype is {dtype}, and these features are {spec.units}: give one of integers, such as torch.int64"
    largest = max(max(spec.codebook_sizes) - 1 if spec.codebook_sizes else np.iinfo(stored).max, version.padding_value)
    if largest > torch.iinfo(dtype).max:
        return f"dtype is {dtype}, which ends at {torch.iinfo(dtype).max:,}: these features go up to {largest:,}"
    return None


@dataclass
class _Progress:
    """The state of an iteration."""

    ahead: int = 0
    """The number of batches that the sampler has given, and training has not received."""
    waited: float = 0.0
    """The seconds that training has waited."""


@dataclass
class _BatchUnderWay:
    """A batch that may still be on its way to the device."""

    batch: dict[str, Any]
    """The batch as training gets it."""
    tensors: list[torch.Tensor]
    """All tensors in it."""
    mark: Any
    """The transfer's mark after which they are on the device."""

    def hand_over(self, transfer: _MemoryTransfer | _CudaTransfer) -> dict[str, Any]:
        """The batch, ready for the caller's stream; nothing of it is held here any more."""
        transfer.make_ready(self.mark, self.tensors)
        batch, self.batch, self.tensors = self.batch, {}, []
        return batch


def _rows(batch: Iterable[int]) -> list[int]:
    try:
        return [*batch]
    except TypeError:
        raise ArgumentError(
            f"the sampler gives {batch!r}: featcache.DataLoader needs lists of positions; "
            "torch.utils.data.BatchSampler makes them of single positions"
        ) from None


class _MemoryTransfer:
    """Brings batches to CPU memory; to a device that is not CUDA, torch copies them, and waits.

    Safe to use from several threads, as is `_CudaTransfer`, which returns tensors that may still be on their way.
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

    def mark(self) -> Any:
        """A mark after everything that this thread has sent on its way."""

    def make_ready(self, mark: Any, tensors: list[torch.Tensor]) -> None:
        """Have the caller's stream wait for a mark before it uses these tensors."""


class _PinnedMemory:
    """Page-locked memory, and an event after the last copy from it."""

    def __init__(self) -> None:
        self.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits does not spin
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> torch.Tensor:
        """So many bytes, uint8, that nothing is being copied from any more."""
        self.copied.synchronize()
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(int(num_bytes * _SLACK), dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._memory[:num_bytes]


class _CudaTransfer:
    """Batches on a GPU, copied from page-locked memory on a stream of their own.

    The allocator must not give a batch's memory to others while the training's stream still works on it, although it
    was taken on the copies' stream: hence `record_stream`.
    """

    def __init__(self, device: torch.device, num_batches: int) -> None:
        # "cuda" is the current device of this thread; in another thread, it would be the first.
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._free: SimpleQueue[_PinnedMemory] = SimpleQueue()
        for _ in range(num_batches):
            self._free.put(_PinnedMemory())

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
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                features = stored.to(self._device, non_blocking=True)
                pinned.copied.record(self._stream)
                if not raw:
                    return features if dtype is None else features.to(dtype)
                return _values_of(features, ranges, dtype, self.move)
        finally:
            self._free.put(pinned)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # From memory that is not page-locked, the copy would first wait for all others on the stream.
            return tensor.pin_memory().to(self._device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def make_ready(self, mark: torch.cuda.Event, tensors: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(stream)


def _values_of(
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
