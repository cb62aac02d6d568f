"""Utterances that fail: the ledger's record of one, and whether one that has would fail again."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping

from featcache.audio.decode import probe_rate, probe_seconds
from featcache.audio.members import stamp_now
from featcache.audio.remote import each_at_once
from featcache.audio.waveform import AudioPolicy
from featcache.errors import AudioError, Reason
from featcache.manifest import CallersUrls, Manifest, Utterance
from featcache.manifest.audio_locations import AudioLocation, AudioSource, Member, Url, locate, url_of, why_no_file
from featcache.version.ledger import Failure

Stamp = tuple[int | None, int | None]
"""A file's size in bytes and its mtime in ns, see `FileStamp`; two Nones if there is no such file. Of what is inside a
container at a URL, the size is None."""

_MAY_PASS = frozenset({Reason.FILE_UNREADABLE, Reason.NOT_IN_SOURCE, Reason.OUT_OF_MEMORY})
"""Reasons that may no longer hold on another disk or machine, or with another source version."""


def failure_of(utterance: Utterance, root: AudioLocation, error: AudioError) -> Failure:
    """The ledger's record of an utterance that failed."""
    location = locate(root, utterance.path)
    is_not_had = error.reason in (Reason.FILE_MISSING, Reason.FILE_UNREADABLE)
    size, mtime_ns = (None, None) if isinstance(location, Url) and is_not_had else stat_of(location)
    where = where_missing(utterance.path, root) if error.reason == Reason.FILE_MISSING else ""
    return Failure(
        **utterance.row(), reason=error.reason.value, message=f"{error}{where}", size=size, mtime_ns=mtime_ns
    )


def stat_of(location: AudioSource) -> Stamp:
    """A file's size and mtime as they are now; of a file at a URL, two Nones if the server does not tell, too.

    What is inside a container has its own size and the container's mtime; see `stamp_now`."""
    try:
        if isinstance(location, Url | Member):
            return stamp_now(location)
        stat = os.stat(location)
    except (AudioError, OSError, ValueError):  # ValueError: the path has a zero byte
        return None, None
    return stat.st_size, stat.st_mtime_ns


def is_same(now: Stamp, was: Stamp) -> bool:
    """Whether a file is what it was: by its size, if it is known now, and its mtime."""
    size, mtime_ns = now
    return now == was or (size is None and mtime_ns is not None and mtime_ns == was[1])


def where_missing(path: str, root: AudioLocation) -> str:
    """The end of a message about a path without a file: where it was looked for, or why it cannot be a file."""
    location = locate(root, path)
    if why := why_no_file(path):
        return f": {why}"
    return "" if str(location) == path or os.path.isabs(path) else f": {location}"


def stats_of_failed(manifest: Manifest, failures: Iterable[Failure]) -> dict[AudioSource, Stamp]:
    """What `stat_of` says of files at URLs that failed. Only the manifest's own are asked for: see `CallersUrls`."""
    if not manifest.has_urls:
        return {}
    own = CallersUrls(manifest)
    locations = {manifest.resolve(failure.path) for failure in failures if failure.reason not in _MAY_PASS}
    urls = [location for location in locations if (url := url_of(location)) and url in own]
    return dict(zip(urls, each_at_once(stat_of, urls), strict=True))


def would_fail_again(
    root: AudioLocation,
    failure: Failure,
    audio: AudioPolicy,
    max_seconds: float | None,
    known: Mapping[AudioSource, Stamp],
) -> bool:
    """Whether an utterance that failed would fail again: its file is the same, and is refused again if it was refused.

    `root` is what paths are relative to; `audio` and `max_seconds`, the longest recording that is allowed, are what the
    config says now; `known` is what `stats_of_failed` gave."""
    if failure.reason in _MAY_PASS:
        return False
    path = locate(root, failure.path)
    if url_of(path) and path not in known:
        return False
    found = known[path] if url_of(path) else stat_of(path)
    if not is_same(found, (failure.size, failure.mtime_ns)):
        return False
    if failure.reason == Reason.RATE_REFUSED and audio.resample != "forbid":
        rate = probe_rate(path)
        return rate is not None and rate < audio.min_source_rate
    if failure.reason != Reason.TOO_LONG:
        return True
    seconds = math.inf if failure.duration else probe_seconds(path)  # the file is at least as long as the duration
    if max_seconds is None or seconds is None:
        return False
    return min(failure.duration or math.inf, seconds - (failure.start or 0.0)) > max_seconds
