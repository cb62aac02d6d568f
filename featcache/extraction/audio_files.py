"""The audio files of a manifest as they are now: whether they exist, what their headers
say, whether they have changed since extraction, whether a version was extracted from them
at all, and whether failed ones would fail again."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.audio.content_hash import hash_of_content
from featcache.audio.decode import Cut, probe_seconds, span_of
from featcache.audio.formats import OLD_FFMPEG, UNKNOWN, Header
from featcache.audio.members import beginning_of, check_container, copy_of, stamp_now
from featcache.audio.recording import Recording
from featcache.audio.remote import URLS_AT_ONCE, each_at_once, require, stamp_of
from featcache.audio.tables import pyarrow
from featcache.errors import AudioError, ManifestError, Reason, counted
from featcache.manifest.audio_locations import (
    AudioLocation,
    AudioSource,
    Command,
    Member,
    Url,
    is_compressed,
    locate,
    need_pyarrow,
    url_of,
    why_no_file,
)
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest, nearest_sample, rows_at_even_steps
from featcache.version.index import Index
from featcache.version.join import RowStatus, find_other_files, sources_of
from featcache.version.ledger import Failure
from featcache.version.version import Version

_PROBED = 256
"""The most files that are looked at if some of them are enough."""

_FETCHED = 32
"""The same, if they are at URLs or inside containers."""

_STAT_THREADS = 16


def require_reading(manifest: Manifest) -> None:
    """Check that the manifest's containers can be read, and its files at URLs fetched, as
    far as some of them tell. Raises MissingDependencyError if the package that reads or
    fetches them is not installed; ManifestError if a URL is not valid, or the environment
    lacks what its store needs."""
    if need_pyarrow(manifest.paths):
        pyarrow()
    if not manifest.has_urls:
        return
    for row in rows_at_even_steps(len(manifest), _PROBED).tolist():
        if url := url_of(manifest.resolve(manifest.paths[row])):
            require(url)


def row_seconds(
    manifest: Manifest, known: NDArray[np.float64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The duration of each row in seconds, float64 `[rows]`; unknown ones are the mean of
    some files' headers.

    `known` has NaN for durations that are not known, and `speed` is what each row's
    recording gets; float64 `[rows]`.
    """
    seconds = known.copy()
    unknown = np.flatnonzero(np.isnan(seconds))
    if not len(unknown):
        return seconds
    near = rows_of_first_copy(manifest, unknown[:_FETCHED])
    most = _FETCHED if isinstance(manifest.resolve(manifest.paths[unknown[0]]), Member) else _PROBED
    probed = near if len(near) else unknown[rows_at_even_steps(len(unknown), most)]
    locations = [manifest.resolve(path) for path in manifest.paths.take(probed)]
    # A container is copied by this thread, which Ctrl-C ends.
    found = (
        [*map(probe_seconds, locations)] if len(near) else each_at_once(probe_seconds, locations)
    )
    lengths = np.array([math.nan if length is None else length for length in found])
    lengths = (lengths - np.nan_to_num(manifest.start[probed])) / speed[probed]
    usable = lengths > 0
    seconds[unknown] = lengths[usable].mean() if usable.any() else 1.0
    seconds[probed[usable]] = lengths[usable]
    return seconds


def rows_of_first_copy(manifest: Manifest, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows in the first one's container, if it must be copied: no other should be, as
    the run begins with it."""
    containers = [_copied_container(manifest, row) for row in rows.tolist()]
    return rows.compress(
        [container is not None and container == containers[0] for container in containers]
    )


def _copied_container(manifest: Manifest, row: int) -> Path | Url | None:
    location = manifest.resolve(manifest.paths[row])
    if not isinstance(location, Member):
        return None
    return (
        location.container
        if isinstance(location.container, Url) or is_compressed(location.container)
        else None
    )


def with_changed_files(
    manifest: Manifest, status: RowStatus, index: Index, version: Version
) -> RowStatus:
    """Also extract the rows whose file has another size or mtime than when it was decoded,
    or was decoded in a way that gave other samples."""
    rows = np.flatnonzero(status.present)
    sources = sources_of(version, index, status.positions[rows])

    def look(some: NDArray[np.int64]) -> list[Stamp]:
        return stats_of([manifest.resolve(path) for path in manifest.paths.take(some)])

    with ThreadPoolExecutor(1 if manifest.has_urls else _STAT_THREADS) as pool:
        now = list(chain.from_iterable(pool.map(look, np.array_split(rows, 1 + len(rows) // 1024))))
    gone = None, None  # a file that is gone cannot be extracted again
    same = [
        stat == gone or (is_same(stat, tuple(source)) and decoder != OLD_FFMPEG)
        for stat, (*source, decoder) in zip(now, sources.tolist(), strict=True)
    ]
    present = status.present.copy()
    present[rows] = same
    return replace(status, present=present)


def refuse_another_corpus(
    manifest: Manifest, status: RowStatus, index: Index, version: Version
) -> None:
    """Refuse a manifest with the version's ids and paths but other files, which looks
    like another corpus.

    `find_other_files` says which files are looked at. Raises ManifestError if such files
    were found."""
    other, seen = find_other_files(
        manifest, status, version, index, lambda urls: [size for size, _ in stats_of(urls)]
    )
    if len(other):
        files = f"{len(other):,} of {counted(seen, 'file')} checked"
        example = f"for example {manifest.resolve(manifest[int(other[0])].path)}"
        what = (
            f"{manifest.source}: {files} are not what {version.path} was extracted from, {example}"
        )
        raise ManifestError(
            f"{what}: use another cache (-o) for another corpus, --check-sources for changed audio"
        )


def copying_notes(manifest: Manifest) -> list[str]:
    """That containers are fetched or unpacked, if any are, as far as some of them tell."""
    where, notes = f"{tempfile.gettempdir()} (TMPDIR)", []
    containers = [
        _copied_container(manifest, row)
        for row in rows_at_even_steps(len(manifest), _PROBED).tolist()
    ]
    if any(isinstance(container, Url) for container in containers):
        notes.append(
            f"audio in containers at URLs: each is fetched whole to {where} when it is needed"
        )
    if any(container is not None and is_compressed(container) for container in containers):
        notes.append(
            f"audio in compressed tars: each is unpacked in {where} when it is needed; a "
            "plain .tar is faster"
        )
    return [f"{manifest.source}: {note}" for note in notes]


def same_span_notes(manifest: Manifest) -> list[str]:
    """Tell of rows that read the same span of a file under different ids, if there are any."""
    rows = manifest.read_again()
    if not len(rows):
        return []
    first, second = (manifest[row] for row in rows[:2].tolist())
    what = f"{len(rows):,} of {len(manifest):,} rows read what another row reads"
    return [f"{manifest.source}: {what}: {first.id} and {second.id} the same of {first.path}"]


def missing_file_notes(
    manifest: Manifest, rows: NDArray[np.bool_], whole: Manifest | None = None
) -> list[str]:
    """That none of the files to be extracted is there, as far as some of them tell.

    `rows` says which are to be extracted. If the rows are a partition of a manifest,
    `whole` is all of it. Raises ManifestError if no other file of the manifest is there
    either, as far as some tell: the root is probably another than was meant. A single
    file that is missing may be just that."""
    paths = some_paths(manifest, rows)
    if len(paths) < 2 or not (fault := _fault_of_all(manifest, paths)):
        return []
    location = manifest.resolve(paths[0])
    hint = (
        ""
        if url_of(location) or os.path.isabs(paths[0])
        else "; --root says what relative paths are relative to"
    )
    note = f"none of {len(paths):,} audio files checked {fault}{hint}"
    others = some_paths(manifest, ~rows) if whole is None else some_paths(whole)
    if not others or _fault_of_all(manifest, others):
        raise ManifestError(f"{manifest.source}: {note}")
    return [note]


def paths_there(root: AudioLocation, paths: Iterable[str]) -> list[str]:
    """Those of some paths whose file is there, on this machine, as far as a look tells."""
    return [path for path in paths if not _fault(locate(root, path))]


def can_be_read(root: AudioLocation, path: str) -> bool:
    """Whether all bytes of a file can be read on this machine; of what is at a URL or
    printed by a command, False."""
    location = locate(root, path)
    with suppress(AudioError, OSError, ValueError):  # ValueError: the path has a zero byte
        if isinstance(location, Member) and not isinstance(location.container, Url):
            copy_of(location)
            return True
        if isinstance(location, Path):
            with open(location, "rb", buffering=0) as file:
                hash_of_content(file.fileno())
                return True
    return False


def some_paths(manifest: Manifest, rows: NDArray[np.bool_] | None = None) -> list[str]:
    """The different paths of some of these rows, or of any, from the first to the last."""
    numbers = np.arange(len(manifest)) if rows is None else np.flatnonzero(rows)
    some = numbers[rows_at_even_steps(len(numbers), _FETCHED if manifest.has_urls else _PROBED)]
    return list(dict.fromkeys(manifest.paths[row] for row in some.tolist()))


def _fault_of_all(manifest: Manifest, paths: list[str]) -> str:
    """What is wrong with all of these files, with the first as an example; empty if one
    exists, or may exist.

    What else hides a file on this machine is reported when it is decoded."""
    first, *others = map(manifest.resolve, paths)
    if not (fault := _fault(first)):
        return ""
    if not all(each_at_once(_fault, others) if any(map(url_of, others)) else map(_fault, others)):
        return ""
    example = f"for example {paths[0]}{where_missing(paths[0], manifest.root)}"
    return f"exists, {example}" if fault == _MISSING else f"can be had, {example}: {fault}"


_MISSING = "there is no such file"


def _fault(location: AudioSource) -> str:
    """Why a file cannot be had; empty if it can be, or may be."""
    try:
        if isinstance(location, Url):
            stamp_of(location)
        elif isinstance(location, Member):
            check_container(location.container)
        elif not isinstance(location, Command):
            os.stat(location)
    except (FileNotFoundError, NotADirectoryError):
        return _MISSING
    except AudioError as error:
        return _MISSING if error.reason == Reason.FILE_MISSING else str(error)
    except OSError:
        return ""
    return ""


# Files that failed

Stamp = tuple[int | None, int | None]
"""A file's size in bytes and its mtime in ns, see `FileStamp`; two Nones if there is no
such file. Of what is inside a container at a URL, the size is None."""

_MAY_PASS = frozenset({Reason.FILE_UNREADABLE, Reason.NOT_IN_SOURCE, Reason.OUT_OF_MEMORY})
"""Reasons that may no longer hold on another disk or machine, or with another source
version."""


def failure_of(utterance: Utterance, root: AudioLocation, error: AudioError) -> Failure:
    """The ledger's record of an utterance that failed."""
    location = locate(root, utterance.path)
    is_not_had = error.reason in (Reason.FILE_MISSING, Reason.FILE_UNREADABLE)
    size, mtime_ns = (None, None) if isinstance(location, Url) and is_not_had else stat_of(location)
    end = where_missing(utterance.path, root) if error.reason == Reason.FILE_MISSING else ""
    return Failure(
        **utterance.row(),
        reason=error.reason.value,
        message=f"{error}{end}",
        size=size,
        mtime_ns=mtime_ns,
    )


def stat_of(location: AudioSource) -> Stamp:
    """A file's size and mtime as they are now; of a file at a URL, two Nones if the
    server does not tell, too.

    What is inside a container has its own size and the container's mtime; see `stamp_now`."""
    try:
        if isinstance(location, Url | Member):
            return stamp_now(location)
        stat = os.stat(location)
    except (AudioError, OSError, ValueError):  # ValueError: the path has a zero byte
        return None, None
    return stat.st_size, stat.st_mtime_ns


def stats_of(locations: Sequence[AudioSource]) -> list[Stamp]:
    """What `stat_of` says of each file; servers are asked about many at a time."""
    return (
        each_at_once(stat_of, locations)
        if any(map(url_of, locations))
        else [*map(stat_of, locations)]
    )


def is_same(now: Stamp, was: Stamp) -> bool:
    """Whether a file is what it was: by its size, if it is known now, and its mtime."""
    size, mtime_ns = now
    return now == was or (size is None and mtime_ns is not None and mtime_ns == was[1])


def where_missing(path: str, root: AudioLocation) -> str:
    """The end of a message about a path without a file: where it was looked for, or why
    it cannot be a file."""
    location = locate(root, path)
    if why := why_no_file(path, root):
        return f": {why}"
    return "" if str(location) == path or os.path.isabs(path) else f": {location}"


def are_unchanged(failures: Sequence[Failure], files: Sequence[AudioSource]) -> list[bool]:
    """Of each failure, whether it is of a kind that stays, and its file is still the one
    that failed."""
    stay = [failure.reason not in _MAY_PASS for failure in failures]
    asked = [*{*compress(files, stay)}]
    now = dict(zip(asked, stats_of(asked), strict=True))
    was = [(failure.size, failure.mtime_ns) for failure in failures]
    return [
        stays and is_same(now[file], stamp)
        for stays, file, stamp in zip(stay, files, was, strict=True)
    ]


# Headers

_FILES_AT_ONCE = 256
"""Files that a thread looks at before it says so."""

NOT_SAID = "length_not_in_header"
"""The reason of a row at a URL whose header gives no length, as in some MP3 and M4A. Its
audio may be good."""


@dataclass(frozen=True, eq=False)
class FileHeaders:
    """What the headers of the files of a manifest's rows say."""

    durations: NDArray[np.float64]
    """Each row's seconds: the manifest's, else from its start to the end of its file,
    `[rows]`; else NaN."""
    headers: dict[int, Header]
    """The headers of the files of the rows that were looked at, and are good."""
    failures: dict[int, tuple[str, str]]
    """The rows of which nothing is known: the reason, of `featcache.errors.Reason` or
    `NOT_SAID`, and a message."""


def read_headers(
    manifest: Manifest, threads: int, report: Callable[[int], object], every: bool = False
) -> FileHeaders:
    """Read the headers of the files of rows without a duration; none of them is inside a
    container.

    A row with the duration that is found has the same samples as without. Of a file that
    is cut off, nothing is known. Where the header does not say how long the file is, it
    is decoded, unless it is at a URL: MP3 without a header frame, and what FFmpeg
    decodes, whose headers round.

    Args:
        threads: Files that are looked at side by side; at URLs, more are.
        report: Called with a number of rows that are done, from several threads.
        every: Whether to look at the files of all rows.
    """
    rows_of: dict[str, list[int]] = {}  # a file of many rows is opened once
    for row in np.flatnonzero(np.isnan(manifest.duration) | every).tolist():
        rows_of.setdefault(manifest.paths[row], []).append(row)
    durations, headers, failures = (
        manifest.duration.copy(),
        dict[int, Header](),
        dict[int, tuple[str, str]](),
    )

    def look(paths: Sequence[str]) -> None:
        for path in paths:
            for row, found in zip(
                rows_of[path], _look_at(manifest, path, rows_of[path]), strict=True
            ):
                if not isinstance(found, Header):
                    failures[row] = found
                    continue
                headers[row] = found
                if math.isnan(durations[row]):
                    first = nearest_sample(manifest[row].start or 0.0, found.sample_rate)
                    durations[row] = (found.num_samples - first) / found.sample_rate
        report(sum(len(rows_of[path]) for path in paths))

    paths = [*rows_of]
    are_at_urls = len(paths) > 0 and isinstance(manifest.resolve(paths[0]), Url)
    with ThreadPoolExecutor(
        max(threads, URLS_AT_ONCE) if are_at_urls else threads, "featcache-headers"
    ) as pool:
        list(
            pool.map(
                look,
                [paths[at : at + _FILES_AT_ONCE] for at in range(0, len(paths), _FILES_AT_ONCE)],
            )
        )
    return FileHeaders(durations, headers, dict(sorted(failures.items())))


def _look_at(
    manifest: Manifest, path: str, rows: Sequence[int]
) -> Sequence[Header | tuple[str, str]]:
    """What the header of a path's file says; or why nothing is known of each of its rows."""
    location = manifest.resolve(path)
    try:
        with closing(Recording(location, beginning_of)) as recording:
            header = recording.header
            if header.num_samples == UNKNOWN and not (
                header.shortfall or isinstance(location, Url)
            ):
                header = header._replace(num_samples=recording.count_samples())
    except AudioError as error:
        return [(error.reason.value, str(error))] * len(rows)
    if header.num_samples == UNKNOWN and not header.shortfall:
        what = (
            "its header does not say how long it is, and what is at a URL is not fetched "
            "whole for that"
        )
        return [(NOT_SAID, what)] * len(rows)
    spans = [span_of(recording, header.num_samples, Cut(manifest[row].start), None) for row in rows]
    return [
        (span.reason.value, str(span)) if isinstance(span, AudioError) else header for span in spans
    ]
