"""What the columns of a manifest may be called."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from featcache.errors import listing
from featcache.manifest.faults import Faults

SPELLINGS = {
    "id": ("id", "utt_id", "uttid", "utt", "utterance_id", "utterance", "audio_id", "segment_id", "key"),
    "path": (
        *("path", "wav", "wav_path", "audio", "audio_path", "audio_file", "audio_filepath"),
        *("file", "file_path", "filepath", "file_name", "filename"),
    ),
    "start": ("start", "start_time", "begin", "begin_time", "offset"),
    "duration": ("duration", "dur"),
    "channel": ("channel",),
}
"""How each column may be spelled, in any case. A table with two spellings of one column is refused, unless
one of them is exactly the column's own name, as it stands on the left: then the others are carried.

Names that do not say seconds are left out on purpose: a `length` is as often in samples or frames.
"""

_COLUMN_OF = {spelling: column for column, spellings in SPELLINGS.items() for spelling in spellings}
_ENDS = {"end", "end_time", "stop", "stop_time"}  # not read, so a fault where one stands for a duration

_AUDIO = re.compile(r"\.(wav|flac|mp3|ogg|opus|sph|aiff?|m4a)\s*\|?$", re.IGNORECASE)


def no_header(cells: Sequence[str], required: Collection[str]) -> str | None:
    """Why the first row of a table names no columns, where it is plain to see; None where it is not."""
    if all(column in map(_meaning, cells) for column in required):
        return None
    if len(cells) == 1:
        for separator, name, remedy in (
            (";", "semicolons", "write commas for them"),
            ("\t", "tabs", "name the file .tsv"),
            (" ", "spaces, as in Kaldi's wav.scp and segments", "docs/manifest.md says how to convert these"),
        ):
            if separator in cells[0].strip():
                return f"fields are separated by {name}: {remedy}"
    if any(map(_AUDIO.search, cells)):
        return "there is no header, but a file's name: name the columns in a line above it, id and path for instance"
    return None


def meanings(names: Collection[str], line: int, faults: Faults) -> list[str]:
    """For each column the one of `SPELLINGS` that it is, or its own name where it is carried."""
    found = [name if _meaning(name) in names else _meaning(name) for name in names]
    for column in SPELLINGS:
        same = {name: None for name, meaning in zip(names, found, strict=True) if meaning == column}
        if len(same) > 1:
            faults.add(line, f"{' and '.join(map(repr, same))} both mean {column}: name one of them {column}")
    if "start" in found and "duration" not in found:
        for name in names:
            if name.strip().lower() in _ENDS:
                faults.add(line, f"{name!r} is not read: give a duration, {name} - start, instead")
    return found


def require(required: Collection[str], names: Collection[str], line: int, faults: Faults) -> None:
    """Add a fault for each required column that none of `names` means."""
    for column in required:
        if column not in map(_meaning, names):
            known = listing(SPELLINGS[column], len(SPELLINGS[column]))
            there = listing(map(repr, names))
            faults.add(line, f"no {column} column among {there}: rename or add one; known spellings: {known}")


def _meaning(name: str) -> str:
    return _COLUMN_OF.get(name.strip().lower(), name)
