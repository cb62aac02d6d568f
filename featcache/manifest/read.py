"""Reads a manifest, and reports every fault at once.

In memory, it may be a data frame of pandas or Polars, a table of Arrow, or a list of
dictionaries. None of these packages is imported. All their tables have `len`, and give
ranges of rows, columns by name, and lists of a column's values, under names that differ
little."""

from __future__ import annotations

import errno
import math
import os
import re
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from featcache import trust
from featcache.errors import ArgumentError, ManifestError, listing, refuse_url
from featcache.manifest.audio_locations import Url, as_root, is_audio_url, is_command
from featcache.manifest.columns import GrowingValues, Values, carried
from featcache.manifest.formats import FORMATS, format_of, tables
from featcache.manifest.formats.source import (
    ROWS_PER_BATCH,
    Batch,
    Cells,
    Faults,
    Rows,
    Source,
    open_source,
)
from featcache.manifest.formats.toolkits import BARS
from featcache.manifest.segments import SegmentColumns
from featcache.manifest.utterances import (
    COLUMNS,
    LONGEST,
    SPELLINGS,
    START,
    Column,
    Manifest,
    default_id,
    path_or_command,
    refuse_secrets,
)
from featcache.strings import GrowingStrings


def read_manifest(
    source: str | Path,
    *,
    root: str | Path | None = None,
    audio: bool = True,
    carry: bool = True,
    format: str | None = None,  # noqa: A002
    values: Mapping[str, str] | None = None,
    allow_commands: bool = False,
    allow_queries: bool = False,
) -> Manifest:
    """Read and check a manifest.

    Args:
        source: A file or a folder in any of the formats of docs/manifest.md, or `-` for
            standard input. A file may be compressed by gzip.
        root: What relative paths are relative to, a folder or a URL such as
            `s3://bucket/corpus`; by default what the manifest says, or the manifest
            itself if it is a folder, or its folder; for standard input the current one.
        audio: Whether paths are required. Ids always are, but paths stand for them.
        carry: Whether to keep the columns that an `Utterance` does not have.
        format: The name of the format, one of `featcache.manifest.formats.FORMATS`; by
            default it is recognised.
        values: What stands for the placeholders in a table of SpeechBrain's, by name,
            such as `data_root`.
        allow_commands: Whether a path may be a command that prints audio, as in Kaldi's
            `wav.scp`: text that ends in `|`. Whatever decodes the manifest's audio in
            this process then runs them, as the user that it runs as.
        allow_queries: Whether URLs may have a query or a fragment (`?id=7`). They are
            stored in the cache and shown, so they must give access to nothing. Where
            paths are not required, they are always allowed.

    Raises:
        ManifestError: It cannot be read, has faults, or fits several formats. The message
            lists the first 20 faults.
        ArgumentError: The manifest is a URL, the root one that has a secret in it, or
            there is no such format.
        MissingDependencyError: Parquet needs pyarrow.
    """
    refuse_url("the manifest", source)
    if root is not None and not is_audio_url(str(root)):
        refuse_url("root", root)
    name = "<stdin>" if str(source) == "-" else str(source)
    if "\0" in name:
        raise ManifestError(f"{name!r}: cannot be read: no path has a NUL in it")
    try:
        source = _table_of(source, format)
        name = name if source == "-" else str(source)
        allowed = {"allow_commands": allow_commands, "allow_queries": allow_queries}
        with open_source(
            source, given_root=root, values=values or {}, audio=audio, carry=carry, **allowed
        ) as opened:
            kind = format_of(opened, format)
            columns, others, places = gather(FORMATS[kind].read(opened), opened)
            recognised = (
                f"read as {kind}" if format is None and kind not in tables.PLAIN.values() else ""
            )
            said = ", ".join(
                filter(None, [recognised, "" if opened.has_ids else "paths stand for ids"])
            )
            if said and places:
                opened.notes.insert(0, said)
            if format is not None and not places:
                opened.faults.raise_first(
                    f"not one row is as --format {format} has them; without it, it is recognised"
                )
    except ManifestError as error:
        raise ManifestError(f"{name}: {error}") from error
    except (
        OSError,
        EOFError,
        zlib.error,
    ) as error:  # the latter two come from a gzip file that is cut off or damaged
        inside = getattr(error, "filename", None)
        where = f": {inside}" if isinstance(inside, str) and inside != name else ""
        what = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            what = f"{what} for a copy of the pipe: set TMPDIR to another folder"
        if "_OP_" in name:
            what = (
                f"{what}: NeMo has a range for _OP_ … _CL_: as 'manifest_*.json', quoted, "
                "they are a corpus"
            )
        raise ManifestError(f"{name}{where}: cannot be read: {what}") from error
    if kind == "folder" and not places and not opened.faults.count and _is_cache(opened):
        raise ManifestError(
            f"{name}: is a cache, not a manifest: give the manifest that it was extracted from"
        )
    return checked_manifest(opened, columns, others, places, kind)


def checked_manifest(
    reading: Source,
    columns: dict[str, Any],
    others: dict[str, Values],
    places: array[int],
    kind: str,
) -> Manifest:
    """The manifest of what `gather` has returned; a ManifestError if there were faults,
    or two rows have one id."""
    faults = reading.faults
    if not places and not faults.count:
        what = "there are no audio files below it" if kind == "folder" else "there are no rows"
        faults.add(0, "; ".join([what, *reading.notes]))
    ids, paths = columns["id"], columns["path"]
    remedy = "" if reading.has_ids else ": paths stand for ids, so add a column id"
    faults.add_repeated(ids, places, remedy)
    faults.raise_if_any()
    if reading.allow_commands and re.search(rb"\|", paths.blob.data):
        trust.allow_commands(path for path in paths if is_command(path))
    folder = as_root(
        str((reading.root or reading.folder) if reading.given_root is None else reading.given_root)
    )
    if isinstance(folder, Url):  # relative paths may be secrets as the ends of URLs
        faults.parsed(
            places,
            "path ",
            lambda path: refuse_secrets(f"{folder}/{path}", reading.allow_queries),
            paths,
        )
        faults.raise_if_any()
    segments = paths, columns["start"], columns["duration"], columns["channel"]
    _tell_of_unread_times(SegmentColumns(*segments), places, reading)
    faults.raise_if_any()
    root = folder if isinstance(folder, Url) else folder.absolute()
    notes = tuple(f"{reading.name}: {note}" for note in reading.notes)
    texts = {name: values.texts for name, values in others.items()}
    kinds = {name: values.kinds for name, values in others.items()}
    placeholders = frozenset(reading.placeholders)
    return Manifest(*segments, reading.name, root, ids, texts, kind, notes, placeholders, kinds)


def _tell_of_unread_times(segments: SegmentColumns, places: Any, reading: Source) -> None:
    """Tell of columns that may say where rows begin and end. It is a fault if two of them
    do, and rows read the same of a file."""
    unread = [name for name, has_numbers in reading.unread.items() if has_numbers]
    if not unread:
        return
    what = (
        f"{listing(map(repr, unread))} may say where rows begin and end, and cannot be read: "
        "name them start and end, in seconds, or rename what says something else"
    )
    again = segments.read_again()
    if len(again) and len(unread) > 1 and reading.audio:
        reading.faults.add(places[again[1]], f"reads what another row reads: {what}")
    else:
        reading.note(what)


def _table_of(source: str | Path, format: str | None) -> str | Path:  # noqa: A002
    """The list in a folder as LJSpeech is, with `metadata.csv` beside `wavs`; otherwise
    the manifest itself."""
    table = Path(source, "metadata.csv")
    if not (table.is_file() and table.with_name("wavs").is_dir()):
        return source
    if format is None:
        with open_source(table) as opened:
            format = format_of(opened)  # noqa: A001
    return table if format in BARS else source


def _is_cache(folder: Source) -> bool:
    """Whether a folder without audio is a cache, a version or a corpus of caches."""
    inside = [
        folder.names.keys(),
        *(frozenset(os.listdir(folder.path / name)) for name in folder.folders),
    ]
    return "parts" in folder.folders or any({"zarr.json", "shards"} <= names for names in inside)


def gather(
    found: Iterable[Batch], source: Source
) -> tuple[dict[str, Any], dict[str, Values], array[int]]:
    """Each column that an `Utterance` has, text as `Strings` and numbers as an array
    `[rows]`; the other columns; and the place of each row."""
    others: dict[str, GrowingValues] = {}
    columns: dict[str, Any] = {column.name: column.growing() for column in COLUMNS}
    row_places, faults = array("q"), source.faults
    for places, cells in found:
        values = {column.name: _values(column, places, cells, source) for column in COLUMNS}
        for name, time in source.times.items():
            if name in cells and time.role != "end":
                meant = next(column for column in COLUMNS if column.name == time.role)
                seconds = _seconds(meant, name, places, cells[name], source)
                own = values[time.role]
                values[time.role] = np.where(np.isnan(own), seconds, own).tolist()
        if np.isnan(values["duration"]).any():
            values["duration"] = _by_ends(
                places, cells, values["start"], values["duration"], source
            )
        for name in cells.keys() & source.unread.keys():
            source.unread[name] |= any(map(_is_number, cells[name][:_LOOKED_AT]))
        if "id" not in cells and "path" in cells:
            segments = values["path"], values["start"], values["duration"], values["channel"]
            why = "there is no id, and the path, which stands for it, "
            values["id"] = faults.parsed(places, why, default_id, *segments, default="")
            if source.has_ids and row_places:
                faults.add(places[0], "id is missing")
            source.has_ids = False
        elif not source.has_ids:
            faults.add(row_places[0], "id is missing")
            source.has_ids = True
        for name, column in columns.items():
            column.extend(values[name])
        for name in cells if source.carry else ():
            if name in SPELLINGS:
                continue
            column = others.setdefault(name, GrowingValues())
            try:
                column.extend(cells[name], len(row_places), source.has_types)
            except ValueError:
                faults.parsed(places, f"{name} ", carried, cells[name])
        row_places.extend(places)
    gathered = {
        name: column.strings()
        if isinstance(column, GrowingStrings)
        else np.frombuffer(column, column.typecode)
        for name, column in columns.items()
    }
    count = len(row_places)
    return gathered, {name: column.values(count) for name, column in others.items()}, row_places


def _by_ends(
    places: Sequence[int],
    cells: Cells,
    starts: Sequence[float],
    durations: Sequence[float],
    source: Source,
) -> Sequence[float]:
    """The durations, and of rows that have none, those that starts and ends make, if
    there are ends."""
    ends = [name for name, time in source.times.items() if name in cells and time.role == "end"]
    if len(ends) > 1:
        source.faults.add(
            places[0], f"{listing(map(repr, ends))} both end the row: leave one, or give durations"
        )
    if len(ends) != 1:
        return durations
    wanted = [
        end if math.isnan(given) else None
        for end, given in zip(cells[ends[0]], durations, strict=True)
    ]
    stops = _seconds(START, ends[0], places, wanted, source)
    return source.faults.parsed(
        places, f"{ends[0]} ", _between, starts, stops, durations, default=math.nan
    )


def _seconds(
    column: Column, name: str, places: Sequence[int], cells: Sequence[Any], source: Source
) -> Sequence[float]:
    """The times of a column, in seconds."""
    unit = source.times[name].unit
    if unit != "seconds":
        per_second = 1000 if unit == "ms" else source.sample_rate
        cells = [float(cell) / per_second if _is_number(cell) else cell for cell in cells]
    return _values(column._replace(name=name), places, {name: cells}, source)


def _is_number(cell: Any) -> bool:
    try:
        return math.isfinite(float(cell)) and not isinstance(cell, bool)
    except (TypeError, ValueError, OverflowError):
        return False


def _between(start: float, end: float, duration: float) -> float:
    """The seconds from a start to an end, as decimals; without an end, the duration. A
    ValueError for none."""
    if math.isnan(end):
        return duration
    first = 0.0 if math.isnan(start) else start
    if (seconds := round(end - first, 9)) <= 0:
        raise ValueError(f"is {end}, and the row starts at {first}")
    return seconds


def _values(column: Column, places: Sequence[int], cells: Cells, source: Source) -> Sequence[Any]:
    if column.name not in cells:
        return [column.not_given] * len(places)
    if (plain := column.plain(cells[column.name])) is not None:
        return plain
    parse = path_or_command if column.name == "path" and source.allow_commands else column.parse
    is_required = column.name == "id" or (column.name == "path" and source.audio)

    def value_of(cell: Any) -> Any:
        if cell is None or cell == "" or (cell == "NA" and column.not_given != ""):
            if is_required:
                raise ValueError("is missing")
            return column.not_given
        if not (isinstance(cell, str) and len(cell) > LONGEST):  # which is refused anyway
            refuse_secrets(cell, source.allow_queries)
        return parse(cell)

    return source.faults.parsed(
        places, f"{column.name} ", value_of, cells[column.name], default=column.not_given
    )


_LOOKED_AT = 8  # cells of a column, for numbers

# the types of what pandas has for values that are missing, besides NaN
_NOT_GIVEN = ("NAType", "NaTType")


class Table(Protocol):
    """A manifest in memory, as a type: `manifest_of` says what it may be."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...


def is_table(manifest: object) -> bool:
    """Whether a manifest is a table in memory, and no path, and no list of paths."""
    if isinstance(manifest, Sequence):
        return len(manifest) > 0 and isinstance(manifest[0], Mapping)
    return not isinstance(manifest, str | os.PathLike | Manifest)


def manifest_of(
    table: Any,
    *,
    audio: bool = False,
    carry: bool = True,
    root: str | os.PathLike[str] | None = None,
) -> Manifest:
    """Check a table and take it as a manifest, with the columns and the rules of one in a
    file.

    `table` is a data frame of pandas or Polars, a table of Arrow, or a list of
    dictionaries, one per utterance (an ArgumentError refuses others). None, NaN, NA and
    NaT are values not given. `audio` says whether paths are required, `carry` whether to
    keep the columns that an `Utterance` lacks, `root` what relative paths are relative
    to, a folder or a URL; None for the current folder. A ManifestError lists the first 20
    faults, with rows counted from 1."""
    kind = type(table).__name__
    is_list = isinstance(table, Sequence) and not isinstance(table, (str, bytes))
    if not (is_list or (_names(table) is not None and hasattr(table, "__len__"))):
        raise ArgumentError(
            f"manifest is a {kind}: give a path, a data frame, an Arrow table or a list of dicts"
        )
    reading = Source(f"<{kind}>", audio=audio, carry=carry, given_root=os.fspath(root or os.curdir))
    if is_list:
        batches = tables.json_batches(_objects(table, reading.faults), reading)
    else:
        batches = tables.parquet_batches(_by_columns(table), reading)
    return checked_manifest(reading, *gather(batches, reading), "table")


def _by_columns(table: Any) -> tables.Table:
    """A table with columns, as those in files are read."""
    columns = _names(table) or []
    names = [*map(str, columns)]
    named = dict(zip(names, columns, strict=True))

    def batches(wanted: Collection[str]) -> Iterator[Batch]:
        if len(named) < len(names):  # which is a fault already
            return
        rows = getattr(table, "iloc", table)  # of pandas, a range otherwise means labels
        for first in range(0, len(table), ROWS_PER_BATCH):
            last = min(first + ROWS_PER_BATCH, len(table))
            part = rows[first:last]
            yield (
                range(first + 1, last + 1),
                {name: [*map(_plain, part[named[name]])] for name in wanted},
            )

    return tables.Table(names, batches)


def _names(table: Any) -> list[Any] | None:
    """The names of a table's columns; None if it is no table."""
    # Arrow's `columns` are the values
    names = getattr(table, "column_names", getattr(table, "columns", None))
    return None if names is None or callable(names) else [*names]


def _objects(rows: Sequence[Any], faults: Faults) -> Rows:
    """The rows that are dictionaries, each with its place; the others are faults."""
    for place, row in enumerate(rows, faults.file("", "row") + 1):
        if isinstance(row, Mapping):
            yield place, {str(name): _plain(cell) for name, cell in row.items()}
        else:
            faults.add(place, f"is a {type(row).__name__}, not a dictionary")


def _plain(cell: Any) -> Any:
    """A cell as a reader of JSON would give it; None if it is not given."""
    if type(cell) is str:
        return cell
    for name in ("as_py", "tolist", "to_list"):  # Arrow's, numpy's and Polars'
        if hasattr(cell, name):
            return _plain(getattr(cell, name)())
    if isinstance(cell, os.PathLike):
        return os.fspath(cell)
    return (
        None
        if type(cell).__name__ in _NOT_GIVEN or (isinstance(cell, float) and math.isnan(cell))
        else cell
    )
