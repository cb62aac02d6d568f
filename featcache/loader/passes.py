"""The state of a pass through a dataset: its epoch, and the identity of its rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from featcache.strings import Strings


class Rows(list[int]):
    """The rows of a batch, with the epoch of its pass."""

    def __init__(self, rows: Iterable[int], epoch: int) -> None:
        super().__init__(rows)
        self.epoch = epoch


class Epoch:
    """The epoch of a dataset, for batches without an epoch. Each process has its own, also
    after a fork or unpickling. Only the workers of torch's DataLoader have the epoch of the
    process that they work for, their `leader`: in shared memory, if it `is_followed`."""

    def __init__(self, number: int, is_followed: bool, leader: torch.Tensor | None = None) -> None:
        self._is_followed, self._leader = is_followed, leader
        with torch.inference_mode(False):  # which would let nothing set it later
            self._own = torch.tensor(number, dtype=torch.int64, device="cpu")
        if is_followed:
            # Without shared memory, persistent workers stay in their first epoch.
            with suppress(RuntimeError):
                self._own.share_memory_()  # type: ignore[no-untyped-call]
            _FOLLOWED.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Epoch, (self.number, self._is_followed, self._memory)

    @property
    def number(self) -> int:
        """The epoch, from 0."""
        return int(self._memory)

    def set(self, number: int) -> None:
        """Set the epoch for this process and its workers."""
        self._leader = None
        self._own.fill_(number)

    @property
    def _memory(self) -> torch.Tensor:
        is_worker = get_worker_info() is not None
        return self._leader if is_worker and self._leader is not None else self._own


_FOLLOWED: WeakSet[Epoch] = WeakSet()


def _begin_own() -> None:
    for epoch in [*_FOLLOWED]:
        Epoch.__init__(epoch, epoch.number, True, epoch._memory)


os.register_at_fork(after_in_child=_begin_own)


class RowLengths(np.ndarray[Any, np.dtype[np.int64]]):
    """The lengths of a dataset's rows, in frames, int64 `[rows]`, with the digest of the
    rows. A selection or a sum has no digest."""

    digest = ""

    @classmethod
    def of(cls, lengths: NDArray[np.int64], digest: str) -> RowLengths:
        """Return lengths with the digest of their rows."""
        known = lengths.view(cls)
        known.digest = digest
        return known

    def __getitem__(self, at: Any) -> Any:
        return np.asarray(self)[at]

    def __reduce__(self) -> tuple[Any, ...]:
        return RowLengths.of, (np.asarray(self), self.digest)


def digest_of(ids: Sequence[Strings], row_hashes: NDArray[np.uint64]) -> str:
    """Return a digest of ids, in parts of any sizes, and hashes of sources, uint64 `[rows]`."""
    texts, lengths = hashlib.sha256(), hashlib.sha256()
    for part in ids:
        texts.update(part.utf8().data)
        lengths.update(part.byte_lengths().astype("<u4").data)
    digest = hashlib.sha256(texts.digest() + lengths.digest())
    digest.update(np.ascontiguousarray(row_hashes, "<u8").data)
    return digest.hexdigest()
