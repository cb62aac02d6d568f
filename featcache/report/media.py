"""Pictures of features and short sounds, small enough to stand in a page."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import FeatcacheError, MissingDependencyError, first_line
from featcache.loader.cache import Cache
from featcache.manifest.audio_locations import Command, url_of
from featcache.manifest.copies import copies_of
from featcache.manifest.utterances import Manifest
from featcache.report.numbers import Report, Shown
from featcache.spec import FeatureSpec
from featcache.version.version import Version

SECONDS = 6.0
"""The longest part of an utterance that is shown and played."""

RATE = 16000
"""The sample rate of sounds in Hz."""

_SHORT_SECONDS = 3.0
"""The longest part that is played if not all sounds have room."""

_SOUND_BYTES = 1_250_000
"""The bytes of all sounds as base64. With pictures, at most 2 MB of page result."""

_PICTURE_BYTES = 450_000
"""The bytes of all pictures as base64."""

_MOST_COLUMNS = 240
_MOST_ROWS = 80
_PICTURED_VERSIONS = 2
_SHADES = 64
_COLOURS = (
    (8, 6, 30),
    (72, 18, 106),
    (150, 42, 112),
    (222, 90, 82),
    (250, 164, 96),
    (252, 244, 200),
)
"""The palette of pictures, from low to high values; other shades lie between these."""


@dataclass(frozen=True)
class Picture:
    """Features of an utterance as a PNG."""

    version: str
    """The name of the version's config."""
    png: bytes
    what: str
    """A description for people who cannot see it."""


@dataclass(frozen=True)
class Clip:
    """An utterance with its pictures, and maybe its sound."""

    shown: Shown
    pictures: list[Picture]
    wav: bytes | None
    note: str
    """The reason why there is no sound; empty if there is."""


def encode_png(levels: NDArray[np.uint8]) -> bytes:
    """Encode an image of the palette's shades, uint8 `[rows, columns]`."""
    rows, columns = levels.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), levels], axis=1)
    anchors = np.linspace(0, 1, len(_COLOURS))
    shades = np.linspace(0, 1, _SHADES)
    channels = [np.interp(shades, anchors, channel) for channel in zip(*_COLOURS, strict=True)]
    palette = np.stack(channels, axis=1).round().astype(np.uint8).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = {b"IHDR": header, b"PLTE": palette, b"IDAT": zlib.compress(lines.tobytes(), 9)}
    encoded = b"\x89PNG\r\n\x1a\n"
    for name, data in {**chunks, b"IEND": b""}.items():
        checksum = zlib.crc32(name + data)
        encoded += struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)
    return encoded


def encode_wav(samples: NDArray[np.floating[Any]]) -> bytes:
    """Encode samples of one channel at `RATE`, 16 bits each."""
    levels = np.rint(samples.clip(-1, 32767 / 32768) * 32768).astype("<i2")
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, RATE, len(levels), "NONE", ""))
        file.writeframes(levels.tobytes())
    return data.getvalue()


def draw(features: NDArray[Any], spec: FeatureSpec) -> NDArray[np.uint8]:
    """Draw features `[frames, *item_shape]` as shades, time to the right, the first dimension
    below; codes with their first codebook above."""
    values = features.reshape(len(features), -1)
    if spec.codebook_sizes:
        step = -(-len(values) // _MOST_COLUMNS)
        sizes = np.array(spec.codebook_sizes).reshape(-1)[: values.shape[1]]
        shades = (values[::step, :_MOST_ROWS] * np.int64(_SHADES) // sizes[:_MOST_ROWS]).T
    else:
        finite = np.nan_to_num(values.astype(np.float32), posinf=0, neginf=0)
        pooled = _pool(_pool(finite, _MOST_COLUMNS).T, _MOST_ROWS)[::-1]
        low, high = np.percentile(pooled, (2, 99.5))
        shades = (pooled - low) / max(high - low, 1e-9) * (_SHADES - 1)
    drawn: NDArray[np.uint8] = shades.clip(0, _SHADES - 1).astype(np.uint8)
    return drawn


def _pool(values: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """Average adjacent rows, so that at most so many are left."""
    if len(values) <= most:
        return values
    starts = np.arange(most) * len(values) // most
    counts = np.diff(starts, append=len(values))
    pooled = np.add.reduceat(values, starts, axis=0) / counts[:, None]
    return pooled.astype(np.float32)


def make_clips(
    report: Report, versions: Sequence[Version], manifest: Manifest | None = None
) -> list[Clip]:
    """Draw the utterances that a report shows, and read their sound from the manifest's
    files on this machine."""
    caches = [Cache(version) for version in _pictured(versions)]
    pictures = [_pictures(caches, shown) for shown in report.shown]
    sounds: list[bytes | str] = ["give --manifest to hear it"] * len(pictures)
    if manifest is not None:
        (largest,) = (one for one in versions if str(one.path) == report.largest)
        sounds = _sounds(report.shown, manifest, largest)
    clips, room = [], _PICTURE_BYTES
    for shown, drawn, sound in zip(report.shown, pictures, sounds, strict=True):
        room -= sum(_in_base64(len(picture.png)) for picture in drawn)
        wav, note = None, ""
        if isinstance(sound, str):
            note = sound
        else:
            wav = sound
        clips.append(Clip(shown, drawn if room >= 0 else [], wav, note))
    return clips


def _in_base64(num_bytes: int) -> int:
    return -(-num_bytes // 3) * 4


def _pictured(versions: Sequence[Version]) -> list[Version]:
    """Choose the versions to draw: the first of floats and the first of codes, if possible."""
    in_time = [version for version in versions if version.info.spec.kind == "frames"]
    kinds = {bool(version.info.spec.codebook_sizes): version for version in reversed(in_time)}
    chosen = [version for version in in_time if version in kinds.values()]
    return chosen[:_PICTURED_VERSIONS]


def _pictures(caches: Sequence[Cache], shown: Shown) -> list[Picture]:
    pictures = []
    for cache in caches:
        if shown.id not in cache:
            continue
        try:
            features = cache.item(shown.id, duration=SECONDS)
        except FeatcacheError:  # a damaged shard: `verify` reports it
            continue
        kind = "codes" if cache.spec.codebook_sizes else "features"
        what = f"{kind} over time, {len(features):,} frames: {cache.spec.units}"
        name = cache.version.info.name
        pictures.append(Picture(name, encode_png(draw(features, cache.spec)), what))
    return pictures


def _sounds(chosen: Sequence[Shown], manifest: Manifest, version: Version) -> list[bytes | str]:
    """Read the sound of each utterance, or say why there is none."""
    if not copies_of(version.info.config).are_plain:
        return ["a copy at another speed or with noise has no file"] * len(chosen)
    try:
        read = _reader(manifest)
    except MissingDependencyError as error:
        return [first_line(error)] * len(chosen)
    wanted = {shown.id for shown in chosen}
    rows = {id_: row for row, id_ in enumerate(manifest.ids) if id_ in wanted}
    seconds_of_all = [min(shown.audio_seconds, SECONDS) for shown in chosen]
    most = SECONDS
    if _in_base64(int(sum(seconds_of_all) * 2 * RATE)) > _SOUND_BYTES:
        most = _SHORT_SECONDS
    sounds: list[bytes | str] = []
    room = _SOUND_BYTES
    for shown, seconds in zip(chosen, seconds_of_all, strict=True):
        sound: bytes | str = "no room for its sound"
        if shown.id not in rows:
            sound = "not in the manifest"
        elif room > 0:
            sound = read(rows[shown.id], min(seconds, most))
        if isinstance(sound, bytes):
            room -= _in_base64(len(sound))
            if room < 0:
                sound = "no room for its sound"
        sounds.append(sound)
    return sounds


def _reader(manifest: Manifest) -> Callable[[int, float], bytes | str]:
    """Return a function that reads the first seconds of a row as WAV, or says why it cannot.
    It runs no command and sends no request. Raises MissingDependencyError without the
    packages that decode."""
    from featcache.audio.decode import Cut, decode
    from featcache.audio.resample import AudioPolicy, to_waveform
    from featcache.errors import AudioError

    policy = AudioPolicy(sample_rate=RATE)

    def read(row: int, seconds: float) -> bytes | str:
        utterance = manifest[row]
        if not utterance.path:
            return "the manifest has no path"
        source = manifest.resolve(utterance.path)
        if isinstance(source, Command) or url_of(source) is not None:
            return "only files of this machine are played"
        if isinstance(source, Path) and not source.is_file():
            return "the file is not there"
        (decoded,) = decode(source, [Cut(utterance.start, seconds)])
        if isinstance(decoded, AudioError):
            return str(decoded)
        samples, identity = decoded
        try:
            waveform = to_waveform(samples, identity.sample_rate, policy, utterance.channel)
        except AudioError as error:
            return str(error)
        return encode_wav(waveform)

    return read
