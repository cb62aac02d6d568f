"""The utterances of a dataset: those of a manifest or of a cache, their columns, and
where each version has them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from featcache.errors import (
    ArgumentError,
    FeatcacheWarning,
    ManifestError,
    MissingItemError,
    listing,
)
from featcache.loader.cache import Cache
from featcache.loader.corpus import Corpus
from featcache.loader.spans import Windows, check_codebooks, check_padding
from featcache.manifest.columns import TypedColumn, booleans, concatenate, holding, numbers
from featcache.manifest.copies import Copies, copies_of
from featcache.manifest.read import manifest_of, read_manifest
from featcache.manifest.utterances import Manifest
from featcache.strings import Strings
from featcache.version.corpus import by_part_name, manifests_of_parts
from featcache.version.join import RowKeys, describe_changed, join, with_other_files
from featcache.version.ledger import failures_by_row

Columns = dict[str, TypedColumn]
"""Columns of utterances, by name."""

Names = Collection[str] | Mapping[str, type] | None
"""Which columns of a manifest to take, or also their types (`str`, `bool`, `int`, `float`);
None for all."""

Classes = str | Collection[str] | Mapping[str, Sequence[str]]
"""Columns of labels, or also the labels of each."""

OnChanged = Literal["error", "warn", "use"]
"""What to do about rows with features of another row or file."""

Types = Mapping[str, type]
"""The types that columns are to have, by name: `str`, `bool`, `int` or `float`. Others have
the types of their cells."""

Where = Mapping[str, object] | Callable[[dict[str, Any]], object]
"""Which rows of a manifest to take: values of columns, or a function of a row."""

_RESERVED = ("id", "ids", "features", "lengths")
"""The names that items and batches use themselves."""

_Value = TypeVar("_Value")

ByName: TypeAlias = _Value | Mapping[str, _Value]
"""One for a dataset's only version, or for all of them; or one for each, by the versions'
names."""


class Selection(TypedDict, total=False):
    """The arguments of `FeatureDataset` that say which utterances and which columns it
    has."""

    where: Where | None
    skip_missing: bool
    on_changed: OnChanged
    copies: bool
    columns: Names
    classes: Classes


@dataclass(frozen=True)
class DatasetVersion:
    """A version in a dataset."""

    name: str
    """The name by which the dataset knows it."""
    cache: Cache
    codebooks: int | None = None
    """How many codebooks to read; None for all."""
    padding_value: float = 0
    """The value of a batch's frames beyond an utterance's end."""
    positions: NDArray[np.int64] | None = None
    """The positions of the dataset's utterances in the cache, int64 `[utterances]`, -1
    for those that it lacks; None if they are all that it has."""

    def __post_init__(self) -> None:
        check_codebooks(self.cache.spec, self.codebooks)
        check_padding(self.cache.spec, self.padding_value)

    def find(self, ids: Strings) -> DatasetVersion:
        """The version with the positions of these utterances."""
        return replace(
            self, positions=None if ids is self.cache.ids else self.cache.index.find(ids)
        )

    def take(self, rows: NDArray[np.int64]) -> DatasetVersion:
        """The version with the positions of some of the dataset's rows."""
        return replace(self, positions=self.positions_of(rows))

    def positions_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of some of the dataset's rows."""
        return rows if self.positions is None else self.positions[rows]

    def values_of(self, column: NDArray[Any]) -> NDArray[Any]:
        """What a column of the cache's utterances has of the dataset's, `[utterances]`."""
        return column if self.positions is None else column[self.positions]


@dataclass(frozen=True)
class Utterances:
    """Some utterances, in the order of a dataset."""

    source: str
    """The manifest or the cache that they are from, for messages."""
    ids: Strings
    columns: Columns
    versions: list[DatasetVersion]
    classes: dict[str, list[str]] = field(default_factory=dict)
    """The labels of the columns that have numbers in place of them, by number."""

    def without_missing(self, are_allowed: bool) -> tuple[Utterances, list[str]]:
        """The utterances that all versions have, and the ids of the others. Raises
        MissingItemError if a version lacks utterances, which is not allowed, or all of
        them."""
        missing = np.zeros(len(self.ids), bool)
        for version in self.versions:
            if version.positions is None:
                continue
            here = version.positions < 0
            if here.any() and (not are_allowed or (missing | here).all()):
                ids = list(self.ids.take(np.flatnonzero(here)))
                raise MissingItemError(
                    f"{self.source}: {version.cache.missing_error(ids, len(self.ids))}"
                )
            missing |= here
        return self._without(np.flatnonzero(missing))

    def without_short(self, windows: Windows) -> tuple[Utterances, list[str]]:
        """The utterances that are to be read in windows, and the ids of those that are
        too short and to be dropped. Raises ArgumentError if some are too short, which the
        crop does not allow, or all are."""
        crop, count = windows.crop, len(self.ids)
        if crop.short == "pad":
            return self, []
        short = windows.short(
            [version.values_of(version.cache.lengths) for version in self.versions]
        )
        if len(short) and (crop.short == "error" or len(short) == count):
            shorter = (
                f"shorter than the crop of {windows.length} frames: {listing(self.ids.take(short))}"
            )
            raise ArgumentError(
                f"{self.source}: {len(short):,} of {count:,} utterances are {shorter}"
            )
        return self._without(short)

    def with_classes(self, classes: Mapping[str, Sequence[str] | None]) -> Utterances:
        """The utterances with numbers in place of the labels of some columns. Raises
        ManifestError if there is no such column of text; else as `_numbered`."""
        columns, labels = dict(self.columns), {}
        for name, known in classes.items():
            column = columns.get(name)
            if not isinstance(column, Strings):
                there = (
                    listing(
                        repr(name)
                        for name, column in columns.items()
                        if isinstance(column, Strings)
                    )
                    or "none"
                )
                raise ManifestError(
                    f"{self.source}: no column of text is {name!r}, for classes=; there are {there}"
                )
            columns[name], labels[name] = _numbered(
                column, known, f"{self.source}: the column {name!r}"
            )
        return replace(self, columns=columns, classes=labels)

    def _without(self, left_out: NDArray[np.int64]) -> tuple[Utterances, list[str]]:
        """All but some utterances, and the ids of these."""
        if not len(left_out):
            return self, []
        rows = np.delete(np.arange(len(self.ids)), left_out)
        columns = {name: take(column, rows) for name, column in self.columns.items()}
        versions = [version.take(rows) for version in self.versions]
        kept = replace(self, ids=self.ids.take(rows), columns=columns, versions=versions)
        return kept, list(self.ids.take(left_out))


def versions_of(
    cache: ByName[Cache], codebooks: ByName[int] | None, padding: ByName[float]
) -> list[DatasetVersion]:
    """The versions of a dataset, with all their utterances, by name, `features` for a
    single one. Raises ArgumentError if there is none, one is no opened cache, or the
    other arguments do not fit them."""
    caches = {"features": cache} if isinstance(cache, Cache) else cache
    if not isinstance(caches, Mapping) or not all(
        isinstance(each, Cache) for each in caches.values()
    ):
        raise ArgumentError(
            "cache is not an opened cache: give the result of featcache.open, or several by name"
        )
    if not caches:
        raise ArgumentError("cache is empty: give an opened cache, or several by name")
    codes, values = (
        by_version(cache, "codebooks", codebooks),
        by_version(cache, "padding_value", padding),
    )
    return [
        DatasetVersion(name, each, codes.get(name), values.get(name, 0))
        for name, each in caches.items()
    ]


def by_version(cache: ByName[Cache], what: str, value: ByName[_Value] | None) -> dict[str, _Value]:
    """An argument that may differ between the versions of a dataset, by their names;
    empty if it is not given. Raises ArgumentError if it names something that is not a
    version of the dataset."""
    names = ["features"] if isinstance(cache, Cache) else [*cache]
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    if isinstance(cache, Cache):
        raise ArgumentError(
            f"{what} is given by name, but the dataset has one version, without a name"
        )
    if unknown := [repr(name) for name in value if name not in names]:
        raise ArgumentError(
            f"{what} names {listing(unknown)}; the dataset's versions are {listing(names)}"
        )
    return dict(value)


def find_utterances(
    versions: Sequence[DatasetVersion],
    manifest: Any,
    *,
    where: Where | None = None,
    skip_missing: bool = False,
    on_changed: OnChanged = "error",
    copies: bool = True,
    columns: Names = None,
    classes: Classes = (),
) -> tuple[Utterances, list[str]]:
    """The utterances of a manifest, or else of the first version, with all copies, and
    the ids of those skipped.

    The copies of an utterance are next to each other, each with the columns of its row.
    The arguments are those of `FeatureDataset`, which lists the errors."""
    _check(where, columns, classes, on_changed)
    manifest = Path(manifest) if isinstance(manifest, os.PathLike) else manifest
    names = [classes] if isinstance(classes, str) else classes
    labels: Mapping[str, Sequence[str] | None] = (
        classes if isinstance(classes, Mapping) else dict.fromkeys(names)
    )
    types: Types = {
        **(columns if isinstance(columns, Mapping) else {}),
        **dict.fromkeys(labels, str),
    }
    caches = [version.cache for version in versions]

    def of_manifest(versions: Sequence[DatasetVersion], manifest: Any) -> Utterances:
        if not isinstance(manifest, Manifest):
            carry = columns is None or len(columns) > 0 or bool(where)
            read = (
                partial(read_manifest, audio=False)
                if isinstance(manifest, (str, Path))
                else manifest_of
            )
            manifest = read(manifest, carry=carry)
        if where:
            manifest = manifest.take(_rows_where(manifest, where, types))
        ids, all_columns = _with_copies(manifest, columns, types, caches if copies else [])
        find = partial(DatasetVersion.find, ids=ids)
        if on_changed != "use":
            find = partial(_compared, manifest, RowKeys.of(manifest, ids), on_changed == "error")
        return Utterances(manifest.source, ids, all_columns, [*map(find, versions)])

    if manifest is None:
        if where:
            raise ArgumentError("where= selects rows of a manifest: give a manifest too")
        if isinstance(caches[0], Corpus) and not all(isinstance(cache, Corpus) for cache in caches):
            raise ArgumentError(
                "the first version is a corpus, and not all others are: give one first "
                "that is a cache"
            )
        ids, own = _ids_of_copies(caches, copies)
        utterances = Utterances(
            str(caches[0].version.path), ids, own, [version.find(ids) for version in versions]
        )
    elif any(isinstance(cache, Corpus) for cache in caches):
        utterances = _of_parts(versions, manifest, of_manifest)
    else:
        utterances = of_manifest(versions, manifest)
    return utterances.with_classes(labels).without_missing(skip_missing)


def _check(where: object, columns: object, classes: object, on_changed: object) -> None:
    """Refuse, by an ArgumentError, arguments of `find_utterances` that are of other types."""
    is_named = isinstance(classes, Collection) and all(isinstance(name, str) for name in classes)
    if not (is_named or isinstance(classes, Mapping)):
        raise ArgumentError(
            f"classes is {classes!r}: give the name of a column, or labels by column"
        )
    if where is not None and not (isinstance(where, Mapping) or callable(where)):
        raise ArgumentError(
            f"where is {where!r}: give a function of a row, or values of columns: "
            f'{{"split": "train"}}'
        )
    if isinstance(columns, str) or not isinstance(columns, (Collection, NoneType)):
        raise ArgumentError(f"columns is {columns!r}: give a list of names")
    if on_changed not in get_args(OnChanged):
        raise ArgumentError(
            f"on_changed is {on_changed!r}: choose {listing(map(repr, get_args(OnChanged)))}"
        )


def _compared(
    manifest: Manifest, rows: RowKeys, are_refused: bool, version: DatasetVersion
) -> DatasetVersion:
    """As `DatasetVersion.find`; rows with features of another row or file are refused, or
    give a warning."""
    stored, index = version.cache.version, version.cache.index
    # else they are not asked for
    failures = failures_by_row(stored, index) if rows.has_path.any() else {}
    status = with_other_files(join(rows, index, failures), manifest, stored, index)
    if status.changed.any():
        message = describe_changed(manifest, rows, stored, index, status)
        if are_refused:
            way_out = (
                'a manifest without paths, or on_changed="use" in a dataset, takes these '
                "features all the same"
            )
            raise ManifestError(f"{message}; or {way_out}")
        warnings.warn(message, FeatcacheWarning, stacklevel=5)
    return replace(version, positions=status.positions)


def _of_parts(
    versions: Sequence[DatasetVersion], manifest: Any, of_manifest: Callable[..., Utterances]
) -> Utterances:
    """The utterances of the manifests of a corpus's parts, each of which is joined with
    the part of its name. Raises ArgumentError if a part of such a name is missing, or it
    is not a manifest by its path, or not all are corpora; ManifestError if the manifests'
    columns are not of the same names and types."""
    corpora = [version.cache for version in versions if isinstance(version.cache, Corpus)]
    if len(corpora) < len(versions) or not isinstance(manifest, (str, Path)):
        raise ArgumentError(
            "with a corpus, all versions are corpora, and manifest= is the path of "
            "manifests of parts"
        )
    found: list[Utterances] = []
    positions: list[list[NDArray[np.int64]]] = [[] for _ in corpora]
    for part, path in (manifests_of_parts([manifest]) or by_part_name([Path(manifest)])).items():
        of_part = [
            replace(version, cache=corpus.part(part))
            for version, corpus in zip(versions, corpora, strict=True)
        ]
        found.append(of_manifest(of_part, path))
        for version, corpus, at in zip(found[-1].versions, corpora, positions, strict=True):
            assert version.positions is not None  # there is a manifest
            inside = version.positions
            at.append(np.where(inside < 0, inside, inside + corpus.part_of(part).start))
    source, ids = str(manifest), Strings.concatenate([one.ids for one in found])
    names = dict.fromkeys(name for one in found for name in one.columns)
    columns = {name: _joined(source, name, [one.columns for one in found]) for name in names}
    joined = [
        replace(version, positions=np.concatenate(at))
        for version, at in zip(versions, positions, strict=True)
    ]
    return Utterances(source, ids, columns, joined)


def _joined(source: str, name: str, of_parts: Sequence[Columns]) -> TypedColumn:
    """A column of several manifests."""
    columns = [columns[name] for columns in of_parts if name in columns]
    if len(columns) < len(of_parts):
        raise ManifestError(
            f"{source}: not all of these manifests have a column {name!r}: leave it out of columns="
        )
    kinds = sorted({*map(holding, columns)} - {""})
    if len(kinds) > 1:
        remedy = f"columns={{{name!r}: str}} takes text"
        raise ManifestError(
            f"{source}: the column {name!r} holds {kinds[0]} in some manifests, {kinds[1]} in "
            f"others: {remedy}"
        )
    return concatenate(columns)


def _with_copies(
    manifest: Manifest, names: Names, types: Types, caches: Sequence[Cache]
) -> tuple[Strings, Columns]:
    """The ids and columns of a manifest's utterances, and of the copies that all these
    versions have of them. Raises ManifestError if an id ends in a copy's suffix, or a
    column has the name of one that copies have; ArgumentError if the versions have no
    copies in common; else as `_columns_of`."""
    copies = _common_copies(caches) if caches else copies_of({})
    of_copies = _columns_of_copies(copies, np.arange(len(copies)))
    own = {name: column for name, column in of_copies.items() if names is None or name in names}
    if hidden := [name for name in own if name in manifest.columns]:
        remedy = "rename it, leave it out of columns=, or take no copies: copies=False"
        raise ManifestError(
            f"{manifest.source}: the column {hidden[0]!r} would hide the copies' own: {remedy}"
        )
    given = None if names is None else [name for name in names if name not in own]
    columns = _columns_of(manifest, given, types)
    if copies.are_plain:
        return manifest.ids, columns
    copies.refuse_suffixed(manifest.ids, manifest.source)
    rows = np.repeat(np.arange(len(manifest)), len(copies))
    repeated = {name: take(column, rows) for name, column in columns.items()}
    return copies.ids(manifest.ids), repeated | {
        name: np.tile(column, len(manifest)) for name, column in own.items()
    }


def _ids_of_copies(caches: Sequence[Cache], copies: bool) -> tuple[Strings, Columns]:
    """The ids and columns of the first version's copies that all have. Raises
    ArgumentError if there are none."""
    first = caches[0]
    there = copies_of(first.config)
    if all(copies_of(cache.config).are_plain for cache in caches):
        return first.ids, {}
    common = _common_copies(caches)
    own_ids = flat(first.ids)
    numbers = there.numbers(own_ids)
    wanted = common.suffixes if copies else [""]
    is_wanted = np.isin(
        numbers, [number for number, suffix in enumerate(there.suffixes) if suffix in wanted]
    )
    if not is_wanted.any():
        raise ArgumentError(
            f"{first.version.path}: has no plain copies: it has {listing(there.suffixes)}"
        )
    rows = np.flatnonzero(is_wanted)
    ids = first.ids if is_wanted.all() else own_ids.take(rows)
    return ids, _columns_of_copies(there, numbers[rows]) if copies else {}


def _common_copies(caches: Sequence[Cache]) -> Copies:
    """The copies that all versions have, in the first one's order."""
    first, *others = (copies_of(cache.config) for cache in caches)
    shared = [copy for copy in first if all(copy.suffix in other.suffixes for other in others)]
    if not shared:
        raise ArgumentError(
            f"the versions have no copies in common: their configs' augment sections make {first}"
        )
    return Copies(shared)


def _columns_of_copies(copies: Copies, numbers: NDArray[np.int64]) -> Columns:
    """The columns that copies have, by their numbers: float64 `[n]` each; none if
    utterances are their only copies."""
    if copies.are_plain:
        return {}
    columns: Columns = {"speed": copies.speeds[numbers]}
    if not np.isnan(copies.snrs).all():
        columns["snr"] = copies.snrs[numbers]
    return columns


def _columns_of(manifest: Manifest, names: Names, types: Types) -> Columns:
    """A manifest's columns (those of these names), by name. Raises ManifestError if there
    is no such column, its name is one that items and batches use themselves, or its
    values are of another type than `types` says."""
    available = _available(manifest)
    selected: Columns = {}
    for name in available if names is None else names:
        if name == "id":  # which is there anyway
            continue
        if name not in available:
            there = listing(map(repr, available)) or "none but id"
            raise ManifestError(f"{manifest.source}: has no column {name!r}; it has {there}")
        if name in _RESERVED:
            what = (
                f"the column {name!r} would hide the dataset's own: rename it, or leave it "
                "out of columns="
            )
            raise ManifestError(f"{manifest.source}: {what}")
        selected[name] = _typed(manifest, name, available[name], types)
    return selected


def _rows_where(manifest: Manifest, where: Where, types: Types) -> NDArray[np.int64]:
    """The rows whose columns (or `id`) have certain values, or one of several; int64
    `[rows]`.

    Values are compared as text; 3 is also 3.0, and True also true; None is an empty cell. A
    function gets each
    row as a dictionary: `id` and all columns, with values as items have them. Raises
    ManifestError if there is no such column, no row has such a value, or no row has all
    of them."""
    if callable(where):
        return _rows_that_fit(manifest, where, types)
    kept, columns = np.ones(len(manifest), bool), {"id": manifest.ids, **_available(manifest)}
    for name, value in where.items():
        if (column := columns.get(name)) is None:
            there = listing(map(repr, columns))
            raise ManifestError(
                f"{manifest.source}: has no column {name!r} for where=; it has {there}"
            )
        texts = column if isinstance(column, Strings) else [*map(str, column.tolist())]
        values = [*value] if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        wanted = {text for value in values for text in _texts_of(value)}
        if not wanted:
            raise ManifestError(
                f"{manifest.source}: {name} has an empty list in where=, which matches no row"
            )
        found = np.fromiter((text in wanted for text in texts), bool, len(texts))
        if not found.any():
            there = listing(map(repr, sorted(set(texts))))
            raise ManifestError(
                f"{manifest.source}: no row has {name} {listing(map(str, values))}; there "
                f"are {there}"
            )
        kept &= found
    if not kept.any():
        pairs = ", ".join(f"{name} {value}" for name, value in where.items())
        raise ManifestError(f"{manifest.source}: no row has all of {pairs}")
    return np.flatnonzero(kept)


def _texts_of(value: object) -> set[str]:
    """What a value may be as text in a manifest."""
    if value is None:
        return {""}
    if isinstance(value, (bool, np.bool_)):
        return {str(value), str(value).lower(), str(value).upper()}
    if isinstance(value, (int, np.integer)):
        return {str(value), f"{value}.0"}
    return (
        {str(value), str(int(value))}
        if isinstance(value, float) and value.is_integer()
        else {str(value)}
    )


def _rows_that_fit(
    manifest: Manifest, where: Callable[[dict[str, Any]], object], types: Types
) -> NDArray[np.int64]:
    typed = {
        name: _typed(manifest, name, column, types) for name, column in _available(manifest).items()
    }
    records = records_of({"id": manifest.ids, **typed}, len(manifest))
    kept = [row for row, record in enumerate(records) if where(record)]
    if not kept:
        raise ManifestError(f"{manifest.source}: where= is true for none of {len(manifest):,} rows")
    return np.array(kept, np.int64)


def _numbered(
    column: Strings, labels: Sequence[str] | None, what: str
) -> tuple[NDArray[np.int64], list[str]]:
    """The number of each label among all labels, int64 `[rows]`, and these: by default
    those that occur, sorted. `what` is the column, for messages. Raises ManifestError if
    a row has no label, or one that is not among them; ArgumentError if `labels` are not
    different texts."""
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
    if unknown := sorted(set(column) - numbers.keys()):
        remedy = (
            "leave these rows out with where=, or give the labels of both manifests to "
            "both datasets"
        )
        raise ManifestError(
            f"{what} has labels that classes= has not: {listing(map(repr, unknown))}; {remedy}"
        )
    return np.fromiter((numbers[label] for label in column), np.int64, len(column)), list(labels)


def flat(ids: Sequence[str]) -> Strings:
    """Ids in flat arrays, as which those of a corpus are put together here."""
    return ids if isinstance(ids, Strings) else Strings.of(ids)


def take(column: TypedColumn, rows: NDArray[np.int64]) -> TypedColumn:
    """The values of some rows."""
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)


def records_of(columns: Mapping[str, TypedColumn], count: int) -> Iterator[dict[str, Any]]:
    """The rows of some columns, with Python objects as values, which are made one after
    the other."""
    values = [
        np.ascontiguousarray(each).data if isinstance(each, np.ndarray) else each
        for each in columns.values()
    ]
    rows = zip(*values, strict=True) if columns else repeat((), count)
    return (dict(zip(columns, row, strict=True)) for row in rows)


def _available(manifest: Manifest) -> dict[str, Strings | NDArray[Any]]:
    """All columns of a manifest but the ids: those with a meaning to featcache, if they
    are given, and the others."""
    available: dict[str, Strings | NDArray[Any]] = {}
    if len(manifest.paths.blob):
        available["path"] = manifest.paths
    for name, seconds in (("start", manifest.start), ("duration", manifest.duration)):
        if not np.isnan(seconds).all():
            available[name] = seconds
    if (manifest.channel >= 0).any():
        available["channel"] = manifest.channel.astype(np.int64)
    return available | manifest.columns


def _typed(manifest: Manifest, name: str, column: TypedColumn, types: Types) -> TypedColumn:
    """A column as the type that is wanted; by default with the types of its cells."""
    wanted, what = types.get(name), f"{manifest.source}: the column {name!r}"
    if wanted is str and isinstance(column, Strings):
        return column
    if wanted not in (None, bool, int, float):
        kind = getattr(wanted, "__name__", wanted)
        raise ManifestError(
            f"{what} cannot be {kind}: choose str for text columns, bool, int or float"
        )
    if wanted is None:
        return manifest.typed(name) if name in manifest.columns else column
    values: TypedColumn | None = column
    if isinstance(column, Strings):
        values = booleans(column) if wanted is bool else numbers(column)
    dtypes = {bool: "b", int: "i", float: "if"}[wanted]
    if not isinstance(values, np.ndarray) or values.dtype.kind not in dtypes:
        raise ManifestError(f"{what} should be {wanted.__name__}, but not all its values are")
    return values.astype(np.float64) if wanted is float else values
