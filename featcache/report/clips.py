"""The clips of a report: pictures of features, and short sounds of files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from featcache.errors import FeatcacheError, StoreError
from featcache.loader.cache import Cache
from featcache.manifest.audio_locations import Command, LocalFile, url_of
from featcache.manifest.copies import copies_of
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest
from featcache.media.look import encode_wav
from featcache.media.pictures import encode_png, picture_of
from featcache.report.numbers import Document, Report

SECONDS = 6.0
"""The longest part of an utterance that is shown and played."""

RATE = 16000
"""The sample rate of sounds in Hz."""

_SOUND_BYTES = 1_000_000
"""The bytes of all sounds, a quarter less than in base64."""

_MOST_COLUMNS, _MOST_ROWS = 240, 80


@dataclass(frozen=True)
class Clip:
    """An utterance with its pictures, and maybe its sound."""

    shown: Document
    pictures: list[tuple[str, bytes]]
    """A description, and the PNG."""
    sound: bytes | str
    """The WAV, or the reason why there is none."""


def make_clips(
    report: Report, caches: Sequence[Cache], manifest: Manifest | None = None
) -> list[Clip]:
    """Draw the utterances that a report shows, and read their sound from the manifest's
    files on this machine."""
    pictured = caches[:2] if report.compared else _pictured(caches)
    (largest,) = (cache for cache in caches if str(cache.version.path) == report.largest)
    utterances = {}
    if manifest is not None and copies_of(largest.config).are_plain:
        ids = {shown["id"] for shown in report.shown}
        utterances = {id_: manifest[row] for row, id_ in enumerate(manifest.ids) if id_ in ids}
    clips, room = {}, _SOUND_BYTES / (2 * RATE)
    shortest_first = sorted(report.shown, key=lambda shown: float(shown["audio_seconds"]))
    for number, shown in enumerate(shortest_first):
        share = room / (len(report.shown) - number)
        seconds = min(shown["audio_seconds"], share, SECONDS)
        room -= seconds
        try:
            sound: bytes | str = _sound(manifest, utterances.get(shown["id"]), seconds)
        except FeatcacheError as error:
            sound = str(error)
        clips[shown["id"]] = Clip(shown, _pictures(pictured, shown["id"]), sound)
    return [clips[shown["id"]] for shown in report.shown]


def _pictured(caches: Sequence[Cache]) -> list[Cache]:
    """Choose the versions to draw: the first spectrogram, the first codes, the first pitch,
    and the first curve."""
    chosen: dict[tuple[bool, ...], Cache] = {}
    for cache in caches:
        spec = cache.spec
        if spec.kind == "frames":
            is_codes = bool(spec.codebook_sizes)
            chosen.setdefault((spec.is_curve, spec.is_pitch, is_codes), cache)
    return [chosen[kind] for kind in sorted(chosen)]


def _pictures(caches: Sequence[Cache], id_: str) -> list[tuple[str, bytes]]:
    pictures = []
    for cache in caches:
        with suppress(StoreError):  # missing; or damaged, which a report says
            features = cache.item(id_, duration=SECONDS)
            picture = picture_of("", cache.spec, features, _MOST_COLUMNS, _MOST_ROWS)
            what = f"{cache.version.info.name} of {id_}"
            for things in cache.spec.axis.dimensions:
                what += f", {len(features):,} {things} over time"
            if cache.spec.is_pitch or cache.spec.is_curve:
                up = picture.up
                what += f", from {up.low:g} to {up.high:.0f} {up.unit}"
            pictures.append((what, encode_png(picture.shades)))
    return pictures


def _sound(manifest: Manifest | None, utterance: Utterance | None, seconds: float) -> bytes:
    """Read the first seconds of an utterance as WAV. Runs no command and sends no request.
    Raises FeatcacheError with the reason if there is no sound."""
    if manifest is None:
        raise FeatcacheError("--manifest gives it a sound")
    from featcache.audio.decode import Cut, decode
    from featcache.audio.resample import AudioPolicy, to_waveform

    if utterance is None:
        raise FeatcacheError("not in the manifest, or a copy at another speed or with noise")
    source = manifest.resolve(utterance.path)
    if isinstance(source, Command) or url_of(source) is not None:
        raise FeatcacheError("only files of this machine are played")
    if isinstance(source, LocalFile) and not os.path.isfile(source):
        raise FeatcacheError("the file is not there")
    (decoded,) = decode(source, [Cut(utterance.start, seconds)])
    if isinstance(decoded, FeatcacheError):
        raise decoded
    samples, identity = decoded
    policy = AudioPolicy(sample_rate=RATE)
    waveform = to_waveform(samples, identity.sample_rate, policy, utterance.channel)
    return encode_wav(waveform, RATE)
