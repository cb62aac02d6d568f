"""Lists without a header, and those with bars between their fields: fairseq's, LJSpeech's and other recipes' of TTS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from featcache.errors import counted
from featcache.manifest.columns import SPELLINGS, meaning_of
from featcache.manifest.formats.source import Batch, Source, batched, lines_of, names_audio
from featcache.manifest.formats.tables import split_rows, table_batches

BARS = {
    "ljspeech": (("id", "text", "normalised"), ("id", "text")),
    "f5": (("path", "text"),),
    "gpt-sovits": (("path", "speaker", "language", "text"),),
    "styletts2": (("path", "text", "speaker"),),
    "vits": (("path", "speaker", "text"),),
}
"""Lists with bars between their fields, by format: the columns that a line may have."""


def bars_fit(name: str) -> Callable[[Source], bool]:
    """Tells whether a file is a list of this format, by its first line."""

    def fits(source: Source) -> bool:
        cells = source.first_fields.split("|")
        if len(cells) == 1:
            return False
        if _is_header(cells):
            return name == "f5"
        columns = next((columns for columns in BARS[name] if len(columns) == len(cells)), ("none",))
        if columns[0] == "id":
            return not (names_audio(cells[0]) or re.search(r"[\s,;]", cells[0].strip()))
        # A speaker's name is one word. Where texts are, too, two formats fit.
        speaker = cells[columns.index("speaker")] if "speaker" in columns else ""
        return columns[0] == "path" and names_audio(cells[0]) and " " not in speaker.strip()

    return fits


def _is_header(cells: Sequence[str]) -> bool:
    return meaning_of(cells[0]) in SPELLINGS and "path" in map(meaning_of, cells)


def read_bars(name: str) -> Callable[[Source], Iterator[Batch]]:
    """Reads a list of this format; LJSpeech's files are `wavs/<id>.wav`. A header is one if it names the columns."""

    def read(source: Source) -> Iterator[Batch]:
        rows = split_rows(lines_of(source.stream, source.faults), "|")
        cells = source.first_fields.split("|")
        if _is_header(cells):
            yield from table_batches(rows, source)
            return
        allowed = {len(columns): columns for columns in BARS[name]}
        columns = allowed.get(len(cells), BARS[name][0])

        def good() -> Iterator[tuple[int, list[str]]]:
            for line, cells in rows:
                if len(cells) == len(columns):
                    yield line, [*cells, f"wavs/{cells[0]}.wav"] if columns[0] == "id" else cells
                elif "".join(cells).strip():
                    expected = "|".join(columns)
                    source.faults.add(line, f"{counted(len(cells), 'field')}, but {expected} has {len(columns)}")

        yield from batched(good(), (*columns, "path") if columns[0] == "id" else columns)

    return read


def fairseq_fits(source: Source) -> bool:
    """Whether a file has a root on its first line, and a path, a tab and a number on its second."""
    if len(source.first_lines) < 2 or "\t" in source.first_lines[0] or not source.first_fields:
        return False
    cells = source.first_lines[1].split("\t")
    return len(cells) == 2 and cells[1].isdecimal()


def read_fairseq(source: Source) -> Iterator[Batch]:
    """fairseq's manifest: a root, and on each line a path and a number of samples."""
    rows = (row for row in split_rows(lines_of(source.stream, source.faults), "\t") if "".join(row[1]).strip())
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
