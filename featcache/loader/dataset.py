"""A torch dataset: the features of one version or of several, joined with the columns of
a manifest."""

from __future__ import annotations

import copy
import hashlib
import operator
import warnings
from collections import UserList
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, SupportsIndex, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from featcache.errors import MOST_COUNTED, ArgumentError, FeatcacheWarning, listing, require_int
from featcache.loader.buffers import Memory
from featcache.loader.cache import Cache, positions_in
from featcache.loader.choices import Choices, Classes, Names, OnChanged
from featcache.loader.epoch import Epoch
from featcache.loader.events import EventBatch
from featcache.loader.sampler import RowLengths, Rows
from featcache.loader.shards import Spans
from featcache.loader.shared import SharedArrays, file_of_rows, is_spawning
from featcache.loader.utterances import ByName, DatasetVersion, find_utterances, take, versions_of
from featcache.loader.windows import Crop, Windows
from featcache.manifest.columns import TypedColumn, Values
from featcache.manifest.read import Table
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import Manifest
from featcache.manifest.where import Where
from featcache.spec import Ints

_Value = TypeVar("_Value")

Move = Callable[[torch.Tensor], torch.Tensor]
"""A function that brings a tensor to a device."""

_ARRAYS = ("columns", "_ids")
"""The attributes of a dataset that spawned processes map from common memory, besides the
positions in its versions."""

_SLOW = (
    "a worker process takes longer to pass a batch on than to read it: "
    "featcache.DataLoader is about 10× as fast"
)


def _stay(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class FrameRanges(Spans):
    """The frames that a batch holds of one version."""

    version: DatasetVersion
    window: tuple[NDArray[np.float64], float] | None = None
    """Where the window of each utterance begins, and how long it is, in seconds; None for
    whole utterances."""

    @property
    def levels(self) -> Self | None:
        """The ranges, if `gather` can return levels."""
        return self if self.version.cache.spec.is_quantized else None

    def gather(self, out: Memory | None = None, raw: bool = False) -> torch.Tensor:
        """Return the padded frames, `[batch, frames, *item_shape]`; with `raw`, quantised
        frames as levels, padded with 0."""
        version = self.version
        padding_value = 0 if raw else version.padding_value
        return version.cache.gather(
            self, codebooks=version.codebooks, padding_value=padding_value, out=out, raw=raw
        )

    def read(self, gather: Callable[[Self], Any], move: Move) -> tuple[Any, torch.Tensor | None]:
        """Return the frames that `gather` makes, or the events; and their numbers, int64
        `[batch]`; None if an utterance is one vector."""
        cache, lengths = self.version.cache, None
        if cache.spec.axis.has_times:
            start, duration = self.window or (None, None)
            events = cache.event_reader().batch(
                self.positions,
                start,
                duration,
                lambda array: move(torch.from_numpy(array)),
                self.version.classes,
            )
            return events, events.lengths
        if cache.spec.axis.is_ragged:
            lengths = move(torch.from_numpy(self.counts))
        return gather(self), lengths


class FeatureDataset(Dataset[dict[str, Any]]):
    """The utterances of a manifest, with their features from a cache; map-style.

    An item is a dictionary of

    * `id`;
    * `features`: a tensor `[frames, *item_shape]` of the stored dtype, a copy;
    * the manifest's columns, with the types of their cells; `start` and `duration` in
      seconds, NaN if not given, and `channel`, -1 if not given.

    A batch, made by `collate`, is a dictionary of

    * `ids`: a list;
    * `features`: a tensor `[batch, frames, *item_shape]`, padded at the ends; vectors are
      `[batch, *item_shape]`;
    * `lengths`: int64 `[batch]`, in frames; None for vectors;
    * with a crop, `crop_start` and `crop_seconds`: where the window begins in the utterance,
      and how much of the utterance it holds, in seconds; float64 `[batch]`;
    * the columns: bool, int64 or float64 tensors `[batch]`, or lists; those of other
      versions are tensors `[batch, *item_shape]` of the stored dtype.

    With several versions, `features` and `lengths` are dictionaries by the versions' names.
    With `torch.utils.data.DataLoader(dataset, collate_fn=dataset.collate)` a batch is
    gathered straight into the padded tensor; `featcache.DataLoader` does this ahead of time.

    Args:
        cache: The opened cache; or several, as a dictionary with names of your choice.
        manifest: A manifest in any of its formats, with an `id` for each utterance, in
            the dataset's order; or a data frame of pandas or Polars, a table of Arrow, or
            a list of dictionaries. By default, the (first) cache's utterances. For a
            corpus, the paths of the manifests of its parts, as a pattern or a folder, or
            that of one part.
        padding_value: The value of frames beyond an utterance's end: a number, or "silence"
            for the frame that long silence settles on, which versions of continuous latents
            keep; one for all versions, or a dictionary.
        crop: Read only a window of each utterance; an integer is `Crop(frames=…)`.
        codebooks: Read only this many codebooks, from the first on; with several
            versions, a dictionary.
        where: Select the manifest's rows: by an expression, `'mos > 3 and split ==
            "train"'`, see docs/loader.md; by columns, `{"split": "train"}`, or a list of
            values, compared as text: 3 is also 3.0, True also true, None an empty cell; or
            by a function that gets each row as a dictionary, `id` and all columns.
        skip_missing: Leave out utterances missing from the cache instead of raising an
            error; `skipped` lists them.
        on_changed: What to do about rows whose features are of another path, start,
            duration or channel under the same id, or of an older file while extracting
            the new one failed: "error", the default, refuses them, "warn" takes the
            features and gives a `FeatcacheWarning`, "use" takes them.
        copies: By default, include all copies that the versions' configs make of each
            utterance, with the columns `speed` and, if there is noise, `snr` (dB; NaN for
            clean copies). If false, only the ids in the manifest.
        columns: Names of the manifest's columns to keep; by default all. A mapping also
            sets their types, `str`, `bool`, `int` or `float`: `{"speaker": str, "digit": int}`;
            and adds columns of other versions, by their paths or opened, which have one
            number or vector for each utterance: `{"mos": "features/dnsmos"}`. A row that
            such a version lacks is missing; one that has changed is refused. Copies have the
            value of their utterance.
        classes: The name of a column of labels, or several: they become numbers from 0,
            in the labels' order as text, and the attribute `classes` has the labels. A
            mapping gives the labels of each: `classes=train.classes`.
        shared_in: A folder of this machine, for one copy of the rows of a large manifest:
            the first process writes their ids, columns and positions to a file, and all
            processes map it. By default, each process that reads the manifest has its own
            copy. Needs the path of a manifest, and no function as `where`.

    Attributes:
        cache: As given.
        names: The versions' names; `features` for a single cache.
        versions: The versions, each with the positions of the dataset's utterances in it.
        columns: The columns `[utterances]`, by name; those of other versions `[utterances,
            *item_shape]`.
        classes: The labels of each column of `classes`: a number is a place in this list.
        skipped, dropped: The ids left out because a version lacks them, or because they
            are shorter than the crop.

    Raises:
        MissingItemError: The cache lacks utterances of the manifest; names up to ten, and
            how many failed.
        ManifestError: The manifest cannot be read or has errors; or a column is missing,
            has another type than in `columns`, labels that `classes` lacks, or a name that
            items and batches use themselves; or rows are refused, see `on_changed`.
        ArgumentError: Other arguments do not fit; or utterances are shorter than a crop
            with `short="error"`.
    """

    def __init__(
        self,
        cache: Cache | Mapping[str, Cache],
        manifest: str | Path | Manifest | Table | None = None,
        *,
        padding_value: ByName[float | Literal["silence"]] = 0,
        crop: Crop | int | None = None,
        codebooks: int | Mapping[str, int] | None = None,
        where: Where | None = None,
        skip_missing: bool = False,
        on_changed: OnChanged = "error",
        copies: bool = True,
        columns: Names = None,
        classes: Classes = (),
        shared_in: str | Path | None = None,
    ) -> None:
        self.cache = cache
        versions = versions_of(cache, codebooks, padding_value)
        self.names = [version.name for version in versions]
        self._epoch = Epoch(0, is_followed=crop is not None)
        if not isinstance(crop, Crop | NoneType):
            crop = Crop(frames=crop)
        choices = Choices(where, skip_missing, on_changed, copies, columns, classes)
        if shared_in is None:
            self._read(versions, manifest, choices, crop)
        elif shared_in == "":
            raise ArgumentError("shared_in is empty: give a folder of this machine")
        else:
            self._share(Path(shared_in), versions, manifest, choices, crop)

    def _read(
        self, versions: Sequence[DatasetVersion], manifest: Any, choices: Choices, crop: Crop | None
    ) -> None:
        """Read the manifest, and find its rows in the versions."""
        utterances, self.skipped = find_utterances(versions, manifest, choices)
        self.dropped: list[str] = []
        self._windows: Windows | None = None
        if crop is not None:
            axes = [version.cache.spec.axis for version in versions]
            lengths = [version.values_of(version.cache.lengths) for version in utterances.versions]
            longest = [int(of_version.max(initial=0)) for of_version in lengths]
            self._windows = Windows(crop, axes, longest)
            utterances, self.dropped = utterances.without_short(self._windows)
        self.columns, self.classes = utterances.columns, utterances.classes
        self.versions = utterances.versions
        # A cache's own ids are not pickled with the dataset.
        self._ids = None if utterances.ids is versions[0].cache.ids else utterances.ids

    def _share(
        self,
        folder: Path,
        versions: Sequence[DatasetVersion],
        manifest: Any,
        choices: Choices,
        crop: Crop | None,
    ) -> None:
        """Map the rows of the manifest from a file; if it is missing, read them, and write it."""
        caches = [version.cache for version in versions]
        path = file_of_rows(folder, caches, manifest, choices, [self.names, crop])

        @cache
        def read() -> dict[str, Any]:
            self._read(versions, manifest, choices, crop)
            names = ("classes", "skipped", "dropped", "_windows")
            return self._arrays() | {name: vars(self)[name] for name in names}

        try:
            shared = SharedArrays.in_file(path, read)
        except OSError as error:
            read()
            warnings.warn(
                f"{path}: {error.strerror}: this process has its own copy of {manifest}",
                FeatcacheWarning,
                stacklevel=3,
            )
            return
        self.versions = [*versions]
        self._map(shared.value())
        shared.parts = self._parts
        self._shared = shared

    def _arrays(self) -> dict[str, Any]:
        """Return what processes map of the rows. Caches are each process's own: they may be
        opened in other ways."""
        arrays = {name: vars(self)[name] for name in _ARRAYS}
        return arrays | {"of_versions": [(one.positions, one.classes) for one in self.versions]}

    def _map(self, arrays: dict[str, Any]) -> None:
        """Take mapped rows, of the versions that are set."""
        pairs = zip(self.versions, arrays.pop("of_versions"), strict=True)
        self.versions = [
            replace(version, positions=positions, classes=classes)
            for version, (positions, classes) in pairs
        ]
        vars(self).update(arrays)

    @property
    def _parts(self) -> list[object]:
        """The objects that hold the rows' arrays."""
        return [self._ids, *self.versions, *self.columns, *self.columns.values()]

    def __repr__(self) -> str:
        columns = f" with {listing(self.columns)}" if self.columns else ""
        folders = ", ".join(version.cache.version.path.name for version in self.versions)
        return f"FeatureDataset({folders}: {len(self):,} utterances{columns})"

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self)}
        for made_of_rows in ("lengths", "digest"):
            state.pop(made_of_rows, None)
        before = state.pop("_shared", None)
        if is_spawning():
            if before is None or not before.holds(self._parts):
                before = self._shared = SharedArrays.in_memory(self._arrays(), self._parts)
            for name in _ARRAYS:
                state.pop(name)
            state["versions"] = [replace(version, positions=None) for version in self.versions]
            state["_mapped"] = before
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        mapped = state.pop("_mapped", None)
        vars(self).update(state)
        if mapped is not None:
            self._map(mapped)

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        vars(made).update(self.__getstate__(), _epoch=copy.copy(self._epoch))
        return made

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: SupportsIndex) -> dict[str, Any]:
        try:
            rows = self.rows_at([operator.index(row)])
        except TypeError:
            raise ArgumentError(
                f"{row!r}: give the position of an utterance; dataset.batch(range(3)) reads several"
            ) from None
        return self.item_in(self.epoch, rows)

    def item_in(self, epoch: int, row: Ints) -> dict[str, Any]:
        """Return the item of a row, int64 `[1]`, in an epoch."""
        position = int(row[0])
        all_ranges = self.frame_ranges(row, epoch)
        features = [
            ranges.read(lambda ranges: ranges.gather()[0], _stay)[0] for ranges in all_ranges
        ]
        item = Item({"id": self.ids[position], "features": self.named(features)})
        for name, column in self.columns.items():
            value = column[position]
            if isinstance(value, np.generic):
                value = value.item()
            elif isinstance(value, np.ndarray):
                value = torch.from_numpy(value.copy())
            item[name] = value
        times = self._crop_times(all_ranges)
        item.update((name, float(of_row[0])) for name, of_row in times.items())
        return item

    def __getitems__(self, rows: Sequence[int]) -> Items:
        """Return the items of several rows; torch's DataLoader calls this for its
        `collate_fn`."""
        return Items.of(self, rows)

    @property
    def ids(self) -> Strings:
        """The utterances' ids, in the dataset's order."""
        if self._ids is not None:
            return self._ids
        return self.versions[0].cache.ids

    @cached_property
    def lengths(self) -> RowLengths:
        """The number of frames of each utterance in the first version, after cropping;
        int64 `[utterances]`."""
        lengths = self.versions[0].values_of(self.versions[0].cache.lengths)
        if self._windows is not None:
            lengths = np.minimum(lengths, self._windows.length)
        return RowLengths.of(lengths, self.digest)

    @cached_property
    def digest(self) -> str:
        """A hash of the utterances' ids, in their order, and of what each was extracted from."""
        ids, row_hashes = self.versions[0].cache.identity()
        texts, lengths = hashlib.sha256(), hashlib.sha256()
        for part in ids if self._ids is None else [self._ids]:
            texts.update(part.utf8().data)
            lengths.update(part.byte_lengths().astype("<u4").data)
        digest = hashlib.sha256(texts.digest() + lengths.digest())
        hashes = self.versions[0].values_of(row_hashes)
        digest.update(np.ascontiguousarray(hashes, "<u8").data)
        return digest.hexdigest()

    @property
    def is_cropped(self) -> bool:
        """True if only a window of each utterance is read."""
        return self._windows is not None

    def subset(self, rows: Sequence[int] | NDArray[Any]) -> Self:
        """Return the dataset of some rows, in their order, such as a fold, with its own epoch.
        Unlike `torch.utils.data.Subset(dataset, rows)`, it has `ids`, `lengths`, `columns` and
        `collate`.

        Args:
            rows: Positions in the dataset, which may repeat; negative ones count from the
                end. For a mask, give `numpy.flatnonzero(mask)`.

        Raises:
            IndexError: There is no such row.
            ArgumentError: They are no positions.
        """
        positions = self.rows_at(rows)
        part = copy.copy(self)
        part._ids = self.ids.take(positions)
        part.columns = {name: take(column, positions) for name, column in self.columns.items()}
        part.versions = [version.take(positions) for version in self.versions]
        return part

    @property
    def shards(self) -> Ints:
        """The number of each utterance's shard in the first version, from 0; int64
        `[utterances]`."""
        return self.versions[0].values_of(np.asarray(self.versions[0].cache.index.shard))

    @property
    def epoch(self) -> int:
        """The current epoch, from 0; random crops differ between epochs."""
        return self._epoch.number

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also for the workers of torch's DataLoader. Call it before each pass,
        except with `featcache.DataLoader`, or a `BucketBatchSampler` whose epoch is set."""
        self._epoch.set(require_int("epoch", epoch, 0, MOST_COUNTED))

    def epoch_of(self, rows: Sequence[int]) -> int:
        """Return the epoch in which the rows of a batch are read."""
        return rows.epoch if isinstance(rows, Rows) else self.epoch

    def collate(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch of items: the `collate_fn` for a DataLoader.

        In a worker process of torch's DataLoader, it gives a `FeatcacheWarning` if the
        items are unchanged: passing them on takes longer than reading them."""
        # Items that were not looked at are unchanged.
        if isinstance(items, Items) and "data" not in vars(items):
            worker = get_worker_info()
            if worker is not None and worker.id == 0:
                warnings.warn(_SLOW, FeatcacheWarning, stacklevel=2)
            return items.dataset.batch(items.rows)
        if not items:
            return self.batch([])
        others = [dict(item) for item in items]
        ids = [item.pop("id") for item in others]
        of_items = [item.pop("features") for item in others]
        lists = {
            name: [item.pop(name) for item in others]
            for name, column in self.columns.items()
            if isinstance(column, Values) and name in items[0]
        }
        collated = []
        for version in self.versions:
            frames = of_items
            if not isinstance(self.cache, Cache):
                frames = [by_name[version.name] for by_name in of_items]
            collated.append(_collated(frames, version))
        features, lengths = (self.named(values) for values in zip(*collated, strict=True))
        batch = {"ids": ids, "features": features, "lengths": lengths}
        return {**batch, **lists, **default_collate(others)}

    def batch(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the batch of rows, gathered straight into padded tensors."""
        return self.batch_in(self.epoch_of(rows), rows)

    def batch_in(
        self,
        epoch: int,
        rows: Sequence[int],
        gather: Callable[[FrameRanges], torch.Tensor] = FrameRanges.gather,
        move: Move = _stay,
    ) -> dict[str, Any]:
        """Return the batch of rows in an epoch: `gather` makes the padded frames, and `move`
        takes all other tensors to their device."""
        positions = self.rows_at(rows)
        columns: dict[str, Any] = {}
        for name, column in self.columns.items():
            columns[name] = cells_of(column, positions)
            if isinstance(columns[name], np.ndarray):
                columns[name] = move(torch.from_numpy(columns[name]))
        all_ranges = self.frame_ranges(positions, epoch)
        times = self._crop_times(all_ranges)
        columns |= {name: move(torch.from_numpy(of_rows)) for name, of_rows in times.items()}
        read = [ranges.read(gather, move) for ranges in all_ranges]
        features, lengths = (self.named(values) for values in zip(*read, strict=True))
        ids = self.ids.texts(positions)
        return {"ids": ids, "features": features, "lengths": lengths, **columns}

    def named(self, values: Sequence[_Value]) -> _Value | dict[str, _Value]:
        """Return one value for each version, by name if the versions were given by name."""
        if isinstance(self.cache, Cache):
            return values[0]
        return dict(zip(self.names, values, strict=True))

    def frame_ranges(self, rows: Ints, epoch: int) -> list[FrameRanges]:
        """List the frames of some rows in an epoch, for each version."""
        positions = [version.positions_of(rows) for version in self.versions]
        lengths = [
            version.cache.index.num_frames[of_version]
            for version, of_version in zip(self.versions, positions, strict=True)
        ]
        firsts, window = [np.zeros(len(rows), np.int64)] * len(lengths), None
        if self._windows is not None:
            firsts, lengths = self._windows.ranges(lengths, positions[0], epoch)
            window = self._windows.times(firsts)
        return [
            FrameRanges(*columns, window)
            for columns in zip(positions, firsts, lengths, self.versions, strict=True)
        ]

    def _crop_times(self, ranges: Sequence[FrameRanges]) -> dict[str, NDArray[np.float64]]:
        """Return where each row's window begins in its utterance, and how much of the
        utterance it holds, in seconds; nothing without a crop."""
        window = ranges[0].window
        if self._windows is None or window is None:
            return {}
        seconds = self._windows.seconds([of_version.counts for of_version in ranges])
        return {"crop_start": window[0], "crop_seconds": seconds}

    def rows_at(self, rows: Sequence[int] | NDArray[Any]) -> Ints:
        """Count rows from the first row on. Raises IndexError if there is no such row."""
        return positions_in(
            "rows", rows, len(self), "the dataset", "a list of positions in the dataset"
        )


def cells_of(column: TypedColumn, rows: Ints) -> NDArray[Any] | list[Any]:
    """Return the values of some rows of a column: numbers as an array, others as a list."""
    if isinstance(column, np.ndarray):
        return column[rows]
    return column.listed(rows) if isinstance(column, Values) else column.texts(rows)


def _collated(frames: Sequence[Any], version: DatasetVersion) -> tuple[Any, torch.Tensor | None]:
    """Return the frames or events of a version in several items as those of a batch, and
    their numbers."""
    axis = version.cache.spec.axis
    if axis.has_times:
        events = EventBatch.joined(frames)
        return events, events.lengths
    if not axis.is_ragged:
        return torch.stack([*frames]), None
    padded = pad_sequence([*frames], batch_first=True)
    value = torch.as_tensor(version.padding_value, dtype=padded.dtype, device=padded.device)
    for row, of_row in zip(padded, frames, strict=True):
        row[len(of_row) :] = value
    return padded, torch.tensor([*map(len, frames)], device="cpu")


class Item(dict[str, Any]):
    """An item of a dataset. torch's default `collate_fn` knows it by its class."""


def _stacked(items: Sequence[Item], *, collate_fn_map: Any) -> Any:
    try:
        return collate([dict(item) for item in items], collate_fn_map=collate_fn_map)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise ArgumentError(
            "features differ in length, and torch does not pad: give its DataLoader "
            "collate_fn=dataset.collate"
        ) from None


default_collate_fn_map[Item] = _stacked


class Items(UserList[dict[str, Any]]):
    """Items of a dataset, read at the first look into the list, unless `collate` gathers them.
    Slices and sums hold items that were read."""

    dataset: FeatureDataset
    rows: Sequence[int]

    @classmethod
    def of(cls, dataset: FeatureDataset, rows: Sequence[int]) -> Self:
        """Return the unread items of some rows."""
        items = cls.__new__(cls)
        items.dataset, items.rows = dataset, rows
        return items

    @cached_property
    def data(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The items."""
        epoch = self.dataset.epoch_of(self.rows)
        rows = self.dataset.rows_at(self.rows)
        return [self.dataset.item_in(epoch, row[None]) for row in rows]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.data,)

    __copy__ = UserList.copy
