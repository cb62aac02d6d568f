"""How long the utterances of a manifest are, by the headers of their files."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.audio.members import beginning_of
from featcache.audio.recording import UNKNOWN, Recording
from featcache.audio.remote import URLS_AT_ONCE, StoppedError
from featcache.errors import AudioError, Reason
from featcache.manifest import Manifest
from featcache.manifest.audio_locations import Url
from featcache.manifest.utterances import nearest_sample

_FILES_AT_ONCE = 256
"""Files that a thread looks at before it says so."""

NOT_SAID = "length_not_in_header"
"""The reason of a row whose file is at a URL, and has no header that says how long it is, as an MP3 without a header
frame, or M4A. Its audio may be good."""


class Header(NamedTuple):
    """What the header of a file says."""

    sample_rate: int
    """In Hz."""
    num_samples: int
    """The samples of each channel."""
    num_channels: int
    """The number of channels."""


@dataclass(frozen=True, eq=False)
class Durations:
    """The durations of a manifest's rows."""

    seconds: NDArray[np.float64]
    """Seconds, float64 `[rows]`; NaN for rows whose manifest gives one, and for those without."""
    failures: dict[int, tuple[str, str]]
    """The rows that have none, each with the reason, one of `featcache.errors.Reason` or `NOT_SAID`, and a message."""
    headers: dict[int, Header]
    """The headers of the other rows' files that were looked at."""

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows have none, by reason."""
        return dict(sorted(Counter(reason for reason, _ in self.failures.values()).items()))


def measure_durations(
    manifest: Manifest, threads: int, report: Callable[[int], object] = lambda _: None, *, every: bool = False
) -> Durations:
    """Look up the duration of every row that gives none: from its start to the end of its file.

    A row with this duration has the same samples as without. A file that is cut off has none, so that extraction
    reports it. Where the header does not say how long the file is, it is decoded, unless it is at a URL: MP3 without a
    header frame, and what FFmpeg decodes, whose headers round.

    Args:
        manifest: The rows.
        threads: Files that are looked at side by side; at URLs, more are.
        report: Called with a number of rows that are done, from several threads.
        every: Whether to look at the files of all rows, also of those that give a duration: for their headers.
    """
    rows = np.flatnonzero(np.isnan(manifest.duration) | every)
    hashes = manifest.paths.take(rows).hashes()
    rows = rows[np.argsort(hashes, kind="stable")]  # a file of many rows is opened once
    cuts = np.flatnonzero(np.diff(np.sort(hashes))) + 1
    files = sorted(np.split(rows, cuts), key=lambda members: int(members[0])) if len(rows) else []
    seconds = np.full(len(manifest), math.nan)
    failures: dict[int, tuple[str, str]] = {}
    headers: dict[int, Header] = {}
    stop = threading.Event()

    def wait(seconds: float) -> None:
        if stop.wait(seconds):
            raise StoppedError

    def look(some: Sequence[NDArray[np.int64]]) -> None:
        for members in some:
            if stop.is_set():
                return
            header = _header(manifest, int(members[0]), wait)
            for row in members.tolist():
                found = _seconds(manifest, row, header) if isinstance(header, Header) else header
                if isinstance(found, float) and isinstance(header, Header):
                    headers[row] = header
                    seconds[row] = found if math.isnan(manifest.duration[row]) else math.nan
                elif not isinstance(found, float):
                    failures[row] = found
        report(sum(map(len, some)))

    # Members of a container wait for it together: with more threads, more containers would be copied at a time.
    are_at_urls = len(files) > 0 and isinstance(manifest.resolve(manifest.paths[int(files[0][0])]), Url)
    at_once = max(threads, URLS_AT_ONCE) if are_at_urls else threads
    with ThreadPoolExecutor(at_once, "featcache-durations") as pool:
        try:
            for _ in pool.map(look, [files[at : at + _FILES_AT_ONCE] for at in range(0, len(files), _FILES_AT_ONCE)]):
                pass
        finally:  # Ctrl-C does not wait until a container is copied
            stop.set()
    return Durations(seconds, dict(sorted(failures.items())), headers)


def _header(manifest: Manifest, row: int, wait: Callable[[float], object]) -> Header | tuple[str, str]:
    """The header of a row's file, or why nothing is known of it; `wait` as for `beginning_of`."""
    location = manifest.resolve(manifest.paths[row])
    try:
        with closing(Recording(location, partial(beginning_of, wait=wait))) as recording:
            shortfall, num_samples = recording.shortfall, recording.num_samples
            if num_samples == UNKNOWN and not (shortfall or isinstance(location, Url)):
                num_samples = recording.count_samples()
            header = Header(recording.sample_rate, num_samples, recording.num_channels)
    except AudioError as error:
        return error.reason.value, str(error)
    if shortfall:
        return Reason.TRUNCATED.value, shortfall
    if header.num_samples == UNKNOWN:
        return NOT_SAID, "its header does not say how long it is, and what is at a URL is not fetched whole for that"
    return header


def _seconds(manifest: Manifest, row: int, header: Header) -> float | tuple[str, str]:
    """The seconds from a row's start to the end of its file, or why there are none."""
    rate, num_samples, _ = header
    first = nearest_sample(float(np.nan_to_num(manifest.start[row])), rate)
    if first < num_samples:
        return (num_samples - first) / rate
    if not num_samples:
        return Reason.EMPTY.value, "it holds no samples, according to its header"
    message = f"it starts at {first / rate:.3f} s, but the file holds {num_samples / rate:.3f} s"
    return Reason.SEGMENT_OUTSIDE.value, message
