"""Data directories of Kaldi, ESPnet and CosyVoice: `wav.scp`, `segments`, `text` …"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, compress, count
from typing import Any, BinaryIO

import numpy as np

from featcache.manifest.audio_locations import is_command
from featcache.manifest.formats.source import (
    ROWS_PER_BATCH,
    Batch,
    Cells,
    Faults,
    Source,
    batched,
    names_audio,
    opened,
    texts_of,
)
from featcache.manifest.utterances import refused_command
from featcache.strings import GrowingStrings

_COLUMNS = {
    "text": "text",
    "utt2spk": "speaker",
    "utt2lang": "language",
    "utt2gender": "gender",
    "utt2category": "category",
    "instruct": "instruct",
}
"""The columns that files with a value for each utterance become."""


def is_data_folder(source: Source) -> bool:
    """Tell whether a folder has `wav.scp`, or a file has its form."""
    if source.is_folder:
        return "wav.scp" in source.names
    _, _, path = source.first_fields.strip().partition(" ")
    are_pairs = all(" " in line.strip() for line in source.first_lines)
    is_list = (
        names_audio(path) and are_pairs and not re.search(r"[,;|\t]", source.first_fields[:-1])
    )
    return is_list or source.suffix == ".scp"


def read_data_folder(source: Source) -> Iterator[Batch]:
    """Read a data directory, or a `wav.scp`."""
    if not source.is_folder:
        for places, cells in _recordings(source, source.stream, 0):
            yield _by_file(source, places, cells)
        return
    lookups = {
        column: _lookup(source, name)
        for name, column in _COLUMNS.items()
        if source.carry and name in source.names
    }
    with opened(source.path / "wav.scp") as stream:
        batches = _recordings(source, stream, source.faults.file("wav.scp"))
        if "segments" in source.names:
            batches = _segments(source, _by_id(batches, source.faults))
        for places, cells in batches:
            values = {column: values_of(cells["id"]) for column, values_of in lookups.items()}
            yield _by_file(source, places, {**cells, **values})


def _by_file(source: Source, places: Sequence[int], cells: Cells) -> Batch:
    """Split rows of several files, an utterance's channels in ESPnet."""
    files = [_files_of(path) for path in cells["path"]]
    if max(map(len, files)) == 1:
        return places, cells
    source.note("utterances of several files, their channels, are read as ID-c0, ID-c1 …")
    rows: list[int] = []
    ids: list[str] = []
    for row, paths in enumerate(files):
        id_ = cells["id"][row]
        numbers = range(len(paths))
        ids += [f"{id_}-c{number}" for number in numbers] if len(paths) > 1 else [id_]
        rows += [row for _ in numbers]
    split: Cells = {name: [values[row] for row in rows] for name, values in cells.items()}
    split |= {"id": ids, "path": [*chain.from_iterable(files)]}
    return [places[row] for row in rows], split


def _files_of(path: str) -> list[str]:
    paths = path.split()
    if len(paths) > 1 and all(map(names_audio, paths)):
        return paths
    return [path]


def _recordings(source: Source, stream: BinaryIO, base: int) -> Iterator[Batch]:
    for places, lines in _fields(stream, source.faults, base, 1):
        if set(map(len, lines)) == {2}:
            ids, paths = zip(*lines, strict=True)
            if "|" not in "".join(paths):
                yield places, {"id": ids, "path": paths}
                continue
        cells_of = partial(_recording, source.allow_commands)
        yield from batched(zip(places, lines, strict=True), ("id", "path"), cells_of, source.faults)


def _recording(allow_commands: bool, fields: list[str]) -> list[str]:
    if len(fields) < 2:
        raise ValueError("path is missing")
    if is_command(fields[1]) and not allow_commands:
        raise ValueError(f"path {refused_command(fields[1])}")
    return fields


def _by_id(recordings: Iterator[Batch], faults: Faults) -> dict[str, str]:
    paths: dict[str, str] = {}
    ids, all_places = GrowingStrings(), array("q")
    for places, cells in recordings:
        paths.update(zip(cells["id"], cells["path"], strict=True))
        ids.extend(cells["id"])
        all_places.extend(places)
    faults.add_repeated(ids.strings(), all_places)
    return paths


_NAMES = ("id", "path", "start", "duration", "channel")


def _segments(source: Source, recordings: dict[str, str]) -> Iterator[Batch]:
    faults = source.faults
    with opened(source.path / "segments") as stream:
        for places, lines in _fields(stream, faults, faults.file("segments")):
            plain = _plain_segments(lines, recordings)
            if plain is not None:
                yield places, plain
                continue
            rows = zip(places, lines, strict=True)
            yield from batched(rows, _NAMES, partial(_segment, recordings), faults)


def _plain_segments(
    lines: Sequence[list[str]], recordings: dict[str, str]
) -> dict[str, Sequence[Any]] | None:
    """Read lines of `segments` at once; None if one needs `_segment`."""
    if set(map(len, lines)) != {4}:
        return None
    ids, names, *texts = zip(*lines, strict=True)
    try:
        paths = [recordings[name] for name in names]
        start, end = (list(map(float, cells)) for cells in texts)
    except (KeyError, ValueError):
        return None
    seconds = np.subtract(end, start)
    if not (seconds.min() > 0 and seconds.max() < math.inf):
        return None
    durations = [round(value, 9) for value in seconds.tolist()]
    return {"id": ids, "path": paths, "start": start, "duration": durations}


def _segment(
    recordings: dict[str, str], fields: list[str]
) -> tuple[str, str, float, float | None, str | None]:
    if not 4 <= len(fields) <= 5:
        raise ValueError(
            f"{len(fields)} fields, but utterance, recording, start and end are expected"
        )
    id_, name, start_text, end_text, *rest = fields
    if name not in recordings:
        raise ValueError(f"recording {name!r} is not in wav.scp")
    start, end = float(start_text), float(end_text)
    channel = rest[0] if rest else None
    if end == -1:
        return id_, recordings[name], start, None, channel
    if not -math.inf < start < end < math.inf:
        raise ValueError(
            f"ends at {end}, and starts at {start}: only an end of -1 is that of the recording"
        )
    # without the rounding of binary fractions
    return id_, recordings[name], start, round(end - start, 9), channel


def _lookup(source: Source, name: str) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that finds utterances' values in a file of ids and values. It
    reads on only until they are found, since files have the same order. The first value
    of an id counts."""
    ahead: dict[str, str] = {}
    base = source.faults.file(name)

    def lines() -> Iterator[list[str]]:
        with opened(source.path / name) as stream:
            for _, batch in _fields(stream, source.faults, base, 1):
                yield from batch

    unread = lines()

    def values_of(ids: Sequence[str]) -> list[str]:
        values = []
        for id_ in ids:
            while id_ not in ahead:
                fields = next(unread, None)
                if fields is None:
                    break
                ahead.setdefault(fields[0], fields[1] if len(fields) == 2 else "")
            values.append(ahead.pop(id_, ""))
        return values

    return values_of


def _fields(
    stream: BinaryIO, faults: Faults, base: int, most: int = -1
) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Split lines that are not blank at white space of ASCII, with their places."""
    first = base + 1
    for text in texts_of(stream, faults, base):
        # then all white space is line ends, and spaces between fields
        is_plain = (
            text.isascii() and text.replace("\n", "").isprintable() and " \n" not in f"{text}\n"
        )
        lines = text.split("\n")
        for begin in range(0, len(lines), ROWS_PER_BATCH):
            batch = lines[begin : begin + ROWS_PER_BATCH]
            if is_plain:
                rows = [line.split(None, most) for line in batch]
            else:
                rows = [
                    [field.decode() for field in line.encode().strip().split(None, most)]
                    for line in batch
                ]
            yield [*compress(count(first + begin), rows)], [*filter(None, rows)]
        first += len(lines) - 1
