"""Batches made ahead of training: gathered by threads, copied to the device while it
works on the previous batch.

**Ahead of batches**, shards of an object store are fetched while training works on those
before. A sampler that takes the utterances of a few shards at a time knows what comes
next. While the batches of one window are made, the shards of the next ones are copied to
the local disk or into memory, in the order in which they are read, as far as there is
room for them beside what is still needed. A copy is held until the last batch of these
windows that reads it has been made; then it may make room for others at once."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice, repeat
from queue import SimpleQueue
from time import perf_counter
from typing import Any, TypeAlias, Unpack

import numpy as np
import torch
from torch.utils.data import Subset

from featcache.device import PinnedMemory, on_this_device, parse_device
from featcache.errors import ArgumentError, FeatcacheError, listing, require_int
from featcache.loader.cache import Buffers
from featcache.loader.dataset import FeatureDataset, FrameRanges, Move
from featcache.loader.local_copies import ObjectShards
from featcache.loader.sampler import Batching, BucketBatchSampler, other_rows
from featcache.loader.utterances import ByName, DatasetVersion, by_version
from featcache.quantize import dequantize

Reading: TypeAlias = AbstractContextManager[None]
"""The context to make a batch in: its shards stay meanwhile."""

_PREFETCH = 2
_PREFETCH_ASKED = 8
"""Batches that are prepared ahead if each waits for its own requests."""

_SHARDS_AT_ONCE = 8
"""Shards that are fetched side by side ahead of batches."""

_MOST_WINDOWS = 4
"""Windows that are taken ahead."""


class DataLoader:
    """The batches of a dataset, in a sampler's order, on a device; each is a dictionary,
    see `FeatureDataset`.

    There is nothing to decode, so there are no worker processes: threads gather each
    batch straight into a reused, padded buffer. For a GPU, buffers are page-locked, and
    copied on a stream of their own. Features, lengths and numeric columns are tensors on
    the device. On the CPU, a batch's memory is reused once no tensor refers to it.

    `DataLoader(dataset, batch_size=32)` makes a `BucketBatchSampler` of its own, with
    everything that it offers: the same batches on every machine, ranks, and exact resume.
    Its batches are in another order than the dataset, also without shuffling: the longest
    utterances first. The end of a pass begins the next epoch, for the next pass and for
    `state_dict`.

    Random crops follow the sampler's epoch. The loader can be iterated over repeatedly.
    Simultaneous iterations do not affect each other, but `state_dict` and `waited` are
    those of the latest.

    Args:
        dataset: The dataset to read; or a `torch.utils.data.Subset` of one, also of a
            subset, as `random_split` makes.
        batch_sampler: Yields a list of positions in the dataset for each batch: a
            `BucketBatchSampler`, a `torch.utils.data.BatchSampler`, or a list of lists.
        device: The device for the batches.
        prefetch: How many batches to prepare while training works on one; by default 2,
            or 8 if their bytes are asked of an object store. There each has a thread;
            else there is at most one per core.
        dtype: Converts features to this dtype, on the device; by default, they keep their
            stored dtype. Of several versions, a dictionary by name, or one for all that
            it fits: a float dtype leaves codes as they are.
        transform: Called with each batch as training would get it, on the device and
            after `dtype`; what it returns is what training gets. The loader's threads
            call it, up to `prefetch` at once and ahead of training; on a GPU, on the
            stream of the copies. The batch is its own: it may write to the tensors.
        batching: Instead of `batch_sampler`, `max_frames` or `batch_size` or both, and
            `shuffle` (by default true), `seed`, `drop_last`, `rank`, `world_size` and
            `shards_in_memory`: arguments of `BucketBatchSampler`.

    Attributes:
        dataset: The dataset, or that of the subset's utterances: `FeatureDataset.subset`.
        batch_sampler: As given, or the loader's own.
        device, prefetch, transform: As given.

    Raises:
        ArgumentError: The dataset is not a `FeatureDataset`, or the arguments do not fit
            it or each other.
    """

    def __init__(
        self,
        dataset: FeatureDataset | Subset[dict[str, Any]],
        batch_sampler: Iterable[Iterable[int]] | None = None,
        *,
        device: str | torch.device = "cpu",
        prefetch: int | None = None,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        **batching: Unpack[Batching],
    ) -> None:
        if not isinstance(batch_sampler, Iterable | None):
            raise ArgumentError(
                f"batch_sampler is {batch_sampler!r}: give lists of positions; batch_size= "
                "limits rows"
            )
        if unknown := [name for name in batching if name not in Batching.__annotations__]:
            takes = (
                f"{listing(Batching.__annotations__)}; threads make the batches, and "
                "transform= changes them"
            )
            raise ArgumentError(f"featcache.DataLoader has no {listing(unknown)}: it takes {takes}")
        if batch_sampler is not None and batching:
            raise ArgumentError(
                f"batch_sampler makes the batches already: leave it out, or {listing(batching)}"
            )
        self.dataset = _whole(dataset)
        self._makes_batches = batch_sampler is None
        self.batch_sampler: Any = (
            _own_sampler(self.dataset, batching) if batch_sampler is None else batch_sampler
        )
        if not (transform is None or callable(transform)):
            raise ArgumentError(f"transform is {transform!r}: give a function of a batch")
        self.transform = transform
        try:
            self.device = parse_device(device)
        except ValueError as error:
            raise ArgumentError(f"device is {device!r}: {error}") from error
        asks = any(not shards.places for _, shards in _remote(self.dataset))
        prefetch = (_PREFETCH_ASKED if asks else _PREFETCH) if prefetch is None else prefetch
        self.prefetch = require_int("prefetch", prefetch, 1, 1 << 20)
        self._dtypes = _dtypes(self.dataset, dtype)
        self._threads = self.prefetch if asks else min(self.prefetch, len(os.sched_getaffinity(0)))
        self._latest = _Progress()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_transfer"}

    def __repr__(self) -> str:
        settings = f"device={str(self.device)!r}, prefetch={self.prefetch}"
        return f"DataLoader({self.dataset!r}, {self.batch_sampler!r}, {settings})"

    def __len__(self) -> int:
        """How many batches an epoch has, if the sampler knows."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._latest = _Progress()
        return self._batches(iter(self.batch_sampler), self._latest)

    @property
    def waited(self) -> float:
        """Seconds that the training loop has waited for batches in the current or latest
        iteration."""
        return self._latest.waited

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, for new batches and new random crops. An iteration in progress
        keeps its epoch."""
        if (sampler := self._with("set_epoch")) is not None:
            sampler.set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state of training in the epoch: after the batches that it has received, not
        after those made ahead. Raises ArgumentError if the sampler keeps no state."""
        sampler = self._stateful()
        # as the sampler counts: it may be in another pass by now
        consumed = min(sampler.given, self._latest.received)
        state = sampler.state_dict(consumed=consumed)
        return {"sampler": state, "rows": self.dataset.lengths.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration yield what was left when the state was taken; see
        `BucketBatchSampler`. Raises ArgumentError if it is not such a state, or the
        sampler keeps none."""
        try:
            inner = state["sampler"]
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                "this is not the state of a DataLoader: give what its state_dict returned"
            ) from error
        sampler = self._stateful()
        digest = self.dataset.lengths.digest
        if state.get("rows", digest) != digest:
            raise ArgumentError(other_rows(len(self.dataset)))
        sampler.load_state_dict(inner)

    def _with(self, name: str) -> Any:
        """The sampler, or the one that it makes batches of, if it has an attribute; a
        `BatchSampler` has no epochs."""
        samplers = (self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        return next((sampler for sampler in samplers if hasattr(sampler, name)), None)

    @cached_property
    def _transfer(self) -> Transfer:
        transfer = _CudaTransfer if self.device.type == "cuda" else Transfer
        # training holds one batch while it asks for the next
        return transfer(self.device, self.prefetch + 2)

    def _stateful(self) -> Any:
        if not hasattr(self.batch_sampler, "load_state_dict"):
            name = type(self.batch_sampler).__name__
            raise ArgumentError(
                f"the sampler, a {name}, keeps no state: featcache.BucketBatchSampler does"
            )
        return self.batch_sampler

    def _batches(
        self, batches: Iterator[Iterable[int]], progress: _Progress
    ) -> Iterator[dict[str, Any]]:
        started, process = perf_counter(), os.getpid()
        of_pass = batches if hasattr(batches, "epoch") else self._with("epoch")
        epoch = self.dataset.epoch if of_pass is None else of_pass.epoch
        self.dataset.set_epoch(epoch)
        ahead: deque[Future[list[Any]]] = deque()
        self._transfer.begin()  # a transform may use what was computed before
        are_fetched = any(shards.places for _, shards in _remote(self.dataset))
        shards = (
            ShardsAhead(self.dataset)
            if are_fetched and getattr(batches, "has_windows", False)
            else None
        )
        rows_of = map(_rows_of, batches)
        given = (
            zip(rows_of, repeat(nullcontext()))
            if shards is None
            else shards.windows(rows_of, batches)
        )
        with ThreadPoolExecutor(self._threads, "featcache-loader") as threads:

            def ask(count: int) -> None:
                try:
                    for rows, reading in islice(given, count):
                        ahead.append(threads.submit(self._make, rows, epoch, reading))
                except Exception as error:  # noqa: BLE001 - raised where the batch would have come
                    ahead.append(Future())
                    ahead[-1].set_exception(error)

            try:
                ask(self.prefetch)
                while ahead:
                    made = ahead.popleft().result()
                    ask(1)
                    progress.received += 1
                    # nobody but training holds its memory
                    mark, batch = made.pop(), made.pop()
                    self._transfer.make_ready(mark, batch)
                    progress.waited += perf_counter() - started
                    yield batch
                    if os.getpid() != process:
                        raise FeatcacheError(
                            "an iteration cannot continue in a forked process: begin a new "
                            "one there"
                        )
                    started = perf_counter()
                    del batch
                is_latest = self._latest is progress and self._makes_batches
                if is_latest and self.batch_sampler.epoch == epoch:
                    self.batch_sampler.set_epoch(epoch + 1)
            finally:
                for future in ahead:
                    future.cancel()
                if shards is not None:
                    shards.close()

    def _make(self, rows: list[int], epoch: int, reading: Reading) -> list[Any]:
        """Gather a batch and send it on its way: the batch as training gets it, and the
        mark of its arrival."""

        def gather(ranges: FrameRanges) -> torch.Tensor:
            return self._transfer.gather(ranges, self._dtypes.get(ranges.version.name))

        with reading:
            batch: Any = self.dataset.batch_in(epoch, rows, gather, self._transfer.move)
        if self.transform is not None:
            with self._transfer.working():
                batch = self.transform(batch)
        return [batch, self._transfer.mark()]


def _whole(dataset: Any) -> FeatureDataset:
    """A dataset by itself, without the subsets of torch around it."""
    if isinstance(dataset, Subset):
        return _whole(dataset.dataset).subset(dataset.indices)
    if not isinstance(dataset, FeatureDataset):
        wanted = (
            "featcache.DataLoader takes a FeatureDataset, or a Subset of one; "
            "torch.utils.data's takes any"
        )
        raise ArgumentError(f"dataset is a {type(dataset).__name__}: {wanted}")
    return dataset


def _own_sampler(dataset: FeatureDataset, batching: Batching) -> BucketBatchSampler:
    """The sampler of a loader to which none is given."""
    if not {"max_frames", "batch_size"} & batching.keys():
        raise ArgumentError(
            "nothing says what the batches are: give batch_size= or max_frames=, or a batch_sampler"
        )
    shards = dataset.shards if batching.get("shards_in_memory") is not None else None
    return BucketBatchSampler(dataset.lengths, shards=shards, **batching)


def _dtypes(dataset: FeatureDataset, dtype: ByName[torch.dtype] | None) -> dict[str, torch.dtype]:
    """The dtypes to convert the versions' features to, by name. One dtype for all is for
    those that it fits. Raises ArgumentError if it is not a dtype, or features cannot be
    converted to it without loss."""
    dtypes = by_version(dataset.cache, "dtype", dtype)
    given = [version for version in dataset.versions if version.name in dtypes]
    faults = {
        version.name: fault for version in given if (fault := _fault(dtypes[version.name], version))
    }
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
        what = f"dtype is {dtype}, which would cut off fractions: these features are {stored}"
        return None if dtype.is_floating_point else what
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return (
            f"dtype is {dtype}, and these features are {spec.units}: give one of integers, "
            "such as torch.int64"
        )
    largest = max(
        max(spec.codebook_sizes) - 1 if spec.codebook_sizes else np.iinfo(stored).max,
        version.padding_value,
    )
    limits = torch.iinfo(dtype)
    if version.padding_value < limits.min:
        return (
            f"dtype is {dtype}, which begins at {limits.min:,}, and padding_value is "
            f"{version.padding_value:,}"
        )
    if largest > limits.max:
        return (
            f"dtype is {dtype}, which ends at {limits.max:,}: these features go up to {largest:,}"
        )
    return None


@dataclass
class _Progress:
    """The state of an iteration."""

    received: int = 0
    """The number of batches that training has received, of those that the sampler has
    given."""
    waited: float = 0.0
    """The seconds that training has waited."""


def _rows_of(batch: Iterable[int]) -> list[int]:
    """The rows of a batch that a sampler gives."""
    try:
        return [*batch]
    except TypeError:
        wanted = (
            "featcache.DataLoader needs lists of positions, which "
            "torch.utils.data.BatchSampler makes"
        )
        raise ArgumentError(f"the sampler gives {batch!r}: {wanted}") from None


def _remote(dataset: FeatureDataset) -> list[tuple[DatasetVersion, ObjectShards]]:
    """The versions that are in an object store; of those without places for copies,
    batches ask it for their bytes."""
    versions = ((version, version.cache._shards) for version in dataset.versions)
    return [(version, shards) for version, shards in versions if isinstance(shards, ObjectShards)]


_Key: TypeAlias = tuple[ObjectShards, int]
"""A shard by its number."""


class ShardsAhead:
    """The shards that the batches of one iteration will read. Safe to use from several
    threads.

    A batch waits for its shards, unless it is the first of those that have not been made:
    so whatever there is room for, there is one that goes on. What cannot be fetched is no
    error here, but where it is read."""

    def __init__(self, dataset: FeatureDataset) -> None:
        self._versions = [
            (version, shards) for version, shards in _remote(dataset) if shards.places
        ]
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(_SHARDS_AT_ONCE, "featcache-ahead")
        self._is_closed = False
        # the numbers of those that have not been made, in their order
        self._batches: deque[int] = deque()
        # What these read, in the order in which it is fetched: the number of the last one
        # that reads each shard.
        self._last: dict[_Key, int] = {}
        self._begun: set[_Key] = set()
        # what lets go of those that are there, if they are
        self._held: dict[_Key, Callable[[], None] | None] = {}

    def windows(
        self, batches: Iterator[list[int]], sampler: Any
    ) -> Iterator[tuple[list[int], Reading]]:
        """The batches, of which windows are taken ahead: at least one, and as many as
        keep all threads fetching while there is room; each with the context to make it
        in. `sampler`, which gives them, has the `window` of the latest.

        The context raises CancelledError if all was closed meanwhile."""
        upcoming: deque[list[tuple[int, list[int]]]] = deque()
        for _, group in groupby(enumerate(batches), lambda _: sampler.window):
            upcoming.append([*group])
            are_begun = self._expect(upcoming[-1])
            if len(upcoming) > 1 and (not are_begun or len(upcoming) > _MOST_WINDOWS):
                yield from (
                    (rows, self._reading(number, rows)) for number, rows in upcoming.popleft()
                )
        for rest in upcoming:
            yield from ((rows, self._reading(number, rows)) for number, rows in rest)

    def _expect(self, window: list[tuple[int, list[int]]]) -> bool:
        """Fetch what a window's batches read, as soon as there is room; whether all that
        is expected has begun."""
        last = {key: number for number, rows in window for key in self._wanted(rows)}
        with self._changed:
            self._batches += [number for number, _ in window]
            self._last |= last
            self._go_on()
            return len(self._begun) == len(self._last)

    def _wanted(self, rows: list[int]) -> dict[_Key, None]:
        """The shards that are copied to read some rows, in the order of these."""
        at = np.array(rows, np.int64)
        numbers = (
            (shards, shards.index.shard[version.positions_of(at)])
            for version, shards in self._versions
        )
        return dict.fromkeys(
            (shards, number) for shards, each in numbers for number in each.tolist()
        )

    @contextmanager
    def _reading(self, number: int, rows: list[int]) -> Iterator[None]:
        wanted = self._wanted(rows)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._may_read(number, wanted))
            if self._is_closed:
                raise CancelledError
        try:
            yield
        finally:
            with self._changed:
                if not self._is_closed:
                    self._batches.remove(number)
                    self._go_on()

    # A default, since at the interpreter's exit the module's own names may be gone.
    def close(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Fetch nothing more, and hold nothing."""
        # a forked child has neither the threads nor the locks
        if is_ending() or os.getpid() != self._process:
            return
        with self._changed:
            self._is_closed = True
            self._batches.clear()
            self._go_on()
        self._threads.shutdown(wait=False)

    def _may_read(self, number: int, wanted: Iterable[_Key]) -> bool:
        """Whether a batch's shards are there; for the first one, those that there is room
        for."""
        missing = [key for key in wanted if key not in self._held]
        if not self._begun.isdisjoint(missing):
            return False
        return not missing or (number == self._batches[0] and self._next() is None)

    def _next(self) -> _Key | None:
        """What is to begin next, if there is room for it."""
        key = next((key for key in self._last if key not in self._begun), None)
        if key is None or (room := key[0].room) == math.inf:
            return key
        begun = [other for other in self._begun if other[0].where == key[0].where]
        return (
            key
            if sum(int(shards.sizes[number]) for shards, number in [*begun, key]) <= room
            else None
        )

    def _go_on(self) -> None:
        """Let go of what nobody reads any more; only then begin, in their order, what
        there are threads and room for, and no more, since the interpreter does not end
        before what has been begun. Wake who waits for that."""
        first = self._batches[0] if self._batches else math.inf
        for read in [key for key, last in self._last.items() if last < first]:
            if read in self._held or read not in self._begun:  # else it goes once it is there
                del self._last[read]
                self._begun.discard(read)
                if let_go := self._held.pop(read, None):
                    let_go()
        while (key := self._next()) is not None and len(self._begun) - len(
            self._held
        ) < _SHARDS_AT_ONCE:
            self._begun.add(key)
            try:
                self._threads.submit(self._fetch, key)
            except (
                RuntimeError
            ):  # the interpreter is ending, or there are no more threads: who reads it fetches it
                self._held[key] = None
        self._changed.notify_all()

    def _fetch(self, key: _Key) -> None:
        shards, number = key
        let_go = None
        with suppress(Exception):  # which is raised where it is read
            let_go = shards.hold(number)
        with self._changed:
            self._held[key] = let_go
            self._go_on()


class Transfer:
    """Brings batches, of which there are so many at a time, to CPU memory; to a device
    that is not CUDA, torch copies them, and waits. That to a GPU returns tensors that may
    still be on their way. Safe to use from several threads."""

    def __init__(self, device: torch.device, num_batches: int) -> None:
        self._device = device
        self._gathered = Buffers(kept=num_batches)
        self._converted = Buffers(kept=num_batches)

    def gather(self, ranges: FrameRanges, dtype: torch.dtype | None) -> torch.Tensor:
        """Gather the padded frames of a batch, and have them copied to the device and
        converted there."""
        gathered = ranges.gather(self._gathered.take)
        if self._device.type != "cpu":
            return gathered.to(self._device, dtype)
        if dtype is None or dtype == gathered.dtype:
            return gathered
        converted = torch.from_numpy(
            np.asarray(self._converted.take(gathered.numel() * dtype.itemsize))
        )
        return converted.view(dtype).view(gathered.shape).copy_(gathered)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a small tensor copied to the device."""
        return tensor.to(self._device)

    def begin(self) -> None:
        """Have the work on batches wait for what the caller's stream has been given
        before."""

    def working(self) -> AbstractContextManager[Any]:
        """The context to work on batches in, before the mark."""
        return nullcontext()

    def mark(self) -> Any:
        """A mark after everything that this thread has sent on its way."""

    def make_ready(self, mark: Any, batch: Any) -> None:
        """Have the caller's stream wait for a mark before it uses the tensors of a batch."""


class _CudaTransfer(Transfer):
    """Batches on a GPU, copied from page-locked memory on a stream of their own.

    The allocator must not give a batch's memory to others while the training's stream
    still works on it, although it was taken on the copies' stream: hence
    `record_stream`."""

    def __init__(self, device: torch.device, num_batches: int) -> None:
        self._device = on_this_device(device)
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._free: SimpleQueue[PinnedMemory] = SimpleQueue()
        for _ in range(num_batches):
            self._free.put(PinnedMemory())

    def gather(self, ranges: FrameRanges, dtype: torch.dtype | None) -> torch.Tensor:
        # a quarter of the bytes are copied, and become values on the GPU
        raw = ranges.version.cache.spec.is_quantized
        pinned = self._free.get()
        try:
            stored = ranges.gather(pinned.take, raw)
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
            # From memory that is not page-locked, the copy would first wait for all
            # others on the stream.
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
    levels: torch.Tensor, ranges: FrameRanges, dtype: torch.dtype | None, move: Move
) -> torch.Tensor:
    """The values of levels, uint8 `[batch, frames, *item_shape]`, on their device; `move`
    copies to that."""
    quantization = move(ranges.version.cache.quantization(ranges.positions))
    lengths = move(torch.from_numpy(ranges.counts))
    values_dtype = torch.float32 if dtype is None else dtype
    return dequantize(
        levels,
        quantization,
        values_dtype,
        lengths=lengths,
        padding_value=ranges.version.padding_value,
    )
