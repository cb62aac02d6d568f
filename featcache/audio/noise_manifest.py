"""The noises that a manifest of noise names, and a hash of what they hold.

A config's fingerprint includes what decides values: which samples of which files, in the manifest's order, by the hash
of the files' bytes; not the manifest's path or ids, nor where the files are. For this, files are read whole, once per
process while they do not change: MUSAN's noise, 0.7 GB, takes about a second.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from featcache.errors import AudioError, ManifestError, Reason, listing
from featcache.manifest import Manifest, Utterance, read_manifest

_THREADS = 8

_hashes: dict[tuple[object, ...], str] = {}
"""Of files as they are, by path, size, time and inode."""


@dataclass(frozen=True, slots=True)
class NoiseClip:
    """One row of a noise manifest.

    Attributes:
        path: of the file.
        first: the first sample, at the file's rate.
        num_samples: at the file's rate.
        sample_rate: of the file, in Hz.
        channel: of the file, from 0; None for the config's.
    """

    path: Path
    first: int
    num_samples: int
    sample_rate: int
    channel: int | None


def read_noise(manifest: str | Path) -> list[NoiseClip]:
    """The noises of a manifest, in its order, by their files' headers.

    Raises:
        ValueError: the manifest or some of its rows cannot be used; says which, all of them in one line.
    """
    try:
        read = read_manifest(manifest, carry=False)
    except ManifestError as error:
        raise ValueError(" ".join(str(error).split())) from error
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda row: _noise_clip(read, read[row]), range(len(read))))
    clips = [one for one in found if isinstance(one, NoiseClip)]
    if faults := [one for one in found if isinstance(one, str)]:
        raise ValueError(f"{read.source}: {listing(faults)}")
    return clips


def noise_content(clips: Sequence[NoiseClip]) -> str:
    """SHA-256, in hex, of what decides the values of noise: which samples of which bytes, in this order.

    Raises:
        ValueError: a file cannot be read.
    """
    paths = list(dict.fromkeys(clip.path for clip in clips))
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            hashes = dict(zip(paths, pool.map(_file_hash, paths), strict=True))
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from error
    lines = [[hashes[clip.path], clip.first, clip.num_samples, clip.channel] for clip in clips]
    return hashlib.sha256("\n".join(map(json.dumps, lines)).encode()).hexdigest()


def _noise_clip(manifest: Manifest, row: Utterance) -> NoiseClip | str:
    """A row's noise, or what is wrong with it."""
    # It brings decoders, which most configs do not need.
    from featcache.audio.recording import END_TOLERANCE_SECONDS, UNKNOWN, Recording

    path = manifest.resolve(row.path)
    try:
        with closing(Recording(path)) as recording:
            if recording.shortfall:
                raise AudioError(Reason.TRUNCATED, recording.shortfall)
            if recording.num_samples == UNKNOWN:
                raise AudioError(Reason.NOT_AUDIO, "its header does not say how long it is: make it WAV or FLAC")
            if row.channel is not None and row.channel >= recording.num_channels:
                raise AudioError(Reason.NO_SUCH_CHANNEL, f"there is no channel {row.channel}")
            rate, held = recording.sample_rate, recording.num_samples
            first = round((row.start or 0.0) * rate)
            stop = held if row.duration is None else first + round(row.duration * rate)
            if stop > held + round(END_TOLERANCE_SECONDS * rate) or min(stop, held) <= first:
                raise AudioError(Reason.SEGMENT_OUTSIDE, f"no such segment: the file holds {held / rate:.3f} s")
            return NoiseClip(path, first, min(stop, held) - first, rate, row.channel)
    except AudioError as error:
        return f"{row.id}: {row.path}: {error}"


def _file_hash(path: Path) -> str:
    stat = os.stat(path)
    key = str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino
    if key not in _hashes:
        with path.open("rb") as file:
            _hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _hashes[key]
