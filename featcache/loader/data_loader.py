"""Batches made ahead of training: gathered by threads, copied to the device while it
works on the previous batch."""

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
from typing import Any, Protocol, TypeAlias, Unpack

import numpy as np
import torch
from torch.utils.data import Subset

from featcache.device import PinnedMemory, on_this_device, parse_device
from featcache.errors import ArgumentError, FeatcacheError, listing, require_int
from featcache.loader.buffers import Buffers, Memory
from featcache.loader.dataset import FeatureDataset, FrameRanges, Move
from featcache.loader.local_copies import ObjectShards
from featcache.loader.sampler import Batching, BucketBatchSampler, other_rows
from featcache.loader.utterances import ByName, DatasetVersion, by_version
from featcache.quantize import dequantize

Reading: TypeAlias = AbstractContextManager[None]
"""A context in which a batch is made, and its shards stay."""

_PREFETCH = 2
_PREFETCH_REQUESTS = 8
"""Batches that are prepared ahead, without local copies and with requests."""

_SHARDS_AT_ONCE = 8
"""Shards that are fetched at the same time, ahead of batches."""

_MOST_WINDOWS = 4
"""Windows that are taken ahead of the current one."""


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


class DataLoader:
    """The batches of a dataset, in a sampler's order, on a device; each is a dictionary,
    see `FeatureDataset`.

    Threads, and no worker processes, gather each batch straight into a reused, padded
    buffer. For a GPU, buffers are page-locked, and copied on a stream of their own.
    Features, lengths and numeric columns are tensors on the device. On the CPU, a batch's
    memory is reused once no tensor refers to it.

    `DataLoader(dataset, batch_size=32)` makes its own `BucketBatchSampler`: the same
    batches on every machine, ranks, and exact resume; also without shuffling, the longest
    utterances first. The end of a pass begins the next epoch, for the next pass and for
    `state_dict`.

    Random crops follow the sampler's epoch. Simultaneous iterations do not affect each
    other, but `state_dict` and `waited` are those of the latest.

    Args:
        dataset: The dataset to read; or a `torch.utils.data.Subset` of one, also of a
            subset, as `random_split` makes.
        batch_sampler: Yields a list of positions in the dataset for each batch: a
            `BucketBatchSampler`, a `torch.utils.data.BatchSampler`, or a list of lists.
        device: The device for the batches.
        prefetch: How many batches to prepare while training works on one; by default 2,
            each in a thread, of which there is at most one per core. If bytes are requested
            from an object store, 8 by default, each in a thread.
        dtype: Converts features to this dtype, on the device; by default, they keep their
            stored dtype. Of several versions, a dictionary by name, or one for all that
            it fits: a float dtype leaves codes as they are.
        transform: A function that training gets the results of. It is called with each
            batch, on the device and after `dtype`, by the loader's threads, up to
            `prefetch` at once and ahead of training; on a GPU, on the stream of the copies.
            It may write to the tensors.
        batching: Instead of `batch_sampler`, `max_frames` or `batch_size` or both, and
            `shuffle` (by default true), `seed`, `drop_last`, `rank`, `world_size` and
            `shards_in_memory`: arguments of `BucketBatchSampler`.

    Attributes:
        dataset: The dataset, or that of the subset's utterances: `FeatureDataset.subset`.
        batch_sampler: As given, or the loader's own.

    Raises:
        ArgumentError: The arguments do not fit the dataset or each other.
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
        unknown = batching.keys() - Batching.__annotations__.keys()
        if unknown:
            raise ArgumentError(
                f"featcache.DataLoader has no {listing(sorted(unknown))}: it takes "
                f"{listing(Batching.__annotations__)}; threads make the batches, and "
                "transform= changes them"
            )
        if batch_sampler is not None and batching:
            raise ArgumentError(
                f"batch_sampler makes the batches already: leave it out, or {listing(batching)}"
            )
        self.dataset = _whole(dataset)
        self._makes_batches = batch_sampler is None
        self.batch_sampler: Any = batch_sampler
        if batch_sampler is None:
            self.batch_sampler = _own_sampler(self.dataset, batching)
        if not (transform is None or callable(transform)):
            raise ArgumentError(f"transform is {transform!r}: give a function of a batch")
        self.transform = transform
        try:
            self.device = parse_device(device)
        except ValueError as error:
            raise ArgumentError(f"device is {device!r}: {error}") from error
        sends_requests = any(not shards.places for _, shards in _remote(self._versions))
        if prefetch is None:
            prefetch = _PREFETCH_REQUESTS if sends_requests else _PREFETCH
        self.prefetch = require_int("prefetch", prefetch, 1, 1 << 20)
        self._dtypes = _dtypes(self.dataset, dtype)
        self._threads = self.prefetch
        if not sends_requests:
            self._threads = min(self.prefetch, len(os.sched_getaffinity(0)))
        self._latest = _Progress()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_transfer"}

    def __repr__(self) -> str:
        settings = f"device={str(self.device)!r}, prefetch={self.prefetch}"
        return f"DataLoader({self.dataset!r}, {self.batch_sampler!r}, {settings})"

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._latest = _Progress()
        return self._batches(iter(self.batch_sampler), self._latest)

    @property
    def waited(self) -> float:
        """Seconds that training has waited for batches in the current or latest iteration."""
        return self._latest.waited

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, for new batches and random crops. Iterations in progress keep theirs."""
        sampler = self._with("set_epoch")
        if sampler is not None:
            sampler.set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training in the epoch, after the batches that it has received.
        Raises ArgumentError if the sampler keeps no state."""
        sampler = self._stateful()
        # The sampler may be in another pass.
        consumed = min(sampler.given, self._latest.received)
        state = sampler.state_dict(consumed=consumed)
        return {"sampler": state, "rows": self.dataset.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration yield what was left when the state was taken, as of a
        `BucketBatchSampler`. Raises ArgumentError if it is not such a state, or the sampler
        keeps none."""
        try:
            inner = state["sampler"]
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                "this is not the state of a DataLoader: give what its state_dict returned"
            ) from error
        sampler = self._stateful()
        digest = self.dataset.digest
        if state.get("rows", digest) != digest:
            raise ArgumentError(other_rows(len(self.dataset)))
        sampler.load_state_dict(inner)

    def _with(self, name: str) -> Any:
        """Return the batch sampler, or its own sampler, if it has this attribute."""
        samplers = (self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        return next((sampler for sampler in samplers if hasattr(sampler, name)), None)

    @property
    def _versions(self) -> list[DatasetVersion]:
        """The versions that batches are read from."""
        return self.dataset.versions

    @cached_property
    def _transfer(self) -> Transfer:
        transfer = _CudaTransfer if self.device.type == "cuda" else Transfer
        # Training holds one batch while it asks for the next.
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
        self._transfer.begin()  # a transform may use what was computed before
        shards: ShardsAhead | None = None
        upcoming: Iterator[tuple[list[int], Reading]]
        upcoming = zip(map(_rows_of, batches), repeat(nullcontext()))
        are_copied = any(shards.places for _, shards in _remote(self._versions))
        if are_copied and getattr(batches, "has_windows", False):
            shards = ShardsAhead(self.dataset)
            upcoming = shards.windows(map(_rows_of, batches), batches)
        ahead: deque[Future[list[Any]]] = deque()
        with ThreadPoolExecutor(self._threads, "featcache-loader") as threads:

            def prepare(count: int) -> None:
                try:
                    for rows, reading in islice(upcoming, count):
                        ahead.append(threads.submit(self._make, rows, epoch, reading))
                except Exception as error:  # noqa: BLE001 - raised in the batch's place
                    failed: Future[list[Any]] = Future()
                    failed.set_exception(error)
                    ahead.append(failed)

            try:
                prepare(self.prefetch)
                while ahead:
                    made = ahead.popleft().result()
                    prepare(1)
                    progress.received += 1
                    # Once popped, only training refers to the batch, and frees its memory.
                    mark = made.pop()
                    batch = made.pop()
                    self._transfer.make_ready(mark, batch)
                    progress.waited += perf_counter() - started
                    yield batch
                    if os.getpid() != process:
                        raise FeatcacheError(
                            "an iteration cannot continue in a forked process: begin another"
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
        """Return a batch as training gets it, and the mark of its arrival on the device."""

        with reading:
            batch: Any = self._read(rows, epoch)
        if self.transform is not None:
            with self._transfer.working():
                batch = self.transform(batch)
        return [batch, self._transfer.mark()]

    def _read(self, rows: list[int], epoch: int) -> dict[str, Any]:
        """Return the batch of some rows, before `transform`."""
        return self.dataset.batch_in(epoch, rows, self._gather, self._transfer.move)

    def _gather(self, ranges: Gathered) -> torch.Tensor:
        """Return frames on the device, in their dtype."""
        return self._transfer.gather(ranges, self._dtypes.get(ranges.version.name))


def _whole(dataset: Any) -> FeatureDataset:
    if isinstance(dataset, Subset):
        return _whole(dataset.dataset).subset(dataset.indices)
    if not isinstance(dataset, FeatureDataset):
        raise ArgumentError(
            f"dataset is a {type(dataset).__name__}: featcache.DataLoader takes a "
            "FeatureDataset, or a Subset of one; torch.utils.data's takes any"
        )
    return dataset


def _own_sampler(dataset: FeatureDataset, batching: Batching) -> BucketBatchSampler:
    if not {"max_frames", "batch_size"} & batching.keys():
        raise ArgumentError(
            "nothing says what the batches are: give batch_size= or max_frames=, or a batch_sampler"
        )
    shards = dataset.shards if batching.get("shards_in_memory") is not None else None
    return BucketBatchSampler(dataset.lengths, shards=shards, **batching)


def _dtypes(dataset: FeatureDataset, dtype: ByName[torch.dtype] | None) -> dict[str, torch.dtype]:
    """Return the dtypes to convert features to, by the versions' names; one dtype for all,
    only where it fits. Raises ArgumentError if it fits no version, or one of several dtypes
    does not fit its version."""
    dtypes = by_version(dataset.cache, "dtype", dtype)
    named = [version for version in dataset.versions if version.name in dtypes]
    fault_of = {version.name: _fault(dtypes[version.name], version) for version in named}
    faults = [fault for fault in fault_of.values() if fault]
    if faults and (isinstance(dtype, Mapping) or len(faults) == len(named)):
        raise ArgumentError(faults[0])
    return {name: wanted for name, wanted in dtypes.items() if not fault_of[name]}


def _fault(dtype: object, version: DatasetVersion) -> str | None:
    """Explain why a version's features cannot be converted to a dtype without loss."""
    if not isinstance(dtype, torch.dtype):
        return f"dtype is {dtype!r}: give one of torch's, such as torch.float32"
    spec, padding = version.cache.spec, version.padding_value
    if spec.axis.has_times:
        return f"dtype is {dtype}, and the times of {version.name} stay {spec.dtype}"
    stored = spec.values_dtype
    if stored.kind == "f":
        if dtype.is_floating_point:
            return None
        return f"dtype is {dtype}, which would cut off fractions: these features are {stored}"
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return (
            f"dtype is {dtype}, and these features are {spec.units}: give one of integers, "
            "such as torch.int64"
        )
    limits = torch.iinfo(dtype)
    if padding < limits.min:
        return f"dtype is {dtype}, which begins at {limits.min:,}, and padding_value is {padding:,}"
    most = max(spec.codebook_sizes) - 1 if spec.codebook_sizes else np.iinfo(stored).max
    largest = max(most, padding)
    if largest > limits.max:
        return (
            f"dtype is {dtype}, which ends at {limits.max:,}: these features go up to {largest:,}"
        )
    return None


@dataclass
class _Progress:
    """The number of batches that training has received in an iteration, and the seconds
    that it has waited."""

    received: int = 0
    waited: float = 0.0


def _rows_of(batch: Iterable[int]) -> list[int]:
    try:
        return [*batch]
    except TypeError:
        raise ArgumentError(
            f"the sampler gives {batch!r}: featcache.DataLoader needs lists of positions, which "
            "torch.utils.data.BatchSampler makes"
        ) from None


def _remote(versions: Iterable[DatasetVersion]) -> list[tuple[DatasetVersion, ObjectShards]]:
    """List the versions in an object store."""
    pairs = ((version, version.cache._shards) for version in versions)
    return [(version, shards) for version, shards in pairs if isinstance(shards, ObjectShards)]


_Key: TypeAlias = tuple[ObjectShards, int]
"""A shard by its number."""

_Window: TypeAlias = list[tuple[int, list[int]]]
"""The batches of a window: the number and the rows of each."""


class ShardsAhead:
    """The shards of an object store that the batches of one iteration will read, if the
    sampler takes the utterances of a few shards at a time. Safe to use from several threads.

    While the batches of one window are made, the shards of the next windows are copied in
    the order in which they are read, as far as there is room. A copy is held until the last
    of these batches that reads it has been made. A batch waits for its shards; the first of
    the unmade batches, only while there is room for them, so that one batch always goes on.
    A shard that cannot be fetched raises its error where it is read."""

    def __init__(self, dataset: FeatureDataset) -> None:
        remote = _remote(dataset.versions)
        self._versions = [(version, shards) for version, shards in remote if shards.places]
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(_SHARDS_AT_ONCE, "featcache-ahead")
        self._is_closed = False
        self._batches: deque[int] = deque()
        """The numbers of the unmade batches, in their order."""
        self._last: dict[_Key, int] = {}
        """The last batch that reads each shard, in the order in which shards are fetched."""
        self._begun: set[_Key] = set()
        """The shards whose fetching has begun."""
        self._held: dict[_Key, Callable[[], None] | None] = {}
        """The fetched shards, with the function that lets go of each; None for a failed one."""

    def windows(
        self, batches: Iterator[list[int]], sampler: Any
    ) -> Iterator[tuple[list[int], Reading]]:
        """Yield the batches, each with the context to make it in, which raises CancelledError
        if all was closed meanwhile. Windows are taken ahead: at least one, and more while
        there are threads and room. `sampler` yields the batches, and its `window` is that of
        the latest."""
        upcoming: deque[_Window] = deque()
        for _, group in groupby(enumerate(batches), lambda _: sampler.window):
            upcoming.append([*group])
            are_begun = self._expect(upcoming[-1])
            if len(upcoming) > 1 and (not are_begun or len(upcoming) > _MOST_WINDOWS):
                yield from self._readings(upcoming.popleft())
        for window in upcoming:
            yield from self._readings(window)

    def _readings(self, window: _Window) -> Iterator[tuple[list[int], Reading]]:
        return ((rows, self._reading(number, rows)) for number, rows in window)

    def _expect(self, window: _Window) -> bool:
        """Fetch the shards of a window as soon as there is room. Tells whether the fetching
        of all expected shards has begun."""
        last = {key: number for number, rows in window for key in self._keys(rows)}
        with self._changed:
            self._batches += [number for number, _ in window]
            self._last |= last
            self._go_on()
            return len(self._begun) == len(self._last)

    def _keys(self, rows: list[int]) -> list[_Key]:
        """List the shards that are copied to read some rows, in the order of these."""
        keys: dict[_Key, None] = {}
        for version, shards in self._versions:
            positions = version.positions_of(np.array(rows, np.int64))
            keys |= dict.fromkeys((shards, n) for n in shards.index.shard[positions].tolist())
        return [*keys]

    @contextmanager
    def _reading(self, number: int, rows: list[int]) -> Iterator[None]:
        keys = self._keys(rows)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._may_read(number, keys))
            if self._is_closed:
                raise CancelledError
        try:
            yield
        finally:
            with self._changed:
                if not self._is_closed:
                    self._batches.remove(number)
                    self._go_on()

    # At the interpreter's exit, the module's names may be gone: hence the default.
    def close(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Fetch nothing more, and hold nothing."""
        # A forked child has neither the threads nor the locks.
        if is_ending() or os.getpid() != self._process:
            return
        with self._changed:
            self._is_closed = True
            self._batches.clear()
            self._go_on()
        self._threads.shutdown(wait=False)

    def _may_read(self, number: int, keys: Iterable[_Key]) -> bool:
        """Tell whether a batch's shards are fetched, or, for the first batch, have no room."""
        missing = [key for key in keys if key not in self._held]
        if not self._begun.isdisjoint(missing):
            return False
        return not missing or (number == self._batches[0] and self._next() is None)

    def _next(self) -> _Key | None:
        """Return the shard to fetch next; None if there is none, or no room for it."""
        key = next((key for key in self._last if key not in self._begun), None)
        if key is None or key[0].room == math.inf:
            return key
        same_places = [other for other in self._begun if other[0].where == key[0].where]
        num_bytes = sum(int(shards.sizes[number]) for shards, number in [*same_places, key])
        return key if num_bytes <= key[0].room else None

    def _go_on(self) -> None:
        """Let go of the shards that were read last. Begin to fetch others, as far as there
        are threads and room: the interpreter does not end before what has begun. Wake all
        waiting threads."""
        first = self._batches[0] if self._batches else math.inf
        for key in [key for key, last in self._last.items() if last < first]:
            if key in self._begun and key not in self._held:
                continue  # until it is fetched
            del self._last[key]
            self._begun.discard(key)
            let_go = self._held.pop(key, None)
            if let_go is not None:
                let_go()
        while len(self._begun) - len(self._held) < _SHARDS_AT_ONCE:
            upcoming = self._next()
            if upcoming is None:
                break
            self._begun.add(upcoming)
            try:
                self._threads.submit(self._fetch, upcoming)
            except RuntimeError:  # no more threads: the batch that reads it fetches it
                self._held[upcoming] = None
        self._changed.notify_all()

    def _fetch(self, key: _Key) -> None:
        shards, number = key
        let_go = None
        with suppress(Exception):  # raised again where it is read
            let_go = shards.hold(number)
        with self._changed:
            self._held[key] = let_go
            self._go_on()


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
