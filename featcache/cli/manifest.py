"""`featcache manifest`: a manifest in another format."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from featcache.cli import options
from featcache.cli.common import FAILURES_LEFT, note, printing, say, say_json
from featcache.cli.process import progress_bar
from featcache.errors import ArgumentError, counted

_SHOWN = 5
_LOOKING_THREADS = 4
"""Threads for each core: they mostly wait for the disk."""


@options.command(
    short_help="Convert a manifest from any format to CSV, JSONL, Parquet, NeMo's or Lhotse's."
)
@click.option(
    "--to",
    metavar="NAME",
    help="csv, jsonl, parquet, nemo or lhotse (cuts).  [default: by FILE's suffix]",
)
@options.manifest_argument
@options.output_file(help="The new manifest; - is standard output.", required=True)
@options.root()
@options.manifest_format
@options.threads(
    help="Files that are looked at side by side.  [default: 4 for each core, at most 32]"
)
@options.force
@options.as_json()
def manifest(
    manifest: str, output: Path, to: str | None, threads: int | None, force: bool, **reading: Any
) -> int:
    """Write the MANIFEST, whatever its format, as another one: the same ids, segments and
    columns.

    As CSV, JSONL or Parquet, paths stay as they are, so that features that were extracted
    with either are those of the other. NeMo's and Lhotse's have absolute paths and
    durations. For these, the headers of the audio files are read: for NeMo those of rows
    without a duration, for Lhotse all; files whose header does not tell are decoded. Rows
    whose files cannot be read are left out: they are counted by reason, and the exit code
    is 3.

    \b
    Examples:
      featcache manifest data/train -o train.parquet
      featcache manifest cuts.jsonl.gz -o train.csv
      featcache manifest train.csv -o cuts.jsonl.gz --to lhotse
      featcache manifest train.jsonl -o - --to csv | head
    """
    import numpy as np

    from featcache.manifest.write import WRITTEN, format_to_write, packed, require_names
    from featcache.storage.files import write_file

    is_printed = str(output) == "-"
    if is_printed and printing.as_json:
        raise ArgumentError("-o - and --json would both print to standard output")
    if not is_printed:
        options.refuse_output(output, force)
    kind = format_to_write(output, to)
    read = options.read_manifest(manifest, reading)
    if kind not in ("nemo", "lhotse"):
        data, failures = WRITTEN[kind](read), {}
        if output.absolute().parent != read.root and not all(map(os.path.isabs, read.paths)):
            note(f"{output}: relative paths are relative to {read.root}: give --root {read.root}")
    else:
        from featcache.extraction.audio_files import missing_file_notes, read_headers

        require_names(read, kind)
        missing_file_notes(read, np.ones(len(read), bool))  # raises if none is there
        threads = threads or min(32, _LOOKING_THREADS * len(os.sched_getaffinity(0)))
        with progress_bar(len(read), "rows") as bar:
            found = read_headers(read, threads, bar.update, every=kind == "lhotse")
        failures = found.failures
        rows = np.array([row for row in range(len(read)) if row not in failures], np.int64)
        files = {
            number: found.headers[row][:3]
            for number, row in enumerate(rows.tolist())
            if row in found.headers
        }
        data = WRITTEN[kind](replace(read, duration=found.durations).take(rows), files)
        for row, (reason, message) in list(failures.items())[:_SHOWN]:
            note(f"{read.ids[row]}: {reason}: {read.paths[row]}: {message}")
        if failures:
            counts = Counter(reason for reason, _ in failures.values())
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()))
            note(f"{counted(len(failures), 'row is', 'rows are')} left out: {reasons}")
    if is_printed:
        click.echo(data, nl=False)
    else:
        write_file(output, packed(data, output))
    written = len(read) - len(failures)
    say_json(
        {"output": str(output), "format": kind, "utterances": written, "failed": len(failures)}
    )
    (note if is_printed else say)(
        f"{output}: {counted(written, 'row')} as {kind}, read as {read.format}"
    )
    return FAILURES_LEFT if failures else 0
