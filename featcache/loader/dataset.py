"""A torch dataset: the features of one version or of several, joined with the columns of a manifest."""

from __future__ import annotations

import operator
import os
import warnings
from collections import UserList
from collections.abc import Collection, Mapping, Sequence, Sized
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal, SupportsIndex, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from featcache.arguments import require_int
from featcache.errors import ArgumentError, FeatcacheWarning, ManifestError, MissingItemError, listing
from featcache.loader import perturbed
from featcache.loader.cache import Cache
from featcache.loader.columns import Column, rows_where, take
from featcache.loader.crop import Crop
from featcache.loader.view import Part, View, Views
from featcache.manifest import Manifest, read_manifest
from featcache.store.join import RowKeys, describe_changed
from featcache.strings import Strings

__all__ = ["FeatureDataset"]

_FEATURES = "features"
_ON_CHANGED = ("error", "warn", "use")
_Value = TypeVar("_Value")


class FeatureDataset(Dataset[dict[str, Any]]):
    """The utterances of a manifest, with their features from a cache; map-style.

    An item is a dictionary:

    * `id`;
    * `features`: a tensor `[frames, *item_shape]` of the stored dtype, a copy;
    * each of the manifest's columns: text, or numbers if all values of the column are; `start` and `duration` in
      seconds, NaN if not given, and `channel`, -1 if not given.

    A batch, made by `collate`, is a dictionary too:

    * `ids`: a list;
    * `features`: a tensor `[batch, frames, *item_shape]`, padded at the ends;
    * `lengths`: int64 `[batch]`, in frames;
    * the columns: lists of text, or float64 or int64 tensors `[batch]`.

    With several versions, `features` and `lengths` are dictionaries with the versions' names as keys.

    With `DataLoader(dataset, batch_size=64, collate_fn=dataset.collate)` a batch is gathered in one call, straight into
    the padded tensor. `featcache.DataLoader` does this ahead of time.

    Args:
        cache: the opened cache; or several, as a dictionary with names of your choice.
        manifest: a CSV, TSV or JSONL file with an `id` for each utterance, in the order of the dataset; audio paths are
            not needed, but rows that have one are compared with what was extracted. Without a manifest, the dataset has
            the utterances of the (first) cache, in its order.
        where: select the manifest's rows by columns: `{"split": "train"}`; a list of values matches any of them.
        columns: names of the manifest's columns to keep; by default all. A mapping also sets their types:
            `{"speaker": str, "digit": int}`.
        skip_missing: leave out utterances missing from the cache instead of raising an error; `skipped` lists them.
        on_changed: what to do about rows with a path whose features are of another row (another path, start, duration
            or channel under the same id), or of an older file while extracting the new one failed: "error" refuses
            them, "warn" takes the features and gives a `FeatcacheWarning`, "use" takes them.
        padding_value: the value of frames beyond an utterance's end; with several versions, one for all, or a
            dictionary.
        crop: read only a window of each utterance; an integer is `Crop(frames=…)`.
        codebooks: read only this many codebooks, from the first on; with several versions, a dictionary.
        copies: include all copies that the versions' configs make of each utterance, at other speeds and with noise,
            with the columns `speed` and, if there is noise, `snr` (dB; NaN for clean copies). If false, only the ids in
            the manifest.

    Attributes:
        cache: as given.
        names: of the versions; `features` for a single cache.
        columns: `[utterances]`, by name.
        skipped: ids of utterances that were left out because a version lacks them.
        dropped: ids of utterances that were left out because they are shorter than the crop.

    Raises:
        MissingItemError: the cache lacks utterances of the manifest; names up to ten, counts all, and says how many
            failed in extraction.
        ManifestError: the manifest cannot be read or has errors; or a column is missing, has another type than
            `columns` says, or has a name that items and batches use themselves; or the features of rows are of other
            rows or files, see `on_changed`: names up to ten, counts all, and says what differs.
        ArgumentError: other arguments do not fit the versions or each other; or utterances are shorter than a crop with
            `short="error"`.
    """

    def __init__(
        self,
        cache: Cache | Mapping[str, Cache],
        manifest: str | Path | Manifest | None = None,
        *,
        where: Mapping[str, object] | None = None,
        columns: Collection[str] | Mapping[str, type] | None = None,
        skip_missing: bool = False,
        on_changed: Literal["error", "warn", "use"] = "error",
        padding_value: float | Mapping[str, float] = 0,
        crop: Crop | int | None = None,
        codebooks: int | Mapping[str, int] | None = None,
        copies: bool = True,
    ) -> None:
        self.cache = cache
        caches = _by_name(cache)
        if not isinstance(manifest, (str, os.PathLike, Manifest, NoneType)):
            raise ArgumentError(f"manifest is a {type(manifest).__name__}: give a CSV, TSV or JSONL file")
        if where is not None and not isinstance(where, Mapping):
            raise ArgumentError(f'where is {where!r}: give values of columns, such as {{"split": "train"}}')
        if not isinstance(columns, (Collection, NoneType)):
            raise ArgumentError(f"columns is {columns!r}: give a list of names")
        if on_changed not in _ON_CHANGED:
            raise ArgumentError(f"on_changed is {on_changed!r}: choose {listing(map(repr, _ON_CHANGED))}")
        self.names = list(caches)
        self.skipped: list[str] = []
        self.dropped: list[str] = []
        self.columns: dict[str, Column] = {}
        self._epoch = torch.zeros((), dtype=torch.int64)
        first = next(iter(caches.values()))
        source = str(first.version.path)
        self._ids: Strings | None = None  # of a manifest, or of what is left of the cache's
        if manifest is not None:
            if not isinstance(manifest, Manifest):
                carry = columns is None or len(columns) > 0 or bool(where)
                manifest = read_manifest(manifest, audio=False, carry=carry)
            if where:
                manifest = manifest.take(rows_where(manifest, where))
            self._ids, self.columns = perturbed.of_manifest(manifest, columns, list(caches.values()), copies)
            source = manifest.source
        elif where:
            raise ArgumentError("where= selects rows of a manifest: give a manifest too")
        else:
            rows, self.columns = perturbed.of_cache(list(caches.values()), copies)
            if rows is not None:
                self._ids = first.ids.take(rows)
        ids = first.ids if self._ids is None else self._ids
        if manifest is not None and on_changed != "use":
            positions = _compared(manifest, RowKeys.of(manifest, ids), caches, on_changed == "error")
        else:
            positions = {
                name: None if self._ids is None and each is first else each.index.find(ids)
                for name, each in caches.items()
            }
        padding = self.by_name("padding_value", padding_value)
        codes = self.by_name("codebooks", codebooks)
        views = [
            View(name, each, positions[name], codes.get(name), padding.get(name, 0)) for name, each in caches.items()
        ]
        self._views = Views(views, crop if crop is None or isinstance(crop, Crop) else Crop(frames=crop))
        if self._views.crop is not None:
            with suppress(RuntimeError):  # without shared memory, workers that live on stay in the epoch they began in
                self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._leave_out_missing(skip_missing, source)
        self._leave_out_short(source)

    def __repr__(self) -> str:
        versions = ", ".join(view.cache.version.path.name for view in self._views.views)
        carried = f" with {listing(self.columns)}" if self.columns else ""
        return f"FeatureDataset({versions}: {len(self):,} utterances{carried})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lengths"}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: SupportsIndex) -> dict[str, Any]:
        try:
            (at,) = self._at([operator.index(row)]).tolist()
        except TypeError:
            raise ArgumentError(f"{row!r}: give the position of an utterance; batch takes several") from None
        parts = self.parts([at])
        columns = {
            name: column[at] if isinstance(column, Strings) else column[at].item()
            for name, column in self.columns.items()
        }
        features = self.named([part.gather()[0] for part in parts])
        return {"id": self.ids[at], "features": features, **columns}

    def __getitems__(self, rows: Sequence[int]) -> Items:
        """The items of several rows, as a list that is read when it is first looked into.

        torch's DataLoader calls this, where there is one, and hands what it returns to its `collate_fn`.
        """
        return Items(self, rows)

    @property
    def ids(self) -> Strings:
        """The utterances' ids, in the dataset's order."""
        return self._views.views[0].cache.ids if self._ids is None else self._ids

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of frames of each utterance in the first version, after cropping; int64 `[utterances]`."""
        return self._views.lengths

    @property
    def epoch(self) -> int:
        """The current epoch, from 0; random crops differ between epochs."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also for the workers of torch's DataLoader.

        `featcache.DataLoader` calls this itself. With torch's DataLoader, also in Lightning, you must call it.

        Raises:
            ArgumentError: `epoch` is not a whole number, 0 or more.
        """
        self._epoch.fill_(require_int("epoch", epoch, 0))

    def collate(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch of items: the `collate_fn` for a DataLoader. Without items, the batch is empty."""
        if isinstance(items, Items) and not items.were_read:
            return items.dataset.batch(items.rows)
        if not items:
            return self.batch([])
        rest = [{name: value for name, value in item.items() if name not in ("id", "features")} for item in items]
        features, lengths = [], []
        has_one = isinstance(self.cache, Cache)
        for view in self._views.views:
            each = [item["features"] if has_one else item["features"][view.name] for item in items]
            features.append(pad_sequence(each, batch_first=True, padding_value=view.padding_value))
            lengths.append(torch.from_numpy(np.array([len(frames) for frames in each], np.int64)))
        return {
            "ids": [item["id"] for item in items],
            "features": self.named(features),
            "lengths": self.named(lengths),
            **default_collate(rest),
        }

    def batch(self, rows: Sequence[int]) -> dict[str, Any]:
        """The batch of the given rows, gathered straight into padded tensors. Without rows, the batch is empty."""
        parts, ids, columns = self.contents(rows)
        return {
            "ids": ids,
            "features": self.named([part.gather() for part in parts]),
            "lengths": self.named([torch.from_numpy(part.counts) for part in parts]),
            **columns,
        }

    def contents(
        self, rows: Sequence[int], epoch: int | None = None
    ) -> tuple[list[Part], list[str], dict[str, list[str] | torch.Tensor]]:
        """What a batch of some rows is made of: `parts` in an epoch, ids, and columns, as lists of text or tensors."""
        at = self._at(rows)
        columns = {
            name: column.texts(at) if isinstance(column, Strings) else torch.from_numpy(column[at])
            for name, column in self.columns.items()
        }
        return self._parts(at, epoch), self.ids.texts(at), columns

    def parts(self, rows: Sequence[int], epoch: int | None = None) -> list[Part]:
        """What a batch of some rows is to hold of each version, in an epoch; by default in the dataset's."""
        return self._parts(self._at(rows), epoch)

    def by_name(self, what: str, value: _Value | Mapping[str, _Value] | None) -> dict[str, _Value]:
        """An argument that may differ from version to version, by name, for those that it is given for.

        Raises:
            ArgumentError: it names what is no version here.
        """
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.names, value)
        if isinstance(self.cache, Cache):
            raise ArgumentError(f"{what} is given by name, but the dataset has one version, without a name")
        unknown = [repr(name) for name in value if name not in self.names]
        if unknown:
            raise ArgumentError(f"{what} names {listing(unknown)}; the dataset's versions are {listing(self.names)}")
        return dict(value)

    def named(self, values: Sequence[_Value]) -> _Value | dict[str, _Value]:
        """One value for each version, as items and batches have them: by name, where several versions were given."""
        if isinstance(self.cache, Cache):
            return values[0]
        return dict(zip(self.names, values, strict=True))

    def _parts(self, at: NDArray[np.int64], epoch: int | None) -> list[Part]:
        return self._views.parts(at, self.epoch if epoch is None else epoch)

    def _at(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Some rows, counted from the first one; int64 `[rows]`.

        Raises:
            IndexError: there is no such row.
        """
        if not isinstance(rows, Sized):
            raise ArgumentError(f"rows is {rows!r}: give a list of positions in the dataset")
        at = np.asarray(rows) if len(rows) else np.empty(0, np.int64)
        if at.dtype.kind not in "iu" or at.ndim != 1:
            raise ArgumentError(f"rows are {at.dtype} {list(at.shape)}: give a list of positions in the dataset")
        outside = at[(at < -len(self)) | (at >= len(self))]
        if len(outside):
            raise IndexError(f"no row at {outside[0]}: the dataset has {len(self):,} utterances")
        return at.astype(np.int64) % len(self) if len(at) else at

    def _leave_out_missing(self, are_allowed: bool, source: str) -> None:
        """Go without the rows that a version has not, or refuse to."""
        missing = np.zeros(len(self.ids), bool)
        for view in self._views.views:
            if view.positions is None:
                continue
            here = view.positions < 0
            if here.any() and (not are_allowed or (missing | here).all()):
                ids = list(self.ids.take(np.flatnonzero(here)))
                raise MissingItemError(f"{source}: {view.cache.missing_error(ids, len(self.ids))}")
            missing |= here
        self.skipped = self._keep(~missing)

    def _leave_out_short(self, source: str) -> None:
        """Go without utterances that are shorter than the crop, or refuse to, if it says so."""
        crop = self._views.crop
        if crop is not None and crop.short != "pad" and len(short := self._views.short()):
            window, count = self._views.window, len(self.ids)
            ids = self.ids.take(short)
            if crop.short == "error" or len(short) == count:
                raise ArgumentError(
                    f"{source}: {len(short):,} of {count:,} utterances are shorter than the crop of {window} frames: "
                    f"{listing(ids)}"
                )
            kept = np.ones(count, bool)
            kept[short] = False
            self.dropped = self._keep(kept)

    def _keep(self, kept: NDArray[np.bool_]) -> list[str]:
        """Go on with these rows only; the ids of the others."""
        if kept.all():
            return []
        rows = np.flatnonzero(kept)
        left_out = list(self.ids.take(np.flatnonzero(~kept)))
        self._ids = self.ids.take(rows)
        self.columns = {name: take(column, rows) for name, column in self.columns.items()}
        self._views = self._views.only(rows)
        return left_out


def _by_name(cache: Cache | Mapping[str, Cache]) -> dict[str, Cache]:
    """The versions that were given, by name."""
    if isinstance(cache, Cache):
        return {_FEATURES: cache}
    if not isinstance(cache, Mapping) or not all(isinstance(each, Cache) for each in cache.values()):
        raise ArgumentError("cache is not an opened cache: give the result of featcache.open, or several by name")
    if not cache:
        raise ArgumentError("cache is empty: give an opened cache, or several by name")
    return dict(cache)


def _compared(
    manifest: Manifest, rows: RowKeys, caches: Mapping[str, Cache], are_refused: bool
) -> dict[str, NDArray[np.int64] | None]:
    """The positions of a manifest's rows in each version; those that have features of another row or file are refused,
    or give a warning.
    """
    positions: dict[str, NDArray[np.int64] | None] = {}
    for name, cache in caches.items():
        joined = cache.join(rows, manifest)
        positions[name] = joined.positions
        if not joined.is_changed.any():
            continue
        message = describe_changed(manifest, rows, cache.version, cache.index, joined)
        if are_refused:
            raise ManifestError(f'{message}; or on_changed="use" takes these features all the same')
        warnings.warn(message, FeatcacheWarning, stacklevel=3)
    return positions


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
