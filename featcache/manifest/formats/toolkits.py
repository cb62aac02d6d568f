"""Manifests of NeMo, SpeechBrain and fairseq; lists with bars of TTS recipes; lists of paths.

NeMo has JSON lines with `audio_filepath`, of files or of members of tars. Its script
`convert_to_tarred_audio_dataset.py` puts the audio of rows with `"shard_id": 3` into
`audio_3.tar`, beside `tarred_audio_manifest.json` and above
`sharded_manifests/manifest_3.json`. Rows of one member `a.wav` name it `a.wav`,
`a-sub1.wav`, `a-sub2.wav` and so on.

SpeechBrain has CSV with `$name` in its paths, and JSON with an object for each id, and
`{name}`."""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from featcache.errors import counted
from featcache.manifest.audio_locations import is_audio_url, names_container
from featcache.manifest.formats.source import Batch, Cells, Rows, Source, batched, names_audio
from featcache.manifest.formats.tables import (
    csv_rows,
    json_batches,
    json_rows,
    split_rows,
    table_batches,
)
from featcache.manifest.times import times_of
from featcache.manifest.utterances import SPELLINGS, float_of, meaning_of, shown

_PART = re.compile(r"(.+)-sub\d+(\.\w+)?\Z")


def nemo_rows(source: Source) -> Rows:
    """Read the objects of NeMo's JSON lines, without those to be skipped."""
    num_skipped, is_tarred = 0, None
    for place, row in json_rows(source.text):
        if row.pop("_skipme", False):
            num_skipped += 1
            continue
        shard_id, name = row.get("shard_id"), row.get("audio_filepath")
        # a member of a tar, which has no folders
        if type(shard_id) is int and shard_id >= 0 and type(name) is str and "/" not in name:
            if is_tarred is None:
                is_tarred = _is_tarred(source, shard_id, name)
            if is_tarred:
                row["audio_filepath"] = _member(source, shard_id, name)
        yield place, row
    if num_skipped:
        source.note(f"{counted(num_skipped, 'row')} left out, by _skipme")


def _is_tarred(source: Source, shard_id: int, name: str) -> bool:
    """Tell whether the audio is in tars, not unpacked. Sets the root if they are above the
    manifest."""
    root = source.given_root
    if is_audio_url(str(root)):
        return True
    folder = source.folder if root is None else Path(root)
    tar = f"audio_{shard_id}.tar"
    if os.path.exists(folder / tar):
        return True
    above = source.folder.absolute().parent
    if root is None and os.path.exists(above / tar):
        source.root = above
        return True
    return not os.path.exists(folder / name)


def _member(source: Source, shard_id: int, name: str) -> str:
    name = _PART.sub(r"\1\2", name)
    if source.given_root is not None and names_container(f"{source.given_root}/"):
        return name
    return f"audio_{shard_id}.tar/{name}"


_MOST_BYTES = 2 << 30
"""The largest JSON file that is read: all of it is in memory."""

_BLOCK_BYTES = 1 << 20

_KEY = re.compile(r'\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_AFTER_VALUE = re.compile(r"\s*([,}])\s*")
_NESTED = re.compile(rf"\s*\{{{_KEY.pattern}\{{")
_BY_DOLLAR = re.compile(r"\$([\w.]+)|\$\{(\w+)\}")
_BY_BRACES = re.compile(r"\{(\w+)\}")


def is_speechbrain(source: Source) -> bool:
    """Tell whether a file is CSV with the columns `ID` and `wav` (or `wav_path`), or JSON
    whose first value is an object."""
    if source.suffix == ".jsonl":
        return False
    if _is_json(source):
        are_objects = all(isinstance(value, dict) for value in source.first_object.values())
        return are_objects and _NESTED.match("\n".join(source.first_lines)) is not None
    names = {name.strip(' "') for line in source.first_lines[:1] for name in line.split(",")}
    return "ID" in names and bool(names & {"wav", "wav_path"})


def _is_json(source: Source) -> bool:
    return "".join(source.first_lines[:1]).lstrip().startswith("{")


def read_speechbrain(source: Source) -> Iterator[Batch]:
    """Read SpeechBrain's CSV or JSON, and fill placeholders. Those without a value stay,
    except in paths."""
    source.renamed = _renamed
    if _is_json(source):
        pattern, batches = _BY_BRACES, json_batches(_entries(source), source)
    else:
        rows = csv_rows(source.text, skipinitialspace=True)
        pattern, batches = _BY_DOLLAR, table_batches(rows, source)
    for places, cells in batches:
        cells = _in_seconds(source, places, cells)
        yield places, {name: _filled(source, pattern, name, places, cells[name]) for name in cells}


def _renamed(names: Sequence[str]) -> list[str]:
    """Rename columns: SpeechBrain reads `wav` from `start` to `stop` in samples, or for
    `duration` seconds from `start` on. A duration without a start is the file's."""
    new_names = {"ID": "id"}
    if "stop" in names:
        for name in times_of(names):
            if name != "start":
                new_names[name] = f"original_{name}"
    if "wav" in names:
        new_names |= {"wav": "path", "path": "original_path"}
    if "start" not in map(meaning_of, names):
        new_names["duration"] = "original_duration"
    return [new_names.get(name, name) for name in names]


def _in_seconds(source: Source, places: Sequence[int], cells: Cells) -> Cells:
    if "original_stop" not in cells:
        return cells
    starts, stops = cells.get("start", [None] * len(places)), cells["original_stop"]
    to_seconds = partial(_part_in_seconds, source.sample_rate)
    parts = source.faults.parsed(places, "", to_seconds, starts, stops, default=(None, None))
    start, duration = zip(*parts, strict=True)
    return {**cells, "start": start, "duration": duration}


def _part_in_seconds(
    rate: int, first_cell: Any, stop_cell: Any
) -> tuple[float | None, float | None]:
    try:
        first = float_of(first_cell or 0)
        stop = float_of(stop_cell or first)
    except (TypeError, ValueError, OverflowError):
        first = stop = math.nan
    if not (first.is_integer() and stop.is_integer()):
        raise ValueError(
            "start and stop are no whole numbers of samples: give start and duration in "
            f"seconds: {shown(first_cell)}, {shown(stop_cell)}"
        )
    start = duration = None
    if first_cell not in (None, ""):
        start = first / rate
    if stop != first:  # otherwise `read_audio` reads to the end
        duration = (stop - first) / rate
    return start, duration


def _filled(
    source: Source, pattern: re.Pattern[str], name: str, places: Sequence[int], cells: Any
) -> list[Any]:
    def value_of(match: re.Match[str]) -> str:
        variable = match[match.lastindex or 1]
        source.placeholders.add(variable)
        return source.values.get(variable, match[0])

    mark = pattern.pattern.replace("\\", "")[0]
    filled = [*cells]
    for row, cell in enumerate(cells):
        if not (type(cell) is str and mark in cell):
            continue
        filled[row] = pattern.sub(value_of, cell)
        unfilled = pattern.search(filled[row])
        if unfilled and name == "path":
            remedy = f"give --set {unfilled[unfilled.lastindex or 1]}=FOLDER"
            what = f"path has {unfilled[0]}, which has no value: {remedy}"
            source.faults.add(places[row], what)
    return filled


def _entries(source: Source) -> Rows:
    """Decode the objects in one JSON object one at a time, with their keys as ids."""
    data = bytearray()
    for block in iter(partial(source.stream.read, _BLOCK_BYTES), b""):
        data += block
        if len(data) > _MOST_BYTES:
            source.faults.add(0, f"more than {_MOST_BYTES:,} bytes of JSON: make it JSON lines")
            return
    faults, line = source.faults, 1
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        faults.add(data.count(b"\n", 0, error.start) + 1, f"not UTF-8: 0x{data[error.start]:02x}")
        return
    del data
    decode = json.JSONDecoder().raw_decode
    counted_to, position, mark = 0, text.index("{") + 1, ","
    may_have_halves = "\\ud" in text or "\\uD" in text  # of surrogate pairs
    try:
        while mark == ",":
            key = _matched(_KEY, text, position, "a key and ':'")
            line += text.count("\n", counted_to, key.start(1))
            counted_to = key.start(1)
            id_, _ = decode(text, counted_to)
            row, position = decode(text, key.end())
            if may_have_halves:
                json.dumps(row, ensure_ascii=False).encode()
            after = _matched(_AFTER_VALUE, text, position, "','")
            mark, position = after[1], after.end()
            if isinstance(row, dict):
                part = row.get("wav")
                if isinstance(part, dict):  # for `read_audio`
                    row |= {"wav": part.get("file"), "start": part.get("start")}
                    row["stop"] = part.get("stop")
                row["id"] = id_
                yield line, row
            else:
                faults.add(line, f"not an object of an utterance: {shown(id_)}")
        if position < len(text):
            raise json.JSONDecodeError("Extra data", text, position)
    except json.JSONDecodeError as error:
        faults.add(error.lineno, f"not JSON: {error.msg} at character {error.colno}")
    except (ValueError, RecursionError) as error:
        faults.add(line, f"JSON that cannot be read: {error}")


def _matched(pattern: re.Pattern[str], text: str, position: int, what: str) -> re.Match[str]:
    """Match a pattern at a position. Raises a JSONDecodeError that expects `what`."""
    match = pattern.match(text, position)
    if match is None:
        place = len(text) - len(text[position:].lstrip())
        raise json.JSONDecodeError(f"Expecting {what}", text, place)
    return match


BARS = {
    "ljspeech": (("id", "text", "normalised"), ("id", "text")),
    "piper": (("id", "speaker", "text"),),
    "f5": (("path", "text"),),
    "gpt-sovits": (("path", "speaker", "language", "text"),),
    "styletts2": (("path", "text", "speaker"),),
    "vits": (("path", "speaker", "text"),),
}
"""The columns that lines with bars may have, by format."""


def reading_of(name: str, source: Source) -> str:
    """Name a format, and how it reads the first line of a list with bars."""
    if name not in BARS:
        return name
    cells = source.first_fields.split("|")
    columns = zip(_columns(name, cells), cells, strict=False)
    return f"{name} ({', '.join(f'{column} {shown(cell)}' for column, cell in columns)})"


def _columns(name: str, cells: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a line with so many fields, or the most usual ones."""
    layouts = BARS[name]
    return next((columns for columns in layouts if len(columns) == len(cells)), layouts[0])


def fitting_bars(source: Source) -> list[str]:
    """List the formats in `BARS` that a file's first lines may have."""
    cells = source.first_fields.split("|")
    if len(cells) == 1:
        return []
    if _is_header(cells):
        return ["f5"]
    if all(re.match(r"[^\s|]+\s+[^\s|].*\|\s*$", line.lstrip()) for line in source.first_lines):
        return []  # ids and commands of Kaldi's
    first, choose = "id", _with_ids
    if names_audio(cells[0]):
        first, choose = "path", _with_speakers
    elif re.search(r"[\s,;]", cells[0].strip()):
        return []
    layouts = {name: _columns(name, cells) for name in BARS}
    alike = [
        name
        for name, columns in layouts.items()
        if columns[0] == first and len(columns) == len(cells)
    ]
    if len(alike) < 2:
        return alike
    lines = [line.split("|") for line in source.first_lines]
    second, third = zip(*(line[1:] for line in lines if len(line) == 3), strict=True)
    return choose(second, third) or alike


def _with_speakers(second: Sequence[str], third: Sequence[str]) -> list[str]:
    """Find the column of speakers in lists of paths: they have fewer words, and come again."""
    words = [sum(len(cell.split()) for cell in cells) for cells in (second, third)]
    values = [len(set(cells)) for cells in (second, third)]
    if words[0] < words[1] and values[0] <= values[1]:
        return ["vits"]
    if words[0] > words[1] and values[0] >= values[1]:
        return ["styletts2"]
    return []


def _with_ids(second: Sequence[str], third: Sequence[str]) -> list[str]:
    """Tell whether lists of ids have texts in two forms, which share words, or speakers, who
    come again."""
    pairs = [*zip(second, third, strict=True)]
    if sum(not _words(text).isdisjoint(_words(other)) for text, other in pairs) * 2 >= len(pairs):
        return ["ljspeech"]
    if len(set(second)) < len(set(pairs)):
        return ["piper"]
    return []


def _words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text.lower())}


def _is_header(cells: Sequence[str]) -> bool:
    return meaning_of(cells[0]) in SPELLINGS and "path" in map(meaning_of, cells)


def read_bars(name: str, source: Source) -> Iterator[Batch]:
    """Read a list of this format; files of ids are `wavs/<id>.wav`. A header is optional."""
    rows = split_rows(source.text, "|")
    cells = source.first_fields.split("|")
    if _is_header(cells):
        return table_batches(rows, source)
    columns = _columns(name, cells)
    folder = "wavs"
    if name == "piper" and (source.folder / "wav").is_dir():  # as Piper does
        folder = "wav"
    rows = (row for row in rows if len(row[1]) == len(columns) or "".join(row[1]).strip())
    names = [*dict.fromkeys((*columns, "path"))]
    return batched(rows, names, partial(_with_path, columns, folder), source.faults)


def _with_path(columns: Sequence[str], folder: str, cells: list[str]) -> list[str]:
    if len(cells) != len(columns):
        fields = counted(len(cells), "field")
        raise ValueError(f"{fields}, but {'|'.join(columns)} has {len(columns)}")
    if columns[0] == "id":
        return [*cells, f"{folder}/{cells[0]}.wav"]
    return cells


def fairseq_fits(source: Source) -> bool:
    """Tell whether the first line is a root, and the second a path, a tab and a number."""
    if len(source.first_lines) < 2 or "\t" in source.first_lines[0] or not source.first_fields:
        return False
    cells = source.first_lines[1].split("\t")
    return len(cells) == 2 and cells[1].isdecimal()


def read_fairseq(source: Source) -> Iterator[Batch]:
    """Read a root, and on each line a path and a number of samples."""
    rows = (row for row in split_rows(source.text, "\t") if "".join(row[1]).strip())
    line, cells = next(rows, (0, [""]))
    source.root = cells[0] if is_audio_url(cells[0]) else source.folder / cells[0]
    if len(cells) != 1:
        source.faults.add(line, "has a tab, but a root is expected")
    return batched(rows, ("path", "samples"), _path_and_samples, source.faults)


def _path_and_samples(cells: list[str]) -> list[str]:
    if not (len(cells) == 2 and cells[1].isdecimal()):
        raise ValueError("not a path, a tab and a number of samples")
    return cells


def paths_fit(source: Source) -> bool:
    """Tell whether the first line ends as the name of an audio file, and has no fields."""
    first = source.first_fields
    return names_audio(first) and not re.search(r"[,;|\t]", first) and source.suffix != ".scp"


def read_paths(source: Source) -> Iterator[Batch]:
    """Read a path on each line."""
    return batched(split_rows(source.text, "\n"), ("path",), list, source.faults)
