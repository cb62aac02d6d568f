"""From the bytes of a table to batches of rows: CSV, TSV, JSON lines, Parquet. Every fault is counted."""

from __future__ import annotations

import codecs
import csv
import json
import re
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from reprlib import repr as shown
from typing import Any, BinaryIO

from featcache.errors import ManifestError, counted, listing
from featcache.manifest.columns import SPELLINGS, meaning_of
from featcache.manifest.parquet import ParquetTable

_ROWS_PER_BATCH = 1024
_FAULTS_SHOWN = 20
_LINE_BYTES = 4 << 20
_ENDS = {"end", "end_time", "stop", "stop_time"}  # names of columns that are not read in place of a duration
_AUDIO = re.compile(r"\.(wav|flac|mp3|ogg|opus|sph|aiff?|m4a)\s*\|?$", re.IGNORECASE)

_Rows = Iterator[tuple[int, Any]]
"""The line that each row begins on; its cells, as a list or by key."""

Batch = tuple[Sequence[int], dict[str, Sequence[Any]]]
"""The line of each of some rows; their cells, by column."""


class Faults:
    """Counts the faults of a manifest, and keeps those that are shown: the first by line. Line 0 is the whole file.

    Args:
        source: The manifest, for the message.
    """

    unit = "line"
    """What is counted: lines, or the rows of a table that has no lines."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        self._first: list[tuple[int, str]] = []

    def add(self, line: int, what: str) -> None:
        """Add what is wrong with a line."""
        self.count += 1
        insort(self._first, (line, what), key=itemgetter(0))
        del self._first[_FAULTS_SHOWN:]

    def raise_if_any(self) -> None:
        """Raise a ManifestError that says how many faults there are, and lists the first by line."""
        if not self.count:
            return
        message = [f"{self._source}: {counted(self.count, 'error')}"]
        message += [f"  {self.unit} {line}: {what}" if line else f"  {what}" for line, what in self._first]
        if self.count > _FAULTS_SHOWN:
            message.append(f"  … and {self.count - _FAULTS_SHOWN} more")
        raise ManifestError("\n".join(message))


def batches(stream: BinaryIO, suffix: str, required: Collection[str], carry: bool, faults: Faults) -> Iterator[Batch]:
    """The rows of a manifest, by column.

    Args:
        stream: The manifest's bytes.
        suffix: The suffix of its name, which tells the format; if it does not, the first line does.
        required: Columns that must be there.
        carry: Whether columns that an `Utterance` does not have are wanted; they may be there even if not.
        faults: Where faults are added; rows that cannot be read are left out.

    Raises:
        ManifestError: A Parquet file is damaged.
        MissingDependencyError: Parquet needs pyarrow.
    """
    if suffix == ".parquet":
        return _parquet_batches(ParquetTable(stream), required, carry, faults)
    lines = _decoded(stream, faults)
    head = []  # up to the first line that is not blank
    for line in lines:
        head.append(line)
        if line.strip():
            break
    first = "".join(head).lstrip()
    lines = chain(head, lines)
    if suffix not in {".csv", ".tsv", ".json", ".jsonl"}:
        suffix = ".jsonl" if first.startswith(("{", "[")) else ".tsv" if "\t" in first else ".csv"
    if suffix == ".csv":
        return _table_batches(_csv_rows(lines, faults), required, faults)
    if suffix == ".tsv":
        return _table_batches(_tsv_rows(lines), required, faults)
    if first.startswith("["):
        faults.add(len(head), "a JSON array; one object on each line is expected: jq -c '.[]' makes them")
        return iter(())
    return _json_batches(_json_rows(lines, faults), required, faults)


def _decoded(stream: BinaryIO, faults: Faults) -> Iterator[str]:
    """The lines as text; a faulty line as some other text, so that the rest is checked too."""
    for number, raw in enumerate(iter(lambda: stream.readline(_LINE_BYTES + 1), b""), 1):
        if len(raw) > _LINE_BYTES:  # a device, or no table: the rest of it may have no end
            faults.add(number, f"longer than {_LINE_BYTES:,} bytes")
            return
        if number == 1:
            if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                faults.add(1, "UTF-16, and UTF-8 is expected: iconv -f UTF-16 -t UTF-8 converts it")
                return
            if raw.startswith(b"PAR1"):
                faults.add(0, "a Parquet file: its name must end in .parquet")
                return
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            faults.add(number, f"byte {error.start + 1} is not UTF-8: 0x{raw[error.start]:02x}")
            line = raw.decode("cp437")  # in which all bytes above ASCII are printable and differ
        if "\0" in line:
            faults.add(number, "there is a NUL byte")
            line = line.replace("\0", "\ufffd")
        yield line


def _csv_rows(lines: Iterable[str], faults: Faults) -> _Rows:
    reader = csv.reader(lines, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            faults.add(line, f"not a CSV row: {error} (is a quote not closed, or not doubled?)")
        else:
            yield line, row


def _tsv_rows(lines: Iterable[str]) -> _Rows:
    for number, line in enumerate(lines, 1):
        yield number, line.removesuffix("\n").removesuffix("\r").split("\t")


def _table_batches(rows: _Rows, required: Collection[str], faults: Faults) -> Iterator[Batch]:
    rows = (row for row in rows if len(row[1]) > 1 or "".join(row[1]).strip())
    line, header = next(rows, (0, []))
    if not header:
        return
    if (fault := _no_header(header, required)) is not None:
        faults.add(line, fault)
        return
    _refuse_equal_names(header, line, faults)
    _require(required, header, line, faults)
    names = _meanings(header, line, faults)
    while batch := list(islice(rows, _ROWS_PER_BATCH)):
        for line, row in batch:
            if len(row) != len(names):
                faults.add(line, f"{counted(len(row), 'field')}, but the header has {len(names)}")
        if batch := [row for row in batch if len(row[1]) == len(names)]:
            lines, cells = zip(*batch, strict=True)
            yield lines, dict(zip(names, zip(*cells, strict=True), strict=True))


def _json_rows(lines: Iterable[str], faults: Faults) -> _Rows:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "\\ud" in line.lower():  # such an escape may be half of a surrogate pair, which is no text
                json.dumps(row, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            faults.add(number, f"not JSON: {error.msg} at character {error.pos + 1}")
        except (ValueError, RecursionError) as error:
            faults.add(number, f"JSON that cannot be read: {error}")
        else:
            if isinstance(row, dict):
                yield number, row
            else:
                faults.add(number, f"not a JSON object: {shown(row)}")


def _json_batches(rows: _Rows, required: Collection[str], faults: Faults) -> Iterator[Batch]:
    layouts: dict[tuple[str, ...], list[str]] = {}  # the keys of an object -> what they mean
    names: dict[str, None] = {}  # every column so far, in order
    while batch := list(islice(rows, _ROWS_PER_BATCH)):
        if not names:  # the keys of the first objects serve as a header
            keys = dict.fromkeys(key for _, row in batch for key in row)
            _require(required, keys, batch[0][0], faults)
        renamed = []
        for line, row in batch:
            layout = tuple(row)
            if layout not in layouts:
                layouts[layout] = _meanings(layout, line, faults)
                names |= dict.fromkeys(layouts[layout])
            renamed.append(dict(zip(layouts[layout], row.values(), strict=True)))
        yield [line for line, _ in batch], {name: [row.get(name, "") for row in renamed] for name in names}


def _parquet_batches(table: ParquetTable, required: Collection[str], carry: bool, faults: Faults) -> Iterator[Batch]:
    faults.unit = "row"
    _refuse_equal_names(table.names, 0, faults)
    _require(required, table.names, 0, faults)
    names = dict(zip(table.names, _meanings(table.names, 0, faults), strict=True))
    wanted = {name: meaning for name, meaning in names.items() if carry or meaning in SPELLINGS}
    for rows, cells in table.batches(wanted):
        yield rows, {meaning: cells[name] for name, meaning in wanted.items()}


def _no_header(cells: Sequence[str], required: Collection[str]) -> str | None:
    """Why the first row of a table plainly names no columns; None if it may be a header."""
    if all(column in map(meaning_of, cells) for column in required):
        return None
    if len(cells) == 1:
        for separator, name, remedy in (
            (";", "semicolons", "write commas for them"),
            ("\t", "tabs", "name the file .tsv"),
            (" ", "spaces, as in Kaldi's wav.scp and segments", "docs/manifest.md says how to convert these"),
        ):
            if separator in cells[0].strip():
                return f"fields are separated by {name}: {remedy}"
    if any(map(_AUDIO.search, cells)):
        return "there is no header, but a file's name: name the columns in a line above it, id and path for instance"
    return None


def _refuse_equal_names(names: Iterable[str], line: int, faults: Faults) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            faults.add(line, f"{count} columns are named {name!r}")


def _meanings(names: Collection[str], line: int, faults: Faults) -> list[str]:
    """The column that each name means, or the name itself if it is carried."""
    found = [name if meaning_of(name) in names else meaning_of(name) for name in names]
    for column in SPELLINGS:
        same = {name: None for name, meaning in zip(names, found, strict=True) if meaning == column}
        if len(same) > 1:
            faults.add(line, f"{' and '.join(map(repr, same))} both mean {column}: name one of them {column}")
    if "start" in found and "duration" not in found:
        for name in names:
            if name.strip().lower() in _ENDS:
                faults.add(line, f"{name!r} is not read: give a duration, {name} - start, instead")
    return found


def _require(required: Collection[str], names: Collection[str], line: int, faults: Faults) -> None:
    """Add a fault for each required column that none of `names` means."""
    for column in required:
        if column not in map(meaning_of, names):
            known = listing(SPELLINGS[column], len(SPELLINGS[column]))
            there = listing(map(repr, names))
            faults.add(line, f"no {column} column among {there}: rename or add one; known spellings: {known}")
