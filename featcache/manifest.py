"""Manifests: tables of utterances, read into flat columns, with every fault reported at once.

Three formats, told apart by suffix; standard input and files with another suffix, by their first line:

* CSV (`.csv`): comma-separated, with a header; a quoted field may hold commas, quotes and newlines.
* TSV (`.tsv`): tab-separated, with a header; quotes mean nothing, a cell is what stands between two tabs.
* JSON lines (`.jsonl`, `.json`): an object on each line; its keys are the columns.

All are UTF-8, with or without a byte order mark; blank lines are skipped. A manifest may have 10^7 rows: they
are read and checked in batches, and what stays of them are flat arrays.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
import sys
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from reprlib import repr as shown
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ManifestError, listing
from featcache.strings import Strings, extend_hashes

__all__ = ["SPELLINGS", "Manifest", "Utterance", "read_manifest", "row_hashes"]

SPELLINGS = {
    "id": ("id", "utt_id", "uttid", "utt", "utterance_id", "utterance", "audio_id", "segment_id", "key"),
    "path": (
        *("path", "wav", "wav_path", "audio", "audio_path", "audio_file", "audio_filepath"),
        *("file", "file_path", "filepath", "file_name", "filename"),
    ),
    "start": ("start", "start_time", "begin", "begin_time", "offset"),
    "duration": ("duration", "dur"),
    "channel": ("channel",),
}
"""How each column may be spelled, in any case. A table with two spellings of one column is refused, unless
one of them is exactly the column's own name, as it stands on the left: then the others are carried.

Names that do not say seconds are left out on purpose: a `length` is as often in samples or frames.
"""

_COLUMN_OF = {spelling: column for column, spellings in SPELLINGS.items() for spelling in spellings}
_ENDS = {"end", "end_time", "stop", "stop_time"}  # not read, so a fault where one stands for a duration
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ROWS_PER_BATCH = 1024
_FAULTS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Utterance:
    """One row of a manifest.

    Attributes:
        id: unique in its manifest.
        path: the audio file, as written; `Manifest.resolve` says where it is.
        start: seconds from the beginning of the file; None where not given.
        duration: seconds; None where not given.
        channel: which channel of the file, from 0; None where not given.
    """

    id: str
    path: str
    start: float | None
    duration: float | None
    channel: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A table of utterances, by column; `manifest[row]` is an `Utterance`.

    Attributes:
        source: what was read, for messages: the file as it was named, or `<stdin>`.
        root: the folder that relative paths are relative to; absolute.
        ids: `[rows]`, all different.
        paths: `[rows]`, as written; empty where not given, which only `audio=False` allows.
        start: float64 `[rows]`, seconds; NaN where not given.
        duration: float64 `[rows]`, seconds; NaN where not given.
        channel: int32 `[rows]`; -1 where not given.
        columns: every other column `[rows]`, as text, by its own name.
    """

    source: str
    root: Path
    ids: Strings
    paths: Strings
    start: NDArray[np.float64]
    duration: NDArray[np.float64]
    channel: NDArray[np.int32]
    columns: dict[str, Strings]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Utterance:
        start, duration, channel = float(self.start[row]), float(self.duration[row]), int(self.channel[row])
        return Utterance(
            id=self.ids[row],
            path=self.paths[row],
            start=None if math.isnan(start) else start,
            duration=None if math.isnan(duration) else duration,
            channel=None if channel < 0 else channel,
        )

    def resolve(self, path: str) -> Path:
        """Where the file of one of the `paths` is: under `root`, unless the path is absolute."""
        return self.root / path


def read_manifest(
    source: str | Path, *, root: str | Path | None = None, audio: bool = True, carry: bool = True
) -> Manifest:
    """Read and check a manifest.

    Args:
        source: a file, or `-` for standard input.
        root: the folder that relative paths are relative to; by default the manifest's own, and for standard
            input the current one.
        audio: whether paths are required; ids always are.
        carry: whether to keep the columns that an `Utterance` does not have.

    Raises:
        ManifestError: the file cannot be read, or has faults. The message lists them by line, the first 20.
    """
    is_stdin = str(source) == "-"
    name = "<stdin>" if is_stdin else str(source)
    required = ("id", "path") if audio else ("id",)
    faults = _Faults(name)
    try:
        with nullcontext(sys.stdin.buffer) if is_stdin else Path(source).open("rb") as stream:
            batches = _batches(stream, Path(source).suffix.lower(), required, faults)
            parts, lines = _gather(batches, required, carry, faults)
    except OSError as error:
        raise ManifestError(f"{name}: cannot be read: {error.strerror or error}") from error
    if not lines and not faults.count:
        faults.add(0, "there are no rows")
    ids = Strings.concatenate(parts.pop("id"))
    _find_duplicates(ids, lines, faults)
    faults.raise_if_any()
    return Manifest(
        source=name,
        root=(Path(source).parent if root is None else Path(root)).absolute(),
        ids=ids,
        paths=Strings.concatenate(parts.pop("path")),
        start=np.concatenate(parts.pop("start")),
        duration=np.concatenate(parts.pop("duration")),
        channel=np.concatenate(parts.pop("channel")),
        columns={column: Strings.concatenate(parts.pop(column)) for column in list(parts)},
    )


def row_hashes(
    paths: Strings, start: NDArray[np.float64], duration: NDArray[np.float64], channel: NDArray[np.int32]
) -> NDArray[np.uint64]:
    """What tells rows apart: equal for rows with equal path, start, duration and channel.

    It is the 64-bit FNV-1a hash of the path's bytes, start and duration (little-endian float64, one NaN, one
    zero) and channel (little-endian int32).

    Args:
        paths: `[rows]`.
        start: `[rows]`, seconds; NaN where not given.
        duration: `[rows]`, seconds; NaN where not given.
        channel: `[rows]`; -1 where not given.

    Returns:
        uint64 `[rows]`.
    """
    hashes = paths.hashes()
    for seconds in (start, duration):
        hashes = extend_hashes(hashes, np.where(np.isnan(seconds), np.nan, seconds + 0.0))
    return extend_hashes(hashes, channel.astype(np.int32))


class _Faults:
    """Counts the faults, and keeps those that are shown: the first by line. Line 0 is the whole file."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        self._first: list[tuple[int, str]] = []

    def add(self, line: int, what: str) -> None:
        self.count += 1
        insort(self._first, (line, what), key=itemgetter(0))
        del self._first[_FAULTS_SHOWN:]

    def raise_if_any(self) -> None:
        if not self.count:
            return
        message = [f"{self._source}: {_counted(self.count, 'fault')}"]
        message += [f"  line {line}: {what}" if line else f"  {what}" for line, what in self._first]
        if self.count > _FAULTS_SHOWN:
            message.append(f"  … and {self.count - _FAULTS_SHOWN} more")
        raise ManifestError("\n".join(message))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# From bytes to batches of rows

_Rows = Iterator[tuple[int, Any]]  # the line that each begins on; its cells, listed or by key
_Batch = tuple[Sequence[int], dict[str, Sequence[Any]]]  # of some rows: their lines; their cells, by column


def _batches(stream: BinaryIO, suffix: str, required: Collection[str], faults: _Faults) -> Iterator[_Batch]:
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


def _decoded(stream: BinaryIO, faults: _Faults) -> Iterator[str]:
    """The lines as text; a faulty one as some other text, so that all the rest is checked too."""
    for number, raw in enumerate(stream, 1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            faults.add(number, f"byte {error.start + 1} is not UTF-8: 0x{raw[error.start]:02x}")
            line = raw.decode("cp437")  # where all bytes above ASCII are printable and differ
        if "\0" in line:
            faults.add(number, "there is a NUL byte")
            line = line.replace("\0", "\ufffd")
        yield line


def _csv_rows(lines: Iterable[str], faults: _Faults) -> _Rows:
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


def _table_batches(rows: _Rows, required: Collection[str], faults: _Faults) -> Iterator[_Batch]:
    rows = (row for row in rows if len(row[1]) > 1 or "".join(row[1]).strip())
    line, header = next(rows, (0, []))
    if not header:
        return
    for name, count in Counter(header).items():
        if count > 1:
            faults.add(line, f"{count} columns are named {name!r}")
    _require(required, header, line, faults)
    names = _meanings(header, line, faults)
    while batch := list(islice(rows, _ROWS_PER_BATCH)):
        for line, row in batch:
            if len(row) != len(names):
                faults.add(line, f"{_counted(len(row), 'field')}, but the header has {len(names)}")
        if batch := [row for row in batch if len(row[1]) == len(names)]:
            lines, cells = zip(*batch, strict=True)
            yield lines, dict(zip(names, zip(*cells, strict=True), strict=True))


def _json_rows(lines: Iterable[str], faults: _Faults) -> _Rows:
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


def _json_batches(rows: _Rows, required: Collection[str], faults: _Faults) -> Iterator[_Batch]:
    layouts: dict[tuple[str, ...], list[str]] = {}  # the keys of an object -> what they mean
    names: dict[str, None] = {}  # every column so far, in order
    while batch := list(islice(rows, _ROWS_PER_BATCH)):
        if not names:  # the first objects stand for a header
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


# What the columns mean


def _meaning(name: str) -> str:
    return _COLUMN_OF.get(name.strip().lower(), name)


def _meanings(names: Collection[str], line: int, faults: _Faults) -> list[str]:
    """For each column the one of `SPELLINGS` that it is, or its own name where it is carried."""
    meanings = [name if _meaning(name) in names else _meaning(name) for name in names]
    for column in SPELLINGS:
        same = {name: None for name, meaning in zip(names, meanings, strict=True) if meaning == column}
        if len(same) > 1:
            faults.add(line, f"{' and '.join(map(repr, same))} both mean {column}: name one of them {column}")
    if "start" in meanings and "duration" not in meanings:
        for name in names:
            if name.strip().lower() in _ENDS:
                faults.add(line, f"{name!r} is not read: give a duration, {name} - start, instead")
    return meanings


def _require(required: Collection[str], names: Collection[str], line: int, faults: _Faults) -> None:
    for column in required:
        if column not in map(_meaning, names):
            known = listing(SPELLINGS[column], len(SPELLINGS[column]))
            there = listing(map(repr, names))
            faults.add(line, f"no {column} column among {there}: rename or add one; known spellings: {known}")


# What the cells mean; a ValueError says what is wrong with one


def _text(cell: Any) -> str:
    if not isinstance(cell, str):
        raise ValueError(f"is not text: {shown(cell)}")
    return cell


def _id(cell: Any) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return str(cell)
    if not _text(cell).isprintable() and _CONTROL.search(cell):
        raise ValueError(f"has a control character: {shown(cell)}")
    return _text(cell)


def _path(cell: Any) -> str:
    if _text(cell).rstrip().endswith("|"):
        raise ValueError(f"is a pipe, and pipes are never run: {shown(cell)}")
    if "\0" in cell:
        raise ValueError(f"has a NUL character: {shown(cell)}")
    return _text(cell)


def _number(cell: Any) -> float:
    try:
        if isinstance(cell, bool):
            raise TypeError
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"is not a number: {shown(cell)}") from None
    if not math.isfinite(value):
        raise ValueError(f"is not finite: {value}")
    return value


def _start(cell: Any) -> float:
    seconds = _number(cell)
    if seconds < 0:
        raise ValueError(f"is negative: {seconds}")
    return seconds


def _duration(cell: Any) -> float:
    seconds = _start(cell)
    if seconds == 0:
        raise ValueError("is zero: leave it empty to read to the end of the file")
    return seconds


def _channel(cell: Any) -> int:
    value = _number(cell)
    if not (value.is_integer() and 0 <= value < 2**31):
        raise ValueError(f"is not a whole number from 0 up: {shown(cell)}")
    return int(value)


def _carried(cell: Any) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, separators=(",", ":"))


class _Column(NamedTuple):
    name: str
    parse: Callable[[Any], Any]
    not_given: Any
    pack: Callable[[list[Any]], Any]


_COLUMNS = (
    _Column("id", _id, "", Strings.of),
    _Column("path", _path, "", Strings.of),
    _Column("start", _start, math.nan, partial(np.array, dtype=np.float64)),
    _Column("duration", _duration, math.nan, partial(np.array, dtype=np.float64)),
    _Column("channel", _channel, -1, partial(np.array, dtype=np.int32)),
)


# From batches to columns


def _gather(
    batches: Iterable[_Batch], required: Collection[str], carry: bool, faults: _Faults
) -> tuple[dict[str, list[Any]], array[int]]:
    """The flat parts of each column, one per batch; and the line of each row."""
    parts: dict[str, list[Any]] = {name: [] for name in SPELLINGS}
    row_lines = array("q")
    for lines, cells in batches:
        for column in _COLUMNS:
            values = [column.not_given] * len(lines)
            if column.name in cells:
                values = _values(column, lines, cells[column.name], column.name in required, faults)
            parts[column.name].append(column.pack(values))
        for name in cells:
            if carry and name not in SPELLINGS:
                so_far = parts.setdefault(name, [_empty_strings(len(row_lines))])
                so_far.append(Strings.of(map(_carried, cells[name])))
        row_lines.extend(lines)
    return parts, row_lines


def _values(column: _Column, lines: Sequence[int], cells: Sequence[Any], required: bool, faults: _Faults) -> list[Any]:
    values = []
    for line, cell in zip(lines, cells, strict=True):
        value = column.not_given
        if cell is not None and cell != "":
            try:
                value = column.parse(cell)
            except ValueError as error:
                faults.add(line, f"{column.name} {error}")
        elif required:
            faults.add(line, f"{column.name} is missing")
        values.append(value)
    return values


def _empty_strings(count: int) -> Strings:
    return Strings(np.zeros(0, np.uint8), np.zeros(count + 1, np.int64))


def _find_duplicates(ids: Strings, lines: Sequence[int], faults: _Faults) -> None:
    hashes = ids.hashes()
    ordered = np.sort(hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    first_rows: dict[str, int] = {}
    for row in np.flatnonzero(np.isin(hashes, repeated)).tolist():
        name = ids[row]
        first = first_rows.setdefault(name, row)
        if name and first != row:
            faults.add(lines[row], f"id {name!r} is already on line {lines[first]}")
