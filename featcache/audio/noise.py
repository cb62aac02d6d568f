"""Noise added to a waveform at a signal-to-noise ratio: the manifest of noises, the choice
of a cut (see docs/configs.md), the sum.

Decoded noise stays in memory, as far as it has room, at the file's own rate: a cut from
resampled noise has other values than a resampled cut."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from featcache.audio.blocks import Joined, Samples
from featcache.audio.content_hash import state_of
from featcache.audio.formats import UNKNOWN
from featcache.audio.kept import Kept
from featcache.audio.resample import AudioPolicy, Channel, to_mono, to_waveform
from featcache.errors import AudioError, ConfigError, ManifestError, Reason, listing, refuse_url
from featcache.manifest.audio_locations import LocalFile
from featcache.manifest.read import read_manifest
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest
from featcache.sections import Section
from featcache.storage.base import in_parallel

# Functions import the decoders: reading a config needs this file, and most have no noise.

_THREADS = 8
_KEPT_BYTES = 3 << 29  # 7 hours at 16 kHz. MUSAN's noise is 6 hours
_MOST_FILES = 1 << 20

_DECODED: Kept[Samples] = Kept(_KEPT_BYTES, lambda samples: samples.nbytes)
"""Whole noises, mono, by the content of their manifest."""

_FILE_HASHES: Kept[str] = Kept(_MOST_FILES)


def distinct(values: tuple[float, ...]) -> tuple[float, ...]:
    """Check numbers that become suffixes of ids, and sort them: their order in a config
    does not matter."""
    long = [value for value in values if float(f"{value:g}") != value]
    faults = [f"{value!r} has more than six digits" for value in long]
    for value, count in sorted(Counter(values).items()):
        if count > 1:
            faults.append(f"{value:g} is there {count} times")
    if not values:
        faults.append("expected one number at least")
    if faults:
        raise ValueError(listing(faults))
    return tuple(sorted(value + 0.0 for value in values))


class NoisePolicy(Section):
    """`noise` in the `augment` section: which noise is added."""

    manifest: str
    """A manifest of noise files, in the same format as any manifest. A relative path is
    relative to the config file. The fingerprint includes the content of the noise, not
    its location."""
    snr: Annotated[
        tuple[Annotated[float, Field(ge=-50.0, le=100.0)], ...], AfterValidator(distinct)
    ]
    """Signal-to-noise ratios in dB, over the whole clip. Each ratio makes one copy."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """The seed and the copy's id decide which noise a copy gets, and at which sample of the
    noise the cut begins."""
    content: str | None = Field(default=None, validate_default=True)
    """A hash of the noise. Leave it out: featcache fills it in. If you give it, any other
    noise is refused."""

    @field_validator("manifest")
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        refuse_url("the file", value)
        path = Path((info.context or {}).get("folder") or "", os.path.expanduser(value)).absolute()
        read_noise(path)
        return str(path)

    @field_validator("content")
    @classmethod
    def _holds(cls, value: str | None, info: ValidationInfo) -> str | None:
        manifest = info.data.get("manifest")
        if manifest is None:  # it has its own fault, which pydantic reports
            return value
        content = noise_content(read_noise(manifest))
        if value not in (None, content):
            what = f"it is {content[:12]} now, and was {value[:12]}"
            raise ValueError(f"{manifest}: the noise has changed: {what}")
        return content


@dataclass(frozen=True, slots=True)
class NoiseClip:
    """One row of a noise manifest. Samples are counted at the file's rate."""

    path: str
    first: int
    num_samples: int
    sample_rate: int
    channel: int | None  # from 0; None for the config's


class Noise:
    """The noise of a config, made into waveforms by `audio`, as utterances are, in several
    threads. Raises ConfigError if it has changed since the config was read."""

    def __init__(self, policy: NoisePolicy, audio: AudioPolicy) -> None:
        self._audio = audio
        self._seed = policy.seed
        try:
            self._clips = read_noise(policy.manifest)
            self._content = noise_content(self._clips)
            if self._content != policy.content:
                raise ValueError(f"{policy.manifest}: has changed since the config was read")
        except ValueError as error:
            raise ConfigError(f"augment.noise.manifest: {error}") from error
        itemsize = np.dtype(np.float32).itemsize
        totals = accumulate(clip.num_samples * itemsize for clip in self._clips)
        pairs = zip(self._clips, totals, strict=True)
        self._kept = {clip for clip, num_bytes in pairs if num_bytes <= _KEPT_BYTES}

    def add_to(self, waveform: Samples, id_: str, snr: float) -> Samples:
        """Add noise to a copy, float32 `[num_samples]` at the config's rate, scaled so that
        the ratio of the mean powers of both is `snr` dB, without clipping. With a silent
        clip or cut of noise, returns the clip itself. Raises ConfigError if the noise
        cannot be decoded."""
        noise = self.cut(len(waveform), id_)
        speech_power, noise_power = _power(waveform), _power(noise)
        if not speech_power or not noise_power:
            return waveform
        gain = math.sqrt(speech_power / noise_power) * 10 ** (-snr / 20)
        return (waveform.astype(np.float64) + gain * noise).astype(np.float32)

    def cut(self, num_samples: int, id_: str) -> Samples:
        """Return the noise of a copy before it is scaled, float32 `[num_samples]` at the
        config's rate, which may be shared. If a noise is long enough, the cut lies anywhere
        within it; a shorter noise begins anywhere, and is repeated."""
        digest = hashlib.sha256(f"{self._seed} {id_}".encode()).digest()
        draw, place = struct.unpack_from("<2Q", digest)
        clip = self._clips[draw % len(self._clips)]
        needed = -(-num_samples * clip.sample_rate // self._audio.sample_rate)
        if needed <= clip.num_samples:
            first = place % (clip.num_samples - needed + 1)
            return self._waveform(clip, first, first + needed)[:num_samples]
        whole = self._waveform(clip, 0, clip.num_samples)
        if not len(whole):
            return np.zeros(num_samples, np.float32)
        return np.resize(np.roll(whole, -(place % len(whole))), num_samples)

    def _waveform(self, clip: NoiseClip, first: int, stop: int) -> Samples:
        try:
            mono = self._mono(clip, first, stop)
            return to_waveform(mono[:, None], clip.sample_rate, self._audio, 0)
        except AudioError as error:
            what = f"augment.noise.manifest: {clip.path}: {error}"
            raise ConfigError(f"{what}: repair it, or leave it out") from error

    def _mono(self, clip: NoiseClip, first: int, stop: int) -> Samples:
        channel = self._audio.channel if clip.channel is None else clip.channel
        if clip in self._kept:
            key = self._content, clip, channel
            with suppress(AudioError):  # of another part of it: the cut may still be good
                whole = _DECODED.get(key, lambda: _decoded(clip, channel, 0, clip.num_samples))
                return whole[first:stop]
        return _decoded(clip, channel, first, stop)


def read_noise(manifest: str | Path) -> list[NoiseClip]:
    """List a manifest's noises by their files' headers. Raises a ValueError of one line
    with all faults."""
    # a config may be a stranger's: a pipe would wait, and a device never end
    if not Path(manifest).is_file():
        raise ValueError(f"{manifest}: cannot be read: not a file")
    try:
        read = read_manifest(manifest, carry=False).clips()
    except ManifestError as error:
        raise ValueError(" ".join(str(error).split())) from error
    clips = in_parallel(lambda row: _noise_clip(read, read[row]), range(len(read)), _THREADS)
    faults = [clip for clip in clips if isinstance(clip, str)]
    if faults:
        raise ValueError(f"{read.source}: {listing(faults)}")
    return [clip for clip in clips if isinstance(clip, NoiseClip)]


def noise_content(clips: Sequence[NoiseClip]) -> str:
    """Hash the files and the samples of noise, in their order, for the fingerprint;
    SHA-256, in hex. Raises ValueError if a file cannot be read."""
    paths = list(dict.fromkeys(clip.path for clip in clips))
    try:
        hashes = dict(zip(paths, in_parallel(_file_hash, paths, _THREADS), strict=True))
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from error
    lines = [[hashes[clip.path], clip.first, clip.num_samples, clip.channel] for clip in clips]
    return hashlib.sha256("\n".join(map(json.dumps, lines)).encode()).hexdigest()


def _noise_clip(manifest: Manifest, row: Utterance) -> NoiseClip | str:
    """Find the noise of a row, or say what is wrong with it."""
    from featcache.audio.decode import Cut, span_of
    from featcache.audio.recording import Recording

    path = manifest.resolve(row.path)
    if not isinstance(path, LocalFile):
        what = "is at a URL or in a container: copy the noise to this machine, as a file"
        return f"{row.id}: {row.path}: {what}"
    try:
        with closing(Recording(path)) as recording:
            header = recording.header
            if header.num_samples == UNKNOWN:
                what = "its header does not say how long it is: make it WAV or FLAC"
                raise AudioError(Reason.NOT_AUDIO, what)
            if row.channel is not None and row.channel >= header.num_channels:
                raise AudioError(Reason.NO_SUCH_CHANNEL, f"there is no channel {row.channel}")
            span = span_of(recording, header.num_samples, Cut(row.start, row.duration), None)
            if isinstance(span, AudioError):
                raise span
            first, stop = span
            return NoiseClip(path, first, stop - first, header.sample_rate, row.channel)
    except AudioError as error:
        return f"{row.id}: {row.path}: {error}"


def _file_hash(path: str) -> str:
    with open(path, "rb") as file:
        state = state_of(os.fstat(file.fileno()))
        return _FILE_HASHES.get(state, lambda: hashlib.file_digest(file, "sha256").hexdigest())


def _decoded(clip: NoiseClip, channel: Channel, first: int, stop: int) -> Samples:
    from featcache.audio.decode import Cut, decode

    class Mono(Joined):
        def add(self, block: Samples) -> None:
            super().add(to_mono(block, channel))

    rate = clip.sample_rate
    cut = Cut((clip.first + first) / rate, (stop - first) / rate)
    (result,) = decode(clip.path, [cut], collect=lambda _, __, expected: Mono(expected))
    if isinstance(result, AudioError):
        raise result
    samples: Samples = result[0]
    return samples


def _power(waveform: Samples) -> float:
    """Return the mean square, in float64, summed in one order for any number of threads."""
    if not len(waveform):
        return 0.0
    return float(np.square(waveform, dtype=np.float64).mean())
