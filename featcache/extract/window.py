"""Rows of several batches, collected by padded length until there are enough to compute together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from featcache.device import Device
from featcache.extract.rows import Row, row_extractor

Key = tuple[str, int]
"""A target's name, and a padded length."""


class Window:
    """Rows that wait to be computed. Not thread-safe.

    Args:
        device: where they will be: its type decides how many rows make a batch.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._filling: dict[Key, list[Row]] = {}
        self._ages: dict[Key, int] = {}  # the lowest number of a batch that has rows there
        self._full: deque[list[Row]] = deque()

    def __bool__(self) -> bool:
        """Whether any row waits."""
        return bool(self._full or self._filling)

    def add(self, batch: int, rows: Iterable[Row]) -> None:
        """Put rows of the batch of that number with others of their length."""
        for row in rows:
            key = row.pending.target.config.name, row.padded_length
            group = self._filling.setdefault(key, [])
            group.append(row)
            self._ages[key] = min(batch, self._ages.get(key, batch))
            if len(group) >= self._count(row):
                self._full.append(self._pop(key))

    def full(self) -> list[Row] | None:
        """The rows of a whole batch, which are then no longer here; None where there is none."""
        return self._full.popleft() if self._full else None

    def oldest(self, batch: int | None = None) -> list[Row] | None:
        """The group that holds the oldest row (of that batch), though it is not full; None where there is none."""
        key = min(self._ages, key=self._ages.__getitem__, default=None)
        if key is None or batch not in (None, self._ages[key]):
            return None
        return self._pop(key)

    def _pop(self, key: Key) -> list[Row]:
        del self._ages[key]
        return self._filling.pop(key)

    def _count(self, row: Row) -> int:
        extractor = row_extractor(row.pending.target)
        assert extractor is not None
        return extractor.rows(row.padded_length, self._device.torch_device)
