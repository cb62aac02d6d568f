"""Tables with a header or keys: CSV, TSV, JSON lines, Parquet, Arrow. Every fault is counted.

Parquet and Arrow are read by pyarrow, the reference implementation, which pandas,
datasets and Spark use too: a few thousand rows at a time, and only the columns that are
wanted."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
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
from featcache.manifest.utterances import ENDS, SPELLINGS, meaning_of, shown

# names of columns that are as often numbers of samples as seconds
_OTHER_ENDS = {"stop", "stop_time"}

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
    first = source.first_lines[0].lstrip() if source.first_lines else ""
    return "jsonl" if first.startswith(("{", "[")) else "tsv" if "\t" in first else "csv"


def has_header(source: Source, mark: str) -> bool:
    """Whether the first line names a column of ids or paths between these marks."""
    return any(
        meaning_of(cell.strip('"')) in ("id", "path") for cell in source.first_fields.split(mark)
    )


def read_csv(source: Source) -> Iterator[Batch]:
    """CSV with a header. Semicolons separate fields if the header has them, and no commas
    give its columns."""
    by_semicolons = not has_header(source, ",") and has_header(source, ";")
    return table_batches(
        csv_rows(source.stream, source.faults, delimiter=";" if by_semicolons else ","), source
    )


def read_tsv(source: Source) -> Iterator[Batch]:
    """TSV with a header."""
    return table_batches(split_rows(source.stream, source.faults, "\t"), source)


def read_jsonl(source: Source) -> Iterator[Batch]:
    """JSON lines."""
    return json_batches(json_rows(source.stream, source.faults), source)


def read_parquet(source: Source) -> Iterator[Batch]:
    """Parquet; a ManifestError if it is damaged."""
    return parquet_batches(parquet_table(source.stream), source)


def csv_rows(stream: BinaryIO, faults: Faults, base: int = 0, **dialect: Any) -> Rows:
    """The rows of CSV; `base` is the place of the file's line 0, and `dialect` what
    `csv.reader` is told besides."""
    # the process has one limit, at first 131,072 characters
    csv.field_size_limit(max(csv.field_size_limit(), _CELL))
    reader, is_over = csv.reader(lines_of(stream, faults, base), strict=True, **dialect), False
    while not is_over:
        line = base + reader.line_num + 1
        try:
            for row in reader:
                yield line, row
                line = base + reader.line_num + 1
            is_over = True
        except csv.Error as error:
            faults.add(line, f"not a CSV row: {error} (is a quote not closed, or not doubled?)")


def split_rows(stream: BinaryIO, faults: Faults, delimiter: str) -> Rows:
    """The rows of lines whose fields are everything between two delimiters."""
    for place, line in enumerate(lines_of(stream, faults), 1):
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
    needed = {*SPELLINGS, *ENDS}
    wanted = {
        name: meaning
        for name, meaning in names.items()
        if reading.carry or meaning.strip().lower() in needed
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
    names = reading.renamed(given)
    there = set(names)
    found = [name if meaning_of(name) in there else meaning_of(name) for name in names]
    for column in SPELLINGS:
        same = {name: None for name, meaning in zip(names, found, strict=True) if meaning == column}
        if len(same) > 1:
            reading.faults.add(
                line,
                f"{' and '.join(map(repr, same))} both mean {column}: name one of them {column}",
            )
    if "start" in found and "duration" not in found:
        for name in names:
            if name.strip().lower() in _OTHER_ENDS:
                reading.faults.add(
                    line, f"{name!r} is not read: give a duration, {name} - start, instead"
                )
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


def _holds_bytes(arrow_type: Any) -> bool:
    """Whether values of a type of Arrow's are bytes, or have bytes in them."""
    types = pyarrow().types
    if any(
        of(arrow_type)
        for of in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    ):
        return True
    if types.is_dictionary(arrow_type):
        return _holds_bytes(arrow_type.value_type)
    return any(
        _holds_bytes(arrow_type.field(number).type) for number in range(arrow_type.num_fields)
    )
