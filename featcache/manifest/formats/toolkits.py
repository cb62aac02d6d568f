"""NeMo's manifests, SpeechBrain's and fairseq's, lists with bars of recipes of TTS, and
plain lists of paths.

NeMo's are JSON lines with `audio_filepath`, of files, or of members of tars. Its script
`convert_to_tarred_audio_dataset.py` puts the audio of rows with `"shard_id": 3` into
`audio_3.tar`, beside `tarred_audio_manifest.json` and above
`sharded_manifests/manifest_3.json`. Of a file with several rows, there is one member,
`a.wav`, and the rows name `a.wav`, `a-sub1.wav`, `a-sub2.wav` and so on.

SpeechBrain's are CSV with `$name` in its paths, and JSON that has an object for each id,
with `{name}`."""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from featcache.errors import counted
from featcache.manifest.audio_locations import is_audio_url, names_container
from featcache.manifest.formats.source import (
    Batch,
    Cells,
    Rows,
    Source,
    batched,
    lines_of,
    names_audio,
)
from featcache.manifest.formats.tables import (
    csv_rows,
    json_batches,
    json_rows,
    split_rows,
    table_batches,
)
from featcache.manifest.times import times_of
from featcache.manifest.utterances import SPELLINGS, meaning_of, shown

_PART = re.compile(r"(.+)-sub\d+(\.\w+)?")


def read_nemo(source: Source) -> Iterator[Batch]:
    """JSON lines as NeMo has them: without the rows that are to be skipped, and with the
    tars of members."""
    skipped = 0

    def kept() -> Rows:
        nonlocal skipped
        is_tarred: bool | None = None
        for place, row in json_rows(source.stream, source.faults):
            if row.pop("_skipme", False):
                skipped += 1
                continue
            shard_id, name = row.get("shard_id"), row.get("audio_filepath")
            # A member of a tar, which has no folders.
            if type(shard_id) is int and shard_id >= 0 and type(name) is str and "/" not in name:
                if is_tarred is None:
                    is_tarred = _is_tarred(source, row)
                if is_tarred:
                    row["audio_filepath"] = _member(source, row)
            yield place, row

    yield from json_batches(kept(), source)
    if skipped:
        source.notes.append(f"{counted(skipped, 'row')} left out, by _skipme")


def _is_tarred(source: Source, row: dict[str, Any]) -> bool:
    """Whether the rows' audio is in tars, and not unpacked. Sets the root if the tars are
    above the manifest."""
    root = source.given_root
    if is_audio_url(str(root)):
        return True
    folder = source.folder if root is None else Path(root)
    tar = f"audio_{row['shard_id']}.tar"
    above = source.folder.absolute().parent
    if root is None and not os.path.exists(folder / tar) and os.path.exists(above / tar):
        source.root = above
        return True
    return os.path.exists(folder / tar) or not os.path.exists(folder / row["audio_filepath"])


def _member(source: Source, row: dict[str, Any]) -> str:
    """The path of a row's member; below a root that is a tar, its name."""
    part = _PART.fullmatch(row["audio_filepath"])
    name = row["audio_filepath"] if part is None else f"{part[1]}{part[2] or ''}"
    is_in_root = source.given_root is not None and names_container(f"{source.given_root}/")
    return name if is_in_root else f"audio_{row['shard_id']}.tar/{name}"


_MOST_BYTES = 2 << 30  # the largest JSON file that is read: all of it is in memory

_BLOCK_BYTES = 1 << 20

_MARKS = {
    mark: re.compile(rf"[ \t\r\n]*{re.escape(mark)}[ \t\r\n]*") for mark in ("{", ":", ",", "")
}
_NESTED = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{')
_BY_DOLLAR = re.compile(r"\$([\w.]+)|\$\{(\w+)\}")
_BY_BRACES = re.compile(r"\{(\w+)\}")


def is_speechbrain(source: Source) -> bool:
    """Whether a file is CSV with the columns `ID` and `wav` (or `wav_path`), or JSON
    whose first value is an object."""
    if source.suffix == ".jsonl" or not source.first_lines:
        return False
    if source.first_lines[0].lstrip().startswith("{"):
        are_objects = all(isinstance(value, dict) for value in source.first_object.values())
        return are_objects and _NESTED.match("\n".join(source.first_lines)) is not None
    names = {name.strip().strip('"') for name in source.first_lines[0].split(",")}
    return "ID" in names and bool(names & {"wav", "wav_path"})


def read_speechbrain(source: Source) -> Iterator[Batch]:
    """The rows, with the values of `--set` for placeholders. Those of other columns stay
    if they have no value."""
    source.renamed = _renamed
    if source.first_lines and source.first_lines[0].lstrip().startswith("{"):
        pattern, batches = _BY_BRACES, json_batches(_entries(source), source)
    else:
        rows = csv_rows(source.stream, source.faults, skipinitialspace=True)
        pattern, batches = _BY_DOLLAR, table_batches(rows, source)
    for places, cells in batches:
        cells = _in_seconds(source, places, _unpacked(cells))
        yield places, {name: _filled(source, pattern, name, places, cells[name]) for name in cells}


def _renamed(names: Sequence[str]) -> list[str]:
    """Columns as SpeechBrain's recipes use them: `wav` is read, from `start` to `stop` in
    samples, or for `duration` seconds from `start` on. A duration without a start is the
    file's, by which batches are made."""
    own = {"ID": "id"}
    if "stop" in names:
        others = times_of(names).keys() - {"start"}
        own |= {name: f"original_{name}" for name in others}
    if "wav" in names:
        own |= {"wav": "path", "path": "original_path"}
    if "start" not in map(meaning_of, names):
        own["duration"] = "original_duration"
    return [own.get(name, name) for name in names]


def _unpacked(cells: Cells) -> Cells:
    """The cells with those paths unpacked that are objects, as `read_audio` takes them:
    `{"file": …, "start": …}`."""
    paths = cells.get("path", ())
    if not any(type(path) is dict for path in paths):
        return cells
    parts = [path if type(path) is dict else {"file": path} for path in paths]
    keys = {"path": "file", "start": "start", "original_stop": "stop"}
    return {**cells, **{name: [part.get(key) for part in parts] for name, key in keys.items()}}


def _in_seconds(source: Source, places: Sequence[int], cells: Cells) -> Cells:
    """The cells with start and duration in place of the samples from `start` to `stop`; a
    ManifestError if nothing says how many of them are a second."""
    if "original_stop" not in cells:
        return cells
    rate = source.sample_rate
    firsts, stops = cells.get("start", [None] * len(places)), cells["original_stop"]
    parts = source.faults.parsed(
        places, "", partial(_part_in_seconds, rate), firsts, stops, default=(None, None)
    )
    start, duration = zip(*parts, strict=True)
    return {**cells, "start": start, "duration": duration}


def _part_in_seconds(
    rate: int, first_cell: Any, stop_cell: Any
) -> tuple[float | None, float | None]:
    """The start and the duration of a part, or a ValueError."""
    try:
        first, stop = map(float, (first_cell or 0, stop_cell or first_cell or 0))
    except (TypeError, ValueError, OverflowError):
        first = stop = math.nan
    if not (first.is_integer() and stop.is_integer()):
        what = "start and stop are no whole numbers of samples: give start and duration in seconds"
        raise ValueError(f"{what}: {shown(first_cell)}, {shown(stop_cell)}")
    start = None if first_cell is None or first_cell == "" else first / rate
    # as `read_audio` has it: to the end
    return start, (stop - first) / rate if stop != first else None


def _filled(
    source: Source, pattern: re.Pattern[str], name: str, places: Any, cells: Any
) -> Sequence[Any]:
    """A column's cells with values for placeholders."""
    mark = pattern.pattern.replace("\\", "")[0]
    marked = [row for row, cell in enumerate(cells) if type(cell) is str and mark in cell]
    if not marked:
        return cast(Sequence[Any], cells)

    def value_of(found: re.Match[str]) -> str:
        variable = found[found.lastindex or 1]
        source.placeholders.add(variable)
        return source.values.get(variable, found[0])

    filled = [*cells]
    for row in marked:
        filled[row] = cell = pattern.sub(value_of, cells[row])
        if name == "path" and mark in cell and (left := pattern.search(cell)):
            variable = left[left.lastindex or 1]
            source.faults.add(
                places[row], f"path has {left[0]}, which has no value: give --set {variable}=FOLDER"
            )
    return filled


def _entries(source: Source) -> Rows:
    """The objects of one JSON object, each with its key as the id; one at a time is made
    of the text."""
    data = bytearray()
    # memory for so much is taken
    while len(data) <= _MOST_BYTES and (block := source.stream.read(_BLOCK_BYTES)):
        data += block
    faults, line = source.faults, 1
    if len(data) > _MOST_BYTES:
        faults.add(0, f"more than {_MOST_BYTES:,} bytes of JSON: make it JSON lines")
        return
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        faults.add(data.count(b"\n", 0, error.start) + 1, f"not UTF-8: 0x{data[error.start]:02x}")
        return
    del data
    decode, at, counted = json.JSONDecoder().raw_decode, 0, 0
    may_have_halves = "\\ud" in text or "\\uD" in text  # of surrogate pairs: as in JSON lines
    try:
        at = _after(text, at, "{")
        while not text.startswith("}", at):
            line += text.count("\n", counted, at)
            counted = at
            key, at = decode(text, at)
            row, at = decode(text, _after(text, at, ":"))
            if may_have_halves:
                json.dumps(row, ensure_ascii=False).encode()
            at = _after(text, at, "")
            if not text.startswith("}", at):
                at = _after(text, at, ",")
            if isinstance(row, dict) and isinstance(key, str):
                row["id"] = key
                yield line, row
            else:
                faults.add(line, f"not an object of an utterance: {shown(key)}")
        at = _after(text, at + 1, "")
        if at < len(text):
            raise json.JSONDecodeError("Extra data", text, at)
    except json.JSONDecodeError as error:
        faults.add(error.lineno, f"not JSON: {error.msg} at character {error.colno}")
    except (ValueError, RecursionError) as error:
        faults.add(line, f"JSON that cannot be read: {error}")


def _after(text: str, at: int, mark: str) -> int:
    """Where what follows a mark begins, or without one, white space; there may be white
    space around the mark."""
    if found := _MARKS[mark].match(text, at):
        return found.end()
    raise json.JSONDecodeError(f"Expecting {mark!r}", text, _after(text, at, ""))


BARS = {
    "ljspeech": (("id", "text", "normalised"), ("id", "text")),
    "piper": (("id", "speaker", "text"),),
    "f5": (("path", "text"),),
    "gpt-sovits": (("path", "speaker", "language", "text"),),
    "styletts2": (("path", "text", "speaker"),),
    "vits": (("path", "speaker", "text"),),
}
"""Lists with bars between their fields, by format: the columns that a line may have."""


def bars_fit(name: str, source: Source) -> bool:
    """Whether a file is a list of this format, by its first lines."""
    return name in _fitting(source)


def bars_reading(name: str, source: Source) -> str:
    """How the first line of a list is read in this format."""
    cells = source.first_fields.split("|")
    columns = _columns(name, len(cells)) or BARS[name][0]
    return ", ".join(
        f"{column} {shown(cell)}" for column, cell in zip(columns, cells, strict=False)
    )


def _columns(name: str, width: int) -> tuple[str, ...] | None:
    """The columns of a line with that many fields."""
    return next((columns for columns in BARS[name] if len(columns) == width), None)


def _fitting(source: Source) -> list[str]:
    """The formats that a list with bars may have: several, if their columns look alike
    and its lines do not tell."""
    cells = source.first_fields.split("|")
    if len(cells) == 1:
        return []
    if _is_header(cells):
        return ["f5"]
    has_paths = names_audio(cells[0])
    if not has_paths and re.search(r"[\s,;]", cells[0].strip()):
        return []
    first = "path" if has_paths else "id"
    alike = [
        name for name in BARS if (columns := _columns(name, len(cells))) and columns[0] == first
    ]
    if len(alike) < 2:
        return alike
    lines = [line.split("|") for line in source.first_lines]
    second, third = zip(*(line[1:] for line in lines if len(line) == 3), strict=True)
    plain = (_with_speakers if has_paths else _with_ids)(second, third)
    return alike if plain is None else [plain]


def _with_speakers(second: Sequence[str], third: Sequence[str]) -> str | None:
    """Whether lists of paths have speakers before texts or behind: speakers' names have
    fewer words, and come again."""
    words = [sum(len(cell.split()) for cell in cells) for cells in (second, third)]
    values = [len(set(cells)) for cells in (second, third)]
    if words[0] < words[1] and values[0] <= values[1]:
        return "vits"
    return "styletts2" if words[0] > words[1] and values[0] >= values[1] else None


def _with_ids(second: Sequence[str], third: Sequence[str]) -> str | None:
    """Whether lists of ids have texts twice, the second time normalised, which leaves
    words as they are; or speakers, who say different things."""
    pairs = [*zip(second, third, strict=True)]
    alike = sum(bool(_words(before) & _words(after)) for before, after in pairs)
    if alike * 2 >= len(pairs):
        return "ljspeech"
    return "piper" if len(set(second)) < len(set(pairs)) else None


def _words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text.lower())}


def _is_header(cells: Sequence[str]) -> bool:
    return meaning_of(cells[0]) in SPELLINGS and "path" in map(meaning_of, cells)


def read_bars(name: str, source: Source) -> Iterator[Batch]:
    """Reads a list of this format; files of ids are `wavs/<id>.wav`. A header is one if
    it names the columns."""
    rows = split_rows(source.stream, source.faults, "|")
    cells = source.first_fields.split("|")
    if _is_header(cells):
        return table_batches(rows, source)
    columns = _columns(name, len(cells)) or BARS[name][0]
    # Piper looks into `wav` first.
    folder = "wav" if name == "piper" and (source.folder / "wav").is_dir() else "wavs"
    rows = (row for row in rows if len(row[1]) == len(columns) or "".join(row[1]).strip())
    names = (*columns, "path") if columns[0] == "id" else columns
    return batched(rows, names, partial(_with_path, columns, folder), source.faults)


def _with_path(columns: Sequence[str], folder: str, cells: list[str]) -> list[str]:
    """The cells of a line, or a ValueError; with the path behind an id."""
    if len(cells) != len(columns):
        raise ValueError(
            f"{counted(len(cells), 'field')}, but {'|'.join(columns)} has {len(columns)}"
        )
    return [*cells, f"{folder}/{cells[0]}.wav"] if columns[0] == "id" else cells


def fairseq_fits(source: Source) -> bool:
    """Whether a file has a root on its first line, and a path, a tab and a number on its
    second."""
    if len(source.first_lines) < 2 or "\t" in source.first_lines[0] or not source.first_fields:
        return False
    cells = source.first_lines[1].split("\t")
    return len(cells) == 2 and cells[1].isdecimal()


def read_fairseq(source: Source) -> Iterator[Batch]:
    """fairseq's manifest: a root, and on each line a path and a number of samples."""
    rows = (
        row for row in split_rows(source.stream, source.faults, "\t") if "".join(row[1]).strip()
    )
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
    """Whether the first line is the name of an audio file, or at least ends in one and
    has no fields."""
    first = source.first_fields
    return names_audio(first) and not re.search(r"[,;|\t]", first) and source.suffix != ".scp"


def read_paths(source: Source) -> Iterator[Batch]:
    """A path on each line."""
    lines = enumerate(lines_of(source.stream, source.faults), 1)
    rows = ((line, text.rstrip("\r\n")) for line, text in lines if text.strip())
    return batched(rows, ("path",), lambda path: [path], source.faults)
