"""The utterances of a dataset, from a manifest or a cache: their columns, and their
positions in each version."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from featcache import __version__
from featcache.errors import (
    ArgumentError,
    FeatcacheWarning,
    ManifestError,
    MissingItemError,
    did_you_mean,
    listing,
)
from featcache.loader.cache import Cache, check_codebooks, padding_of
from featcache.loader.corpus import Corpus
from featcache.loader.joined import Source, open_columns, read_column
from featcache.loader.windows import Windows
from featcache.manifest.columns import TypedColumn, Types, concatenate, holding
from featcache.manifest.copies import Copies, copies_of
from featcache.manifest.label_files import needs_columns, template_of, with_own_paths
from featcache.manifest.read import manifest_of, read_manifest
from featcache.manifest.utterances import Manifest
from featcache.manifest.where import JoinedColumn, NoRowError, Where, select_rows
from featcache.strings import Strings
from featcache.version.corpus import by_part_name, manifests_of_parts
from featcache.version.index import index_name
from featcache.version.join import RowKeys, RowStatus, describe_changed, join, with_other_files
from featcache.version.ledger import failures_by_row

Columns = dict[str, TypedColumn]
"""Columns of utterances, by name."""

Names = Collection[str] | Mapping[str, type | Source] | None
"""The columns of a manifest to take, or a mapping to their types; None for all. A mapping
also names further columns, with the versions that give them."""

Classes = str | Collection[str] | Mapping[str, Sequence[str]]
"""Columns of labels, or a mapping to the labels of each."""

OnChanged = Literal["error", "warn", "use"]
"""The treatment of rows with features of another row or file."""

_RESERVED = ("id", "ids", "features", "lengths", "crop_start", "crop_seconds")
"""The keys of items and batches."""

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
    positions: NDArray[np.int64] | None = None
    """The positions of the dataset's utterances in the cache, int64 `[utterances]`, -1
    if the cache lacks one; None if the dataset has the cache's utterances."""
    classes: Mapping[str, int] | None = None
    """The number of each label of events; None for labels as text."""

    def __post_init__(self) -> None:
        check_codebooks(self.cache.spec, self.codebooks)

    def find(self, ids: Strings) -> DatasetVersion:
        """Return the version with the positions of these utterances."""
        if ids is self.cache.ids:
            return replace(self, positions=None)
        return replace(self, positions=self.cache.index.find(ids))

    def take(self, rows: NDArray[np.int64]) -> DatasetVersion:
        """Return the version with the positions of some rows."""
        return replace(self, positions=self.positions_of(rows))

    def positions_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
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
    joined: Sequence[DatasetVersion] = ()
    """The versions that give further columns, by the columns' names."""
    classes: dict[str, list[str]] = field(default_factory=dict)
    """The labels of each column of labels. A number in the column is a place in the list."""

    def without_missing(self, are_allowed: bool) -> tuple[Utterances, list[str]]:
        """Return the utterances that all versions have, and the ids of the others."""
        missing = np.zeros(len(self.ids), bool)
        for version in (*self.versions, *self.joined):
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
        positions = np.arange(len(self.ids))
        columns = {
            version.name: read_column(version.cache, version.positions_of(positions))
            for version in self.joined
        }
        return replace(self, columns={**self.columns, **columns}, joined=())

    def with_classes(self, classes: Mapping[str, Sequence[str] | None]) -> Utterances:
        """Replace the labels of some columns by their numbers."""
        columns, labels = dict(self.columns), {}
        texts = [name for name, column in columns.items() if isinstance(column, Strings)]
        versions = {version.name: version for version in self.versions}
        for name, known in classes.items():
            what = f"{self.source}: the column {name!r}"
            if name in versions and versions[name].cache.spec.has_labels:
                labels[name] = self._labels_of(versions[name], known)
                numbers = {label: number for number, label in enumerate(labels[name])}
                versions[name] = replace(versions[name], classes=numbers)
                continue
            column = columns.get(name)
            if not isinstance(column, Strings):
                meant = did_you_mean(name, texts)
                raise ManifestError(
                    f"{self.source}: no column of text is {name!r}{meant}, for classes=; there "
                    f"are {listing(map(repr, texts)) or 'none'}"
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

    def take(self, rows: NDArray[np.int64]) -> Utterances:
        """Return the utterances of some rows."""
        return replace(
            self,
            ids=self.ids.take(rows),
            columns={name: take(column, rows) for name, column in self.columns.items()},
            versions=[version.take(rows) for version in self.versions],
            joined=[version.take(rows) for version in self.joined],
        )

    def _without(self, rows: NDArray[np.int64]) -> tuple[Utterances, list[str]]:
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
class Choices:
    """The choices about a dataset's rows and columns: arguments of `FeatureDataset`."""

    where: Where | None = None
    skip_missing: bool = False
    on_changed: OnChanged = "error"
    copies: bool = True
    columns: Names = None
    classes: Classes = ()

    def check(self) -> None:
        """Raise ArgumentError for a choice of another type."""
        where, columns, classes = self.where, self.columns, self.classes
        is_named = isinstance(classes, Collection) and all(
            isinstance(name, str) for name in classes
        )
        if not (is_named or isinstance(classes, Mapping)):
            raise ArgumentError(
                f"classes is {classes!r}: give the name of a column, or labels by column"
            )
        is_selection = isinstance(where, str | Mapping | NoneType) or callable(where)
        if isinstance(where, Mapping) and not all(isinstance(name, str) for name in where):
            is_selection = False
        if not is_selection or where == "":
            raise ArgumentError(
                f"where is {where!r}: give an expression, values of columns, or a function of a "
                """row: 'split == "train"', {"split": "train"}"""
            )
        if isinstance(columns, str) or not isinstance(columns, (Collection, NoneType)):
            raise ArgumentError(f"columns is {columns!r}: give a list of names")
        if self.on_changed not in get_args(OnChanged):
            raise ArgumentError(
                f"on_changed is {self.on_changed!r}: choose "
                f"{listing(map(repr, get_args(OnChanged)))}"
            )

    def labels(self) -> Mapping[str, Sequence[str] | None]:
        """Return the labels of each column of labels; None for those that occur."""
        if isinstance(self.classes, Mapping):
            return self.classes
        return dict.fromkeys([self.classes] if isinstance(self.classes, str) else self.classes)

    def sources(self) -> dict[str, Source]:
        """Return the versions that give columns, by the columns' names."""
        if not isinstance(self.columns, Mapping):
            return {}
        pairs = self.columns.items()
        sources = {name: value for name, value in pairs if not isinstance(value, type)}
        for name, value in sources.items():
            if name in _RESERVED or not isinstance(value, str | os.PathLike | Cache):
                raise ArgumentError(
                    f"columns: {name!r} is {value!r}: give a type, the path of a version or an "
                    f"opened one, and another name than {listing(_RESERVED)}"
                )
        return sources


@dataclass(frozen=True)
class _Reading:
    """The way in which manifests become utterances."""

    where: Where | None
    names: Collection[str] | None
    """The columns of a manifest to take; None for all."""
    types: Types
    on_changed: OnChanged
    copies: bool
    joined: Sequence[DatasetVersion]
    """The versions that give further columns, by the columns' names."""

    @classmethod
    def of(cls, choices: Choices, check: bool = False) -> _Reading:
        """Open the versions of columns, with `check` as `featcache.open` has it."""
        choices.check()
        sources = choices.sources()
        names = choices.columns
        types: dict[str, Any] = {}
        if isinstance(names, Mapping):
            types = {name: value for name, value in names.items() if name not in sources}
            names = None if sources and not types else [*types]
        types.update(dict.fromkeys(choices.labels(), str))
        caches = open_columns(sources, check)
        joined = [DatasetVersion(name, cache) for name, cache in caches.items()]
        return cls(choices.where, names, types, choices.on_changed, choices.copies, joined)

    def utterances(self, versions: Sequence[DatasetVersion], manifest: Any) -> Utterances:
        """Read a manifest, and find its rows in the versions."""
        if not isinstance(manifest, Manifest):
            carry = self.names is None or len(self.names) > 0 or bool(self.where)
            carry = carry or any(
                needs_columns(version.cache.config) for version in (*versions, *self.joined)
            )
            if isinstance(manifest, (str, Path)):
                manifest = read_manifest(manifest, audio=False, carry=carry)
            else:
                manifest = manifest_of(manifest, carry=carry)
        manifest = self.selected(manifest)
        caches = [version.cache for version in versions] if self.copies else []
        ids, columns = _with_copies(manifest, self.names, self.types, caches)
        are_refused, keys = self.on_changed == "error", self.keys(manifest, manifest.ids)
        # By map: a comprehension would be a level more for warnings, in Python 3.11.
        joined = [*map(partial(_compared, manifest, keys, are_refused), self.joined)]
        of_rows = np.repeat(np.arange(len(manifest)), len(ids) // max(1, len(manifest)))
        joined = [version.take(of_rows) for version in joined]
        keys = self.keys(manifest, ids)
        versions = [*map(partial(_compared, manifest, keys, are_refused), versions)]
        return Utterances(manifest.source, ids, columns, versions, joined)

    def keys(self, manifest: Manifest, ids: Strings) -> RowKeys:
        """Return the keys by which rows are joined: their ids alone, if changed rows are used."""
        if self.on_changed == "use":
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
        if not self.where:
            return manifest
        keys, positions = self.keys(manifest, manifest.ids), []
        for version in self.joined:
            status = _status(manifest, keys, version)
            is_known = status.present
            if self.on_changed == "warn":
                is_known = status.positions >= 0
            positions.append(np.where(is_known, status.positions, -1))
        return manifest.take(self.rows(manifest, positions))

    def rows(self, manifest: Manifest, positions: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the numbers of the rows that `where` takes. The rows are at these positions
        of each version that gives a column; -1 if its value is not known."""
        assert self.where
        columns = {}
        for version, of_rows in zip(self.joined, positions, strict=True):
            values, names = read_column(version.cache, of_rows), version.cache.spec.named_units
            columns[version.name] = JoinedColumn(values, of_rows >= 0, [*names])
        return select_rows(manifest, self.where, self.types, columns)


def find_utterances(
    versions: Sequence[DatasetVersion], manifest: Any, choices: Choices
) -> tuple[Utterances, list[str]]:
    """Find the utterances of a manifest, or else of the first version, with all copies, next
    to each other. Returns also the ids of those skipped. `FeatureDataset` lists the errors."""
    reading = _Reading.of(choices, versions[0].cache.check)
    if isinstance(manifest, os.PathLike):
        manifest = Path(manifest)
    if manifest is None:
        utterances = _of_first(versions, reading)
    elif any(isinstance(version.cache, Corpus) for version in versions):
        utterances = _of_parts(versions, manifest, reading)
    else:
        utterances = reading.utterances(versions, manifest)
    utterances = utterances.with_classes(choices.labels())
    utterances, skipped = utterances.without_missing(choices.skip_missing)
    return utterances.with_joined(), skipped


def digest_of_source(versions: Sequence[DatasetVersion], manifest: Any, choices: Choices) -> str:
    """Return a digest of the content of versions and of manifest files, by their sizes and
    times. Raises ArgumentError if other processes could not tell that theirs is the same."""
    if not isinstance(manifest, str | os.PathLike | NoneType) or callable(choices.where):
        raise ArgumentError(
            "shared_in= needs the path of a manifest, and where= as text or columns: other "
            "processes cannot compare tables or functions"
        )
    choices.check()
    joined = open_columns(choices.sources(), versions[0].cache.check)
    caches = [version.cache for version in versions] + [*joined.values()]
    # Tracks of one version have other lengths, and other values in columns.
    parts: list[Any] = [
        (index_name(cache.version, cache.index.shards), cache.track_name) for cache in caches
    ]
    files: list[Path] = []
    if manifest is not None:
        of_parts = manifests_of_parts([os.fspath(manifest)])
        files = [Path(manifest)] if of_parts is None else [*of_parts.values()]
    for file in files:
        inside = sorted(file.iterdir()) if file.is_dir() else [file]
        for path in inside:
            with suppress(FileNotFoundError):  # which reading reports
                status = path.stat()
                parts.append((str(path.absolute()), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr((__version__, parts)).encode()).hexdigest()


def select_utterances(manifest: Manifest, choices: Choices) -> tuple[Manifest, list[str]]:
    """Select the rows of a manifest that a dataset with these choices has. Returns also the
    ids of rows for which a version that gives a column lacks a value."""
    reading = _Reading.of(choices)
    manifest = reading.selected(manifest)
    is_missing = np.zeros(len(manifest), bool)
    keys = reading.keys(manifest, manifest.ids)
    for version in reading.joined:
        joined = _compared(manifest, keys, True, version)
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


def _compared(
    manifest: Manifest, rows: RowKeys, are_refused: bool, version: DatasetVersion
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
        if are_refused:
            raise ManifestError(
                f"{message}; or a manifest without paths, or "
                'on_changed="use" in a dataset, takes these features all the same'
            )
        warnings.warn(message, FeatcacheWarning, stacklevel=6)
    return replace(version, positions=status.positions)


def _of_first(versions: Sequence[DatasetVersion], reading: _Reading) -> Utterances:
    caches = [version.cache for version in (*versions, *reading.joined)]
    if isinstance(caches[0], Corpus) and not all(isinstance(cache, Corpus) for cache in caches):
        raise ArgumentError(
            "the first version is a corpus, and not all others are: give one first that is a cache"
        )
    ids, columns = _ids_of_copies(caches[: len(versions)], reading.copies)
    source = str(caches[0].version.path)
    versions = [version.find(ids) for version in versions]
    copies = copies_of(caches[0].config)
    ids_of_rows = ids if copies.are_plain else copies.plain_ids(flat(ids))
    joined = [version.find(ids_of_rows) for version in reading.joined]
    utterances = Utterances(source, ids, columns, versions, joined)
    if not reading.where:
        return utterances
    if not joined:
        raise ArgumentError("where= selects rows of a manifest: give a manifest too")
    positions = [version.positions_of(np.arange(len(ids))) for version in joined]
    return utterances.take(reading.rows(Manifest.of_ids(flat(ids_of_rows), source), positions))


def _of_parts(versions: Sequence[DatasetVersion], manifest: Any, reading: _Reading) -> Utterances:
    """Read the manifests of a corpus's parts, and find each in the part of its name."""
    all_versions = [*versions, *reading.joined]
    corpora = [version.cache for version in all_versions if isinstance(version.cache, Corpus)]
    if len(corpora) < len(all_versions) or not isinstance(manifest, (str, Path)):
        raise ArgumentError(
            "with a corpus, all versions are corpora, and manifest= is the path of "
            "manifests of parts"
        )
    paths = manifests_of_parts([manifest]) or by_part_name([Path(manifest)])
    parts: list[Utterances] = []
    not_selected: ManifestError | None = None
    positions: list[list[NDArray[np.int64]]] = [[] for _ in corpora]
    for name, path in paths.items():
        in_part = [
            replace(version, cache=corpus.part(name))
            for version, corpus in zip(all_versions, corpora, strict=True)
        ]
        of_part = replace(reading, joined=in_part[len(versions) :])
        try:
            part = of_part.utterances(in_part[: len(versions)], path)
        except NoRowError as error:
            not_selected = error
            continue
        parts.append(part)
        of_versions = zip([*part.versions, *part.joined], corpora, positions, strict=True)
        for version, corpus, of_version in of_versions:
            inside = version.positions
            assert inside is not None  # there is a manifest
            of_version.append(np.where(inside < 0, inside, inside + corpus.part_of(name).start))
    if not_selected is not None and not parts:
        raise not_selected
    source = str(manifest)
    ids = Strings.concatenate([part.ids for part in parts])
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {name: _joined(source, name, [part.columns for part in parts]) for name in names}
    together = [
        replace(version, positions=np.concatenate(of_version))
        for version, of_version in zip(all_versions, positions, strict=True)
    ]
    return Utterances(source, ids, columns, together[: len(versions)], together[len(versions) :])


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


def _with_copies(
    manifest: Manifest, names: Collection[str] | None, types: Types, caches: Sequence[Cache]
) -> tuple[Strings, Columns]:
    """Return the ids and columns of a manifest's utterances, and of the copies that all
    versions have of them."""
    copies = _common_copies(caches) if caches else copies_of({})
    of_copies = _columns_of_copies(copies, np.arange(len(copies)))
    if names is not None:
        of_copies = {name: column for name, column in of_copies.items() if name in names}
        names = [name for name in names if name not in of_copies]
    hidden = [name for name in of_copies if name in manifest.columns]
    if hidden:
        raise ManifestError(
            f"{manifest.source}: the column {hidden[0]!r} would hide the copies' own: rename "
            "it, leave it out of columns=, or take no copies: copies=False"
        )
    columns = _columns_of(manifest, names, types)
    if copies.are_plain:
        return manifest.ids, columns
    copies.refuse_suffixed(manifest.ids, manifest.source)
    rows = np.repeat(np.arange(len(manifest)), len(copies))
    columns = {name: take(column, rows) for name, column in columns.items()}
    for name, column in of_copies.items():
        columns[name] = np.tile(column, len(manifest))
    return copies.ids(manifest.ids), columns


def _ids_of_copies(caches: Sequence[Cache], copies: bool) -> tuple[Strings, Columns]:
    """Return the ids and columns of the first version's copies that all versions have."""
    first = caches[0]
    if all(copies_of(cache.config).are_plain for cache in caches):
        return first.ids, {}
    available = copies_of(first.config)
    suffixes = _common_copies(caches).suffixes if copies else [""]
    ids = flat(first.ids)
    numbers = available.numbers(ids)
    wanted = [number for number, suffix in enumerate(available.suffixes) if suffix in suffixes]
    rows = np.flatnonzero(np.isin(numbers, wanted))
    if not len(rows):
        raise ArgumentError(
            f"{first.version.path}: has no plain copies: it has {listing(available.suffixes)}"
        )
    columns = _columns_of_copies(available, numbers[rows]) if copies else {}
    if len(rows) == len(ids):
        return first.ids, columns
    return ids.take(rows), columns


def _common_copies(caches: Sequence[Cache]) -> Copies:
    """Return the copies that all versions have, in the first one's order."""
    first, *others = (copies_of(cache.config) for cache in caches)
    shared = [copy for copy in first if all(copy.suffix in other.suffixes for other in others)]
    if not shared:
        raise ArgumentError(
            f"the versions have no copies in common: their configs' augment sections make {first}"
        )
    return Copies(shared)


def _columns_of_copies(copies: Copies, numbers: NDArray[np.int64]) -> Columns:
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
        if name in _RESERVED:
            raise ManifestError(
                f"{manifest.source}: the column {name!r} would hide the dataset's own: rename "
                "it, or leave it out of columns="
            )
        selected[name] = manifest.column(name, types)
    return selected


def _numbered(
    column: Strings, labels: Sequence[str] | None, what: str
) -> tuple[NDArray[np.int64], list[str]]:
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


def take(column: TypedColumn, rows: NDArray[np.int64]) -> TypedColumn:
    """Return the values of some rows."""
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)
