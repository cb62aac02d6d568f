"""Writes a manifest that has been read: as a table, or as NeMo and Lhotse have them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from featcache.errors import ArgumentError, ManifestError, listing
from featcache.manifest.audio_locations import Command, Member, Url
from featcache.manifest.columns import to_arrow
from featcache.manifest.formats.lhotse import SAID
from featcache.manifest.formats.source import suffix_of
from featcache.manifest.formats.tables import PLAIN, pyarrow
from featcache.manifest.utterances import Manifest, meaning_of, nearest_sample

AudioFile = tuple[int, int, int]
"""A file's sample rate in Hz, its samples per channel, and its channels."""


def format_to_write(target: Path, name: str | None) -> str:
    """The format to write: the one named, or the one of the file's suffix; an
    ArgumentError if there is no such one."""
    chosen = name or PLAIN.get(suffix_of(target))
    if chosen not in WRITTEN:
        what = (
            f"--to: there is no {name!r}: choose"
            if name
            else f"-o: {target} does not say the format: give --to"
        )
        raise ArgumentError(f"{what} {listing(WRITTEN)}")
    return chosen


def to_csv(manifest: Manifest) -> bytes:
    """CSV with a header."""
    columns, out = _columns(manifest, manifest.columns.__getitem__), io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue().encode()


def to_jsonl(manifest: Manifest) -> bytes:
    """JSON lines; what is not given has no key."""
    columns = _columns(manifest, manifest.cells)
    rows = (zip(columns, cells, strict=True) for cells in zip(*columns.values(), strict=True))
    return _json_lines({name: cell for name, cell in row if cell is not None} for row in rows)


def to_parquet(manifest: Manifest) -> bytes:
    """Parquet; what is not given is null."""
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
    """Raise a ManifestError if NeMo, or Lhotse, has no name for where the audio is:
    inside a container, or for NeMo, what a command prints."""
    for path in manifest.paths:
        location = manifest.resolve(path)
        if isinstance(location, Member):
            raise ManifestError(
                f"{path}: is inside a container, which NeMo and Lhotse name in other ways: "
                "unpack it"
            )
        if isinstance(location, Command) and kind == "nemo":
            raise ManifestError(f"{path}: NeMo runs no commands")


def to_nemo(manifest: Manifest, files: Mapping[int, AudioFile]) -> bytes:
    """NeMo's JSON lines, with absolute paths and the ids. Every row has a duration."""

    carried = _carried(manifest)

    def of_row(number: int) -> dict[str, Any]:
        row = manifest[number]
        found = {
            "audio_filepath": str(manifest.resolve(row.path)),
            "duration": row.duration,
            "id": row.id,
        }
        optional = {"offset": row.start, "channel": row.channel}
        found |= {name: value for name, value in optional.items() if value is not None}
        # which no column of its names replaces
        return found | carried(number) | found

    return _json_lines(map(of_row, range(len(manifest))))


def to_lhotse(manifest: Manifest, files: Mapping[int, AudioFile]) -> bytes:
    """Lhotse's cuts, with absolute paths. `files` has the file of each row; every row has
    a duration."""
    carried = _carried(manifest)
    return _json_lines(
        _cut(manifest, number, files[number], carried(number)) for number in range(len(manifest))
    )


def _cut(
    manifest: Manifest, number: int, file: AudioFile, carried: dict[str, Any]
) -> dict[str, Any]:
    row = manifest[number]
    rate, num_samples, num_channels = file
    location = manifest.resolve(row.path)
    channels = list(range(num_channels))
    channel: int | list[int] = (
        row.channel if row.channel is not None else channels if num_channels > 1 else 0
    )
    start = row.start or 0.0
    seconds = min(row.duration or math.inf, (num_samples - nearest_sample(start, rate)) / rate)
    segment = {"start": start, "duration": seconds, "channel": channel}
    supervision = {"id": row.id, "recording_id": row.path, **segment, "start": 0.0}
    supervision |= {name: carried.pop(name) for name in SAID if name in carried}
    kind, source = "url" if isinstance(location, Url) else "file", str(location)
    if isinstance(location, Command):
        kind, source = "command", source.rstrip()[:-1].rstrip()
    sources = [{"type": kind, "channels": channels, "source": source}]
    recording = {
        "id": row.path,
        "sources": sources,
        "sampling_rate": rate,
        "num_samples": num_samples,
    }
    recording |= {"duration": num_samples / rate, "channel_ids": channels}
    supervisions = [supervision | ({"custom": carried} if carried else {})]
    cut = {"id": row.id, **segment, "supervisions": supervisions, "recording": recording}
    return cut | {"type": "MultiCut" if isinstance(channel, list) else "MonoCut"}


WRITTEN: dict[str, Callable[..., bytes]] = {
    **{"csv": to_csv, "jsonl": to_jsonl, "parquet": to_parquet},
    **{"nemo": to_nemo, "lhotse": to_lhotse},
}
"""The formats that are written. The last two take the rows' files, too."""


def packed(data: bytes, target: Path) -> bytes:
    """The bytes for a file of this name: compressed, if it ends in `.gz`."""
    return gzip.compress(data, mtime=0) if target.suffix.lower() == ".gz" else data


def _columns(
    manifest: Manifest, cells_of: Callable[[str], Sequence[Any]]
) -> dict[str, Sequence[Any]]:
    """The cells of all columns, by name; None for what is not given. `cells_of` gives those
    of a column that an `Utterance` does not have. A column without any value is left out,
    unless another column would then be taken for it."""
    columns: dict[str, Sequence[Any]] = {"id": manifest.ids, "path": manifest.paths}
    meant = set(map(meaning_of, manifest.columns))
    for name in ("start", "duration", "channel"):
        # NaN and -1: not given
        cells = [cell if cell >= 0 else None for cell in getattr(manifest, name).tolist()]
        if name in meant or cells.count(None) < len(cells):
            columns[name] = cells
    return columns | {name: cells_of(name) for name in manifest.columns}


def _carried(manifest: Manifest) -> Callable[[int], dict[str, Any]]:
    """Gives the values of a row's other columns that are not empty, and would not be taken
    for its id or path. What is said is text, whatever it looks like."""
    columns = {
        name: manifest.columns[name] if name in SAID else manifest.cells(name)
        for name in manifest.columns
        if meaning_of(name) not in ("id", "path")
    }

    def of_row(row: int) -> dict[str, Any]:
        named = {name: cells[row] for name, cells in columns.items()}
        return {name: cell for name, cell in named.items() if cell is not None and cell != ""}

    return of_row


def _json_lines(rows: Iterator[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
