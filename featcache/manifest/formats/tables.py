"""Tables with a header or keys: CSV, TSV, JSON lines, Parquet, Arrow."""

from __future__ import annotations

import csv
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from featcache.errors import ManifestError, MissingDependencyError, counted, first_line, listing
from featcache.manifest.formats.source import (
    ROWS_PER_BATCH,
    Batch,
    Cells,
    Rows,
    Source,
    Text,
    in_batches,
    lines_of,
    names_audio,
)
from featcache.manifest.strings import Strings
from featcache.manifest.times import UNITS, Time, may_be_time, times_of
from featcache.manifest.utterances import SPELLINGS, meaning_of, names_of_whole_files, shown

_OF_CLIPS = {"slice_file_name", "fsid"}
"""Columns of UrbanSound8K, in lower case: its files are clips already."""

_NAMES_OF_BYTES = {*SPELLINGS["path"], "audio_bytes", "wav_bytes", "bytes", "flac", "mp3", "opus"}
"""The columns of bytes that are audio, in lower case."""

_ROWS_OF_PARQUET = 8192
_CELLS_AT_ONCE = 1 << 20

_MOST_KEYS = 1000
"""The most columns of JSON lines whose keys differ."""

_CELL = 4 << 20
"""The most characters of a cell of CSV."""


class Table(NamedTuple):
    """A table whose columns are read by name."""

    names: list[str]
    """The names of the columns without bytes."""
    batches: Callable[[Collection[str]], Iterator[Batch]]
    """Gives the cells of all rows in these columns; places are rows, from 1."""
    audio: Sequence[str] = ()
    """The columns with audio: bytes and paths, as Hugging Face stores it; or if no column
    names files, bytes in a column of such a name."""
    paths_outside: Callable[[str], dict[int, Any]] = lambda _: {}
    """Gives the paths of the rows, from 0, without bytes in a column of audio."""


PLAIN = {".csv": "csv", ".tsv": "tsv", ".json": "jsonl", ".jsonl": "jsonl", ".parquet": "parquet"}
"""The table that a suffix means."""


def plain_format(source: Source) -> str:
    """Return the kind of table by the file's suffix, or else by its first line."""
    if source.is_parquet:
        return "parquet"
    if source.suffix in PLAIN:
        return PLAIN[source.suffix]
    header = _layout_of(source).header.lstrip()
    if header.startswith(("{", "[")):
        return "jsonl"
    return "tsv" if "\t" in header else "csv"


class _Layout(NamedTuple):
    """The beginning of a table of text."""

    above: int
    """The number of lines above the header: comments, or Excel's `sep=;`."""
    header: str
    """The header, without the mark of a comment."""
    row: str
    """The line below it."""
    delimiter: str
    """The separator of fields if Excel names it, or all names are quoted; else empty."""


_QUOTED = re.compile(r'"[^"]*"(?:([,;\t |])"[^"]*")?(?:\1"[^"]*")*')


def _layout_of(source: Source) -> _Layout:
    """Find the header in the first lines: below comments, or as in AudioSet, the last comment."""
    lines = [*source.first_lines, "", ""]
    separator = re.fullmatch("sep=(.)", lines[0], re.IGNORECASE)
    above = first = int(separator is not None)
    while lines[above].startswith("#"):
        above += 1
    has_comments = above > first
    if has_comments and not any(_names_columns(lines[above], mark) for mark in ",;\t"):
        above -= 1
    header = lines[above]
    if has_comments:
        header = header.lstrip("# ")
    quoted = _QUOTED.fullmatch(header)
    delimiter = (separator or quoted or ("", ""))[1] or ""
    return _Layout(above, header, lines[above + 1], delimiter)


def _has_row_names(layout: _Layout, delimiter: str) -> bool:
    """Tell whether rows have one field more than the header, their names, as in R."""
    lines = layout.header, layout.row.replace('\\"', '""')
    try:
        header, row = (next(csv.reader([line], delimiter=delimiter), []) for line in lines)
    except csv.Error:  # a carriage return inside a line
        return False
    if len(row) != len(header) + 1 or not (_QUOTED.fullmatch(layout.header) or row[0] == "1"):
        return False
    pairs = zip(header, row, strict=False)  # otherwise, a text has a comma in it
    return not any(meaning_of(name) == "path" and names_audio(cell) for name, cell in pairs)


def _names_columns(header: str, mark: str) -> bool:
    return any(meaning_of(cell.strip('"')) in ("id", "path") for cell in header.split(mark))


def read_text(delimiter: str, source: Source) -> Iterator[Batch]:
    """Read text with a header. Semicolons separate fields if they, and no commas, separate
    its names; then numbers have decimal commas. In TSV, quotes have a meaning if all names
    are quoted."""
    layout = _layout_of(source)
    is_plain = delimiter == "\t" and not layout.delimiter
    if _names_columns(layout.header, ";") and not _names_columns(layout.header, ","):
        delimiter = delimiter.replace(",", ";")
    delimiter = layout.delimiter or delimiter
    has_row_names = _has_row_names(layout, delimiter)
    base, above = 0, layout.above
    while above:
        above -= bool(source.stream.readline().strip())
        base += 1
    file = source.text._replace(base=base)
    if is_plain:
        rows = split_rows(file, delimiter)
    else:
        num_spaced = layout.header.count(f"{delimiter} ")
        is_spaced = 0 < num_spaced == layout.header.count(delimiter)
        rows = csv_rows(file, has_row_names, delimiter=delimiter, skipinitialspace=is_spaced)

    def names_of(header: list[str]) -> list[str]:
        if header[0].startswith("#"):
            header[0] = header[0].lstrip("# ")
        return [""] * has_row_names + header

    for places, cells in table_batches(rows, source, names_of):
        if delimiter == ";":
            for name in {"start", "duration", "channel", *source.times} & cells.keys():
                cells[name] = [cell.replace(",", ".") for cell in cells[name]]
        yield places, cells


def csv_rows(file: Text, is_of_r: bool = False, **dialect: Any) -> Rows:
    """Read the rows of CSV. `dialect` is passed to `csv.reader`."""
    lines = lines_of(file)
    if is_of_r:  # which writes a backslash before a quote inside a field
        lines = (line.replace('\\"', '""') for line in lines)
    # the limit is the process's, at first 131,072 characters
    csv.field_size_limit(max(csv.field_size_limit(), _CELL))
    reader = csv.reader(lines, strict=True, **dialect)
    while True:
        line = file.base + reader.line_num + 1
        try:
            for row in reader:
                yield line, row
                line = file.base + reader.line_num + 1
            return
        except csv.Error as error:
            what = f"not a CSV row: {error} (is a quote not closed, or not doubled?)"
            file.faults.add(line, what)


def split_rows(file: Text, delimiter: str) -> Rows:
    """Split lines that are not blank at each delimiter."""
    for place, line in enumerate(lines_of(file), file.base + 1):
        cells = line.removesuffix("\n").removesuffix("\r").split(delimiter)
        if not _is_blank(cells):
            yield place, cells


def table_batches(
    rows: Rows, source: Source, names_of: Callable[[list[str]], list[str]] = list
) -> Iterator[Batch]:
    """Read rows below a header, the first row that is not blank; `names_of` reads it."""
    source.has_types = False
    faults = source.faults
    line, first_row = next((row for row in rows if not _is_blank(row[1])), (0, []))
    if not first_row:
        return
    header = names_of(first_row)
    no_header = _why_no_header(source.renamed(header), source)
    if no_header:
        faults.add(line, no_header)
        return
    names = _meanings_of_header(header, line, source)
    width = len(names)
    for lines, cells in in_batches(rows, rows_at_once(width, ROWS_PER_BATCH)):
        if width == 1 or set(map(len, cells)) != {width}:
            full_rows = []
            for line, row in zip(lines, cells, strict=True):
                if len(row) == width and not _is_blank(row):
                    full_rows.append((line, row))
                elif not _is_blank(row):
                    faults.add(line, f"{counted(len(row), 'field')}, but the header has {width}")
            if not full_rows:
                continue
            lines, cells = zip(*full_rows, strict=True)
        yield lines, dict(zip(names, zip(*cells, strict=True), strict=True))


def rows_at_once(num_columns: int, most: int) -> int:
    """Return the number of rows to read at once, small for wide tables."""
    return max(1, min(most, _CELLS_AT_ONCE // max(1, num_columns)))


def _is_blank(cells: Sequence[str]) -> bool:
    return len(cells) < 2 and not "".join(cells).strip()


def json_rows(file: Text, of: Any = dict[str, Any]) -> Rows:
    """Read the objects of JSON lines; `of` is their type in msgspec."""
    decode, faults = msgspec.json.Decoder(of).decode, file.faults
    is_first = True
    for place, line in enumerate(lines_of(file), file.base + 1):
        try:
            row = decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            if not line.strip():
                continue
            if is_first and line.lstrip().startswith("["):
                what = "a JSON array; one object on each line is expected: jq -c '.[]' makes them"
                faults.add(place, what)
                return
            is_first = False
            try:
                row = decode_object(line, of)
            except ValueError as error:
                faults.add(place, str(error))
                continue
        is_first = False
        yield place, row


def decode_object(line: str, of: Any = dict[str, Any]) -> Any:
    """Decode an object with Python's parser, which reads NaN, and has better messages than
    msgspec. Raises ValueError."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"JSON that cannot be read: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object: {shown(row)}")
    try:
        return msgspec.convert(row, of)
    except msgspec.ValidationError as error:
        raise ValueError(f"not as expected: {error}") from None


def json_batches(rows: Rows, source: Source) -> Iterator[Batch]:
    """Read objects whose keys are columns."""
    source.has_types = True
    meanings: dict[tuple[str, ...], list[str]] = {}  # by an object's keys
    names: dict[str, None] = {}  # all so far, in order
    for places, objects in in_batches(rows):
        keys_of = list(map(tuple, objects))
        layouts = dict.fromkeys(keys_of)
        if not names:  # the keys of the first objects are a header
            header = dict.fromkeys(chain.from_iterable(map(source.renamed, layouts)))
            _require(header, places[0], source)
        for keys in layouts:
            if keys in meanings:
                continue
            place = places[keys_of.index(keys)]
            meanings[keys] = _meanings(keys, place, source)
            names |= dict.fromkeys(meanings[keys])
            if len(meanings) > 1 and len(names) > _MOST_KEYS:
                what = f"more than {_MOST_KEYS:,} different keys: keys are columns, not ids"
                source.faults.add(place, what)
                return
        first = meanings[keys_of[0]]
        if len(layouts) == 1 and len(first) == len(names):
            columns = zip(*(row.values() for row in objects), strict=True)
            yield places, dict(zip(first, columns, strict=True))
            continue
        by_name = [
            dict(zip(meanings[keys], row.values(), strict=True))
            for keys, row in zip(keys_of, objects, strict=True)
        ]
        yield places, {name: [row.get(name) for row in by_name] for name in names}


def parquet_batches(
    table: Table, source: Source, file: str = "", without: Collection[str] = ()
) -> Iterator[Batch]:
    """Read a table by its columns, `without` some; `file` names one of several."""
    source.has_types = True
    base = source.faults.file(file, "row")
    meanings = _meanings_of_header(table.names, base, source)
    needed = {*SPELLINGS, *source.times, *source.unread}.difference(without)
    wanted = {
        name: meaning
        for name, meaning in zip(table.names, meanings, strict=True)
        if source.carry or meaning in needed
    }
    for rows, cells in table.batches(wanted):
        places = range(base + 1, base + len(rows) + 1)
        base += len(rows)
        yield places, {meaning: cells[name] for name, meaning in wanted.items()}


_SEPARATORS = {
    ";": "semicolons: name one of them id or path",
    "|": "|: name the columns in a line above, as path|speaker|text",
    "\t": "tabs: name the file .tsv",
    " ": "spaces: of Kaldi's files, give their folder, or --format kaldi for a wav.scp",
}


def _why_no_header(cells: Sequence[str], source: Source) -> str:
    """Say why a table's first row is no header; empty if it may be one."""
    if not _missing_column(cells, source):
        return ""
    if len(cells) == 1:
        for separator, remedy in _SEPARATORS.items():
            if separator in cells[0].strip():
                return f"fields are separated by {remedy}"
    if any(map(names_audio, cells)):
        remedy = "name the columns in a line above it, id and path for instance"
        return f"there is no header, but a file's name: {remedy}"
    return ""


def _missing_column(names: Collection[str], source: Source) -> str:
    meanings = set(map(meaning_of, names))
    if source.audio and "path" not in meanings:
        return "path"
    if meanings.isdisjoint(("id", "path")):
        return "id"
    return ""


def _meanings_of_header(header: Sequence[str], line: int, source: Source) -> list[str]:
    names = source.renamed(header)
    for name, count in Counter(names).items():
        if count > 1:
            source.faults.add(line, f"{count} columns are named {name!r}")
    _require(names, line, source)
    return _meanings(header, line, source)


def _require(names: Collection[str], line: int, source: Source) -> None:
    column = _missing_column(names, source)
    if column:
        known = f"rename or add one; known spellings: {', '.join(SPELLINGS[column])}"
        if source.is_parquet and column == "path":
            known += "; or the column audio, with the bytes of files"
        source.faults.add(line, f"no {column} column among {listing(map(repr, names))}: {known}")


def _meanings(header: Sequence[str], line: int, source: Source) -> list[str]:
    """Return the column that each name means, or the name that it is carried by."""
    if source.renamed is list and not _OF_CLIPS.isdisjoint(map(str.lower, header)):
        source.renamed = partial(names_of_whole_files, "path")
        source.note("files are read whole: a start says where in a recording they come from")
    names = source.renamed(header)
    times = times_of(names)
    exact, meanings = {*names}, []
    for name in names:
        is_end = name in times and times[name].role == "end"
        meaning = meaning_of(name)
        meanings.append(name if is_end or meaning in exact else meaning)
    for column in SPELLINGS:
        same = {name: 0 for name, meaning in zip(names, meanings, strict=True) if meaning == column}
        _refuse_two([*same], column, line, source)
    meanings = _with_times(names, meanings, times, line, source)
    paths = {
        meaning: name
        for name, meaning in zip(header, meanings, strict=True)
        if meaning_of(name) == "path"
    }
    if "path" in paths:
        note_column(source, paths.pop("path"), [*paths.values()])
    return meanings


def _refuse_two(names: Sequence[str], column: str, line: int, source: Source) -> None:
    if len(names) > 1:
        both = " and ".join(map(repr, names))
        source.faults.add(line, f"{both} both mean {column}: name one of them {column}")


def note_column(source: Source, column: str, others: Sequence[str]) -> None:
    """Note the column of audio that is read, if a table has others."""
    if others:
        left_out = listing(map(repr, others))
        source.note(f"audio is read from the column {column!r}, and not from {left_out}")


def _with_times(
    names: Sequence[str], meanings: list[str], times: dict[str, Time], line: int, source: Source
) -> list[str]:
    """Choose the columns that cut the rows: a start, and an end or a duration of its unit.
    Returns the meanings, without a `duration` of another unit."""
    if "path" not in meanings:
        return meanings
    times = {name: time for name, time in times.items() if name in meanings}
    if "duration" in meanings:
        times["duration"] = Time("duration", "seconds", True)
    start, unit = _start_of(meanings, times, line, source)
    if not start:
        return meanings
    start_name = names[meanings.index(start)]
    stops = [name for name, time in times.items() if time.role != "start"]
    fitting = [name for name in stops if times[name].unit == unit]
    ends = [name for name in fitting if times[name].role == "end"]
    has_duration = "duration" in meanings and unit == "seconds"
    chosen = ends
    if not (ends or has_duration):
        chosen = fitting[:1]
    source.times |= {name: times[name] for name in chosen}
    if not (chosen or has_duration):
        stops += [name for name in times if name != start and "offset" in name.lower()]
        if stops:
            source.faults.add(line, _why_not_read(stops[0], start_name, times.get(stops[0])))
    elif start != "start" or not has_duration:
        columns = " to ".join(map(repr, [start_name, *ends[:1]]))
        remedy = "if the files are already cut, leave these columns out"
        source.note(f"rows are cut from {columns}, in {unit}: {remedy}")
    if ends and not has_duration and "duration" in meanings:
        meanings[meanings.index("duration")] = "original_duration"
    return meanings


def _why_not_read(name: str, start: str, time: Time | None) -> str:
    if time and time.role != "duration" and not time.is_explicit:
        return f"{name!r} is not read: give a duration, {name} - start, instead"
    remedy = "use one unit in both names, as start_ms and length_ms"
    return f"{name!r} is not read next to {start!r}: {remedy}"


def _start_of(
    meanings: Sequence[str], times: dict[str, Time], line: int, source: Source
) -> tuple[str, str]:
    """Find the column of starts, and its unit; empty if none exists. A name without a unit
    needs an end or a duration beside it."""
    if "start" in meanings:
        return "start", "seconds"
    units = {time.unit for time in times.values() if time.role != "start"}
    for unit in filter(None, UNITS):
        starts = [
            name
            for name, time in times.items()
            if (time.role, time.unit) == ("start", unit) and (time.is_explicit or unit in units)
        ]
        _refuse_two(starts, "start", line, source)
        if starts:
            source.times[starts[0]] = times[starts[0]]
            return starts[0], unit
    for name in meanings:
        time = times.get(name)
        if may_be_time(name) or (time and time.role != "duration"):
            source.unread.setdefault(name, False)
        elif time and time.is_explicit and "duration" not in meanings:
            source.note(f"{name!r} is not read, since no column says where rows begin")
    return "", ""


def parquet_table(stream: BinaryIO) -> Table:
    """Open a Parquet file. This, or what the table gives, raises ManifestError for damage."""
    with _checking():
        file = pyarrow().parquet.ParquetFile(stream, pre_buffer=False)

    def read(columns: list[str]) -> Iterator[Any]:
        rows = rows_at_once(len(columns), _ROWS_OF_PARQUET)
        yield from file.iter_batches(rows, columns=columns, use_threads=False)
        pyarrow().default_memory_pool().release_unused()

    return _table(file.schema_arrow, read, partial(_paths_outside, file))


def arrow_table(stream: BinaryIO) -> Table:
    """Open an Arrow file as `save_to_disk` writes it; see `parquet_table`."""

    def opened() -> Any:
        return pyarrow().ipc.open_stream(pyarrow().memory_map(stream.name))

    def read(columns: list[str]) -> Iterator[Any]:
        with opened() as reader:
            for batch in mapped_batches(reader, stream.fileno()):
                yield batch.select(columns)

    with _checking():
        schema = opened().schema
    return _table(schema, read, lambda audio: _without_bytes(read([audio])))


def _table(
    schema: Any, read: Callable[[list[str]], Iterator[Any]], outside: Callable[[str], Rows]
) -> Table:
    """Make a table: `read` gives batches of some columns, `outside` the `paths_outside`."""
    types = pyarrow().types
    with_paths, bytes_alone = [], []
    for field in schema:
        parts = {}
        if types.is_struct(field.type):
            parts = {part.name: part.type for part in field.type if not types.is_nested(part.type)}
        if {"bytes", "path"} <= parts.keys():
            with_paths.append(field.name)
        elif is_bytes(parts.get("bytes", field.type)) and field.name.lower() in _NAMES_OF_BYTES:
            bytes_alone.append(field.name)

    def paths_outside(name: str) -> dict[int, Any]:
        if name in bytes_alone:
            return {}
        with _checking():
            return dict(outside(name))

    names = [field.name for field in schema if not _holds_bytes(field.type)]
    audio = with_paths
    if not with_paths and "path" not in map(meaning_of, names):
        audio = bytes_alone
    return Table(names, lambda columns: _numbered(read([*columns])), audio, paths_outside)


def _paths_outside(file: Any, audio: str) -> Rows:
    """List the paths of rows without bytes. Bytes are read only if the footer does not say
    that a row group has all."""
    first, data, path = 0, f"{audio}.bytes", f"{audio}.path"
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        chunks = map(group.column, range(group.num_columns))
        known = next(chunk.statistics for chunk in chunks if chunk.path_in_schema == data)
        if known is None or not known.has_null_count or known.null_count:
            batches = file.iter_batches(16, [number], [path, data], use_threads=False)
            yield from _without_bytes(batches, first)
        first += group.num_rows


def mapped_batches(reader: Any, descriptor: int) -> Iterator[Any]:
    """Read the batches of a mapped Arrow file. Raises ValueError if the file becomes
    shorter: reading behind its end would end the process by SIGBUS."""
    size = os.fstat(descriptor).st_size

    def check() -> None:
        if os.fstat(descriptor).st_size < size:
            raise ValueError("it became shorter while it was read")

    check()
    for batch in reader:
        check()
        yield batch
        check()


def _without_bytes(batches: Iterable[Any], row: int = 0) -> Rows:
    for batch in batches:
        audio = batch.column(0)
        fields = dict(zip([field.name for field in audio.type], audio.flatten(), strict=True))
        for number in np.flatnonzero(fields["bytes"].is_null()).tolist():
            path = fields["path"][number].as_py()
            if path is not None:
                yield row + number, path
        row += batch.num_rows


def _numbered(batches: Iterator[Any]) -> Iterator[Batch]:
    first = 1
    with _checking():
        for batch in batches:
            columns = map(_cells_of, batch.columns)
            cells: Cells = dict(zip(batch.schema.names, columns, strict=True))
            yield range(first, first + batch.num_rows), cells
            first += batch.num_rows


def _cells_of(column: Any) -> Sequence[Any]:
    """Return the cells of a column of Arrow. Fractions and ASCII text stay flat if no cell is
    missing: they take a tenth of the time of Python's objects."""
    types = pyarrow().types
    if types.is_integer(column.type) and not column.null_count:
        return cast(list[Any], column.to_numpy().tolist())
    if types.is_floating(column.type):
        numbers = column.to_numpy(zero_copy_only=False)  # NaN for null
        if np.isnan(numbers).any():
            return [None if cell != cell else cell for cell in numbers.tolist()]
        return array("d", numbers.astype(np.float64).tobytes())
    if types.is_string(column.type) and len(column) and not column.null_count:
        _, offsets, blob = column.buffers()
        ends = np.frombuffer(offsets, np.int32)[column.offset :][: len(column) + 1]
        texts = Strings(np.frombuffer(blob or b"", np.uint8), ends)
        if texts.utf8().max(initial=0) < 128:
            return texts
    return cast(list[Any], column.to_pylist())


def pyarrow(needed_for: str = "a manifest in Parquet or Arrow") -> Any:
    """Import pyarrow. Raises MissingDependencyError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependencyError("pyarrow", needed_for, "parquet") from error
    return pyarrow


@contextmanager
def _checking() -> Iterator[None]:
    """Turn errors of pyarrow into ManifestErrors of one line."""
    try:
        yield
    except (pyarrow().ArrowException, OSError, ValueError) as error:
        raise ManifestError(f"not Parquet or Arrow, or damaged: {first_line(error)}") from error


def is_bytes(arrow_type: Any) -> bool:
    """Tell whether a type of Arrow is bytes. Polars writes `binary_view`."""
    return str(arrow_type) in ("binary", "large_binary", "binary_view")


def _holds_bytes(arrow_type: Any) -> bool:
    types = pyarrow().types
    if types.is_dictionary(arrow_type):
        return _holds_bytes(arrow_type.value_type)
    inner = [arrow_type.field(number).type for number in range(arrow_type.num_fields)]
    has_bytes = is_bytes(arrow_type) or types.is_fixed_size_binary(arrow_type)
    return has_bytes or any(map(_holds_bytes, inner))
