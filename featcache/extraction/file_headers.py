"""What the headers of a manifest's audio files say, for manifests that must say it: NeMo's and Lhotse's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.audio.members import beginning_of
from featcache.audio.recording import UNKNOWN, Recording
from featcache.audio.remote import URLS_AT_ONCE
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
class FileHeaders:
    """The headers of the files of a manifest's rows, and how long rows are that do not say it."""

    seconds: NDArray[np.float64]
    """Seconds from a row's start to the end of its file, `[rows]`; NaN for rows whose manifest says how long they are,
    and for failures."""
    failures: dict[int, tuple[str, str]]
    """The rows of which nothing is known, each with the reason, of `featcache.errors.Reason` or `NOT_SAID`, and a
    message."""
    headers: dict[int, Header]
    """The headers of the other rows' files that were looked at."""

    @property
    def reasons(self) -> dict[str, int]:
        """The number of failures by reason."""
        return dict(sorted(Counter(reason for reason, _ in self.failures.values()).items()))


def read_headers(
    manifest: Manifest, threads: int, report: Callable[[int], object] = lambda _: None, *, every: bool = False
) -> FileHeaders:
    """Read the headers of the files of rows without a duration; none of them is inside a container.

    A row with the seconds that are found has the same samples as without. Of a file that is cut off, nothing is known.
    Where the header does not say how long the file is, it is decoded, unless it is at a URL: MP3 without a header
    frame, and what FFmpeg decodes, whose headers round.

    Args:
        threads: Files that are looked at side by side; at URLs, more are.
        report: Called with a number of rows that are done, from several threads.
        every: Whether to look at the files of all rows.
    """
    rows = np.flatnonzero(np.isnan(manifest.duration) | every)
    hashes = manifest.paths.take(rows).hashes()
    rows = rows[np.argsort(hashes, kind="stable")]  # a file of many rows is opened once
    cuts = np.flatnonzero(np.diff(np.sort(hashes))) + 1
    files = sorted(np.split(rows, cuts), key=lambda members: int(members[0])) if len(rows) else []
    seconds = np.full(len(manifest), math.nan)
    failures: dict[int, tuple[str, str]] = {}
    headers: dict[int, Header] = {}

    def look(some: Sequence[NDArray[np.int64]]) -> None:
        for members in some:
            header = _header(manifest, int(members[0]))
            for row in members.tolist():
                found = _seconds(manifest, row, header) if isinstance(header, Header) else header
                if isinstance(found, float) and isinstance(header, Header):
                    headers[row] = header
                    seconds[row] = found if math.isnan(manifest.duration[row]) else math.nan
                elif not isinstance(found, float):
                    failures[row] = found
        report(sum(map(len, some)))

    are_at_urls = len(files) > 0 and isinstance(manifest.resolve(manifest.paths[int(files[0][0])]), Url)
    with ThreadPoolExecutor(max(threads, URLS_AT_ONCE) if are_at_urls else threads, "featcache-headers") as pool:
        for _ in pool.map(look, [files[at : at + _FILES_AT_ONCE] for at in range(0, len(files), _FILES_AT_ONCE)]):
            pass
    return FileHeaders(seconds, dict(sorted(failures.items())), headers)


def _header(manifest: Manifest, row: int) -> Header | tuple[str, str]:
    """The header of a row's file, or why nothing is known of it."""
    location = manifest.resolve(manifest.paths[row])
    try:
        with closing(Recording(location, beginning_of)) as recording:
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
