"""The epoch of a dataset in each process."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import get_worker_info


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
