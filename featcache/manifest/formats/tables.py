"""Tables with a header or keys: CSV, TSV, JSON lines, Parquet, Arrow. Every fault is counted.

Parquet and Arrow are read by pyarrow, the reference implementation, which pandas,
datasets and Spark use too: a few thousand rows at a time, and only the columns that are
wanted."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, BinaryIO, NamedTuple

import msgspec

from featcache.errors import ManifestError, MissingDependencyError, counted, first_line, listing
from featcache.manifest.formats.source import (
    ROWS_PER_BATCH,
    Batch,
    Cells,
    Faults,
    Rows,
    Source,
    lines_of,
    names_audio,
)
from featcache.manifest.times import UNITS, Time, may_be_time, times_of
from featcache.manifest.utterances import SPELLINGS, meaning_of, names_of_whole_files, shown

# names of columns, in lower case, of UrbanSound8K, whose files are clips already
_OF_CLIPS = {"slice_file_name", "fsid"}

_ROWS_OF_PARQUET = 8192  # the rows that pyarrow gives at once
_CELLS_AT_ONCE = 1 << 20
# the most columns of JSON whose objects differ: each row has a place in each of them
_MOST_KEYS = 1000
# the most characters of a cell of CSV, which may have several lines: as a line has bytes
_CELL = 4 << 20


class Table(NamedTuple):
    """A table whose columns are read by name."""

    names: list[str]
    """The names of the columns that hold values a table of text could hold: not those
    with bytes, as of images."""
    batches: Callable[[Collection[str]], Iterator[Batch]]
    """Gives the cells of all rows in these columns; places are the rows' numbers, from 1."""
    audio: Sequence[str] = ()
    """The names of the columns that hold audio as Hugging Face does, as bytes and paths."""
    paths_outside: Callable[[str], dict[int, Any]] = lambda _: {}
    """Gives the paths in a column of audio of the rows, from 0, that have no bytes there."""


PLAIN = {".csv": "csv", ".tsv": "tsv", ".json": "jsonl", ".jsonl": "jsonl", ".parquet": "parquet"}
"""The table that a suffix means."""


def plain_format(source: Source) -> str:
    """The table that a file is, by its suffix; if it has another one, by the first line."""
    if source.is_parquet:
        return "parquet"
    if source.suffix in PLAIN:
        return PLAIN[source.suffix]
    header = _layout_of(source).header.lstrip()
    return "jsonl" if header.startswith(("{", "[")) else "tsv" if "\t" in header else "csv"


class _Layout(NamedTuple):
    """How a table of text begins."""

    above: int
    """The lines above the header: comments, or Excel's `sep=;`. Blank ones do not count."""
    header: str
    """The header, without the mark of a comment."""
    row: str
    """The line below it."""
    delimiter: str
    """What separates fields, if Excel says it, or quotes of all names show it."""
    is_quoted: bool
    """Whether all names in the header are quoted."""

    def has_row_names(self, delimiter: str) -> bool:
        """Whether rows have one field more than the header, their names, as R writes them;
        and not a comma in a text."""
        lines = self.header, self.row.replace('\\"', '""')
        try:
            header, row = (next(csv.reader([line], delimiter=delimiter), []) for line in lines)
        except csv.Error:  # a carriage return in the midst of a line
            return False
        if len(row) != len(header) + 1 or not (self.is_quoted or row[0] == "1"):
            return False
        paths = [
            cell for name, cell in zip(header, row, strict=False) if meaning_of(name) == "path"
        ]
        return not any(map(names_audio, paths))


_QUOTED = re.compile(r'"[^"]*"(?:([,;\t |])"[^"]*")?(?:\1"[^"]*")*')


def _layout_of(source: Source) -> _Layout:
    """The layout by the first lines. The header is below comments, or the last of them, as
    in AudioSet."""
    lines = [*source.first_lines, "", ""]
    separator = re.fullmatch("sep=(.)", lines[0], re.IGNORECASE)
    above = 0 if separator is None else 1
    comments = sum(1 for _ in takewhile(lambda line: line.startswith("#"), lines[above:]))
    above += comments
    if comments and not any(_names_columns(lines[above], mark) for mark in ",;\t"):
        above -= 1
    header = lines[above].lstrip("# ") if comments else lines[above]
    quoted = _QUOTED.fullmatch(header)
    delimiter = separator[1] if separator else quoted[1] if quoted else None
    return _Layout(above, header, lines[above + 1], delimiter or "", quoted is not None)


def _names_columns(header: str, mark: str) -> bool:
    return any(meaning_of(cell.strip('"')) in ("id", "path") for cell in header.split(mark))


def read_csv(source: Source) -> Iterator[Batch]:
    """CSV with a header. Semicolons separate fields if the header has them, and no commas
    give its columns."""
    header = _layout_of(source).header
    by_semicolons = not _names_columns(header, ",") and _names_columns(header, ";")
    return _text_batches(source, ";" if by_semicolons else ",")


def read_tsv(source: Source) -> Iterator[Batch]:
    """TSV with a header. Quotes have a meaning if all names in the header are quoted."""
    return _text_batches(source, "\t")


def _text_batches(source: Source, usual_delimiter: str) -> Iterator[Batch]:
    """The rows of a table of text. Between semicolons, numbers have decimal commas."""
    layout, stream, faults = _layout_of(source), source.stream, source.faults
    delimiter = layout.delimiter or usual_delimiter
    base, above = 0, layout.above
    while above:
        above -= bool(stream.readline().strip())
        base += 1
    has_row_names = layout.has_row_names(delimiter)
    if delimiter == "\t" and not layout.delimiter:
        rows = split_rows(stream, faults, delimiter, base)
    else:
        gaps = layout.header.count(f"{delimiter} ")
        is_spaced = 0 < gaps == layout.header.count(delimiter)
        dialect = {"delimiter": delimiter, "skipinitialspace": is_spaced}
        rows = csv_rows(stream, faults, base, has_row_names, **dialect)
    for place, header in rows:
        if not _is_blank((place, header)):
            if header[0].startswith("#"):
                header[0] = header[0].lstrip("# ")
            names = ["", *header] if has_row_names else header
            rows = chain([(place, names)], rows)
            break
    for places, cells in table_batches(rows, source):
        if delimiter == ";":
            for name in {"start", "duration", "channel", *source.times} & cells.keys():
                cells[name] = [cell.replace(",", ".") for cell in cells[name]]
        yield places, cells


def read_jsonl(source: Source) -> Iterator[Batch]:
    """JSON lines."""
    return json_batches(json_rows(source.stream, source.faults), source)


def read_parquet(source: Source) -> Iterator[Batch]:
    """Parquet; a ManifestError if it is damaged."""
    return parquet_batches(parquet_table(source.stream), source)


def csv_rows(
    stream: BinaryIO, faults: Faults, base: int = 0, is_of_r: bool = False, **dialect: Any
) -> Rows:
    """The rows of CSV. `base` is the place of the file's line 0. R has a backslash before
    a quote inside a field. `dialect` is what `csv.reader` is told besides."""
    lines = lines_of(stream, faults, base)
    if is_of_r:
        lines = (line.replace('\\"', '""') for line in lines)
    # the process has one limit, at first 131,072 characters
    csv.field_size_limit(max(csv.field_size_limit(), _CELL))
    reader, is_over = csv.reader(lines, strict=True, **dialect), False
    while not is_over:
        line = base + reader.line_num + 1
        try:
            for row in reader:
                yield line, row
                line = base + reader.line_num + 1
            is_over = True
        except csv.Error as error:
            faults.add(line, f"not a CSV row: {error} (is a quote not closed, or not doubled?)")


def split_rows(stream: BinaryIO, faults: Faults, delimiter: str, base: int = 0) -> Rows:
    """The rows of lines whose fields are everything between two delimiters."""
    for place, line in enumerate(lines_of(stream, faults, base), base + 1):
        yield place, line.removesuffix("\n").removesuffix("\r").split(delimiter)


def table_batches(rows: Rows, reading: Source) -> Iterator[Batch]:
    """Rows of which the first is the header."""
    reading.has_types = False
    faults = reading.faults
    line, header = next((row for row in rows if not _is_blank(row)), (0, []))
    if not header:
        return
    if (fault := _no_header(reading.renamed(header), reading)) is not None:
        faults.add(line, fault)
        return
    names = _meanings_of_header(header, line, reading)
    while batch := list(islice(rows, rows_at_once(len(names), ROWS_PER_BATCH))):
        lines, cells = zip(*batch, strict=True)
        if len(names) == 1 or set(map(len, cells)) != {len(names)}:
            batch = [row for row in batch if not _is_blank(row)]
            for line, row in batch:
                if len(row) != len(names):
                    faults.add(
                        line, f"{counted(len(row), 'field')}, but the header has {len(names)}"
                    )
            if not (batch := [row for row in batch if len(row[1]) == len(names)]):
                continue
            lines, cells = zip(*batch, strict=True)
        yield lines, dict(zip(names, zip(*cells, strict=True), strict=True))


def rows_at_once(num_columns: int, most: int) -> int:
    """How many rows are read at once, so that a wide table takes no more memory."""
    return max(1, min(most, _CELLS_AT_ONCE // max(1, num_columns)))


def _is_blank(row: tuple[int, Any]) -> bool:
    return len(row[1]) < 2 and not "".join(row[1]).strip()


def json_rows(stream: BinaryIO, faults: Faults, base: int = 0, of: Any = dict[str, Any]) -> Rows:
    """The objects of JSON lines; `of` is their type, in msgspec's terms."""
    decode = msgspec.json.Decoder(of).decode
    is_first = True
    for place, line in enumerate(lines_of(stream, faults, base), base + 1):
        try:
            row = decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            if not line.strip():
                continue
            if is_first and line.lstrip().startswith("["):
                faults.add(
                    place,
                    "a JSON array; one object on each line is expected: jq -c '.[]' makes them",
                )
                return
            is_first = False
            try:
                row = _slowly_decoded(line, of)
            except ValueError as error:
                faults.add(place, str(error))
                continue
        is_first = False
        yield place, row


def _slowly_decoded(line: str, of: Any) -> Any:
    """An object that msgspec refuses: Python's own parser says why, in a ValueError, or
    reads it, as it does NaN."""
    try:
        row = json.loads(line)
        # an escape may be half of a surrogate pair, which is no text
        json.dumps(row, ensure_ascii=False).encode()
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


def json_batches(rows: Rows, reading: Source) -> Iterator[Batch]:
    """Objects, whose keys are the columns."""
    reading.has_types = True
    known: dict[tuple[str, ...], list[str]] = {}  # the keys of an object -> what they mean
    names: dict[str, None] = {}  # every column so far, in order
    while batch := list(islice(rows, ROWS_PER_BATCH)):
        lines, objects = zip(*batch, strict=True)
        keys_of = list(map(tuple, objects))
        found = dict.fromkeys(keys_of)
        if not names:  # the keys of the first objects serve as a header
            _require(
                dict.fromkeys(chain.from_iterable(map(reading.renamed, found))), lines[0], reading
            )
        for keys in found:
            if keys not in known:
                line = lines[keys_of.index(keys)]
                known[keys] = _meanings(keys, line, reading)
                names |= dict.fromkeys(known[keys])
                if len(known) > 1 and len(names) > _MOST_KEYS:
                    reading.faults.add(
                        line, f"more than {_MOST_KEYS:,} different keys: keys are columns, not ids"
                    )
                    return
        if len(found) == 1 and len(known[keys_of[0]]) == len(names):
            columns = zip(*(row.values() for row in objects), strict=True)
            yield lines, dict(zip(known[keys_of[0]], columns, strict=True))
            continue
        meant = [
            dict(zip(known[keys], row.values(), strict=True))
            for keys, row in zip(keys_of, objects, strict=True)
        ]
        yield lines, {name: [row.get(name) for row in meant] for name in names}


def parquet_batches(table: Table, reading: Source, file: str = "") -> Iterator[Batch]:
    """The rows of a table that is read by its columns: of one of several files, or the
    only one, without a name."""
    reading.has_types = True
    base = reading.faults.file(file, "row")
    names = dict(zip(table.names, _meanings_of_header(table.names, base, reading), strict=True))
    needed = {*SPELLINGS, *reading.times, *reading.unread}
    wanted = {
        name: meaning for name, meaning in names.items() if reading.carry or meaning in needed
    }
    for rows, cells in table.batches(wanted):
        yield (
            [base + row for row in rows],
            {meaning: cells[name] for name, meaning in wanted.items()},
        )


def _no_header(cells: Sequence[str], reading: Source) -> str | None:
    """Why the first row of a table plainly names no columns; None if it may be a header."""
    if _missing_column(cells, reading) is None:
        return None
    if len(cells) == 1:
        for separator, name, remedy in (
            (";", "semicolons", "name one of them id or path"),
            ("|", "|", "name the columns in a line above, as path|speaker|text"),
            ("\t", "tabs", "name the file .tsv"),
            (" ", "spaces", "of Kaldi's files, give their folder, or --format kaldi for a wav.scp"),
        ):
            if separator in cells[0].strip():
                return f"fields are separated by {name}: {remedy}"
    if any(map(names_audio, cells)):
        return (
            "there is no header, but a file's name: name the columns in a line above it, "
            "id and path for instance"
        )
    return None


def _missing_column(names: Collection[str], reading: Source) -> str | None:
    """The required column that none of `names` means, if any. Ids are not needed beside
    paths, which stand for them."""
    there = set(map(meaning_of, names))
    if reading.audio and "path" not in there:
        return "path"
    return None if there & {"id", "path"} else "id"


def _meanings_of_header(header: Sequence[str], line: int, reading: Source) -> list[str]:
    """What `_meanings` gives, where these are all columns of the table: names that come
    again or lack are faults."""
    for name, count in Counter(reading.renamed(header)).items():
        if count > 1:
            reading.faults.add(line, f"{count} columns are named {name!r}")
    _require(reading.renamed(header), line, reading)
    return _meanings(header, line, reading)


def _meanings(given: Sequence[str], line: int, reading: Source) -> list[str]:
    """The column that each name means, or the name that it is carried by."""
    if reading.renamed is list and not _OF_CLIPS.isdisjoint(map(str.lower, given)):
        reading.renamed = partial(names_of_whole_files, "path")
        reading.note("files are read whole: a start says where in a recording they come from")
    names = reading.renamed(given)
    there, times = {*names}, times_of(names)
    ends = {name for name, time in times.items() if time.role == "end"}
    found = [
        name if name in ends or meaning_of(name) in there else meaning_of(name) for name in names
    ]
    for column in SPELLINGS:
        same = {name: None for name, meaning in zip(names, found, strict=True) if meaning == column}
        if len(same) > 1:
            reading.faults.add(
                line,
                f"{' and '.join(map(repr, same))} both mean {column}: name one of them {column}",
            )
    found = _with_times(names, found, times, line, reading)
    paths = {
        meaning: name
        for name, meaning in zip(given, found, strict=True)
        if meaning_of(name) == "path"
    }
    if (taken := paths.pop("path", None)) is not None and paths:
        reading.note(
            f"audio is read from the column {taken!r}, and not from "
            f"{listing(map(repr, paths.values()))}"
        )
    return found


def _with_times(
    names: Sequence[str], found: list[str], times: dict[str, Time], line: int, reading: Source
) -> list[str]:
    """Choose the columns of time that cut the rows: a start, and what ends it in the same
    unit. Returns `found`, without a `duration` of another unit."""
    if "path" not in found:
        return found
    others = {name: time for name, time in times.items() if name in found}
    start, unit = _start_of(found, others, line, reading)
    if not start:
        return found
    written = names[found.index(start)]
    stops = [name for name in others if others[name].role != "start"]
    fitting = [name for name in stops if others[name].unit == unit]
    ends = [name for name in fitting if others[name].role == "end"]
    has_duration = "duration" in found and unit == "seconds"
    chosen = ends if ends or has_duration else fitting[:1]
    reading.times |= {name: others[name] for name in chosen}
    if not (chosen or has_duration):
        offsets = [name for name in others if name != start and "offset" in name.lower()]
        for name in [*stops, *offsets, *(name for name in found if name == "duration")][:1]:
            reading.faults.add(line, _why_not_read(name, written, others.get(name)))
    elif start != "start" or not has_duration:
        until = f" to {chosen[0]!r}" if ends else ""
        reading.note(
            f"rows are cut from {written!r}{until}, in {unit}: where each file is a clip "
            "already, leave these columns out"
        )
    if has_duration or not ends:
        return found
    return ["original_duration" if name == "duration" else name for name in found]


def _why_not_read(name: str, start: str, time: Time | None) -> str:
    if time is not None and time.role != "duration" and not time.is_explicit:
        return f"{name!r} is not read: give a duration, {name} - start, instead"
    remedy = "say one unit in both names, as start_ms and length_ms"
    return f"{name!r} is not read beside {start!r}: {remedy}"


def _start_of(
    found: Sequence[str], others: dict[str, Time], line: int, reading: Source
) -> tuple[str, str]:
    """The column that says where rows begin, and its unit; two empty texts if none does,
    and then what is not read is told. A name that says no unit needs a time beside it."""
    if "start" in found:
        return "start", "seconds"
    with_stops = {time.unit for time in others.values() if time.role != "start"}
    with_stops |= {"seconds"} if "duration" in found else set()
    for unit in filter(None, UNITS):
        starts = [
            name
            for name, time in others.items()
            if (time.role, time.unit) == ("start", unit)
            and (time.is_explicit or unit in with_stops)
        ]
        if len(starts) > 1:
            both = " and ".join(map(repr, starts))
            reading.faults.add(line, f"{both} both mean start: name one of them start")
        if starts:
            reading.times[starts[0]] = others[starts[0]]
            return starts[0], unit
    for name in found:
        if may_be_time(name) or (name in others and others[name].role != "duration"):
            reading.unread.setdefault(name, False)
        elif name in others and others[name].is_explicit and "duration" not in found:
            reading.note(f"{name!r} is not read, since no column says where rows begin")
    return "", ""


def _require(names: Collection[str], line: int, reading: Source) -> None:
    """Add a fault if none of `names` means a required column."""
    if (column := _missing_column(names, reading)) is not None:
        there, known = listing(map(repr, names)), ", ".join(SPELLINGS[column])
        reading.faults.add(
            line, f"no {column} column among {there}: rename or add one; known spellings: {known}"
        )


def parquet_table(stream: BinaryIO) -> Table:
    """A table in a Parquet file, of which nothing but the footer has been read; a
    ManifestError, also of what it gives, if it is not one, or is damaged."""
    file = _checked(pyarrow().parquet.ParquetFile, stream)

    def read(columns: list[str]) -> Iterator[Any]:
        rows = rows_at_once(len(columns), _ROWS_OF_PARQUET)
        yield from file.iter_batches(rows, columns=columns, use_threads=False)

    return _table(file.schema_arrow, read, partial(_paths_outside, file))


def arrow_table(stream: BinaryIO) -> Table:
    """A table in an Arrow file, as `save_to_disk` of datasets writes it; otherwise as
    `parquet_table`."""

    def opened() -> Any:
        return pyarrow().ipc.open_stream(pyarrow().memory_map(stream.name))

    def read(columns: list[str]) -> Iterator[Any]:
        with opened() as reader:
            yield from (batch.select(columns) for batch in mapped_batches(reader, stream.fileno()))

    return _table(_checked(opened).schema, read, lambda audio: _without_bytes(read([audio])))


def _table(
    schema: Any, read: Callable[[list[str]], Iterator[Any]], outside: Callable[[str], Rows]
) -> Table:
    """The table of a schema. `read` gives pyarrow's batches of some columns, `outside`
    those of `paths_outside`."""
    types = pyarrow().types
    structs = [field for field in schema if types.is_struct(field.type)]
    parts = [
        {part.name for part in field.type if not types.is_nested(part.type)} for field in structs
    ]
    audio = [
        field.name
        for field, names in zip(structs, parts, strict=True)
        if {"bytes", "path"} <= names
    ]
    names = [field.name for field in schema if not _holds_bytes(field.type)]
    return Table(
        names,
        lambda columns: _numbered(read([*columns])),
        audio,
        lambda name: _checked(dict, outside(name)),
    )


def _paths_outside(file: Any, audio: str) -> Iterator[tuple[int, Any]]:
    """The paths of rows without bytes in a column of audio. Bytes are read only where the
    footer does not say that a row group has them all."""
    first, data, path = 0, f"{audio}.bytes", f"{audio}.path"
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group)
        chunks = {
            rows.column(number).path_in_schema: rows.column(number)
            for number in range(rows.num_columns)
        }
        known = chunks[data].statistics
        if known is None or not known.has_null_count or known.null_count:
            yield from _without_bytes(
                file.iter_batches(16, [group], [path, data], use_threads=False), first
            )
        first += rows.num_rows


def mapped_batches(reader: Any, descriptor: int) -> Iterator[Any]:
    """The batches of an Arrow file that is mapped; a ValueError if the file becomes
    shorter, since to touch what is mapped behind the end of a file ends the process by
    SIGBUS."""
    size = os.fstat(descriptor).st_size

    def next_batch() -> Any:
        batch = None if os.fstat(descriptor).st_size < size else next(reader, None)
        if os.fstat(descriptor).st_size < size:
            raise ValueError("it became shorter while it was read")
        return batch

    yield from iter(next_batch, None)


def _without_bytes(batches: Iterable[Any], row: int = 0) -> Iterator[tuple[int, Any]]:
    """The paths in the one column of some batches for which there are no bytes beside
    them, with their rows."""
    for batch in batches:
        audio = batch.column(0)
        fields = dict(zip([field.name for field in audio.type], audio.flatten(), strict=True))
        lacking = fields["bytes"].is_null().to_pylist()
        if any(lacking):
            paths = enumerate(zip(lacking, fields["path"].to_pylist(), strict=True), row)
            yield from ((at, path) for at, (lacks, path) in paths if lacks and path is not None)
        row += batch.num_rows


def _numbered(batches: Iterator[Any]) -> Iterator[Batch]:
    """The numbers of each batch's rows, and their cells. NaN is no value, as in tables in
    memory: a missing number."""
    types, done = pyarrow().types, 0
    while (batch := _checked(next, batches, None)) is not None:
        cells: Cells = _checked(batch.to_pydict)
        for field in batch.schema:
            if types.is_floating(field.type):
                cells[field.name] = [None if cell != cell else cell for cell in cells[field.name]]
        yield range(done + 1, done + 1 + batch.num_rows), cells
        done += batch.num_rows


def pyarrow(needed_for: str = "a manifest in Parquet or Arrow") -> Any:
    """The package that reads tables, and what Zstandard has compressed; a
    MissingDependencyError says what needs it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependencyError("pyarrow", needed_for, "parquet") from error
    return pyarrow


def _checked(read: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of pyarrow returns. Its errors, of many kinds, have several lines."""
    try:
        return read(*arguments)
    except (pyarrow().ArrowException, OSError, ValueError) as error:
        raise ManifestError(f"not Parquet or Arrow, or damaged: {first_line(error)}") from error


def is_bytes(arrow_type: Any) -> bool:
    """Whether a type of Arrow's is bytes of any length. Polars writes `binary_view`."""
    return str(arrow_type) in ("binary", "large_binary", "binary_view")


def _holds_bytes(arrow_type: Any) -> bool:
    """Whether values of a type of Arrow's are bytes, or have bytes in them."""
    types = pyarrow().types
    if is_bytes(arrow_type) or types.is_fixed_size_binary(arrow_type):
        return True
    if types.is_dictionary(arrow_type):
        return _holds_bytes(arrow_type.value_type)
    return any(
        _holds_bytes(arrow_type.field(number).type) for number in range(arrow_type.num_fields)
    )
