"""Reads a manifest, from a file or from memory, and reports every fault at once."""

from __future__ import annotations

import errno
import math
import os
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ManifestError, counted, listing, refuse_url
from featcache.manifest.audio_locations import (
    Url,
    allow_commands,
    as_root,
    is_audio_url,
    is_command,
)
from featcache.manifest.columns import GrowingValues, Values, carried
from featcache.manifest.formats import FORMATS, features, format_of, tables
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
from featcache.manifest.segments import SegmentColumns, repeated_rows
from featcache.manifest.strings import GrowingStrings, Strings, are_distinct
from featcache.manifest.utterances import (
    COLUMNS,
    LONGEST,
    SPELLINGS,
    Column,
    Manifest,
    Whole,
    default_id,
    exact_id,
    float_of,
    path_or_command,
    refuse_secrets,
)

_Span = Callable[[NDArray[np.float64]], tuple[int, int]]
_Keep = Callable[[Cells], slice]


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
    choose: Callable[[str, Source], _Keep | None] = lambda *_: None,
) -> Manifest:
    """Read and check a manifest.

    Args:
        source: A file, which gzip may compress, a folder, or `-` for standard input.
        root: The root of relative paths, a folder or a URL such as `s3://bucket/corpus`.
            By default the root in the manifest, else the manifest's folder.
        audio: Whether paths are required. Ids always are, but paths stand for them.
        carry: Whether to keep the columns that an `Utterance` lacks.
        format: A name of `featcache.manifest.formats.FORMATS`; recognised by default.
        values: The values of placeholders such as `data_root` in a table of SpeechBrain.
        allow_commands: Whether a path may be a command that prints audio: text that ends
            in `|`, as in Kaldi's `wav.scp`. Decoding in this process then runs it.
        allow_queries: Whether URLs may have a query or a fragment, which are stored and
            shown. Always allowed if paths are not required.
        choose: A function that may choose some rows, see `read_some_rows`.

    Raises:
        ManifestError: It cannot be read, fits several formats, or has faults: the message
            lists the first 20.
        ArgumentError: The manifest is empty or a URL, the root has a secret in it, or no such
            format exists.
        MissingDependencyError: Parquet needs pyarrow.
    """
    refuse_url("the manifest", source)
    if root is not None and not is_audio_url(str(root)):
        refuse_url("root", root)
    name = str(source)
    if not name:
        raise ArgumentError("the manifest's path is empty")
    if "\0" in name:
        raise ManifestError(f"{name!r}: cannot be read: no path has a NUL in it")
    try:
        source = _table_of(source, format)
        name = "<stdin>" if str(source) == "-" else str(source)
        with open_source(
            source,
            given_root=root,
            audio=audio,
            carry=carry,
            values=values or {},
            allow_commands=allow_commands,
            allow_queries=allow_queries,
        ) as opened:
            kind = format_of(opened, format)
            keep = choose(kind, opened)
            gathered = gather(FORMATS[kind].read(opened), opened, keep)
            places = gathered[-1]
            if format is not None and not places:
                what = f"no row is in the format {format}"
                if kind == "features":  # which is never recognised
                    what = "no row names features that import reads"
                else:
                    what += "; leave out --format to have the format recognised"
                opened.faults.raise_first(what)
    except ManifestError as error:
        raise ManifestError(f"{name}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:  # the last two: gzip that is cut off
        raise ManifestError(_why_unreadable(name, error)) from error
    recognised = []
    if format is None and kind not in tables.PLAIN.values():
        recognised.append(f"read as {kind}")
    if not opened.has_ids:
        recognised.append("ids are made from paths")
    if recognised and places:
        opened.notes.insert(0, ", ".join(recognised))
    if kind == "folder" and not places and not opened.faults.count and _is_cache(opened):
        remedy = "give the manifest that it was extracted from"
        raise ManifestError(f"{name}: is a cache, not a manifest: {remedy}")
    return checked_manifest(opened, gathered, kind)


def read_some_rows(source: str | Path, span: _Span, **reading: Any) -> Manifest:
    """Read a manifest as `read_manifest`, without other columns. Of a Parquet file whose
    messages need no other rows, keep hashes of all rows, and only the rows of a span, which
    durations decide."""
    read, some = partial(read_manifest, source, **reading), _SomeRows(span)
    try:
        manifest = read(choose=some.choose)
        if some.hashes is None:
            return manifest
        if are_distinct(some.hashes[0]) and not any(some.unread.values()):
            return replace(manifest, whole=Whole(some.hashes, some.first, read))
    except ManifestError:
        if some.hashes is None:
            raise
    del some  # its hashes
    return read()


class _SomeRows:
    """Reads the times of a Parquet manifest first, which decide what rows are kept."""

    hashes: NDArray[np.uint64] | None = None

    def __init__(self, span: _Span) -> None:
        self._span = span

    def choose(self, kind: str, source: Source) -> _Keep | None:
        """Choose rows of a Parquet file that can be read again, and has no URL as its root."""
        is_file = source.path.is_file() and not is_audio_url(str(source.given_root))
        if kind != "parquet" or source.carry or not is_file:
            return None
        table, durations = tables.parquet_table(source.stream), array("d")
        for places, cells in tables.parquet_batches(table, source, without=("id", "path")):
            durations.extend(_segments(places, cells, source)["duration"])
        self.hashes = hashes = np.zeros((3, len(durations)), np.uint64)
        self.first, end = self._span(np.frombuffer(durations))
        self.unread, row = source.unread, 0

        def keep(values: Cells) -> slice:
            nonlocal row
            ids, paths, *numbers = map(_flat, values.values())
            rows = slice(row, row + len(ids))
            hashes[0, rows] = ids.hashes()
            hashes[1, rows] = SegmentColumns(paths, *numbers).hashes()
            row = rows.stop
            return slice(*(np.clip([self.first, end], rows.start, rows.stop) - rows.start))

        return keep


def _flat(cells: Sequence[Any]) -> Any:
    if isinstance(cells[0], str):
        return cells if isinstance(cells, Strings) else Strings.of(cells)
    return np.asarray(cells)


def _why_unreadable(name: str, error: Exception) -> str:
    file = getattr(error, "filename", None)
    if isinstance(file, str) and file != name:
        name = f"{name}: {file}"
    what = getattr(error, "strerror", None) or error
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        what = f"{what} for a copy of the pipe: set TMPDIR to another folder"
    if "_OP_" in name:
        what = f"{what}: NeMo has a range for _OP_ … _CL_: as 'manifest_*.json', quoted, a corpus"
    return f"{name}: cannot be read: {what}"


def checked_manifest(source: Source, gathered: Gathered, kind: str) -> Manifest:
    """Make the manifest of what `gather` returned. Raises ManifestError for faults."""
    (columns, others, places), faults = gathered, source.faults
    if not places and not faults.count:
        what = "there are no rows"
        if kind == "folder":
            what = "there are no audio files below it"
        elif kind == "features" and source.is_folder:
            what = f"there are no files {' or '.join(features.SUFFIXES)} below it, and no feats.scp"
        faults.add(0, "; ".join([what, *source.notes]))
    ids, paths = columns["id"], columns["path"]
    numbers = (columns[name] for name in ("start", "duration", "channel"))
    segments = SegmentColumns(paths, *numbers)
    if not source.has_ids:
        ids = _without_collisions(ids, segments)
    num_repeats = faults.add_repeated(ids, places, segments)
    if num_repeats:
        rows = counted(num_repeats, "row repeats", "rows repeat")
        source.note(
            f"{rows} the clip of another row, which is extracted once; if they are parts of it, "
            "name their columns start and duration"
        )
    faults.raise_if_any()
    if source.allow_commands and ord("|") in paths.blob:
        allow_commands(path for path in paths if is_command(path))
    given_root = source.given_root
    if given_root is None:
        given_root = source.root or source.folder
    root = as_root(str(given_root))
    if isinstance(root, Url):  # relative paths may be secrets as the ends of URLs

        def check(path: str) -> None:
            refuse_secrets(f"{root}/{path}", source.allow_queries)

        faults.parsed(places, "path ", check, paths)
    else:
        root = root.absolute()
    _note_unread_times(segments, places, source)
    faults.raise_if_any()
    return Manifest(
        **vars(segments),
        source=source.name,
        root=root,
        ids=ids,
        values=others,
        format=kind,
        notes=tuple(f"{source.name}: {note}" for note in source.notes),
        placeholders=frozenset(source.placeholders),
        has_repeats=num_repeats > 0,
    )


def _without_collisions(ids: Strings, segments: SegmentColumns) -> Strings:
    """Give exact ids to the rows that would have one id, though they cut otherwise."""
    rows = repeated_rows(ids.hashes())
    repeated, names = segments.segments(rows), ids.texts(rows)
    hashes_of: dict[str, set[int]] = defaultdict(set)
    for name, segment in zip(names, repeated.hashes().tolist(), strict=True):
        hashes_of[name].add(segment)
    flat = (repeated.start, repeated.duration, repeated.channel)
    cells = zip(repeated.paths, *(column.tolist() for column in flat), strict=True)
    exact = {
        row: exact_id(*cell)
        for row, name, cell in zip(rows.tolist(), names, cells, strict=True)
        if len(hashes_of[name]) > 1
    }
    if not exact:
        return ids
    return Strings.of(exact.get(row, id_) for row, id_ in enumerate(ids))


def _note_unread_times(segments: SegmentColumns, places: Sequence[int], source: Source) -> None:
    """Note columns that may say where rows begin and end. Two of them are a fault if rows
    read the same part of a file."""
    unread = [name for name, has_numbers in source.unread.items() if has_numbers]
    if not unread:
        return
    what = (
        f"{listing(map(repr, unread))} may be times of rows, and featcache does not read them: "
        "name times start and end, in seconds, and give other columns another name"
    )
    again = segments.read_again()
    if len(again) and len(unread) > 1 and source.audio:
        source.faults.add(places[again[1]], f"reads what another row reads: {what}")
    else:
        source.note(what)


def _table_of(source: str | Path, kind: str | None) -> str | Path:
    """Return the list with bars that LJSpeech has in its folder, or the source."""
    table = Path(source, "metadata.csv")
    if table.is_file() and table.with_name("wavs").is_dir():
        if kind is None:
            with open_source(table) as opened:
                kind = format_of(opened)
        if kind in BARS:
            return table
    return source


def _is_cache(folder: Source) -> bool:
    if "parts" in folder.folders:
        return True
    inside = [folder.names, *(os.listdir(folder.path / name) for name in folder.folders)]
    return any({"zarr.json", "shards"} <= {*names} for names in inside)


Gathered = tuple[dict[str, Any], dict[str, Values], "array[int]"]
"""The columns of an `Utterance`, as `Strings` or arrays `[rows]`; the other columns; and the
place of each row."""


def gather(batches: Iterable[Batch], source: Source, keep: _Keep | None = None) -> Gathered:
    """Gather the columns of batches; `keep` chooses rows by their values."""
    others: dict[str, GrowingValues] = {}
    columns: dict[str, Any] = {column.name: column.growing() for column in COLUMNS}
    row_places, faults = array("q"), source.faults
    for places, cells in batches:
        values = _segments(places, cells, source)
        if "id" not in cells and "path" in cells:
            values["id"] = _ids_of_paths(values, places, cells, source)
            if source.has_ids and row_places:
                faults.add(places[0], "id is missing")
            source.has_ids = False
        elif not source.has_ids:
            faults.add(row_places[0], "id is missing")
            source.has_ids = True
        if keep is not None:
            rows = keep(values)
            values = {name: _cut(column, rows) for name, column in values.items()}
            places = places[rows]
        for name, column in columns.items():
            column.extend(values[name])
        for name in cells:
            if name in SPELLINGS or not source.carry:
                continue
            column = others.setdefault(name, GrowingValues())
            try:
                column.extend(cells[name], len(row_places), source.has_types)
            except ValueError:
                faults.parsed(places, f"{name} ", carried, cells[name])
        if isinstance(places, range):  # takes a tenth of the time
            row_places.frombytes(np.arange(places.start, places.stop, dtype=np.int64).tobytes())
        else:
            row_places.extend(places)
    for name, column in columns.items():
        if isinstance(column, GrowingStrings):
            columns[name] = column.strings()
        else:
            columns[name] = np.frombuffer(column, column.typecode)
    count = len(row_places)
    carried_columns = {name: column.values(count) for name, column in others.items()}
    return columns, carried_columns, row_places


def _cut(cells: Sequence[Any], rows: slice) -> Sequence[Any]:
    if isinstance(cells, Strings):
        return Strings(cells.blob, cells.offsets[rows.start : rows.stop + 1])
    return cells[rows]


def _ids_of_paths(
    values: Cells, places: Sequence[int], cells: Cells, source: Source
) -> Sequence[str]:
    paths = values["path"]
    if paths is cells["path"] and not (cells.keys() & {"start", "channel"} or source.times):
        return paths  # plain texts, which may be ids as they are
    segments = [values[name] for name in ("path", "start", "duration", "channel")]
    why = "there is no id, and the path, which stands for it, "
    return source.faults.parsed(places, why, default_id, *segments, default="")


def _segments(places: Sequence[int], cells: Cells, source: Source) -> dict[str, Sequence[Any]]:
    """Return the values of an `Utterance`'s columns, also from other columns of time."""
    values = {column.name: _values(column, places, cells, source) for column in COLUMNS}
    ends = []
    for name, (role, _, _) in source.times.items():
        if name in cells and role == "end":
            ends.append(name)
        elif name in cells:
            seconds = _seconds(role, name, places, cells[name], source)
            exact = values[role]
            values[role] = np.where(np.isnan(exact), seconds, exact).tolist()
    durations = values["duration"]
    if ends and np.isnan(durations).any():
        end = ends[0]
        if len(ends) > 1:
            both = listing(map(repr, ends))
            what = f"{both} both end the row: leave one, or give durations"
            source.faults.add(places[0], what)
        pairs = zip(cells[end], durations, strict=True)
        needed = [cell if math.isnan(duration) else None for cell, duration in pairs]
        stops = _seconds("start", end, places, needed, source)
        values["duration"] = source.faults.parsed(
            places, f"{end} ", _between, values["start"], stops, durations, default=math.nan
        )
    for name in cells.keys() & source.unread.keys():
        source.unread[name] |= any(map(_is_number, cells[name][:8]))
    return values


def _seconds(
    role: str, name: str, places: Sequence[int], cells: Sequence[Any], source: Source
) -> Sequence[float]:
    """Read times in any unit as seconds, as the column `role` is read."""
    column = next(column for column in COLUMNS if column.name == role)
    unit, per_second = source.times[name].unit, 1000
    if unit == "samples":
        per_second = source.sample_rate
    if unit != "seconds":
        cells = [float_of(cell) / per_second if _is_number(cell) else cell for cell in cells]
    return _values(column._replace(name=name), places, {name: cells}, source)


def _is_number(cell: Any) -> bool:
    try:
        return math.isfinite(float_of(cell))
    except (TypeError, ValueError, OverflowError):
        return False


def _between(start: float, end: float, duration: float) -> float:
    """Return the seconds from start to end, rounded as decimals; the duration without an
    end."""
    if math.isnan(end):
        return duration
    if math.isnan(start):
        start = 0.0
    seconds = round(end - start, 9)
    if seconds <= 0:
        raise ValueError(f"is {end}, and the row starts at {start}")
    return seconds


def _values(column: Column, places: Sequence[int], cells: Cells, source: Source) -> Sequence[Any]:
    if column.name not in cells:
        if column.not_given == "":
            return [""] * len(places)
        return cast(Sequence[Any], column.growing([column.not_given]) * len(places))
    plain = column.plain(cells[column.name])
    if plain is not None:
        return plain
    parse = column.parse
    if column.name == "path" and source.allow_commands:
        parse = path_or_command
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


_NOT_GIVEN = ("NAType", "NaTType")
"""The types of pandas' missing values, except NaN."""


class Table(Protocol):
    """A manifest in memory, as a type: see `manifest_of`."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...


def are_paths(values: Sequence[Any]) -> bool:
    """Tell whether values are paths, one or more."""
    return len(values) > 0 and all(isinstance(value, str | Path) for value in values)


def is_table(manifest: object) -> bool:
    """Tell whether a manifest is a table in memory, or nothing that can be read: no path, and
    no list of paths."""
    if isinstance(manifest, Sequence) and not isinstance(manifest, str):
        return not are_paths(manifest)
    return not isinstance(manifest, str | os.PathLike | Manifest)


def manifest_of(
    table: Any,
    *,
    audio: bool = False,
    carry: bool = True,
    root: str | os.PathLike[str] | None = None,
) -> Manifest:
    """Check a table in memory as `read_manifest` checks a file.

    `table` is a data frame of pandas or Polars, a table of Arrow, or a list of
    dictionaries; anything else raises ArgumentError. No such package is imported. `root` is
    by default the current folder. Rows are counted from 1."""
    kind = type(table).__name__
    is_list = isinstance(table, Sequence) and not isinstance(table, (str, bytes))
    if not (is_list or (_names(table) is not None and hasattr(table, "__len__"))):
        remedy = "give a path, a data frame, an Arrow table or a list of dicts"
        raise ArgumentError(f"manifest is a {kind}: {remedy}")
    if is_list and are_paths(table):
        remedy = "give one path; for several parts of a corpus, a pattern such as 'train-*.csv'"
        raise ArgumentError(f"manifest is a {kind} of paths: {remedy}")
    own_root = os.fspath(root or os.curdir)
    source = Source(f"<{kind}>", audio=audio, carry=carry, given_root=own_root)
    if is_list:
        batches = tables.json_batches(_objects(table, source.faults), source)
    else:
        batches = tables.parquet_batches(_by_columns(table), source)
    return checked_manifest(source, gather(batches, source), "table")


def _by_columns(table: Any) -> tables.Table:
    columns = _names(table) or []
    names = [*map(str, columns)]
    column_of = dict(zip(names, columns, strict=True))

    def batches(wanted: Collection[str]) -> Iterator[Batch]:
        if len(column_of) < len(names):  # which is a fault already
            return
        rows = getattr(table, "iloc", table)  # in pandas, other ranges mean labels
        for first in range(0, len(table), ROWS_PER_BATCH):
            last = min(first + ROWS_PER_BATCH, len(table))
            part = rows[first:last]
            cells: Cells = {}
            for name in wanted:
                cells[name] = [*map(_plain, part[column_of[name]])]
            yield range(first + 1, last + 1), cells

    return tables.Table(names, batches)


def _names(table: Any) -> list[Any] | None:
    # Arrow's `columns` are the values
    names = getattr(table, "column_names", getattr(table, "columns", None))
    if names is None or callable(names):
        return None
    return [*names]


def _objects(rows: Sequence[Any], faults: Faults) -> Rows:
    for place, row in enumerate(rows, faults.file("", "row") + 1):
        if isinstance(row, Mapping):
            yield place, {str(name): _plain(cell) for name, cell in row.items()}
        else:
            faults.add(place, f"is a {type(row).__name__}, not a dictionary")


def _plain(cell: Any) -> Any:
    if type(cell) is str:
        return cell
    for name in ("as_py", "tolist", "to_list"):  # Arrow's, numpy's and Polars'
        if hasattr(cell, name):
            return _plain(getattr(cell, name)())
    if isinstance(cell, os.PathLike):
        return os.fspath(cell)
    is_nan = isinstance(cell, float) and math.isnan(cell)
    if is_nan or type(cell).__name__ in _NOT_GIVEN:
        return None
    return cell
