"""A sample of a manifest's utterances, over the whole range of their lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from featcache.audio.decode import probe_seconds
from featcache.audio.waveform import WaveformMaker
from featcache.extract.decoding import decode_all
from featcache.manifest import Manifest, Utterance

HEADERS = 256
"""Files whose headers are read where the manifest gives no durations."""

_SEED = 0


@dataclass(frozen=True, eq=False)
class Sampled:
    """An utterance to try something on.

    Attributes:
        id: the utterance's.
        waveform: float32 `[num_samples]` at the config's rate.
    """

    id: str
    waveform: NDArray[np.float32]


def sample(manifest: Manifest, count: int) -> list[Utterance]:
    """`count` utterances at even steps of the order of their lengths, from the shortest to the longest.

    Where the manifest lacks durations, of those rows alone whose files' headers were read: `HEADERS`, drawn at random
    from a fixed seed.
    """
    rows = np.arange(len(manifest))
    seconds = manifest.duration
    if np.isnan(seconds).any():
        rows = np.random.default_rng(_SEED).permutation(rows)[: max(HEADERS, count)]
        seconds = np.array([_seconds(manifest, manifest[row]) for row in rows.tolist()])
    order = rows[np.argsort(seconds, kind="stable")]
    chosen = order[np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))]
    return [manifest[row] for row in chosen.tolist()]


def read(manifest: Manifest, utterance: Utterance, waveform_maker: WaveformMaker, longest_seconds: float) -> Sampled:
    """An utterance's waveform, as a config wants it; of its first `longest_seconds`, where it is longer.

    Raises:
        AudioError: there is none.
    """
    longest_cut = longest_seconds * waveform_maker.speed(utterance.id)
    if longest_cut < _seconds(manifest, utterance) < math.inf:
        utterance = replace(utterance, duration=longest_cut)
    (decoded,) = decode_all([utterance], manifest.root)
    if decoded.samples is None or decoded.source is None:
        assert decoded.error is not None
        raise decoded.error
    rate = decoded.source.sample_rate
    waveform = waveform_maker.waveform(decoded.samples, rate, utterance.id, utterance.channel)
    return Sampled(utterance.id, waveform[: int(longest_seconds * waveform_maker.audio.sample_rate)])


def _seconds(manifest: Manifest, utterance: Utterance) -> float:
    """How long an utterance lasts, by its row or its file's header; infinite where neither says."""
    if utterance.duration is not None:
        return utterance.duration
    held = probe_seconds(manifest.resolve(utterance.path))
    return math.inf if held is None else held - (utterance.start or 0.0)
