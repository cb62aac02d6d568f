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

from featcache.errors import FeatcacheError, MissingDependencyError
from featcache.loader.cache import Cache
from featcache.manifest.audio_locations import Command, url_of
from featcache.manifest.copies import copies_of
from featcache.manifest.utterances import Manifest
from featcache.report.numbers import Document, Report
from featcache.spec import FeatureSpec
from featcache.version.version import Version

SECONDS = 6.0
"""The longest part of an utterance that is shown and played."""

RATE = 16000
"""The sample rate of sounds in Hz."""

_SOUND_BYTES = 1_000_000
"""The bytes of all sounds, a quarter less than in base64."""

_MOST_COLUMNS, _MOST_ROWS = 240, 80
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
class Clip:
    """An utterance with its pictures, and maybe its sound."""

    shown: Document
    pictures: list[tuple[str, bytes]]
    """A description, and the PNG."""
    sound: bytes | str
    """The WAV, or the reason why there is none."""


def encode_png(shades: NDArray[np.uint8]) -> bytes:
    """Encode an image of the palette's shades, uint8 `[rows, columns]`."""
    rows, columns = shades.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), shades], axis=1)
    at, anchors = np.linspace(0, 1, _SHADES), np.linspace(0, 1, len(_COLOURS))
    channels = [np.interp(at, anchors, channel) for channel in zip(*_COLOURS, strict=True)]
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0),
        b"PLTE": np.stack(channels, axis=1).round().astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(lines.tobytes(), 9),
        b"IEND": b"",
    }
    encoded = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks.items():
        checksum = zlib.crc32(name + data)
        encoded += struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)
    return encoded


def encode_wav(samples: NDArray[np.floating[Any]]) -> bytes:
    """Encode samples of one channel at `RATE`, 16 bits each."""
    levels = np.rint(samples * 32768).clip(-32768, 32767).astype("<i2")
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, RATE, len(levels), "NONE", ""))
        file.writeframes(levels.tobytes())
    return data.getvalue()


def draw(features: NDArray[Any], spec: FeatureSpec) -> NDArray[np.uint8]:
    """Draw features `[frames, *item_shape]` as shades, time to the right, the first dimension
    below; codes with their first codebook above."""
    values = features.reshape(len(features), -1)
    if len(spec.codebook_sizes) == values.shape[1]:
        step = -(-len(values) // _MOST_COLUMNS)
        sizes = np.array(spec.codebook_sizes[:_MOST_ROWS])
        shades = (values[::step, :_MOST_ROWS] * np.int64(_SHADES) // sizes).T
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
    caches = _pictured(versions)
    (largest,) = (one for one in versions if str(one.path) == report.largest)
    try:
        read = _reader(manifest, largest, report.shown)
    except MissingDependencyError as error:
        why = str(error)
        read = lambda shown, seconds: why  # noqa: E731
    clips, room = {}, _SOUND_BYTES / (2 * RATE)
    shortest_first = sorted(report.shown, key=lambda shown: float(shown["audio_seconds"]))
    for number, shown in enumerate(shortest_first):
        share = room / (len(report.shown) - number)
        seconds = min(shown["audio_seconds"], share, SECONDS)
        room -= seconds
        clips[shown["id"]] = Clip(shown, _pictures(caches, shown["id"]), read(shown, seconds))
    return [clips[shown["id"]] for shown in report.shown]


def _pictured(versions: Sequence[Version]) -> list[Cache]:
    """Open the versions to draw: the first of floats and the first of codes, if possible."""
    chosen: dict[bool, Version] = {}
    for version in versions:
        if version.info.spec.kind == "frames":
            chosen.setdefault(bool(version.info.spec.codebook_sizes), version)
    return [*map(Cache, chosen.values())]


def _pictures(caches: Sequence[Cache], id_: str) -> list[tuple[str, bytes]]:
    pictures = []
    for cache in caches:
        if id_ in cache:
            features = cache.item(id_, duration=SECONDS)
            what = f"{cache.version.info.name} of {id_}, {len(features):,} frames over time"
            pictures.append((what, encode_png(draw(features, cache.spec))))
    return pictures


def _reader(
    manifest: Manifest | None, version: Version, chosen: Sequence[Document]
) -> Callable[[Document, float], bytes | str]:
    """Return a function that reads the first seconds of an utterance as WAV, or says why it
    cannot. It runs no command and sends no request. Raises MissingDependencyError without
    the packages that decode."""
    if manifest is None:
        return lambda shown, seconds: "--manifest gives it a sound"
    from featcache.audio.decode import Cut, decode
    from featcache.audio.resample import AudioPolicy, to_waveform

    is_plain = copies_of(version.info.config).are_plain
    policy, ids = AudioPolicy(sample_rate=RATE), {shown["id"] for shown in chosen}
    rows = {id_: row for row, id_ in enumerate(manifest.ids) if id_ in ids}

    def read(shown: Document, seconds: float) -> bytes | str:
        row = rows.get(shown["id"])
        if row is None or not is_plain:
            return "not in the manifest, or a copy at another speed or with noise"
        utterance = manifest[row]
        source = manifest.resolve(utterance.path)
        if isinstance(source, Command) or url_of(source) is not None:
            return "only files of this machine are played"
        if isinstance(source, Path) and not source.is_file():
            return "the file is not there"
        (decoded,) = decode(source, [Cut(utterance.start, seconds)])
        if isinstance(decoded, FeatcacheError):
            return str(decoded)
        samples, identity = decoded
        try:
            rate = identity.sample_rate
            return encode_wav(to_waveform(samples, rate, policy, utterance.channel))
        except FeatcacheError as error:
            return str(error)

    return read
