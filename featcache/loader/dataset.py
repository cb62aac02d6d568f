"""A torch dataset: a cache's features, joined with the columns of a manifest."""

from __future__ import annotations

import operator
from collections import UserList
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from featcache.errors import ManifestError, MissingItemError, listing
from featcache.loader.cache import Cache
from featcache.manifest import Manifest, read_manifest
from featcache.strings import Strings

__all__ = ["FeatureDataset"]

_OWN = ("id", "ids", "features", "lengths")


class FeatureDataset(Dataset[dict[str, Any]]):
    """The utterances of a manifest, with their features from a cache; map-style.

    An item is a dictionary:

    * `id`;
    * `features`: a tensor `[frames, *item_shape]` of the stored dtype, a copy that is the caller's own;
    * each of the manifest's columns: text, but `start` and `duration` are floats, in seconds and NaN where not
      given, and `channel` is an integer, -1 where not given.

    A batch, which `collate` makes, is a dictionary too:

    * `ids`: a list;
    * `features`: a tensor `[batch, frames, *item_shape]`, padded at the ends;
    * `lengths`: int64 `[batch]`, in frames;
    * the columns: lists of text, and float64 or int64 tensors `[batch]`.

    With `DataLoader(dataset, batch_size=64, collate_fn=dataset.collate)` a batch is gathered in one call,
    straight into the padded tensor.

    Args:
        cache: holds the features.
        manifest: a CSV, TSV or JSONL file with an `id` for each utterance, in the order that the dataset is to
            have; audio paths are not needed. Without one, the dataset is the cache's utterances in its order.
        columns: those to carry, by their names in the manifest; all of them by default.
        skip_missing: leave out the manifest's utterances that the cache has not, instead of raising; `skipped`
            tells which.
        padding_value: what a batch's frames beyond an utterance's end are filled with.

    Attributes:
        cache: as given.
        ids: the utterances' ids, in the dataset's order.
        lengths: how many frames each has; int64 `[utterances]`.
        columns: `[utterances]`, by name.
        skipped: ids of the manifest's utterances that were left out.
        padding_value: as given.

    Raises:
        MissingItemError: the manifest has utterances that the cache has not; names up to ten, says how many, and
            how many of them failed in extraction.
        ManifestError: the manifest cannot be read or has faults; or a column is not there, or has a name that
            items and batches use themselves.
    """

    def __init__(
        self,
        cache: Cache,
        manifest: str | Path | Manifest | None = None,
        *,
        columns: Collection[str] | None = None,
        skip_missing: bool = False,
        padding_value: float = 0,
    ) -> None:
        self.cache = cache
        self.padding_value = padding_value
        self.skipped: list[str] = []
        self.columns: dict[str, Strings | NDArray[Any]] = {}
        if manifest is None:
            self.ids = cache.ids
            self._positions = np.arange(len(cache))
        else:
            if not isinstance(manifest, Manifest):
                manifest = read_manifest(manifest, audio=False, carry=columns is None or len(columns) > 0)
            self.columns = _select(manifest, columns)
            self.ids = manifest.ids
            self._positions = cache.index.find(manifest.ids)
            self._leave_out(np.flatnonzero(self._positions < 0), skip_missing, manifest.source)
        self.lengths = cache.lengths[self._positions]

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, row: SupportsIndex) -> dict[str, Any]:
        row = operator.index(row)
        features, _ = self.cache.batch([self._positions[row]])
        columns = {
            name: column[row] if isinstance(column, Strings) else column[row].item()
            for name, column in self.columns.items()
        }
        return {"id": self.ids[row], "features": features[0], **columns}

    def __getitems__(self, rows: Sequence[int]) -> Items:
        """The items of several rows, as a list that is read when it is first looked into.

        torch's DataLoader calls this, where there is one, and hands what it returns to its `collate_fn`.
        """
        return Items(self, rows)

    def collate(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch of items: a DataLoader's `collate_fn`."""
        if isinstance(items, Items) and not items.were_read:
            return items.dataset._batch(items.rows)
        features = [item["features"] for item in items]
        rest = [{name: value for name, value in item.items() if name not in _OWN} for item in items]
        return {
            "ids": [item["id"] for item in items],
            "features": pad_sequence(features, batch_first=True, padding_value=self.padding_value),
            "lengths": torch.tensor([len(item) for item in features]),
            **default_collate(rest),
        }

    def _leave_out(self, rows: NDArray[np.int64], are_allowed: bool, source: str) -> None:
        """Go without the rows that the cache has not, or refuse to."""
        if not len(rows):
            return
        self.skipped = list(self.ids.take(rows))
        if not are_allowed or len(rows) == len(self.ids):
            raise MissingItemError(f"{source}: {self.cache.missing_error(self.skipped, len(self.ids))}")
        kept = np.flatnonzero(self._positions >= 0)
        self._positions = self._positions[kept]
        self.ids = self.ids.take(kept)
        self.columns = {
            name: column.take(kept) if isinstance(column, Strings) else column[kept]
            for name, column in self.columns.items()
        }

    def _batch(self, rows: Sequence[int]) -> dict[str, Any]:
        at = np.asarray(rows)
        features, lengths = self.cache.batch(self._positions[at], padding_value=self.padding_value)
        columns = {
            name: [column[row] for row in rows] if isinstance(column, Strings) else torch.from_numpy(column[at])
            for name, column in self.columns.items()
        }
        return {"ids": [self.ids[row] for row in rows], "features": features, "lengths": lengths, **columns}


class Items(UserList[dict[str, Any]]):
    """Items of a dataset, read when somebody looks into the list; `collate` need not, and gathers them instead."""

    def __init__(self, dataset: FeatureDataset, rows: Sequence[int]) -> None:
        self.dataset = dataset
        self.rows = rows

    @cached_property
    def data(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """What the list holds."""
        return [self.dataset[row] for row in self.rows]

    @property
    def were_read(self) -> bool:
        """Whether somebody has looked, and may have changed something."""
        return "data" in vars(self)


def _select(manifest: Manifest, names: Collection[str] | None) -> dict[str, Strings | NDArray[Any]]:
    """A manifest's columns (those of these names), ready to be joined with features."""
    given: dict[str, Strings | NDArray[Any]] = {}
    if len(manifest.paths.blob):
        given["path"] = manifest.paths
    if not np.isnan(manifest.start).all():
        given["start"] = manifest.start
    if not np.isnan(manifest.duration).all():
        given["duration"] = manifest.duration
    if (manifest.channel >= 0).any():
        given["channel"] = manifest.channel.astype(np.int64)
    given |= manifest.columns
    names = given if names is None else names
    for name in names:
        if name not in given:
            there = listing(map(repr, given)) or "none but id"
            raise ManifestError(f"{manifest.source}: has no column {name!r}; it has {there}")
        if name in _OWN:
            raise ManifestError(
                f"{manifest.source}: the column {name!r} would hide what the dataset itself calls so: "
                "rename it, or leave it out of columns="
            )
    return {name: given[name] for name in names}
