"""Clips to try an extractor on: a manifest's, over the whole range of their lengths; a version's, at random. And what
an extractor gives for them: features, side arrays, and the latents that codes are made from.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.audio.decode import probe_seconds
from featcache.audio.remote import each_at_once
from featcache.audio.waveform import WaveformMaker
from featcache.care.compare import ClipResult
from featcache.device import Device
from featcache.extraction.audio_files import rows_of_first_copy
from featcache.extraction.from_audio import decode_all
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.codec import CodecExtractor
from featcache.extractors.rows import Rows
from featcache.manifest import Manifest, Utterance
from featcache.manifest.audio_locations import AudioLocation
from featcache.version.index_table import Index

_MOST_HEADERS = 256
"""The number of files whose headers are read if the manifest does not give all durations."""

_NEAR = 4096
"""The first rows, of which those in one container are sampled."""

_SEED = 0


@dataclass(frozen=True, eq=False)
class SampledClip:
    """An utterance to try something on."""

    id: str
    waveform: NDArray[np.float32]
    """The waveform, float32 `[num_samples]` at the config's rate."""


def utterances_by_length(manifest: Manifest, count: int) -> list[Utterance]:
    """Sample `count` utterances at even steps in the order of their lengths, from the shortest to the longest.

    If the manifest does not give all durations, only rows whose headers are read can be chosen: `_MOST_HEADERS` of
    them, drawn with a fixed seed. If audio is in containers that have to be copied, only those in the first."""
    rows = np.arange(len(manifest))
    if len(near := rows_of_first_copy(manifest, rows[:_NEAR])):
        manifest = manifest.take(near)
        rows = np.arange(len(manifest))
    seconds = manifest.duration
    if np.isnan(seconds).any():
        rows = np.random.default_rng(_SEED).permutation(rows)[: max(_MOST_HEADERS, count)]
        seconds = np.array(each_at_once(lambda row: _seconds(manifest, manifest[row]), rows.tolist()))
    order = rows[np.argsort(seconds, kind="stable")]
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))]
    return [manifest[row] for row in chosen.tolist()]


def items_at_random(index: Index, count: int) -> list[int]:
    """Sample positions of the index at random, distinct and sorted."""
    return sorted(random.Random().sample(range(len(index)), min(count, len(index))))


def decode_waveform(utterance: Utterance, root: AudioLocation, waveform_maker: WaveformMaker) -> NDArray[np.float32]:
    """Decode an utterance and make its waveform, float32 `[num_samples]`. Raises AudioError if it cannot be decoded."""
    (decoded,) = decode_all([utterance], root)
    if decoded.samples is None or decoded.source is None:
        assert decoded.error is not None
        raise decoded.error
    rate = decoded.source.sample_rate
    return waveform_maker.waveform(decoded.samples, rate, utterance.id, utterance.channel)


def read_clip(
    manifest: Manifest, utterance: Utterance, waveform_maker: WaveformMaker, longest_seconds: float
) -> SampledClip:
    """Read an utterance as a config wants it, or its first `longest_seconds` if it is longer. Raises AudioError if it
    cannot be decoded."""
    longest_cut = longest_seconds * waveform_maker.speed(utterance.id)
    if longest_cut < _seconds(manifest, utterance) < math.inf:
        utterance = replace(utterance, duration=longest_cut)
    waveform = decode_waveform(utterance, manifest.root, waveform_maker)
    return SampledClip(utterance.id, waveform[: int(longest_seconds * waveform_maker.audio.sample_rate)])


def _seconds(manifest: Manifest, utterance: Utterance) -> float:
    """The length of an utterance, by its row or its file's header; infinite if neither gives it."""
    if utterance.duration is not None:
        return utterance.duration
    held = probe_seconds(manifest.resolve(utterance.path))
    return math.inf if held is None else held - (utterance.start or 0.0)


def extract_results(extractor: Extractor[Params], clips: Sequence[SampledClip], device: Device) -> list[ClipResult]:
    """Extract clips in one call. The results are on the device, of which the caller holds a slot."""
    waveforms = device.upload([clip.waveform for clip in clips])
    given = [Clip(clip.id, waveform) for clip, waveform in zip(clips, waveforms, strict=True)]
    if (codec := extractor.as_codec_extractor()) is not None:
        num_codebooks = len(extractor.spec.codebook_sizes)
        return [
            ClipResult(rows.features[:, :num_codebooks].long(), rows.features[:, num_codebooks:], rows.side)
            for rows in _with_latents(codec).extract_rows(given)
        ]
    if (row_extractor := extractor.as_row_extractor()) is not None:
        return [ClipResult(_comparable(rows.features), side=rows.side) for rows in row_extractor.extract_rows(given)]
    return [ClipResult(_comparable(features)) for features in extractor.extract(given)]


def _comparable(features: torch.Tensor) -> torch.Tensor:
    return features if features.is_floating_point() else features.long()  # torch cannot compare all unsigned integers


def _with_latents(extractor: CodecExtractor[Any]) -> CodecExtractor[Any]:
    """A copy of the extractor whose features are float64 `[R, F, Q + D]`: codes, and the latents they are made from."""
    showing = copy.copy(extractor)

    def encode(waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        found: list[torch.Tensor] = []
        this_call = copy.copy(extractor)

        def latents(waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
            found.append(extractor.latents(waveforms, num_samples))
            return found[-1]

        this_call.latents = latents  # type: ignore[method-assign]
        rows = this_call.encode(waveforms, num_samples)
        (of_call,) = found
        return Rows(torch.cat([rows.features.double(), of_call.double()], dim=2), rows.side)

    showing.encode = encode  # type: ignore[method-assign]
    return showing
