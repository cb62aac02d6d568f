"""`featcache durations`: a manifest with the durations of its utterances."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from featcache.cli import options
from featcache.cli.common import FAILURES_LEFT, note, print_json, read_manifest, refuse_output, say, terminal_columns
from featcache.errors import ArgumentError, counted

if TYPE_CHECKING:
    from featcache.extraction.durations import Durations
    from featcache.manifest import Manifest

_SHOWN = 5
_LOOKING_THREADS = 4
"""Threads for each core: they mostly wait for the disk."""


@click.command(short_help="Add durations to a manifest, from the files' headers.")
@options.new_manifest("The new manifest, in the same format.", required=True)
@click.pass_context
def durations(
    ctx: click.Context,
    manifest: str,
    output: Path,
    root: Path | None,
    threads: int | None,
    force: bool,
    as_json: bool,
    reading: dict[str, Any],
) -> None:
    """Write the MANIFEST again with a duration, in seconds, for each row that has none. Columns and rows stay as they
    are. Of most audio files only the header is read; where it does not say how long the file is, as in MP3 without a
    header frame, and in M4A and what else FFmpeg decodes, the file is decoded.

    `featcache extract --partition` needs durations, because it cuts the manifest into partitions of equal length. A row
    with its duration has the same features as without, but is another row: versions that were extracted with the old
    manifest are extracted again with the new one. So do this first.

    Rows stay without a duration if their file cannot be read, is cut off, or is at a URL and its header does not say
    how long it is: they are counted by reason, and the exit code is 3. Each counts as long as the mean of the others,
    and extraction tries it.

    \b
    Examples:
      featcache durations train.csv -o train-durations.csv
      featcache durations segments.jsonl -o timed.jsonl --root /corpora/audio --threads 64
    """
    import numpy as np

    from featcache.extraction.audio_files import copying_notes, missing_file_notes
    from featcache.manifest.rewrite import with_durations
    from featcache.store.files import write_file

    if manifest == "-":
        raise ArgumentError("MANIFEST is -: give a file, which is read twice")
    refuse_output(output, force)
    read = read_manifest(manifest, reading, root=root, carry=False)
    missing_file_notes(read, np.isnan(read.duration))  # raises if none is there: the root is another, probably
    for said in copying_notes(read):
        note(said)
    found = look(read, threads)
    write_file(output, with_durations(read, found.seconds.tolist(), output))
    added = int((found.seconds == found.seconds).sum())
    if as_json:
        print_json(
            {
                "output": str(output),
                "utterances": len(read),
                "added": added,
                "failed": len(found.failures),
                "failed_by_reason": found.reasons,
            }
        )
    else:
        say(f"{output}: {counted(len(read), 'row')}, {added:,} durations added")
    note_root(output, read)
    note_failures(read, found)
    ctx.exit(FAILURES_LEFT if found.failures else 0)


def look(read: Manifest, threads: int | None, every: bool = False) -> Durations:
    """What the headers say of the files of rows without durations, or of all files."""
    from featcache.extraction.durations import measure_durations

    threads = threads or min(32, _LOOKING_THREADS * len(os.sched_getaffinity(0)))
    with tqdm(total=len(read), unit=" rows", leave=False, file=sys.stderr, disable=not terminal_columns()) as bar:
        return measure_durations(read, threads, bar.update, every=every)


def note_root(output: Path, read: Manifest) -> None:
    """Say what to give as --root for a new manifest whose paths are relative to another folder than its own."""
    if output.absolute().parent != read.root and not all(map(os.path.isabs, read.paths)):
        note(f"{output}: relative paths are relative to {read.root}: give --root {read.root}")


def note_failures(read: Manifest, found: Durations) -> None:
    """Say which rows have no duration, and why."""
    for row, (reason, message) in list(found.failures.items())[:_SHOWN]:
        note(f"{read.ids[row]}: {reason}: {read.paths[row]}: {message}")
    if found.failures:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in found.reasons.items())
        note(f"{counted(len(found.failures), 'row has', 'rows have')} no duration: {reasons}")
