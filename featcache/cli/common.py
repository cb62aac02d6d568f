"""What several commands share: printing, and the default number of threads."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.errors import StoreError

if TYPE_CHECKING:
    from featcache.store.version import Version


FIRST_SECONDS = 5.0
"""Before the first line of progress, where stderr is no terminal: what is shorter is not told of."""

LINE_SECONDS = 30.0
"""Between such lines."""


def default_threads() -> int:
    """Every core that this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


def terminal_columns() -> int:
    """How wide the terminal is that stderr goes to; 0 where it goes elsewhere, or to a terminal without a size."""
    if not sys.stderr.isatty():
        return 0
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0


def note(message: str) -> None:
    """A line for the person, on stderr."""
    click.echo(message, err=True)


def note_unfinished(version: Version) -> None:
    """Lines on stderr where not all that was to be extracted is there."""
    from featcache.store.index import open_index
    from featcache.store.unfinished import find_unfinished

    for run in find_unfinished(version, open_index(version)):
        note(f"{version.path}: {run}")


def refuse_output(path: Path, force: bool) -> None:
    """Refuse a file that cannot be written, before the work and not after it.

    Raises:
        ArgumentError: there is such a file, and `force` is not set.
        StoreError: its folder is not there, or may not be written.
    """
    from featcache.stats.result import refuse_to_replace

    refuse_to_replace(path, force)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise StoreError(f"{path}: cannot be written: there is no folder {path.parent}")
    if not os.access(folder, os.W_OK):
        raise StoreError(f"{path}: cannot be written: the folder {path.parent} may not be written")


def print_json(document: Any) -> None:
    """The one document that `--json` prints on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def megabytes(num_bytes: float) -> str:
    """Bytes for a person: `12.3 MB`, `4.56 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 999 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


def hours(seconds: float) -> str:
    """Seconds of audio for a person: `3.71 h`, `12.4 min`, `9.7 s`."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.2f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def clock(seconds: float) -> str:
    """A duration as a clock shows it: `1:02:03`, `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    whole, minutes = divmod(minutes, 60)
    return f"{whole}:{minutes:02}:{rest:02}" if whole else f"{minutes}:{rest:02}"


def best(fastest: dict[str, Any] | None) -> str:
    """What a probe found to be the fastest way, for a person: `fastest without a mismatch: padded, fp32: 151 × …`."""
    if fastest is None:
        return "every combination has mismatches"
    speed = f"{fastest['times_real_time']:,.0f} × real time"
    return f"fastest without a mismatch: {fastest['policy']}, {fastest['precision']}: {speed}"
