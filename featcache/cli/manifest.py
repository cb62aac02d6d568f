"""`featcache manifest`: a manifest in another format, or some of its rows."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import FAILURES_LEFT, first_few, note, printing, say, say_json
from featcache.cli.progress import Steps
from featcache.cli.runs import by_reason
from featcache.errors import ArgumentError, counted

if TYPE_CHECKING:
    from featcache.manifest.utterances import Manifest

_SHOWN = 5
_THREADS_PER_CORE = 4
"""Threads that read headers mostly wait for the disk."""


@options.command()
@click.option(
    "--to",
    metavar="NAME",
    help="The new format: csv, jsonl, parquet, nemo or lhotse (cuts).  [default: by FILE's suffix]",
)
@click.option(
    "--where",
    metavar="EXPRESSION",
    help="Write only the rows for which this is true: 'duration < 20 and lang == \"en\"'.",
)
@options.pairs(
    "--column",
    "columns",
    "mos=features/dnsmos",
    "Add a column for --where: mos=features/dnsmos. The version must have one value or "
    "vector for each utterance.",
    metavar="NAME=VERSION",
)
@options.manifest_argument
@options.output_file(
    type=options.FILE_OR_STREAM, help="The new manifest; - is standard output.", required=True
)
@options.root()
@options.manifest_format
@options.threads(
    help="Threads that read headers of audio files.  [default: 4 for each core, at most 32]"
)
@options.force
def manifest(
    manifest: str,
    output: Path,
    to: str | None,
    where: str | None,
    columns: dict[str, str],
    threads: int | None,
    force: bool,
    **reading: Any,
) -> int:
    """Convert a manifest to CSV, JSONL, Parquet, NeMo or Lhotse. Ids, segments and columns
    stay the same. With --where, only some rows are written: the same rows that
    FeatureDataset(where=…) takes.

    CSV, JSONL and Parquet keep paths as they are, so features that were extracted with one
    manifest fit the other. NeMo and Lhotse get absolute paths, and durations from the headers
    of audio files: for NeMo if a row has none, for Lhotse always. A row is left out, and
    counted by reason, if its file cannot be read, or if the version of a --column lacks it.
    Then the exit code is 3.

    \b
    Examples:
      featcache manifest data/train -o train.parquet
      featcache manifest train.csv -o cuts.jsonl.gz --to lhotse
      featcache manifest train.jsonl -o - --to csv | head
      featcache manifest a.csv -o b.csv --where 'mos["ovrl"] > 3' --column mos=features/dnsmos
    """
    from featcache.manifest.write import WRITTEN, format_to_write, packed
    from featcache.storage.files import write_file

    is_printed = str(output) == "-"
    if is_printed and printing.as_json:
        raise ArgumentError("-o - and --json would both print to standard output")
    if not is_printed:
        options.refuse_output(output, force)
    kind = format_to_write(output, to)
    if columns and where is None:
        raise ArgumentError("--column gives --where a column: give --where, too")
    whole = read = options.read_manifest(manifest, reading)
    failed = lacking = 0
    if where is not None:
        read, lacking = _select(whole, where, columns)
    if kind in ("nemo", "lhotse"):
        data, failed = _with_headers(read, kind, threads)
    else:
        data = WRITTEN[kind](read)
        if output.absolute().parent != read.root and not all(map(os.path.isabs, read.paths)):
            note(f"{output}: relative paths are relative to {read.root}: give --root {read.root}")
    if is_printed:
        click.echo(data, nl=False)
    else:
        write_file(output, packed(data, output))
    written = len(read) - failed
    say_json(
        {
            "output": str(output),
            "format": kind,
            "where": where,
            "rows": len(whole),
            "utterances": written,
            "lacking": lacking,
            "failed": failed,
        }
    )
    rows = counted(written, "row")
    if where is not None:
        rows = f"{written:,} of {counted(len(whole), 'row')}"
    tell = note if is_printed else say
    tell(f"{output}: {rows} as {kind}, read as {read.format}")
    return FAILURES_LEFT if failed or lacking else 0


def _select(read: Manifest, where: str, columns: dict[str, str]) -> tuple[Manifest, int]:
    from featcache.loader.choices import Choices
    from featcache.loader.utterances import select_utterances

    with warnings.catch_warnings(record=True, action="always") as caught:
        selected, lacking = select_utterances(read, Choices(where=where, columns=columns))
    for warning in caught:
        note(str(warning.message))
    if lacking:
        rows = counted(len(lacking), "row is", "rows are")
        note(f"{rows} left out, of which a version has no value: {first_few(lacking, _SHOWN)}")
    return selected, len(lacking)


def _with_headers(read: Manifest, kind: str, threads: int | None) -> tuple[bytes, int]:
    """Convert a manifest to a format with durations. Returns also the number of rows that are
    left out."""
    import numpy as np

    from featcache.extraction.audio_files import missing_file_notes, read_headers
    from featcache.manifest.write import WRITTEN, require_names

    require_names(read, kind)
    missing_file_notes(read, np.ones(len(read), bool))  # raises if no file is there
    threads = threads or min(32, _THREADS_PER_CORE * len(os.sched_getaffinity(0)))
    with Steps(len(read), "rows") as bar:
        headers = read_headers(read, threads, bar.update, every=kind == "lhotse")
    failures = headers.failures
    rows = [row for row in range(len(read)) if row not in failures]
    by_row = headers.headers
    files = {number: by_row[row][:3] for number, row in enumerate(rows) if row in by_row}
    readable = replace(read, duration=headers.durations).take(np.array(rows, np.int64))
    for row, (reason, message) in list(failures.items())[:_SHOWN]:
        note(f"{read.ids[row]}: {reason}: {read.paths[row]}: {message}")
    if failures:
        counts = Counter(sorted(reason for reason, _ in failures.values()))
        note(f"{counted(len(failures), 'row is', 'rows are')} left out: {by_reason(counts)}")
    return WRITTEN[kind](readable, files), len(failures)
