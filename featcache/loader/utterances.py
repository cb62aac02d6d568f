"""The utterances of a dataset, from a manifest or a cache: their columns, and their
positions in each version."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from featcache.errors import (
    ArgumentError,
    FeatcacheWarning,
    ManifestError,
    MissingItemError,
    did_you_mean,
    listing,
)
from featcache.loader.cache import Cache, check_codebooks, padding_of
from featcache.loader.choices import RESERVED, Choices, read_column
from featcache.loader.corpus import Corpus
from featcache.loader.windows import Windows
from featcache.manifest.columns import TypedColumn, Types, concatenate, holding
from featcache.manifest.copies import Copies, copies_of, noise_of
from featcache.manifest.label_files import needs_columns, template_of, with_own_paths
from featcache.manifest.read import manifest_of, read_manifest
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import Manifest
from featcache.manifest.where import JoinedColumn, NoRowError, select_rows
from featcache.spec import Ints
from featcache.version.corpus import by_part_name, manifests_of_parts
from featcache.version.join import RowKeys, RowStatus, describe_changed, join, with_other_files
from featcache.version.ledger import failures_by_row

Columns = dict[str, TypedColumn]
"""Columns of utterances, by name."""

_Value = TypeVar("_Value")

ByName: TypeAlias = _Value | Mapping[str, _Value]
"""One value for all versions of a dataset, or one for each, by the versions' names."""


@dataclass(frozen=True)
class DatasetVersion:
    """A version in a dataset."""

    name: str
    """The name by which the dataset knows it."""
    cache: Cache
    codebooks: int | None = None
    """The number of codebooks to read; None for all."""
    padding_value: Any = 0
    """The value of a batch's frames beyond an utterance's end: a number, or an array
    `[*item_shape]`."""
    positions: Ints | None = None
    """The positions of the dataset's utterances in the cache, int64 `[utterances]`, -1
    if the cache lacks one; None if the dataset has the cache's utterances."""
    classes: Mapping[str, int] | None = None
    """The number of each label of events; None for labels as text."""
    is_column: bool = False
    """True if the version gives a column of the same name, and is not read itself."""

    def __post_init__(self) -> None:
        check_codebooks(self.cache.spec, self.codebooks)

    def find(self, ids: Strings) -> DatasetVersion:
        """Return the version with the positions of these utterances."""
        if ids is self.cache.ids:
            return replace(self, positions=None)
        return replace(self, positions=self.cache.index.find(ids))

    def take(self, rows: Ints) -> DatasetVersion:
        """Return the version with the positions of some rows."""
        return replace(self, positions=self.positions_of(rows))

    def positions_of(self, rows: Ints) -> Ints:
        """Return the positions of some of the dataset's rows."""
        return rows if self.positions is None else self.positions[rows]

    def values_of(self, column: NDArray[Any]) -> NDArray[Any]:
        """Select the values of the dataset's utterances from a column of the cache's."""
        return column if self.positions is None else column[self.positions]


@dataclass(frozen=True)
class Utterances:
    """Utterances in the order of a dataset."""

    source: str
    """The manifest or cache, for messages."""
    ids: Strings
    columns: Columns
    versions: list[DatasetVersion]
    """The versions; until `with_joined`, also the versions that give columns."""
    classes: dict[str, list[str]] = field(default_factory=dict)
    """The labels of each column of labels. A number in the column is a place in the list."""

    def without_missing(self, are_allowed: bool) -> tuple[Utterances, list[str]]:
        """Return the utterances that all versions have, and the ids of the others."""
        missing = np.zeros(len(self.ids), bool)
        for version in self.versions:
            if version.positions is None:
                continue
            is_lacking = version.positions < 0
            missing |= is_lacking
            if is_lacking.any() and (not are_allowed or missing.all()):
                ids = [*dict.fromkeys(self.ids.take(np.flatnonzero(is_lacking)))]
                raise MissingItemError(
                    f"{self.source}: {version.cache.missing_error(ids, len(self.ids))}"
                )
        return self._without(np.flatnonzero(missing))

    def without_short(self, windows: Windows) -> tuple[Utterances, list[str]]:
        """Return the utterances to read in windows, and the ids of those that are too short."""
        crop = windows.crop
        if crop.short == "pad":
            return self, []
        short = windows.short(
            [version.values_of(version.cache.lengths) for version in self.versions]
        )
        if len(short) and (crop.short == "error" or len(short) == len(self.ids)):
            raise ArgumentError(
                f"{self.source}: {len(short):,} of {len(self.ids):,} utterances are shorter than "
                f"the crop of {windows.window} frames: {listing(self.ids.take(short))}"
            )
        return self._without(short)

    def with_joined(self) -> Utterances:
        """Read the columns that versions give."""
        rows = np.arange(len(self.ids))
        columns = {
            version.name: read_column(version.cache, version.positions_of(rows))
            for version in self.versions
            if version.is_column
        }
        versions = [version for version in self.versions if not version.is_column]
        return replace(self, columns={**self.columns, **columns}, versions=versions)

    def with_classes(self, classes: Mapping[str, Sequence[str] | None]) -> Utterances:
        """Replace the labels of some columns by their numbers."""
        columns, labels = dict(self.columns), {}
        texts = [name for name, column in columns.items() if isinstance(column, Strings)]
        versions = {(version.is_column, version.name): version for version in self.versions}
        for name, known in classes.items():
            what = f"{self.source}: the column {name!r}"
            version = versions.get((False, name))
            if version is not None and version.cache.spec.has_labels:
                labels[name] = self._labels_of(version, known)
                numbers = {label: number for number, label in enumerate(labels[name])}
                versions[False, name] = replace(version, classes=numbers)
                continue
            column = columns.get(name)
            if not isinstance(column, Strings):
                meant = did_you_mean(name, texts)
                raise ManifestError(
                    f"{self.source}: has no column of text {name!r}{meant} for classes=; it has "
                    f"{listing(map(repr, texts)) or 'none'}"
                )
            columns[name], labels[name] = _numbered(column, known, what)
        return replace(self, columns=columns, classes=labels, versions=[*versions.values()])

    def _labels_of(self, version: DatasetVersion, known: Sequence[str] | None) -> list[str]:
        """Return the labels that events may have; by default those that occur, sorted."""
        if known is None:
            positions = version.positions_of(np.arange(len(self.ids)))
            reader = version.cache.event_reader()
            labels = map(reader.labels, positions[positions >= 0, None].tolist())
            known = sorted({*chain.from_iterable(labels)})
        return _numbered(Strings.of([]), known, str(version.cache.version.path))[1]

    def take(self, rows: Ints) -> Utterances:
        """Return the utterances of some rows."""
        return replace(
            self,
            ids=self.ids.take(rows),
            columns={name: take(column, rows) for name, column in self.columns.items()},
            versions=[version.take(rows) for version in self.versions],
        )

    def _without(self, rows: Ints) -> tuple[Utterances, list[str]]:
        if not len(rows):
            return self, []
        return self.take(np.delete(np.arange(len(self.ids)), rows)), list(self.ids.take(rows))


def versions_of(
    cache: ByName[Cache], codebooks: ByName[int] | None, padding: ByName[float | Literal["silence"]]
) -> list[DatasetVersion]:
    """List the versions of a dataset, with all their utterances; a single one is called
    `features`. Raises ArgumentError if the arguments do not fit."""
    caches = {"features": cache} if isinstance(cache, Cache) else cache
    if not isinstance(caches, Mapping) or not all(
        isinstance(opened, Cache) for opened in caches.values()
    ):
        raise ArgumentError(
            "cache is not an opened cache: give the result of featcache.open, or several by name"
        )
    if not caches:
        raise ArgumentError("cache is empty: give an opened cache, or several by name")
    codebooks_of = by_version(cache, "codebooks", codebooks)
    value_of: dict[str, float | Literal["silence"]] = by_version(cache, "padding_value", padding)
    return [
        DatasetVersion(
            name, opened, codebooks_of.get(name), padding_of(opened, value_of.get(name, 0))
        )
        for name, opened in caches.items()
    ]


def by_version(cache: ByName[Cache], what: str, value: ByName[_Value] | None) -> dict[str, _Value]:
    """Return an argument's values by the names of a dataset's versions; empty without a
    value. Raises ArgumentError for unknown names."""
    names = ["features"] if isinstance(cache, Cache) else [*cache]
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    if isinstance(cache, Cache):
        raise ArgumentError(
            f"{what} is given by name, but the dataset has one version, without a name"
        )
    unknown = [repr(name) for name in value if name not in names]
    if unknown:
        raise ArgumentError(
            f"{what} names {listing(unknown)}; the dataset's versions are {listing(names)}"
        )
    return dict(value)


@dataclass(frozen=True)
class _Reading:
    """The way in which manifests become utterances."""

    choices: Choices
    versions: Sequence[DatasetVersion]
    """The versions that are read, then the versions that give columns."""

    @classmethod
    def of(
        cls, choices: Choices, versions: Sequence[DatasetVersion] = (), check: bool = False
    ) -> _Reading:
        """Open the versions of columns, with `check` as `featcache.open` has it."""
        columns = choices.open_columns(check)
        joined = [DatasetVersion(name, cache, is_column=True) for name, cache in columns.items()]
        return cls(choices, [*versions, *joined])

    @property
    def joined(self) -> list[DatasetVersion]:
        """The versions that give columns."""
        return [version for version in self.versions if version.is_column]

    @property
    def copies(self) -> Copies:
        """The copies of each utterance: those that all versions have, in the first one's
        order; or the utterance itself."""
        if not self.choices.copies:
            return copies_of({})
        caches = [version.cache for version in self.versions if not version.is_column]
        first, *others = (copies_of(cache.config) for cache in caches)
        shared = [copy for copy in first if all(copy.suffix in other.suffixes for other in others)]
        if not shared:
            raise ArgumentError(
                "the versions have no copies in common: their configs' augment sections make "
                f"{first}"
            )
        are_noisy = any(copy.snr is not None for copy in shared)
        if are_noisy and len({noise_of(cache.config) for cache in caches}) > 1:
            raise ArgumentError(
                "copies of the same ids have different noise, or different seeds, in the versions: "
                "copies=False reads the utterances alone"
            )
        return Copies(shared)

    def utterances(self, manifest: Any) -> Utterances:
        """Read a manifest, and find its rows in the versions."""
        names = self.choices.names
        if not isinstance(manifest, Manifest):
            carry = names is None or len(names) > 0 or bool(self.choices.where)
            carry = carry or any(needs_columns(version.cache.config) for version in self.versions)
            if isinstance(manifest, (str, Path)):
                manifest = read_manifest(manifest, audio=False, carry=carry)
            else:
                manifest = manifest_of(manifest, carry=carry)
        manifest = self.selected(manifest)
        copies = self.copies
        ids, columns = _with_copies(manifest, self.choices, copies)
        of_rows, of_copies = self.keys(manifest, manifest.ids), self.keys(manifest, ids)
        rows = np.repeat(np.arange(len(manifest)), len(copies))
        versions = []
        for version in self.versions:
            if version.is_column:
                versions.append(self.compared(manifest, of_rows, version).take(rows))
            else:
                versions.append(self.compared(manifest, of_copies, version))
        return Utterances(manifest.source, ids, columns, versions)

    def keys(self, manifest: Manifest, ids: Strings) -> RowKeys:
        """Return the keys by which rows are joined: their ids alone, if changed rows are used."""
        if self.choices.on_changed == "use":
            return RowKeys.of_ids(ids)
        return RowKeys.of(manifest, ids)

    def selected(self, manifest: Manifest) -> Manifest:
        """Select the rows that `where` takes; also rows for which it depends on a version
        that lacks them, or has something else of them."""
        available = manifest.available() if self.joined else {}
        for version in self.joined:
            if version.name in available:
                raise ManifestError(
                    f"{manifest.source}: has a column {version.name!r} of its own: give that of "
                    f"{version.cache.version.path} another name"
                )
        if not self.choices.where:
            return manifest
        keys, positions = self.keys(manifest, manifest.ids), []
        for version in self.joined:
            status = _status(manifest, keys, version)
            is_known = status.present
            if self.choices.on_changed == "warn":
                is_known = status.positions >= 0
            positions.append(np.where(is_known, status.positions, -1))
        return manifest.take(self.rows(manifest, positions))

    def rows(self, manifest: Manifest, positions: Sequence[Ints]) -> Ints:
        """Return the numbers of the rows that `where` takes. The rows are at these positions
        of each version that gives a column; -1 if its value is not known."""
        where = self.choices.where
        assert where
        columns = {}
        for version, of_rows in zip(self.joined, positions, strict=True):
            values, names = read_column(version.cache, of_rows), version.cache.spec.named_units
            columns[version.name] = JoinedColumn(values, of_rows >= 0, [*names])
        return select_rows(manifest, where, self.choices.types, columns)

    def compared(
        self, manifest: Manifest, rows: RowKeys, version: DatasetVersion
    ) -> DatasetVersion:
        """Find rows. Refuse those with features of another row or file, or warn of them."""
        config = version.cache.config
        if template_of(config) is not None and rows.has_path.any():
            manifest = with_own_paths(manifest, config)
            rows = RowKeys.of(manifest, rows.ids)
        status = _status(manifest, rows, version)
        if status.changed.any():
            stored, index = version.cache.version, version.cache.index
            message = describe_changed(manifest, rows, stored, index, status)
            if self.choices.on_changed == "error":
                raise ManifestError(
                    f"{message}; or a manifest without paths, or "
                    'on_changed="use" in a dataset, takes these features all the same'
                )
            warnings.warn(message, FeatcacheWarning, stacklevel=6)
        return replace(version, positions=status.positions)


def find_utterances(
    versions: Sequence[DatasetVersion], manifest: Any, choices: Choices
) -> tuple[Utterances, list[str]]:
    """Find the utterances of a manifest, or else of the first version, with all copies, next
    to each other. Returns also the ids of skipped utterances. `FeatureDataset` lists the
    errors."""
    reading = _Reading.of(choices, versions, versions[0].cache.check)
    if isinstance(manifest, os.PathLike):
        manifest = Path(manifest)
    if manifest is None:
        utterances = _of_first(reading)
    elif any(isinstance(version.cache, Corpus) for version in versions):
        utterances = _of_parts(manifest, reading)
    else:
        utterances = reading.utterances(manifest)
    utterances = utterances.with_classes(choices.labels)
    utterances, skipped = utterances.without_missing(choices.skip_missing)
    return utterances.with_joined(), skipped


def select_utterances(manifest: Manifest, choices: Choices) -> tuple[Manifest, list[str]]:
    """Select the rows of a manifest that a dataset with these choices has. Returns also the
    ids of rows for which a version that gives a column lacks a value."""
    reading = _Reading.of(choices)
    manifest = reading.selected(manifest)
    is_missing = np.zeros(len(manifest), bool)
    keys = reading.keys(manifest, manifest.ids)
    for version in reading.joined:
        joined = reading.compared(manifest, keys, version)
        is_missing |= joined.positions_of(np.arange(len(manifest))) < 0
    lacking = manifest.ids.take(np.flatnonzero(is_missing))
    return manifest.take(np.flatnonzero(~is_missing)), [*lacking]


def _status(manifest: Manifest, rows: RowKeys, version: DatasetVersion) -> RowStatus:
    """Compare rows with the items of a version; see `RowStatus`."""
    if isinstance(version.cache, Corpus):
        raise ArgumentError(
            f"{version.cache.version.path}: is a corpus, which needs features of a corpus, and "
            "the path of manifests of parts: or give the cache of one part, corpus.part(name)"
        )
    stored, index = version.cache.version, version.cache.index
    if not rows.has_path.any():
        return join(rows, index, {})
    status = join(rows, index, failures_by_row(stored, index))
    return with_other_files(status, manifest, stored, index)


def _of_first(reading: _Reading) -> Utterances:
    caches = [version.cache for version in reading.versions]
    if isinstance(caches[0], Corpus) and not all(isinstance(cache, Corpus) for cache in caches):
        raise ArgumentError(
            "the first version is a corpus, and not all others are: give one first that is a cache"
        )
    ids, columns = _ids_of_copies(caches[0], reading)
    source = str(caches[0].version.path)
    copies = copies_of(caches[0].config)
    ids_of_rows = ids if copies.are_plain else copies.plain_ids(flat(ids))
    versions = [
        version.find(ids_of_rows if version.is_column else ids) for version in reading.versions
    ]
    utterances = Utterances(source, ids, columns, versions)
    if not reading.choices.where:
        return utterances
    if not reading.joined:
        raise ArgumentError("where= selects rows of a manifest: give a manifest too")
    rows = np.arange(len(ids))
    positions = [version.positions_of(rows) for version in versions if version.is_column]
    return utterances.take(reading.rows(Manifest.of_ids(flat(ids_of_rows), source), positions))


def _of_parts(manifest: Any, reading: _Reading) -> Utterances:
    """Read the manifests of a corpus's parts, and find each in the part of its name."""
    caches = (version.cache for version in reading.versions)
    corpora = [cache for cache in caches if isinstance(cache, Corpus)]
    if len(corpora) < len(reading.versions):
        raise ArgumentError("manifest= with a corpus: all versions must be corpora")
    if not isinstance(manifest, (str, Path)):
        remedy = "give one path: of a part's manifest, or a pattern such as 'train-*.csv'"
        raise ArgumentError(f"manifest is a {type(manifest).__name__}: with a corpus, {remedy}")
    paths = manifests_of_parts([manifest]) or by_part_name([Path(manifest)])
    parts: list[Utterances] = []
    not_selected: ManifestError | None = None
    positions: list[list[Ints]] = [[] for _ in corpora]
    for name, path in paths.items():
        pairs = zip(reading.versions, corpora, strict=True)
        in_part = [replace(version, cache=corpus.part(name)) for version, corpus in pairs]
        try:
            part = replace(reading, versions=in_part).utterances(path)
        except NoRowError as error:
            not_selected = error
            continue
        parts.append(part)
        for version, corpus, places in zip(part.versions, corpora, positions, strict=True):
            inside = version.positions_of(np.arange(len(part.ids)))
            places.append(np.where(inside < 0, inside, inside + corpus.part_of(name).start))
    if not_selected is not None and not parts:
        raise not_selected
    source = str(manifest)
    ids = Strings.concatenate([part.ids for part in parts])
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {name: _joined(source, name, [part.columns for part in parts]) for name in names}
    versions = [
        replace(version, positions=np.concatenate(places))
        for version, places in zip(reading.versions, positions, strict=True)
    ]
    return Utterances(source, ids, columns, versions)


def _joined(source: str, name: str, of_parts: Sequence[Columns]) -> TypedColumn:
    """Join a column of several manifests."""
    columns = [columns[name] for columns in of_parts if name in columns]
    if len(columns) < len(of_parts):
        raise ManifestError(
            f"{source}: not all of these manifests have a column {name!r}: leave it out of columns="
        )
    kinds = sorted({*map(holding, columns)} - {""})
    if len(kinds) > 1:
        raise ManifestError(
            f"{source}: the column {name!r} holds {kinds[0]} in some manifests, {kinds[1]} in "
            f"others: columns={{{name!r}: str}} takes text"
        )
    return concatenate(columns)


def _with_copies(manifest: Manifest, choices: Choices, copies: Copies) -> tuple[Strings, Columns]:
    """Return the ids and columns of a manifest's utterances, and of the copies of them."""
    of_copies = _columns_of_copies(copies, np.arange(len(copies)))
    names = choices.names
    if names is not None:
        of_copies = {name: column for name, column in of_copies.items() if name in names}
        names = [name for name in names if name not in of_copies]
    hidden = [name for name in of_copies if name in manifest.columns]
    if hidden:
        raise ManifestError(
            f"{manifest.source}: the column {hidden[0]!r} would hide the copies' own: rename "
            "it, leave it out of columns=, or take no copies: copies=False"
        )
    columns = _columns_of(manifest, names, choices.types)
    if copies.are_plain:
        return manifest.ids, columns
    copies.refuse_suffixed(manifest.ids, manifest.source)
    rows = np.repeat(np.arange(len(manifest)), len(copies))
    columns = {name: take(column, rows) for name, column in columns.items()}
    for name, column in of_copies.items():
        columns[name] = np.tile(column, len(manifest))
    return copies.ids(manifest.ids), columns


def _ids_of_copies(cache: Cache, reading: _Reading) -> tuple[Strings, Columns]:
    """Return the ids and columns of a cache's utterances that are copies to read."""
    available, suffixes = copies_of(cache.config), reading.copies.suffixes
    if available.are_plain:
        return cache.ids, {}
    ids = flat(cache.ids)
    numbers = available.numbers(ids)
    wanted = [number for number, suffix in enumerate(available.suffixes) if suffix in suffixes]
    rows = np.flatnonzero(np.isin(numbers, wanted))
    if not len(rows):
        raise ArgumentError(
            f"{cache.version.path}: has no plain copies: it has {listing(available.suffixes)}"
        )
    columns: Columns = {}
    if reading.choices.copies:
        columns = _columns_of_copies(available, numbers[rows])
    if len(rows) == len(ids):
        return cache.ids, columns
    return ids.take(rows), columns


def _columns_of_copies(copies: Copies, numbers: Ints) -> Columns:
    if copies.are_plain:
        return {}
    columns: Columns = {"speed": copies.speeds[numbers]}
    if not np.isnan(copies.snrs).all():
        columns["snr"] = copies.snrs[numbers]
    return columns


def _columns_of(manifest: Manifest, names: Collection[str] | None, types: Types) -> Columns:
    """Return a manifest's columns of these names, or all."""
    available = manifest.available()
    selected: Columns = {}
    for name in available if names is None else names:
        if name == "id":  # every item has it
            continue
        if name not in available:
            known = listing(map(repr, available)) or "none but id"
            meant = did_you_mean(name, available)
            raise ManifestError(f"{manifest.source}: has no column {name!r}{meant}; it has {known}")
        if name in RESERVED:
            raise ManifestError(
                f"{manifest.source}: the column {name!r} would hide the dataset's own: rename "
                "it, or leave it out of columns="
            )
        selected[name] = manifest.column(name, types)
    return selected


def _numbered(column: Strings, labels: Sequence[str] | None, what: str) -> tuple[Ints, list[str]]:
    """Return the number of each row's label, and all labels, which by default are those that
    occur, sorted. `what` names the column in messages."""
    if labels is None:
        labels = sorted(set(column))
        if labels[:1] == [""]:
            raise ManifestError(
                f"{what} is empty in some rows, which have no class: leave them out with where="
            )
    elif isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise ArgumentError(
            f"classes: {what} has {labels!r}: give a list of labels as text, or classes= of "
            "a dataset"
        )
    numbers = {label: number for number, label in enumerate(labels)}
    if len(numbers) < len(labels):
        raise ArgumentError(
            f"classes: {what} has the same label twice: {listing(map(repr, labels))}"
        )
    unknown = sorted(set(column) - numbers.keys())
    if unknown:
        raise ManifestError(
            f"{what} has labels that classes= has not: {listing(map(repr, unknown))}; leave "
            "these rows out with where=, or give the labels of both manifests to both datasets"
        )
    return np.fromiter((numbers[label] for label in column), np.int64, len(column)), list(labels)


def flat(ids: Sequence[str]) -> Strings:
    """Return ids in flat arrays; those of a corpus are put together here."""
    return ids if isinstance(ids, Strings) else Strings.of(ids)


def take(column: TypedColumn, rows: Ints) -> TypedColumn:
    """Return the values of some rows."""
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)
