"""The `augment` section of a config: at which speeds, and with what noise, further copies of utterances are made.

Noise is named by a manifest of its own. What of it decides values is in the fingerprint: which samples of which files,
in the manifest's order, by the hash of the files' bytes; not its path, nor its ids, nor where the files are. Files are
read whole for that, once in a process as long as they do not change: MUSAN's noise, 0.7 GB, takes about a second.
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
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from featcache.errors import AudioError, ManifestError, Reason, listing
from featcache.manifest import Manifest, Utterance, read_manifest

SLOWEST, FASTEST = 0.5, 2.0
QUIETEST, LOUDEST = -50.0, 100.0  # dB

_END_TOLERANCE_SECONDS = 0.1  # as of utterances: manifests round
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


class NoisePolicy(BaseModel):
    """What noise is added; `noise` in the `augment` section."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    manifest: str
    """A manifest of noises, like any other: id, path, and where wanted start, duration, channel. A relative path is
    relative to the config file. In the fingerprint is what it holds, not where it is."""
    snr: tuple[float, ...]
    """dB by which the speech is stronger than the noise, over the whole clip: a copy for each."""
    seed: int = Field(default=0, ge=0)
    """Which noise an utterance gets, and where in it that begins, follows from this and the copy's id."""
    content: str | None = Field(default=None, validate_default=True)
    """A hash of the noise, which versions keep: to be left out. Where it is given, other noise is refused."""

    @field_validator("snr")
    @classmethod
    def _fit(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        return _distinct(values, QUIETEST, LOUDEST, "dB")

    @field_validator("manifest")
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        path = Path((info.context or {}).get("folder") or "", os.path.expanduser(value)).absolute()
        read_noise(path)
        return str(path)

    @field_validator("content")
    @classmethod
    def _holds(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "manifest" not in info.data:  # it has faults of its own
            return value
        manifest = info.data["manifest"]
        found = noise_content(read_noise(manifest))
        if value not in (None, found):
            raise ValueError(
                f"{manifest} does not hold the noise that it did: it is {found[:12]}, and was {value[:12]}"
            )
        return found


class AugmentPolicy(BaseModel):
    """Which further copies of every utterance are made; the `augment` section."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    speed: tuple[float, ...] = (1.0,)
    """How many times as fast: 1.1 is shorter and higher. Without 1 among them, the utterance itself is not extracted.
    """
    noise: NoisePolicy | None = None
    """Noise that is added: see below."""

    @field_validator("speed")
    @classmethod
    def _fit(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        return _distinct(values, SLOWEST, FASTEST, "times")

    @model_validator(mode="after")
    def _makes_copies(self) -> Self:
        if self.speed == (1.0,) and self.noise is None:
            raise ValueError("makes no copies: leave it out, or give another speed, or noise")
        return self


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
    from featcache.recording import UNKNOWN, Recording  # brings decoders, which most configs do not need

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
            if stop > held + round(_END_TOLERANCE_SECONDS * rate) or min(stop, held) <= first:
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


def _distinct(values: tuple[float, ...], lowest: float, highest: float, unit: str) -> tuple[float, ...]:
    """Numbers for suffixes of ids, sorted: in which order a config gives them decides nothing."""
    faults: list[Any] = []
    if not values:
        faults.append("expected one number at least")
    faults += [
        f"{value:g} is outside {lowest:g} to {highest:g} {unit}" for value in values if not lowest <= value <= highest
    ]
    faults += [f"{value!r} has more than six digits" for value in values if float(f"{value:g}") != value]
    faults += [
        f"{value:g} is there {values.count(value)} times" for value in sorted({*values}) if values.count(value) > 1
    ]
    if faults:
        raise ValueError(listing(faults))
    return tuple(sorted(value + 0.0 for value in values))
