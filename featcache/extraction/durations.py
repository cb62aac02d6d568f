"""How long the utterances of a manifest are, by the headers of their files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.audio.recording import UNKNOWN, Recording
from featcache.audio.remote import URLS_AT_ONCE, fetch_beginning
from featcache.errors import AudioError, Reason
from featcache.manifest import Manifest

_FILES_AT_ONCE = 256
"""Files that a thread looks at before it says so."""

NOT_SAID = "length_not_in_header"
"""The reason of a row whose file's header does not say how long it is, as in an MP3 without a header frame. Its audio
may be good."""


@dataclass(frozen=True, eq=False)
class Durations:
    """The durations of a manifest's rows."""

    seconds: NDArray[np.float64]
    """Seconds, float64 `[rows]`; NaN for rows whose manifest gives one, and for those without."""
    failures: dict[int, tuple[str, str]]
    """The rows that have none, each with the reason, one of `featcache.errors.Reason` or `NOT_SAID`, and a message."""

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows have none, by reason."""
        return dict(sorted(Counter(reason for reason, _ in self.failures.values()).items()))


def measure_durations(manifest: Manifest, threads: int, report: Callable[[int], object] = lambda _: None) -> Durations:
    """Look up the duration of every row that gives none: from its start to the end of its file.

    A row with this duration has the same samples as without. A file that is cut off has none, so that extraction
    reports it.

    Args:
        manifest: The rows.
        threads: Files that are looked at side by side; at URLs, more are.
        report: Called with a number of rows that are done, from several threads.
    """
    rows = np.flatnonzero(np.isnan(manifest.duration))
    hashes = manifest.paths.take(rows).hashes()
    rows = rows[np.argsort(hashes, kind="stable")]  # a file of many rows is opened once
    cuts = np.flatnonzero(np.diff(np.sort(hashes))) + 1
    files = np.split(rows, cuts) if len(rows) else []
    seconds = np.full(len(manifest), math.nan)
    failures: dict[int, tuple[str, str]] = {}

    def look(some: Sequence[NDArray[np.int64]]) -> None:
        for members in some:
            for row, found in _of_file(manifest, members.tolist()):
                if isinstance(found, float):
                    seconds[row] = found
                else:
                    failures[row] = found
        report(sum(map(len, some)))

    at_once = max(threads, URLS_AT_ONCE) if manifest.has_urls else threads
    with ThreadPoolExecutor(at_once, "featcache-durations") as pool:
        for _ in pool.map(look, [files[at : at + _FILES_AT_ONCE] for at in range(0, len(files), _FILES_AT_ONCE)]):
            pass
    return Durations(seconds, dict(sorted(failures.items())))


def _of_file(manifest: Manifest, rows: Sequence[int]) -> Iterable[tuple[int, float | tuple[str, str]]]:
    """The seconds of rows of one file, or why they have none."""
    location = manifest.resolve(manifest.paths[rows[0]])
    try:
        with closing(Recording(location, fetch_beginning)) as recording:
            rate, num_samples, shortfall = recording.sample_rate, recording.num_samples, recording.shortfall
    except AudioError as error:
        return [(row, (error.reason.value, str(error))) for row in rows]
    if shortfall:
        return [(row, (Reason.TRUNCATED.value, shortfall)) for row in rows]
    if num_samples == UNKNOWN:
        return [(row, (NOT_SAID, "its header does not say how long it is")) for row in rows]
    found: list[tuple[int, float | tuple[str, str]]] = []
    for row in rows:
        first = round(float(np.nan_to_num(manifest.start[row])) * rate)
        if first < num_samples:
            found.append((row, (num_samples - first) / rate))
        elif num_samples:
            message = f"it starts at {first / rate:.3f} s, but the file holds {num_samples / rate:.3f} s"
            found.append((row, (Reason.SEGMENT_OUTSIDE.value, message)))
        else:
            found.append((row, (Reason.EMPTY.value, "it holds no samples, according to its header")))
    return found
