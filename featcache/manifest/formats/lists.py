"""Lists without a header, and those with bars between their fields: fairseq's, LJSpeech's and other recipes' of TTS."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from featcache.errors import counted
from featcache.manifest.formats.source import Batch, Source, batched, lines_of, names_audio
from featcache.manifest.formats.tables import split_rows, table_batches
from featcache.manifest.utterances import SPELLINGS, meaning_of, shown

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
    return ", ".join(f"{column} {shown(cell)}" for column, cell in zip(columns, cells, strict=False))


def _columns(name: str, width: int) -> tuple[str, ...] | None:
    """The columns of a line with that many fields."""
    return next((columns for columns in BARS[name] if len(columns) == width), None)


def _fitting(source: Source) -> list[str]:
    """The formats that a list with bars may have: several, if their columns look alike and its lines do not tell."""
    cells = source.first_fields.split("|")
    if len(cells) == 1:
        return []
    if _is_header(cells):
        return ["f5"]
    has_paths = names_audio(cells[0])
    if not has_paths and re.search(r"[\s,;]", cells[0].strip()):
        return []
    first = "path" if has_paths else "id"
    alike = [name for name in BARS if (columns := _columns(name, len(cells))) and columns[0] == first]
    if len(alike) < 2:
        return alike
    lines = [line.split("|") for line in source.first_lines]
    second, third = zip(*(line[1:] for line in lines if len(line) == 3), strict=True)
    plain = (_with_speakers if has_paths else _with_ids)(second, third)
    return alike if plain is None else [plain]


def _with_speakers(second: Sequence[str], third: Sequence[str]) -> str | None:
    """Whether lists of paths have speakers before texts or behind: speakers' names have fewer words, and come again."""
    words = [sum(len(cell.split()) for cell in cells) for cells in (second, third)]
    values = [len(set(cells)) for cells in (second, third)]
    if words[0] < words[1] and values[0] <= values[1]:
        return "vits"
    return "styletts2" if words[0] > words[1] and values[0] >= values[1] else None


def _with_ids(second: Sequence[str], third: Sequence[str]) -> str | None:
    """Whether lists of ids have texts twice, the second time normalised, which leaves words as they are; or speakers,
    who say different things."""
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
    """Reads a list of this format; files of ids are `wavs/<id>.wav`. A header is one if it names the columns."""
    rows = split_rows(source.stream, source.faults, "|")
    cells = source.first_fields.split("|")
    if _is_header(cells):
        return table_batches(rows, source)
    columns = _columns(name, len(cells)) or BARS[name][0]
    # Piper looks into `wav` first.
    folder = "wav" if name == "piper" and (source.folder / "wav").is_dir() else "wavs"

    def good() -> Iterator[tuple[int, list[str]]]:
        for line, cells in rows:
            if len(cells) == len(columns):
                yield line, [*cells, f"{folder}/{cells[0]}.wav"] if columns[0] == "id" else cells
            elif "".join(cells).strip():
                expected = "|".join(columns)
                source.faults.add(line, f"{counted(len(cells), 'field')}, but {expected} has {len(columns)}")

    return batched(good(), (*columns, "path") if columns[0] == "id" else columns)


def fairseq_fits(source: Source) -> bool:
    """Whether a file has a root on its first line, and a path, a tab and a number on its second."""
    if len(source.first_lines) < 2 or "\t" in source.first_lines[0] or not source.first_fields:
        return False
    cells = source.first_lines[1].split("\t")
    return len(cells) == 2 and cells[1].isdecimal()


def read_fairseq(source: Source) -> Iterator[Batch]:
    """fairseq's manifest: a root, and on each line a path and a number of samples."""
    rows = (row for row in split_rows(source.stream, source.faults, "\t") if "".join(row[1]).strip())
    line, cells = next(rows, (0, [""]))
    source.root = cells[0] or None
    if len(cells) != 1:
        source.faults.add(line, "has a tab, but a root is expected")

    def good() -> Iterator[tuple[int, list[str]]]:
        for line, cells in rows:
            if len(cells) == 2 and cells[1].isdecimal():
                yield line, cells
            else:
                source.faults.add(line, "not a path, a tab and a number of samples")

    return batched(good(), ("path", "samples"))


def paths_fit(source: Source) -> bool:
    """Whether the first line is the name of an audio file, or at least ends in one and has no fields."""
    first = source.first_fields
    return names_audio(first) and not re.search(r"[,;|\t]", first) and source.suffix != ".scp"


def read_paths(source: Source) -> Iterator[Batch]:
    """A path on each line."""
    lines = enumerate(lines_of(source.stream, source.faults), 1)
    return batched(((line, [text.rstrip("\r\n")]) for line, text in lines if text.strip()), ("path",))
