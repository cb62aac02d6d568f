"""Batches made ahead of training: gathered by threads, copied to the device while it is busy with the one before."""

from __future__ import annotations

import operator
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

from featcache.errors import ArgumentError
from featcache.loader.dataset import FeatureDataset
from featcache.loader.transfer import Transfer, transfer_to

__all__ = ["DataLoader"]


class DataLoader:
    """The batches of a dataset, in a sampler's order, on a device; each is a dictionary as `FeatureDataset` has it.

    There is nothing to decode, so there are no worker processes: threads gather each batch straight into a padded
    buffer that is used again, page-locked where it goes to a GPU, and copy it there on a stream of their own. Features,
    lengths and columns of numbers are tensors on the device. On the CPU, a batch's memory is used again as soon as
    nothing refers to its tensors any more.

    Random crops follow the sampler's epoch. The loader can be iterated over again and again; several iterations at
    once do not disturb each other, but `state_dict` and `waited` are of the latest.

    Args:
        dataset: what to read.
        sampler: gives lists of the dataset's positions, one for each batch: a `BucketBatchSampler`, a
            `torch.utils.data.BatchSampler`, or a list of lists.
        device: where batches are wanted.
        prefetch: how many batches to have ready, or under way, while training works on one; as many threads make them,
            at most one for each core.
        dtype: to convert features to, on the device; as they are stored, by default. With several versions, one for
            each that is to be converted, by name.

    Attributes:
        dataset: as given; so are `sampler`, `device` and `prefetch`.

    Raises:
        ArgumentError: the dataset is none of featcache's, or the arguments do not fit it.
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
        if not hasattr(prefetch, "__index__") or operator.index(prefetch) < 1:
            raise ArgumentError(f"prefetch is {prefetch!r}: it must be a whole number from 1 on")
        self.dataset = dataset
        self.sampler = sampler
        self.device = _device(device)
        self.prefetch = operator.index(prefetch)
        self._dtypes = dataset.by_name("dtype", dtype)
        for part in dataset.parts([]):
            _check_dtype(self._dtypes.get(part.view.name), part.dtype())
        self._threads = min(self.prefetch, len(os.sched_getaffinity(0)))
        self._transfer = self._new_transfer()
        self._latest = _Progress()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_transfer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._transfer = self._new_transfer()

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
        """Seconds that the training loop has waited for data, in the current iteration or in the last."""
        return self._latest.waited

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: other batches, and other random crops. An iteration that is under way stays in its own."""
        sampler = self._with("set_epoch")
        if sampler is not None:
            sampler.set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where training is in the epoch: behind the batches that it has had, not behind those made ahead.

        Raises:
            ArgumentError: the sampler keeps no state.
        """
        sampler = self._stateful()
        # as the sampler counts: it may be in another pass by now
        return {"sampler": sampler.state_dict(consumed=max(0, sampler.given - self._latest.ahead))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration give what was still to be seen when a state was taken; see `BucketBatchSampler`.

        Raises:
            ArgumentError: it is no such state, or the sampler keeps none.
        """
        try:
            inner = state["sampler"]
        except (KeyError, TypeError) as error:
            raise ArgumentError("this is no state of a DataLoader: give what its state_dict returned") from error
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
        started = perf_counter()
        ahead: deque[Future[_Made]] = deque()
        with ThreadPoolExecutor(self._threads, "featcache-loader") as threads:

            def ask(count: int) -> None:
                for batch in islice(batches, count):
                    progress.ahead += 1
                    ahead.append(threads.submit(self._make, _rows(batch), epoch))

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
                    started = perf_counter()
                    del batch
            finally:
                for future in ahead:
                    future.cancel()

    def _make(self, rows: list[int], epoch: int) -> _Made:
        """Gather a batch and send it on its way."""
        parts = self.dataset.parts(rows, epoch)
        bring, move = self._transfer.bring, self._transfer.move
        features = [bring(part, self._dtypes.get(part.view.name)) for part in parts]
        lengths = [move(torch.from_numpy(part.counts)) for part in parts]
        columns = {
            name: move(column) if isinstance(column, torch.Tensor) else column
            for name, column in self.dataset.columns_of(rows).items()
        }
        batch = {
            "ids": self.dataset.ids_of(rows),
            "features": self.dataset.named(features),
            "lengths": self.dataset.named(lengths),
            **columns,
        }
        tensors = [*features, *lengths, *(column for column in columns.values() if isinstance(column, torch.Tensor))]
        return _Made(batch, tensors, self._transfer.fence())


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device is {device!r}: not a torch device; use cpu, cuda, or cuda:0 and so on") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"device is {device!r}: there is none; torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def _check_dtype(dtype: object, stored: np.dtype[Any]) -> None:
    """Whether features can be converted without losing what they are.

    Raises:
        ArgumentError: they cannot; or it is no dtype of torch's.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is {dtype!r}: give one of torch's, such as torch.float32")
    if stored.kind == "f" and not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}, which would cut off fractions: these features are {stored}")


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
            f"the sampler gives {batch!r}: featcache.DataLoader takes one of batches, which gives lists of positions; "
            "torch.utils.data.BatchSampler makes them of single ones"
        ) from None
