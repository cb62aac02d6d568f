"""Writes a manifest: as a table, or for NeMo or Lhotse."""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from featcache.errors import ArgumentError, ManifestError, did_you_mean, listing
from featcache.manifest.audio_locations import Command, Member, Url
from featcache.manifest.columns import json_line, to_arrow
from featcache.manifest.formats.lhotse import SAID
from featcache.manifest.formats.source import suffix_of
from featcache.manifest.formats.tables import PLAIN, pyarrow
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest, meaning_of, nearest_sample

_EMPTY = (None, "")

AudioFile = tuple[int, int, int]
"""A file's sample rate in Hz, its samples per channel, and its channels."""


def format_to_write(target: Path, name: str | None, remedy: str = "") -> str:
    """Return the format of this name, or of the file's suffix. Raises ArgumentError, with a
    remedy for a suffix of no format, by default `--to`."""
    chosen = name or PLAIN.get(suffix_of(target))
    if chosen in WRITTEN:
        return chosen
    if name:
        meant = did_you_mean(name, WRITTEN)
        raise ArgumentError(f"--to: there is no {name!r}{meant}: choose {listing(WRITTEN)}")
    remedy = remedy or f"add --to {listing(WRITTEN)}"
    raise ArgumentError(f"-o: {target}: its suffix names no format: {remedy}")


def to_csv(manifest: Manifest) -> bytes:
    """Write CSV with a header."""
    columns = _columns(manifest, manifest.columns.__getitem__)
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue().encode()


def to_jsonl(manifest: Manifest) -> bytes:
    """Write JSON lines; missing values have no key."""
    columns = _columns(manifest, manifest.cells)
    cells_of_rows = zip(*columns.values(), strict=True)
    rows = (zip(columns, cells, strict=True) for cells in cells_of_rows)
    objects = ({name: cell for name, cell in row if cell is not None} for row in rows)
    return _json_lines(objects)


def to_parquet(manifest: Manifest) -> bytes:
    """Write Parquet; missing values are null."""
    arrow = pyarrow("a manifest in Parquet")
    numbers = {"start": arrow.float64(), "duration": arrow.float64(), "channel": arrow.int32()}
    columns = _columns(manifest, manifest.cells).items()
    table = {
        name: arrow.array(cells, numbers[name]) if name in numbers else to_arrow(cells, arrow)
        for name, cells in columns
    }
    out = io.BytesIO()
    arrow.parquet.write_table(arrow.table(table), out)
    return out.getvalue()


def require_names(manifest: Manifest, kind: str) -> None:
    """Raise a ManifestError for audio inside a container, or for NeMo, of a command."""
    for path in manifest.paths:
        location = manifest.resolve(path)
        if isinstance(location, Member):
            what = "is inside a container, which NeMo and Lhotse name in other ways: unpack it"
            raise ManifestError(f"{path}: {what}")
        if isinstance(location, Command) and kind == "nemo":
            raise ManifestError(f"{path}: NeMo runs no commands")


def to_nemo(manifest: Manifest, files: Mapping[int, AudioFile]) -> bytes:
    """Write NeMo's JSON lines, with absolute paths and the ids. Every row has a duration."""
    entries = []
    for row, others in _rows(manifest):
        entry = {
            "audio_filepath": str(manifest.resolve(row.path)),
            "duration": row.duration,
            "id": row.id,
            "offset": row.start,
            "channel": row.channel,
        }
        entry = {name: value for name, value in entry.items() if value is not None}
        entries.append({**entry, **others, **entry})
    return _json_lines(entries)


def to_lhotse(manifest: Manifest, files: Mapping[int, AudioFile]) -> bytes:
    """Write Lhotse's cuts, with absolute paths. Every row has a duration."""
    rows = enumerate(_rows(manifest))
    cuts = (_cut(manifest, row, files[number], others) for number, (row, others) in rows)
    return _json_lines(cuts)


def _cut(
    manifest: Manifest, row: Utterance, file: AudioFile, others: dict[str, Any]
) -> dict[str, Any]:
    rate, num_samples, num_channels = file
    location = manifest.resolve(row.path)
    channels = list(range(num_channels))
    is_multi = row.channel is None and num_channels > 1
    start = row.start or 0.0
    seconds_left = (num_samples - nearest_sample(start, rate)) / rate
    seconds = min(row.duration or math.inf, seconds_left)
    channel = channels if is_multi else row.channel or 0
    segment = {"start": start, "duration": seconds, "channel": channel}
    supervision: dict[str, Any] = {"id": row.id, "recording_id": row.path, **segment, "start": 0.0}
    supervision |= {name: others.pop(name) for name in SAID if name in others}
    if others:
        supervision["custom"] = others
    kind, source = "file", str(location)
    if isinstance(location, Url):
        kind = "url"
    elif isinstance(location, Command):
        kind, source = "command", source.rstrip()[:-1].rstrip()
    recording = {
        "id": row.path,
        "sources": [{"type": kind, "channels": channels, "source": source}],
        "sampling_rate": rate,
        "num_samples": num_samples,
        "duration": num_samples / rate,
        "channel_ids": channels,
    }
    return {
        "id": row.id,
        **segment,
        "supervisions": [supervision],
        "recording": recording,
        "type": "MultiCut" if is_multi else "MonoCut",
    }


WRITTEN: dict[str, Callable[..., bytes]] = {
    "csv": to_csv,
    "jsonl": to_jsonl,
    "parquet": to_parquet,
    "nemo": to_nemo,
    "lhotse": to_lhotse,
}
"""The writers of formats. The last two also need the file of each row."""


def packed(data: bytes, target: Path) -> bytes:
    """Compress bytes if the name of their file ends in `.gz`."""
    if target.suffix.lower() == ".gz":
        return gzip.compress(data, mtime=0)
    return data


def _columns(
    manifest: Manifest, cells_of: Callable[[str], Sequence[Any]]
) -> dict[str, Sequence[Any]]:
    """Return the cells of all columns by name, None if missing; `cells_of` gives those that
    an `Utterance` lacks. Empty columns are left out, unless others would be taken for them."""
    columns: dict[str, Sequence[Any]] = {"id": manifest.ids, "path": manifest.paths}
    meant = set(map(meaning_of, manifest.columns))
    for name in ("start", "duration", "channel"):
        # NaN and -1: not given
        cells = [cell if cell >= 0 else None for cell in getattr(manifest, name).tolist()]
        if name in meant or cells.count(None) < len(cells):
            columns[name] = cells
    return columns | {name: cells_of(name) for name in manifest.columns}


def _rows(manifest: Manifest) -> Iterator[tuple[Utterance, dict[str, Any]]]:
    """Give each row, and its values of other columns, except empty values, and columns that
    would be taken for its id or path. The columns `SAID` are text."""
    columns = {
        name: values.texts if name in SAID else values.as_json()
        for name, values in manifest.values.items()
        if meaning_of(name) not in ("id", "path")
    }
    for number in range(len(manifest)):
        others = {name: cells[number] for name, cells in columns.items()}
        others = {name: cell for name, cell in others.items() if cell not in _EMPTY}
        yield manifest[number], others


def _json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(map(json_line, rows)).encode()
