"""From the bytes of a table to batches of rows: CSV, TSV, JSON lines."""

from __future__ import annotations

import codecs
import csv
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from reprlib import repr as shown
from typing import Any, BinaryIO

from featcache.errors import counted
from featcache.manifest.columns import meanings, no_header, require
from featcache.manifest.faults import Faults

_ROWS_PER_BATCH = 1024

_Rows = Iterator[tuple[int, Any]]
"""The line that each row begins on; its cells, listed or by key."""

Batch = tuple[Sequence[int], dict[str, Sequence[Any]]]
"""Some rows: their lines; their cells, by column."""


def batches(stream: BinaryIO, suffix: str, required: Collection[str], faults: Faults) -> Iterator[Batch]:
    """The rows of a manifest, by column.

    Args:
        stream: its bytes.
        suffix: of its name, which tells the format; where it tells none, the first line does.
        required: columns that must be there.
        faults: what is wrong is added to them, and the row left out.
    """
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
    """The lines as text; a faulty one as some other text, so that all the rest is checked too."""
    for number, raw in enumerate(stream, 1):
        if number == 1:
            if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                faults.add(1, "UTF-16, and UTF-8 is expected: iconv -f UTF-16 -t UTF-8 converts it")
                return
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
    if (fault := no_header(header, required)) is not None:
        faults.add(line, fault)
        return
    for name, count in Counter(header).items():
        if count > 1:
            faults.add(line, f"{count} columns are named {name!r}")
    require(required, header, line, faults)
    names = meanings(header, line, faults)
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
        if not names:  # the first objects stand for a header
            keys = dict.fromkeys(key for _, row in batch for key in row)
            require(required, keys, batch[0][0], faults)
        renamed = []
        for line, row in batch:
            layout = tuple(row)
            if layout not in layouts:
                layouts[layout] = meanings(layout, line, faults)
                names |= dict.fromkeys(layouts[layout])
            renamed.append(dict(zip(layouts[layout], row.values(), strict=True)))
        yield [line for line, _ in batch], {name: [row.get(name, "") for row in renamed] for name in names}
