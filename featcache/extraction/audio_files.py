"""The audio files of a manifest as they are now, compared with those of an extraction."""

from __future__ import annotations

import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import chain, compress

import numpy as np
from numpy.typing import NDArray

from featcache.audio.content_hash import hash_of_content
from featcache.audio.decode import Cut, probe_seconds, span_of
from featcache.audio.formats import OLD_FFMPEG, UNKNOWN, Header
from featcache.audio.members import beginning_of, check_container, copy_of, stamp_now
from featcache.audio.recording import Recording
from featcache.audio.remote import FILES_AT_ONCE, URLS_AT_ONCE, each_at_once, require, stamp_of
from featcache.audio.tables import pyarrow
from featcache.errors import AudioError, ManifestError, Reason, counted
from featcache.manifest.audio_locations import (
    AudioLocation,
    AudioSource,
    Command,
    LocalFile,
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
from featcache.storage.base import in_parallel
from featcache.version.index import Index
from featcache.version.join import RowStatus, find_other_files, sources_of
from featcache.version.ledger import Failure
from featcache.version.version import Version

_PROBED = 256

_FETCHED = 32
"""The most files of a sample at URLs or inside containers."""


def locations_of(manifest: Manifest, rows: NDArray[np.int64]) -> list[AudioSource]:
    """Return where the audio of these rows is."""
    return [manifest.resolve(path) for path in manifest.paths.take(rows)]


def _sample(manifest: Manifest) -> list[AudioSource]:
    return locations_of(manifest, rows_at_even_steps(len(manifest), _PROBED))


def require_reading(manifest: Manifest) -> None:
    """Check with a sample of files that containers can be read and URLs fetched. Raises
    MissingDependencyError or ManifestError if not."""
    if need_pyarrow(manifest.paths):
        pyarrow()
    if manifest.has_urls:
        for url in filter(None, map(url_of, _sample(manifest))):
            require(url)


def row_seconds(
    manifest: Manifest, known: NDArray[np.float64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return each row's seconds, float64 `[rows]`: those `known`, or for NaN the mean of a
    sample of headers. `speed` is each row's, float64 `[rows]`."""
    seconds = known.copy()
    unknown = np.flatnonzero(np.isnan(seconds))
    if not len(unknown):
        return seconds
    probed = rows_of_first_copy(manifest, unknown[:_FETCHED])
    is_copied = len(probed) > 0
    if not is_copied:
        first = manifest.resolve(manifest.paths[unknown[0]])
        most = _FETCHED if isinstance(first, Member) else _PROBED
        probed = unknown[rows_at_even_steps(len(unknown), most)]
    locations = locations_of(manifest, probed)
    # This thread copies a container, as Ctrl-C can end it.
    ends = [*map(probe_seconds, locations)] if is_copied else each_at_once(probe_seconds, locations)
    lengths = np.array(ends, np.float64)  # NaN for None
    lengths = (lengths - np.nan_to_num(manifest.start[probed])) / speed[probed]
    usable = lengths > 0
    seconds[unknown] = lengths[usable].mean() if usable.any() else 1.0
    seconds[probed[usable]] = lengths[usable]
    return seconds


def rows_of_first_copy(manifest: Manifest, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows in the first row's container, if it must be copied: the run begins
    with it."""
    containers = [*map(_copied_container, locations_of(manifest, rows))]
    return rows.compress(
        [container is not None and container == containers[0] for container in containers]
    )


def _copied_container(location: AudioSource) -> LocalFile | Url | None:
    if not isinstance(location, Member):
        return None
    container = location.container
    return container if isinstance(container, Url) or is_compressed(container) else None


def with_changed_files(
    manifest: Manifest, status: RowStatus, index: Index, version: Version
) -> RowStatus:
    """Mark rows as missing if their file has changed, or is decoded to other samples
    now."""
    rows = np.flatnonzero(status.present)
    sources = sources_of(version, index, status.positions[rows]).tolist()

    def look(block: NDArray[np.int64]) -> list[Stamp]:
        return stats_of(locations_of(manifest, block))

    blocks = np.array_split(rows, 1 + len(rows) // 1024)
    with ThreadPoolExecutor(1 if manifest.has_urls else FILES_AT_ONCE) as pool:
        stamps = chain.from_iterable(pool.map(look, blocks))
        is_current = [
            # A file that is gone cannot be extracted again.
            stamp == (None, None) or (is_same(stamp, tuple(extracted)) and decoder != OLD_FFMPEG)
            for stamp, (*extracted, decoder) in zip(stamps, sources, strict=True)
        ]
    present = status.present.copy()
    present[rows] = is_current
    return replace(status, present=present)


def refuse_another_corpus(
    manifest: Manifest, status: RowStatus, index: Index, version: Version
) -> None:
    """Raise ManifestError if the version was extracted from other files at these ids and
    paths."""
    other, seen = find_other_files(
        manifest, status, version, index, lambda urls: [size for size, _ in stats_of(urls)]
    )
    if len(other):
        example = manifest.resolve(manifest[int(other[0])].path)
        raise ManifestError(
            f"{manifest.source}: {len(other):,} of {counted(seen, 'file')} checked are not what "
            f"{version.path} was extracted from, for example {example}: use another cache (-o) "
            "for another corpus, --check-sources for changed audio"
        )


def copying_notes(manifest: Manifest) -> list[str]:
    """Note that containers are fetched or unpacked."""
    where, begins = f"{tempfile.gettempdir()} (TMPDIR)", f"{manifest.source}: audio in"
    notes = []
    containers = [*map(_copied_container, _sample(manifest))]
    if any(isinstance(container, Url) for container in containers):
        notes.append(
            f"{begins} containers at URLs: each is fetched whole to {where} when it is needed"
        )
    if any(container is not None and is_compressed(container) for container in containers):
        notes.append(
            f"{begins} compressed tars: each is unpacked in {where} when it is needed; a "
            "plain .tar is faster"
        )
    return notes


def same_span_notes(manifest: Manifest, hashes: NDArray[np.uint64] | None) -> list[str]:
    """Note that rows read the same span of a file under different ids. `hashes` are the
    segments', if known."""
    rows = manifest.read_again(hashes)
    if not len(rows):
        return []
    manifest = manifest.complete()
    first, second = (manifest[row] for row in rows[:2].tolist())
    return [
        f"{manifest.source}: {len(rows):,} of {len(manifest):,} rows read what another row reads: "
        f"{first.id} and {second.id} the same of {first.path}"
    ]


def missing_file_notes(
    manifest: Manifest, rows: NDArray[np.bool_], whole: Manifest | None = None
) -> list[str]:
    """Note that none of a sample of the files to be extracted exists, if there are several.
    Raises ManifestError if no other file of the manifest exists either: the root is
    probably wrong. `rows` marks the rows to be extracted; if they are a partition, `whole`
    is all of the manifest."""
    paths = paths_of_some(manifest, rows)
    fault = _fault_of_all(manifest, paths) if len(paths) > 1 else ""
    if not fault:
        return []
    note = f"none of {len(paths):,} files checked {fault}"
    if not (url_of(manifest.resolve(paths[0])) or os.path.isabs(paths[0])):
        note += "; relative paths begin at the manifest's folder, or at --root FOLDER"
    others = paths_of_some(manifest, ~rows) if whole is None else paths_of_some(whole.complete())
    if not others or _fault_of_all(manifest, others):
        raise ManifestError(f"{manifest.source}: {note}")
    return [note]


def paths_there(root: AudioLocation, paths: Iterable[str]) -> list[str]:
    """List the paths whose file exists on this machine, or may exist."""
    return [path for path in paths if not _fault(locate(root, path))]


def can_be_read(root: AudioLocation, path: str) -> bool:
    """Tell whether all bytes of a file can be read on this machine; False for URLs and
    commands."""
    location = locate(root, path)
    with suppress(AudioError, OSError, ValueError):  # ValueError: the path has a zero byte
        if isinstance(location, Member) and not isinstance(location.container, Url):
            copy_of(location)
            return True
        if isinstance(location, LocalFile):
            with open(location, "rb", buffering=0) as file:
                hash_of_content(file.fileno())
                return True
    return False


def paths_of_some(manifest: Manifest, rows: NDArray[np.bool_] | None = None) -> list[str]:
    """List the different paths of a sample of the rows, in order."""
    numbers = np.arange(len(manifest)) if rows is None else np.flatnonzero(rows)
    most = _FETCHED if manifest.has_urls else _PROBED
    sample = numbers[rows_at_even_steps(len(numbers), most)]
    return list(dict.fromkeys(manifest.paths[row] for row in sample.tolist()))


def _fault_of_all(manifest: Manifest, paths: list[str]) -> str:
    """Describe why no file of these can be read; an empty string if one may exist."""
    first, *others = map(manifest.resolve, paths)
    fault = _fault(first)
    if not fault or not all(each_at_once(_fault, others)):
        return ""
    example = f"for example {paths[0]}{where_missing(paths[0], manifest.root)}"
    return f"exists, {example}" if fault == _MISSING else f"can be had, {example}: {fault}"


_MISSING = "there is no such file"


def _fault(location: AudioSource) -> str:
    """Describe why a file cannot be had; an empty string if it may exist."""
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
"""A file's size in bytes and its mtime in ns, see `FileStamp`; two Nones without a file.
The size in a container at a URL is None."""

_MAY_PASS = frozenset({Reason.FILE_UNREADABLE, Reason.NOT_IN_SOURCE, Reason.OUT_OF_MEMORY})
"""Reasons that may not hold on another machine, or with another source version."""


def failure_of(utterance: Utterance, root: AudioLocation, error: AudioError) -> Failure:
    """Return the ledger's record of an utterance that failed."""
    location = locate(root, utterance.path)
    message = str(error)
    if error.reason == Reason.FILE_MISSING:
        message += where_missing(utterance.path, root)
    size, mtime_ns = None, None
    cannot_be_had = error.reason in (Reason.FILE_MISSING, Reason.FILE_UNREADABLE)
    if not (cannot_be_had and isinstance(location, Url)):
        size, mtime_ns = stat_of(location)
    return Failure(
        **utterance.row(), reason=error.reason.value, message=message, size=size, mtime_ns=mtime_ns
    )


def stat_of(location: AudioSource) -> Stamp:
    """Return a file's size and mtime now; two Nones also if a server does not tell."""
    try:
        if isinstance(location, Url | Member):
            return stamp_now(location)
        stat = os.stat(location)
    except (AudioError, OSError, ValueError):  # ValueError: the path has a zero byte
        return None, None
    return stat.st_size, stat.st_mtime_ns


def stats_of(locations: Sequence[AudioSource]) -> list[Stamp]:
    """Return `stat_of` of each file; servers are asked about many at a time."""
    if any(map(url_of, locations)):
        return each_at_once(stat_of, locations)
    return [*map(stat_of, locations)]


def is_same(now: Stamp, was: Stamp) -> bool:
    """Tell whether a file is unchanged, by its mtime, and its size if that is known now."""
    size, mtime_ns = now
    return now == was or (size is None and mtime_ns is not None and mtime_ns == was[1])


def where_missing(path: str, root: AudioLocation) -> str:
    """Return the end of a message about a missing file: where it was sought, or why it is
    no path."""
    why = why_no_file(path, root)
    if why:
        return f": {why}"
    location = str(locate(root, path))
    return "" if location == path or os.path.isabs(path) else f": {location}"


def are_unchanged(failures: Sequence[Failure], files: Sequence[AudioSource]) -> list[bool]:
    """Tell of each failure whether it would stay, and its file is unchanged."""
    stay = [failure.reason not in _MAY_PASS for failure in failures]
    distinct = [*{*compress(files, stay)}]
    now = dict(zip(distinct, stats_of(distinct), strict=True))
    return [
        stays and is_same(now[file], (failure.size, failure.mtime_ns))
        for failure, file, stays in zip(failures, files, stay, strict=True)
    ]


# Headers

_FILES_AT_ONCE = 256

NOT_SAID = "length_not_in_header"
"""The reason of a row at a URL whose header gives no length. Its audio may be good."""


@dataclass(frozen=True, eq=False)
class FileHeaders:
    """The headers of the files of a manifest's rows."""

    durations: NDArray[np.float64]
    """Each row's seconds, or NaN, `[rows]`: the manifest's, else from its start to the
    file's end."""
    headers: dict[int, Header]
    """The good headers, by row."""
    failures: dict[int, tuple[str, str]]
    """The reason (of `Reason`, or `NOT_SAID`) and a message for each other row."""


def read_headers(
    manifest: Manifest, threads: int, report: Callable[[int], object], every: bool = False
) -> FileHeaders:
    """Read the headers of the files of rows without a duration, none of which is in a
    container.

    A row with the duration that is read has the same samples as without. A truncated file
    fails. If a header has no exact length, the file is decoded, unless it is at a URL.

    Args:
        threads: Files that are read at once; at URLs, more are.
        report: Called with a number of rows that are done, from several threads.
        every: True to read the files of all rows.
    """
    rows_of = defaultdict[str, list[int]](list)  # a file of many rows is opened once
    for row in np.flatnonzero(np.isnan(manifest.duration) | every).tolist():
        rows_of[manifest.paths[row]].append(row)
    durations = manifest.duration.copy()
    headers: dict[int, Header] = {}
    failures: dict[int, tuple[str, str]] = {}

    def look(paths: Sequence[str]) -> None:
        for path in paths:
            rows = rows_of[path]
            for row, result in zip(rows, _look_at(manifest, path, rows), strict=True):
                if not isinstance(result, Header):
                    failures[row] = result
                    continue
                headers[row] = result
                if math.isnan(durations[row]):
                    first = nearest_sample(manifest[row].start or 0.0, result.sample_rate)
                    durations[row] = (result.num_samples - first) / result.sample_rate
        report(sum(len(rows_of[path]) for path in paths))

    paths = [*rows_of]
    if paths and isinstance(manifest.resolve(paths[0]), Url):
        threads = max(threads, URLS_AT_ONCE)
    starts = range(0, len(paths), _FILES_AT_ONCE)
    in_parallel(look, [paths[start : start + _FILES_AT_ONCE] for start in starts], threads)
    return FileHeaders(durations, headers, dict(sorted(failures.items())))


def _look_at(
    manifest: Manifest, path: str, rows: Sequence[int]
) -> Sequence[Header | tuple[str, str]]:
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
        message = "its header does not say how long it is, and a URL is not fetched whole for that"
        return [(NOT_SAID, message)] * len(rows)
    spans = [span_of(recording, header.num_samples, Cut(manifest[row].start), None) for row in rows]
    return [
        (span.reason.value, str(span)) if isinstance(span, AudioError) else header for span in spans
    ]
