"""What several commands do alike: what they print, and how many threads they take."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from featcache.store.version import Version


def default_threads() -> int:
    """Every core that this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


def note(message: str) -> None:
    """A line for the person, on stderr."""
    click.echo(message, err=True)


def note_unfinished(version: Version) -> None:
    """Lines on stderr where not all that was to be extracted is there."""
    from featcache.store.index import open_index
    from featcache.store.unfinished import find_unfinished

    for run in find_unfinished(version, open_index(version)):
        note(f"{version.path}: {run}")


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
        return "nothing is without a mismatch"
    speed = f"{fastest['times_real_time']:,.0f} × real time"
    return f"fastest without a mismatch: {fastest['policy']}, {fastest['precision']}: {speed}"
