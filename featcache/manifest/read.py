"""Reads a manifest, and reports every fault at once."""

from __future__ import annotations

import gzip
import sys
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from featcache.arguments import refuse_url
from featcache.errors import ManifestError
from featcache.manifest.audio_locations import AudioLocation, Url, as_root, is_audio_url
from featcache.manifest.columns import COLUMNS, SPELLINGS, Column, carried
from featcache.manifest.formats import Batch, Faults, batches
from featcache.manifest.utterances import Manifest
from featcache.strings import Strings

_GZIP = b"\x1f\x8b"


def read_manifest(
    source: str | Path, *, root: str | Path | None = None, audio: bool = True, carry: bool = True
) -> Manifest:
    """Read and check a manifest.

    Args:
        source: A file of CSV, TSV or JSON lines, which may be compressed by gzip, or of Parquet; or `-` for standard
            input.
        root: What relative paths are relative to, a folder or a URL such as `s3://bucket/corpus`; by default the
            manifest's folder, and for standard input the current one.
        audio: Whether paths are required; ids always are.
        carry: Whether to keep the columns that an `Utterance` does not have.

    Raises:
        ManifestError: The file cannot be read, or has faults. The message lists the first 20 by line.
        ArgumentError: The manifest is a URL, or the root one that has a secret in it.
    """
    refuse_url("the manifest", source)
    if root is not None and not is_audio_url(str(root)):
        refuse_url("root", root)
    folder: AudioLocation = Path(source).parent if root is None else as_root(str(root))
    is_stdin = str(source) == "-"
    name = "<stdin>" if is_stdin else str(source)
    if is_stdin and sys.stdin is None:
        raise ManifestError(f"{name}: standard input is closed: give a manifest's path, or pipe a manifest in")
    required = ("id", "path") if audio else ("id",)
    faults = Faults(name)
    try:
        with nullcontext(sys.stdin.buffer) if is_stdin else opened(Path(source)) as stream:
            found = batches(stream, suffix_of(Path(source)), required, carry, faults)
            parts, lines = _gather(found, required, carry, faults)
    except ManifestError as error:
        raise ManifestError(f"{name}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:  # the latter two come from a gzip file that is cut off or damaged
        raise ManifestError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not lines and not faults.count:
        faults.add(0, "there are no rows")
    ids = Strings.concatenate(parts.pop("id"))
    _find_duplicates(ids, lines, faults)
    faults.raise_if_any()
    return Manifest(
        source=name,
        root=folder if isinstance(folder, Url) else folder.absolute(),
        ids=ids,
        paths=Strings.concatenate(parts.pop("path")),
        start=np.concatenate(parts.pop("start")),
        duration=np.concatenate(parts.pop("duration")),
        channel=np.concatenate(parts.pop("channel")),
        columns={column: Strings.concatenate(parts.pop(column)) for column in list(parts)},
    )


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file; unpacked, if gzip has compressed it."""
    with path.open("rb") as file:
        if not file.peek(2).startswith(_GZIP):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield cast(BinaryIO, unpacked)


def suffix_of(path: Path) -> str:
    """The suffix that tells the format: `.csv` for `train.csv.gz` too."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _gather(
    found: Iterable[Batch], required: Collection[str], carry: bool, faults: Faults
) -> tuple[dict[str, list[Any]], array[int]]:
    """The flat parts of each column, one for each batch; and the line of each row."""
    parts: dict[str, list[Any]] = {name: [] for name in SPELLINGS}
    row_lines = array("q")
    for lines, cells in found:
        for column in COLUMNS:
            values = [column.not_given] * len(lines)
            if column.name in cells:
                values = _values(column, lines, cells[column.name], column.name in required, faults)
            parts[column.name].append(column.pack(values))
        for name in cells:
            if carry and name not in SPELLINGS:
                so_far = parts.setdefault(name, [_empty_strings(len(row_lines))])
                so_far.append(Strings.of(map(carried, cells[name])))
        row_lines.extend(lines)
    return parts, row_lines


def _values(column: Column, lines: Sequence[int], cells: Sequence[Any], required: bool, faults: Faults) -> list[Any]:
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


def _find_duplicates(ids: Strings, lines: Sequence[int], faults: Faults) -> None:
    hashes = ids.hashes()
    ordered = np.sort(hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    first_rows: dict[str, int] = {}
    for row in np.flatnonzero(np.isin(hashes, repeated)).tolist():
        name = ids[row]
        first = first_rows.setdefault(name, row)
        if name and first != row:
            faults.add(lines[row], f"id {name!r} is already on {faults.unit} {lines[first]}")
