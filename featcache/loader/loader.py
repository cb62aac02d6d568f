"""Batches made ahead of training: gathered by threads, copied to the device while it works on the previous batch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import torch

from featcache.arguments import require_int
from featcache.device import parse_device
from featcache.errors import ArgumentError, FeatcacheError
from featcache.loader.dataset import FeatureDataset
from featcache.loader.transfer import Transfer, transfer_to
from featcache.loader.view import Part

__all__ = ["DataLoader"]


class DataLoader:
    """The batches of a dataset, in a sampler's order, on a device; each is a dictionary, see `FeatureDataset`.

    There is nothing to decode, so there are no worker processes: threads gather each batch straight into a reused,
    padded buffer. For a GPU, buffers are page-locked, and copied on a stream of their own. Features, lengths and
    numeric columns are tensors on the device. On the CPU, a batch's memory is reused once nothing refers to its
    tensors.

    Random crops follow the sampler's epoch. The loader can be iterated over repeatedly. Simultaneous iterations do not
    affect each other, but `state_dict` and `waited` are those of the latest.

    Args:
        dataset: what to read.
        sampler: yields a list of positions in the dataset for each batch: a `BucketBatchSampler`, a
            `torch.utils.data.BatchSampler`, or a list of lists.
        device: the device for the batches.
        prefetch: how many batches to prepare while training works on one; with as many threads, at most one per core.
        dtype: to convert features to, on the device; by default, they keep their stored dtype. With several versions, a
            dictionary by name, or one dtype for all versions that it fits: a float dtype leaves codes as they are.

    Attributes:
        dataset: as given; so are `sampler`, `device` and `prefetch`.

    Raises:
        ArgumentError: the dataset is not a `FeatureDataset`, or the arguments do not fit it.
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
            ArgumentError: the sampler keeps no state.
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

    def _new_transfer(self) -> Transfer:
        return transfer_to(self.device, self.prefetch + 2)  # training has one, and holds it while it asks

    def _stateful(self) -> Any:
        if not hasattr(self.sampler, "load_state_dict"):
            name = type(self.sampler).__name__
            raise ArgumentError(f"the sampler, a {name}, keeps no state: featcache.BucketBatchSampler does")
        return self.sampler

    def _batches(self, batches: Iterator[Iterable[int]], epoch: int, progress: _Progress) -> Iterator[dict[str, Any]]:
        started, process = perf_counter(), os.getpid()
        ahead: deque[Future[_Made]] = deque()
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
                    made = ahead.popleft().result()
                    ask(1)
                    progress.ahead -= 1
                    batch = made.handed_over(self._transfer)
                    del made  # nobody but training holds its memory
                    progress.waited += perf_counter() - started
                    yield batch
                    if os.getpid() != process:
                        raise FeatcacheError("an iteration cannot continue in a forked process: begin a new one there")
                    started = perf_counter()
                    del batch
            finally:
                for future in ahead:
                    future.cancel()

    def _make(self, rows: list[int], epoch: int) -> _Made:
        """Gather a batch and send it on its way."""
        parts, ids, carried = self.dataset.contents(rows, epoch)
        bring, move = self._transfer.bring, self._transfer.move
        features = [bring(part, self._dtypes.get(part.view.name)) for part in parts]
        lengths = [move(torch.from_numpy(part.counts)) for part in parts]
        columns = {
            name: move(column) if isinstance(column, torch.Tensor) else column for name, column in carried.items()
        }
        batch = {
            "ids": ids,
            "features": self.dataset.named(features),
            "lengths": self.dataset.named(lengths),
            **columns,
        }
        tensors = [*features, *lengths, *(column for column in columns.values() if isinstance(column, torch.Tensor))]
        return _Made(batch, tensors, self._transfer.fence())


def _dtypes(dataset: FeatureDataset, dtype: torch.dtype | Mapping[str, torch.dtype] | None) -> dict[str, torch.dtype]:
    """What to convert the versions' features to, by name. One dtype for all is for those that it can be for.

    Raises:
        ArgumentError: it is no dtype; or features cannot be converted to it without losing what they are.
    """
    dtypes = dataset.by_name("dtype", dtype)
    faults = {}
    for part in dataset.parts([]):
        name = part.view.name
        if name in dtypes and (fault := _fault(dtypes[name], part)) is not None:
            faults[name] = fault
    if faults and (isinstance(dtype, Mapping) or len(faults) == len(dtypes)):
        raise ArgumentError(next(iter(faults.values())))
    return {name: wanted for name, wanted in dtypes.items() if name not in faults}


def _fault(dtype: object, part: Part) -> str | None:
    """Why a part's features cannot be converted to a dtype."""
    if not isinstance(dtype, torch.dtype):
        return f"dtype is {dtype!r}: give one of torch's, such as torch.float32"
    spec, stored = part.view.cache.spec, part.dtype()
    if stored.kind == "f":
        if dtype.is_floating_point:
            return None
        return f"dtype is {dtype}, which would cut off fractions: these features are {stored}"
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return f"dtype is {dtype}, and these features are {spec.units}: give one of integers, such as torch.int64"
    largest = max(
        max(spec.codebook_sizes) - 1 if spec.codebook_sizes else np.iinfo(stored).max, part.view.padding_value
    )
    if largest > torch.iinfo(dtype).max:
        return f"dtype is {dtype}, which ends at {torch.iinfo(dtype).max:,}: these features go up to {largest:,}"
    return None


@dataclass
class _Progress:
    """How an iteration goes.

    Attributes:
        ahead: batches that the sampler has given, and training has not had.
        waited: seconds that training has waited.
    """

    ahead: int = 0
    waited: float = 0.0


@dataclass
class _Made:
    """A batch that may still be on its way to the device.

    Attributes:
        batch: as training gets it.
        tensors: all that are in it.
        fence: behind which they are there.
    """

    batch: dict[str, Any]
    tensors: list[torch.Tensor]
    fence: Any

    def handed_over(self, transfer: Transfer) -> dict[str, Any]:
        """The batch, ready for the caller's stream."""
        transfer.ready(self.fence, self.tensors)
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
