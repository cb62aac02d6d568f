"""Data directories of Kaldi, ESPnet and CosyVoice: `wav.scp`, `segments`, `text`, `utt2spk` and the like."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as shown

from featcache.manifest.audio_locations import is_command
from featcache.manifest.columns import COMMAND_REFUSED
from featcache.manifest.formats.source import Batch, Faults, Source, batched, lines_of, names_audio, opened

_COLUMNS = {
    "text": "text",
    "utt2spk": "speaker",
    "utt2lang": "language",
    "utt2gender": "gender",
    "utt2category": "category",
    "instruct": "instruct",
}
"""The files with a value for each utterance, and the columns that they become."""


def is_data_folder(source: Source) -> bool:
    """Whether it is a folder with `wav.scp`, or a file that has its form."""
    if source.is_folder:
        return "wav.scp" in source.names
    _, _, path = source.first_fields.strip().partition(" ")
    return source.suffix == ".scp" or (names_audio(path) and not re.search(r"[,;|\t]", source.first_fields[:-1]))


def read_data_folder(source: Source) -> Iterator[Batch]:
    """A data directory; or a `wav.scp` alone, or `segments` beside its `wav.scp`."""
    if not source.is_folder:
        lines = lines_of(source.stream, source.faults)
        yield from batched(_recordings(source, lines, 0), ("id", "path"))
        return
    columns = [name for name in _COLUMNS if source.carry and name in source.names]
    lookups = [_Lookup(source, name) for name in columns]
    is_cut = "segments" in source.names
    names = ["id", "path", *(["start", "duration", "channel"] if is_cut else []), *(_COLUMNS[name] for name in columns)]
    with opened(source.path / "wav.scp") as stream:
        base = source.faults.file("wav.scp")
        recordings = _recordings(source, lines_of(stream, source.faults, base), base)
        rows = _segments(source, _by_id(recordings, source.faults)) if is_cut else recordings
        full = ((place, (*cells, *[find(cells[0]) for find in lookups])) for place, cells in rows)
        yield from batched(full, names)


def _recordings(source: Source, lines: Iterator[str], base: int) -> Iterator[tuple[int, tuple[str, str]]]:
    """The ids and paths of `wav.scp`."""
    for place, id_, path in _fields(lines, base):
        if fault := _fault(path, source.allow_commands):
            source.faults.add(place, fault)
        else:
            yield place, (id_, path)


def _by_id(recordings: Iterator[tuple[int, tuple[str, str]]], faults: Faults) -> dict[str, str]:
    paths: dict[str, str] = {}
    places: dict[str, int] = {}
    for place, (id_, path) in recordings:
        if places.setdefault(id_, place) != place:
            faults.add(place, f"id {id_!r} is already on {faults.where(places[id_])}")
        paths[id_] = path
    return paths


def _fault(path: str, allow_commands: bool) -> str | None:
    """Why a path of `wav.scp` cannot be used."""
    if not path:
        return "path is missing"
    if is_command(path):
        return None if allow_commands else f"path {COMMAND_REFUSED}: {shown(path)}"
    return None


def _segments(
    source: Source, recordings: dict[str, str]
) -> Iterator[tuple[int, tuple[str, str, float, float | None, str]]]:
    """The rows of `segments`."""
    faults = source.faults
    base = faults.file("segments")
    with opened(source.path / "segments") as stream:
        for place, line in enumerate(lines_of(stream, faults, base), base + 1):
            cells = _split(line)
            if len(cells) not in (4, 5):
                if cells:
                    faults.add(place, f"{len(cells)} fields, but utterance, recording, start and end are expected")
                continue
            id_, recording, start, end = cells[:4]
            if recording not in recordings:
                faults.add(place, f"recording {recording!r} is not in wav.scp")
                continue
            try:
                first = float(start)
                duration = _duration(first, float(end))
            except ValueError as error:
                faults.add(place, str(error))
                continue
            yield place, (id_, recordings[recording], first, duration, cells[4] if len(cells) == 5 else "")


def _duration(start: float, end: float) -> float | None:
    """The seconds of a segment; None for one up to the end of its recording.

    Raises:
        ValueError: It has none.
    """
    if end == -1:
        return None
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError(f"start or end is not finite: {start}, {end}")
    if end <= start:
        raise ValueError(f"ends at {end}, and starts at {start}: only an end of -1 is that of the recording")
    return round(end - start, 9)  # without the rounding of binary fractions


class _Lookup:
    """Finds an utterance's value in a file of ids and values. Read on only until it is found: files are in one order.

    Args:
        source: The data directory.
        name: The file.
    """

    def __init__(self, source: Source, name: str) -> None:
        self._ahead: dict[str, str] = {}
        self._rest = _values(source.path / name, source.faults, source.faults.file(name))

    def __call__(self, id_: str) -> str:
        if id_ in self._ahead:
            return self._ahead.pop(id_)
        for fields in self._rest:
            value = fields[1] if len(fields) == 2 else ""
            if fields[0] == id_:
                return value
            self._ahead[fields[0]] = value
        return ""


def _values(path: Path, faults: Faults, base: int) -> Iterator[list[str]]:
    """The first field and the rest of each line that is not blank."""
    with opened(path) as stream:
        yield from filter(None, (_split(line, 1) for line in lines_of(stream, faults, base)))


def _fields(lines: Iterator[str], base: int) -> Iterator[tuple[int, str, str]]:
    """The place, the first field and the rest of each line that is not blank."""
    for place, line in enumerate(lines, base + 1):
        found = _split(line, 1)
        if found:
            yield place, found[0], found[1] if len(found) == 2 else ""


def _split(line: str, at_most: int = -1) -> list[str]:
    """The fields of a line, between the white space of ASCII alone: `str.split` also takes that of other scripts."""
    line = line.strip(" \t\n\r\f\v")
    if line.isascii() and line.isprintable():  # so that all white space in it are spaces
        return line.split(None, at_most)
    return [field.decode() for field in line.encode().split(None, at_most)]
