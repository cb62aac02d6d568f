"""Writes a manifest again with the durations of its rows; everything else in it stays as it is."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from featcache.errors import ManifestError
from featcache.manifest.columns import meaning_of
from featcache.manifest.formats.source import Source, lines_of, suffix_of
from featcache.manifest.formats.tables import PLAIN
from featcache.manifest.utterances import Manifest


def with_durations(manifest: Manifest, durations: Sequence[float], target: Path) -> bytes:
    """A manifest's bytes with these durations, in the format that it has.

    Args:
        manifest: The manifest, which has been read from a file: it has no faults.
        durations: For each row the seconds to write; NaN to leave the row as it is.
        target: Where it will be written: if its name ends in `.gz`, it is compressed.

    Raises:
        ManifestError: It is no CSV, TSV or JSON lines, the target's suffix says another format, or it has changed since
            it was read.
    """
    source, kind = manifest.source, "jsonl" if manifest.format == "nemo" else manifest.format
    if kind not in ("csv", "tsv", "jsonl"):
        raise ManifestError(f"{source}: is written as CSV or JSON lines first: `featcache manifest` converts it")
    if PLAIN.get(suffix_of(target), kind) != kind:
        raise ManifestError(f"{target}: the manifest is written as it is read, as {kind.upper()}: name it so")
    with Source(source) as opened:
        lines, values = lines_of(opened.stream, opened.faults), iter(durations)
        try:
            rows = _json(lines, values, manifest.format == "nemo") if kind == "jsonl" else _table(lines, kind, values)
            text = "".join(rows)
        except (StopIteration, RuntimeError, ValueError, csv.Error) as error:
            raise ManifestError(f"{source}: has changed while it was read: run it again") from error
    if next(values, None) is not None or opened.faults.count:
        raise ManifestError(f"{source}: has changed while it was read: run it again")
    data = text.encode()
    return gzip.compress(data, mtime=0) if target.suffix.lower() == ".gz" else data


def _table(lines: Iterable[str], kind: str, durations: Iterator[float]) -> Iterator[str]:
    out = io.StringIO()
    if kind == "csv":
        rows: Iterator[list[str]] = csv.reader(lines, strict=True)
        writer = csv.writer(out, lineterminator="\n")
    else:
        rows = (line.removesuffix("\n").removesuffix("\r").split("\t") for line in lines)
    at = -1
    for row in rows:
        if len(row) < 2 and not "".join(row).strip():
            continue
        if at < 0:
            named = _column_in(row)
            at = len(row) if named is None else row.index(named)
            row = [*row, "duration"] if named is None else row
        else:
            seconds = next(durations)
            row = [*row, *[""] * (at + 1 - len(row))]
            if not math.isnan(seconds):
                row[at] = repr(seconds)
        if kind == "csv":
            writer.writerow(row)
        else:
            out.write("\t".join(row) + "\n")
        yield out.getvalue()
        out.seek(0)
        out.truncate()


def _json(lines: Iterable[str], durations: Iterator[float], skips: bool) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            continue
        row = json.loads(line)
        seconds = math.nan if skips and row.get("_skipme") else next(durations)
        if math.isnan(seconds):
            yield line.rstrip("\r\n") + "\n"
            continue
        yield json.dumps({**row, _column_in(row) or "duration": seconds}, ensure_ascii=False) + "\n"


def _column_in(names: Collection[str]) -> str | None:
    """The name of the column that has the durations; None if there is none."""
    return next((name for name in ("duration", *names) if name in names and meaning_of(name) == "duration"), None)
