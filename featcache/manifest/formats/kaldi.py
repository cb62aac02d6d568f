"""Data directories of Kaldi, ESPnet and CosyVoice: `wav.scp`, `segments`, `text` …"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain

from featcache.manifest.audio_locations import is_command
from featcache.manifest.formats.source import (
    Batch,
    Cells,
    Faults,
    Rows,
    Source,
    Text,
    batched,
    lines_of,
    names_audio,
)
from featcache.manifest.utterances import SPELLINGS, float_of, refused_command

_COLUMNS = {
    "text": "text",
    "utt2spk": "speaker",
    "utt2lang": "language",
    "utt2gender": "gender",
    "utt2category": "category",
    "instruct": "instruct",
}
"""Files with a value for each utterance, and their columns."""


def is_data_folder(source: Source) -> bool:
    """Tell whether a folder has `wav.scp`, or a file has its form."""
    if source.is_folder:
        return "wav.scp" in source.names
    first = source.first_fields
    if source.suffix == ".scp":
        return True
    if re.search(r"[,;|\t]", first[:-1]) or not names_audio(first.strip().partition(" ")[2]):
        return False
    return all(" " in line.strip() for line in source.first_lines)


def read_data_folder(source: Source) -> Iterator[Batch]:
    """Read a data directory, or a `wav.scp`."""
    with ExitStack() as stack:
        lookups, file = {}, None
        for name, column in _COLUMNS.items():
            if source.carry and name in source.names:
                lookups[column] = _lookup(stack.enter_context(source.opened(name)))
        if source.is_folder:
            file = stack.enter_context(source.opened("wav.scp"))
        batches = recordings(file or source.text, source.allow_commands)
        if "segments" in source.names:
            segments = stack.enter_context(source.opened("segments"))
            cells_of = partial(_segment, _by_id(batches, source.faults))
            batches = batched(_fields(segments), SPELLINGS, cells_of, source.faults)
        for places, cells in batches:
            values = {column: values_of(cells["id"]) for column, values_of in lookups.items()}
            yield _by_file(source, places, {**cells, **values})


def _by_file(source: Source, places: Sequence[int], cells: Cells) -> Batch:
    """Split rows of several files, an utterance's channels in ESPnet."""
    files = [_files_of(path) for path in cells["path"]]
    if max(map(len, files)) == 1:
        return places, cells
    source.note("utterances of several files, their channels, are read as ID-c0, ID-c1 …")
    rows = [row for row, paths in enumerate(files) for _ in paths]
    split: Cells = {name: [values[row] for row in rows] for name, values in cells.items()}
    split["path"] = [*chain.from_iterable(files)]
    numbers = chain.from_iterable(range(len(paths)) for paths in files)
    split["id"] = [
        f"{cells['id'][row]}-c{number}" if len(files[row]) > 1 else cells["id"][row]
        for row, number in zip(rows, numbers, strict=True)
    ]
    return [places[row] for row in rows], split


def _files_of(path: str) -> list[str]:
    paths = path.split()
    if len(paths) > 1 and all(map(names_audio, paths)):
        return paths
    return [path]


def recordings(file: Text, allow_commands: bool) -> Iterator[Batch]:
    """Read lines of an id and a path, such as `wav.scp`."""
    cells_of = partial(_recording, allow_commands)
    return batched(_fields(file, 1), ("id", "path"), cells_of, file.faults)


def _recording(allow_commands: bool, fields: list[str]) -> list[str]:
    if len(fields) < 2:
        raise ValueError("path is missing")
    if is_command(fields[1]) and not allow_commands:
        raise ValueError(f"path {refused_command(fields[1])}")
    return fields


def _by_id(recordings: Iterator[Batch], faults: Faults) -> dict[str, tuple[str, int]]:
    """Return the path of each recording, and its place."""
    by_id: dict[str, tuple[str, int]] = {}
    for places, cells in recordings:
        for place, id_, path in zip(places, cells["id"], cells["path"], strict=True):
            _, first = by_id.setdefault(id_, (path, place))
            if first != place:
                faults.add(place, f"id {id_!r} is already on {faults.where(first)}")
    return by_id


def _segment(recordings: dict[str, tuple[str, int]], fields: list[str]) -> Sequence[object]:
    if not 4 <= len(fields) <= 5:
        what = "fields, but utterance, recording, start and end are expected"
        raise ValueError(f"{len(fields)} {what}")
    id_, name, start_text, end_text, *channel = fields
    if name not in recordings:
        raise ValueError(f"recording {name!r} is not in wav.scp")
    start, end, duration = float_of(start_text), float_of(end_text), None
    if end != -1 and not -math.inf < start < end < math.inf:
        what = "only an end of -1 is that of the recording"
        raise ValueError(f"ends at {end}, and starts at {start}: {what}")
    if end != -1:
        duration = round(end - start, 9)  # without the rounding of binary fractions
    path, _ = recordings[name]
    return id_, path, start, duration, "".join(channel) or None


def _lookup(file: Text) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that finds utterances' values in a file of ids and values. It reads
    on only until they are found, since files have the same order."""
    ahead: dict[str, str] = {}
    unread = _fields(file, 1)

    def value_of(id_: str) -> str:
        if id_ not in ahead:
            for _, (name, *rest) in unread:
                ahead.setdefault(name, "".join(rest))
                if name == id_:
                    break
        return ahead.pop(id_, "")

    return lambda ids: [*map(value_of, ids)]


def _fields(file: Text, most: int = -1) -> Rows:
    """Split lines that are not blank at white space of ASCII, which alone parts bytes."""
    for place, line in enumerate(lines_of(file), file.base + 1):
        fields = line.strip().split(None, most)
        if not (line.isascii() and line.rstrip("\n").isprintable()):
            parts = line.encode().strip().split(None, most)
            fields = [part.decode() for part in parts]
        if fields:
            yield place, fields
