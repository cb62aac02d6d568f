"""Batches made ahead of training: gathered by threads, copied to the device while it
works on the previous batch."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, repeat
from time import perf_counter
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import Subset

from featcache.device import parse_device
from featcache.errors import ArgumentError, FeatcacheError, listing, require_int
from featcache.loader.dataset import FeatureDataset
from featcache.loader.sampler import Batching, BucketBatchSampler, other_rows
from featcache.loader.shards_ahead import Reading, ShardsAhead, in_object_stores
from featcache.loader.threads import Task, Threads
from featcache.loader.transfer import Gathered, Transfer, transfer_to
from featcache.loader.utterances import ByName, DatasetVersion, by_version

_PREFETCH = 2
_PREFETCH_REQUESTS = 8
"""Batches that are prepared ahead, without local copies and with requests."""

_SHORT = 1.2e-3
"""Seconds. Handing over a batch from a thread takes 0.1 to 0.4 ms, which is more than two
threads gain if a batch takes less than this."""

_MOST_UNTIL_TRIAL = 64
"""The most batches that threads make until the iteration tries again to make one itself."""


class DataLoader:
    """The batches of a dataset, in a sampler's order, on a device; each is a dictionary,
    see `FeatureDataset`.

    Threads, and no worker processes, gather each batch straight into a reused, padded
    buffer. For a GPU, buffers are page-locked, and copied on a stream of their own.
    Features, lengths and numeric columns are tensors on the device. On the CPU, a batch's
    memory is reused once no tensor refers to it. A loop that does nothing but read there
    gathers short batches itself: handing them over would take longer.

    `DataLoader(dataset, batch_size=32)` makes its own `BucketBatchSampler`: the same
    batches on every machine, ranks, and exact resume; also without shuffling, the longest
    utterances first. The end of a pass begins the next epoch, for the next pass and for
    `state_dict`.

    Random crops follow the sampler's epoch. Simultaneous iterations do not affect each
    other, but `state_dict` and `waited` describe the latest.

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
        dataset: The dataset, or the dataset of the subset's utterances:
            `FeatureDataset.subset`.
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
        sends_requests = any(not shards.places for _, shards in in_object_stores(self._versions))
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
        self._end_epoch()  # if training has counted the batches, and has not asked for the end
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
        self._latest.ended = None

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
        self._latest.ended = None

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
        # Training holds one batch while it asks for the next.
        return transfer_to(self.device, self.prefetch + 2)

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
        are_copied = any(shards.places for _, shards in in_object_stores(self._versions))
        if are_copied and getattr(batches, "has_windows", False):
            shards = ShardsAhead(self.dataset)
            upcoming = shards.windows(map(_rows_of, batches), batches)
        needs_threads = self.device.type != "cpu" or self.transform is not None
        with Threads(self._threads, "featcache-loader") as threads:
            ahead = _Ahead(threads, needs_threads=needs_threads)

            def prepare(count: int) -> None:
                try:
                    for rows, reading in islice(upcoming, count):
                        ahead.append(partial(self._make, rows, epoch, reading))
                except Exception as error:  # noqa: BLE001 - raised in the batch's place
                    ahead.append(partial(_fail, error))

            try:
                prepare(self.prefetch)
                while ahead:
                    made = ahead.pop()
                    prepare(1)
                    progress.received += 1
                    progress.ended = None if ahead else epoch
                    # Once popped, only training refers to the batch, and frees its memory.
                    mark = made.pop()
                    batch = made.pop()
                    self._transfer.make_ready(mark, batch)
                    given = perf_counter()
                    progress.waited += given - started
                    yield batch
                    if os.getpid() != process:
                        raise FeatcacheError(
                            "an iteration cannot continue in a forked process: begin another"
                        )
                    started = perf_counter()
                    ahead.trained = started - given
                    del batch
                progress.ended = epoch
                if self._latest is progress:
                    self._end_epoch()
            finally:
                threads.cancel()
                if shards is not None:
                    shards.close()

    def _end_epoch(self) -> None:
        """Begin the next epoch if training has received all batches of this one."""
        epoch = self._latest.ended
        if epoch is not None and self._makes_batches and self.batch_sampler.epoch == epoch:
            self.batch_sampler.set_epoch(epoch + 1)

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
    ended: int | None = None
    """The epoch of the iteration, once training has received its last batch."""


class _Ahead:
    """The batches that are prepared ahead, in their order. Threads make them; or the iteration
    itself, if training would only wait, and batches are short. Both make the same batches."""

    def __init__(self, threads: Threads, *, needs_threads: bool) -> None:
        self.trained = math.inf
        """Seconds between the last two batches that training did not wait."""
        self._threads = threads
        self._tasks: deque[Task[list[Any]]] = deque()
        self._for_threads: float = math.inf if needs_threads else 0
        """The number of batches that threads make before the next trial."""
        self._until_trial = 1
        self._was_short = False
        """True if the latest batch that the iteration made was short."""

    def __len__(self) -> int:
        return len(self._tasks)

    def append(self, make: Callable[[], list[Any]]) -> None:
        """Let a thread make a batch, or leave it to `pop`."""
        task = Task(make)
        self._tasks.append(task)
        if self._for_threads or self.trained > _SHORT / 4:
            self._for_threads = max(0, self._for_threads - 1)
            self._threads.start(task)

    def pop(self) -> list[Any]:
        """Make the next batch, or wait for the thread that makes it."""
        task = self._tasks.popleft()
        if task.is_for_thread:
            return task.result()
        started = perf_counter()
        if torch.is_inference_mode_enabled():  # which threads do not inherit
            with torch.inference_mode(False):
                made = task.result()
        else:
            made = task.result()
        was_short, self._was_short = self._was_short, perf_counter() - started < _SHORT
        if self._was_short:
            self._until_trial = 1
            return made
        if was_short:  # the machine may have been busy for a moment: try again
            return made
        self._for_threads = self._until_trial
        self._until_trial = min(2 * self._until_trial, _MOST_UNTIL_TRIAL)
        for waiting in self._tasks:
            if not waiting.is_for_thread:
                self._threads.start(waiting)
        return made


def _fail(error: Exception) -> list[Any]:
    try:
        raise error
    finally:
        del error  # whose traceback holds this frame


def _rows_of(batch: Iterable[int]) -> list[int]:
    try:
        return [*batch]
    except TypeError:
        raise ArgumentError(
            f"the sampler gives {batch!r}: featcache.DataLoader needs lists of positions, which "
            "torch.utils.data.BatchSampler makes"
        ) from None
