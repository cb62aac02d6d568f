"""Tables with a header or keys: CSV, TSV, JSON lines, Parquet. Every fault is counted."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, BinaryIO, Protocol

import msgspec

from featcache.errors import counted, listing
from featcache.manifest.columns import ENDS, SPELLINGS, meaning_of, shown
from featcache.manifest.formats.parquet import ParquetTable
from featcache.manifest.formats.source import ROWS_PER_BATCH, Batch, Faults, Reading, Source, lines_of, names_audio

_OTHER_ENDS = {"stop", "stop_time"}  # names of columns that are as often numbers of samples as seconds

Names = Sequence[str]
"""The names of a table's columns."""

Rows = Iterator[tuple[int, Any]]
"""The place of each row; its cells, as a list or by key."""


class Table(Protocol):
    """A table whose columns are read by name, as `ParquetTable`."""

    names: list[str]
    """The names of its columns."""

    def batches(self, columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
        """The number of each of some rows, from 1, and their cells in these columns."""


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
    return any(meaning_of(cell.strip('"')) in ("id", "path") for cell in source.first_fields.split(mark))


def read_csv(source: Source) -> Iterator[Batch]:
    """CSV with a header. Semicolons separate fields if the header has them, and no commas give its columns."""
    by_semicolons = not has_header(source, ",") and has_header(source, ";")
    rows = csv_rows(source.stream, source.faults, delimiter=";" if by_semicolons else ",")
    return table_batches(rows, source)


def read_tsv(source: Source) -> Iterator[Batch]:
    """TSV with a header."""
    return table_batches(split_rows(source.stream, source.faults, "\t"), source)


def read_jsonl(source: Source) -> Iterator[Batch]:
    """JSON lines."""
    return json_batches(json_rows(source.stream, source.faults), source)


def read_parquet(source: Source) -> Iterator[Batch]:
    """Parquet; a ManifestError if it is damaged."""
    source.faults.unit("row")
    return parquet_batches(ParquetTable(source.stream), source)


def csv_rows(stream: BinaryIO, faults: Faults, base: int = 0, **dialect: Any) -> Rows:
    """The rows of CSV; `base` is the place of the file's line 0, and `dialect` what `csv.reader` is told besides."""
    reader = csv.reader(lines_of(stream, faults, base), strict=True, **dialect)
    while True:
        line = base + reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            faults.add(line, f"not a CSV row: {error} (is a quote not closed, or not doubled?)")
        else:
            yield line, row


def split_rows(stream: BinaryIO, faults: Faults, delimiter: str) -> Rows:
    """The rows of lines whose fields are everything between two delimiters."""
    for place, line in enumerate(lines_of(stream, faults), 1):
        yield place, line.removesuffix("\n").removesuffix("\r").split(delimiter)


def table_batches(rows: Rows, reading: Reading, renamed: Callable[[Names], Names] = list) -> Iterator[Batch]:
    """Rows of which the first is the header; `renamed` gives the names that the columns are to have."""
    faults = reading.faults
    line, header = next((row for row in rows if not _is_blank(row)), (0, []))
    if not header:
        return
    if (fault := _no_header(renamed(header), reading.required)) is not None:
        faults.add(line, fault)
        return
    _refuse_equal_names(renamed(header), line, faults)
    _require(reading.required, renamed(header), line, faults)
    names = _meanings(header, line, reading, renamed)
    while batch := list(islice(rows, ROWS_PER_BATCH)):
        lines, cells = zip(*batch, strict=True)
        if len(names) == 1 or set(map(len, cells)) != {len(names)}:
            batch = [row for row in batch if not _is_blank(row)]
            for line, row in batch:
                if len(row) != len(names):
                    faults.add(line, f"{counted(len(row), 'field')}, but the header has {len(names)}")
            if not (batch := [row for row in batch if len(row[1]) == len(names)]):
                continue
            lines, cells = zip(*batch, strict=True)
        yield lines, dict(zip(names, zip(*cells, strict=True), strict=True))


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
                faults.add(place, "a JSON array; one object on each line is expected: jq -c '.[]' makes them")
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
    """An object that msgspec refuses: Python's own parser says what is wrong, in a ValueError, or reads it, as it does
    NaN."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # an escape may be half of a surrogate pair, which is no text
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"JSON that cannot be read: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object: {shown(row)}")
    try:
        return msgspec.convert(row, of)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(str(error))) from None


def _in_words(fault: str) -> str:
    """What msgspec says of an object of another form, in other words: of what is expected, it names Python's types."""
    what, _, inside = fault.partition(" - at `$")
    inside = inside.lstrip(".").removesuffix("`")
    if missing := _MISSING.fullmatch(what):
        return f"{f'{inside}.' if inside else ''}{missing[1]} is missing"
    if expected := _EXPECTED.fullmatch(what):
        wanted, found = (_JSON_TYPES.get(name, name) for name in expected.groups())
        return f"{inside or 'the object'} is {found}, and {wanted} is expected"
    return f"not as expected: {fault}"


_MISSING = re.compile(r"Object missing required field `(.*)`")
_EXPECTED = re.compile(r"Expected `(\w+)(?: \| null)?`, got `(\w+)`")
_JSON_TYPES = {
    **{"array": "a list", "object": "an object", "str": "text", "int": "a whole number", "float": "a number"},
    **{"bool": "true or false", "null": "null"},
}


def json_batches(rows: Rows, reading: Reading, renamed: Callable[[Names], Names] = list) -> Iterator[Batch]:
    """Objects, whose keys are the columns; `renamed` is as for `table_batches`."""
    layouts: dict[tuple[str, ...], list[str]] = {}  # the keys of an object -> what they mean
    names: dict[str, None] = {}  # every column so far, in order
    while batch := list(islice(rows, ROWS_PER_BATCH)):
        lines, objects = zip(*batch, strict=True)
        keys_of = list(map(tuple, objects))
        found = dict.fromkeys(keys_of)
        if not names:  # the keys of the first objects serve as a header
            there = dict.fromkeys(chain.from_iterable(map(renamed, found)))
            _require(reading.required, there, lines[0], reading.faults)
        for layout in found:
            if layout not in layouts:
                layouts[layout] = _meanings(layout, lines[keys_of.index(layout)], reading, renamed)
                names |= dict.fromkeys(layouts[layout])
        if len(found) == 1 and len(layouts[keys_of[0]]) == len(names):
            columns = zip(*(row.values() for row in objects), strict=True)
            yield lines, dict(zip(layouts[keys_of[0]], columns, strict=True))
            continue
        meant = [
            dict(zip(layouts[layout], row.values(), strict=True)) for layout, row in zip(keys_of, objects, strict=True)
        ]
        yield lines, {name: [row.get(name, "") for row in meant] for name in names}


def parquet_batches(
    table: Table, reading: Reading, base: int = 0, renamed: Callable[[Names], Names] = list
) -> Iterator[Batch]:
    """The rows of a table in Parquet; `renamed` is as for `table_batches`."""
    given = renamed(table.names)
    _refuse_equal_names(given, base, reading.faults)
    _require(reading.required, given, base, reading.faults)
    names = dict(zip(table.names, _meanings(table.names, base, reading, renamed), strict=True))
    needed = {*SPELLINGS, *ENDS}
    wanted = {name: meaning for name, meaning in names.items() if reading.carry or meaning.strip().lower() in needed}
    for rows, cells in table.batches(wanted):
        places = range(base + rows.start, base + rows.stop)
        yield places, {meaning: cells[name] for name, meaning in wanted.items()}


def _no_header(cells: Sequence[str], required: Collection[str]) -> str | None:
    """Why the first row of a table plainly names no columns; None if it may be a header."""
    if missing_columns(required, cells) == []:
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
        return "there is no header, but a file's name: name the columns in a line above it, id and path for instance"
    return None


def missing_columns(required: Collection[str], names: Collection[str]) -> list[str]:
    """The required columns that none of `names` means. Ids are not needed beside paths: the paths stand for them."""
    there = set(map(meaning_of, names))
    return ["path"] if "path" in required and "path" not in there else [] if there & {"id", "path"} else ["id"]


def _refuse_equal_names(names: Iterable[str], line: int, faults: Faults) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            faults.add(line, f"{count} columns are named {name!r}")


def _meanings(given: Names, line: int, reading: Reading, renamed: Callable[[Names], Names]) -> list[str]:
    """The column that each name means, or the name that it is carried by."""
    names = renamed(given)
    found = [name if meaning_of(name) in names else meaning_of(name) for name in names]
    for column in SPELLINGS:
        same = {name: None for name, meaning in zip(names, found, strict=True) if meaning == column}
        if len(same) > 1:
            reading.faults.add(line, f"{' and '.join(map(repr, same))} both mean {column}: name one of them {column}")
    if "start" in found and "duration" not in found:
        for name in names:
            if name.strip().lower() in _OTHER_ENDS:
                reading.faults.add(line, f"{name!r} is not read: give a duration, {name} - start, instead")
    paths = {meaning: name for name, meaning in zip(given, found, strict=True) if meaning_of(name) == "path"}
    if (taken := paths.pop("path", None)) is not None and paths:
        reading.note(f"audio is read from the column {taken!r}, and not from {listing(map(repr, paths.values()))}")
    return found


def _require(required: Collection[str], names: Collection[str], line: int, faults: Faults) -> None:
    """Add a fault for each required column that none of `names` means."""
    for column in missing_columns(required, names):
        known = listing(SPELLINGS[column], len(SPELLINGS[column]))
        there = listing(map(repr, names))
        faults.add(line, f"no {column} column among {there}: rename or add one; known spellings: {known}")
