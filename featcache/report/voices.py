"""Voices: how near the vector of each utterance is to its speaker's others, and whose it is
nearest to. Nearness is the cosine, and one shard is in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.loader.cache import Cache
from featcache.report.statistics import Floats, read_blocks
from featcache.spec import FeatureSpec, Ints

Vectors = NDArray[np.float64]

_MOST_SPEAKERS = 1000
_MOST_CONFUSED = 50
_AT_ONCE = 4096
"""The most vectors that are compared in one step."""


def has_voices(spec: FeatureSpec) -> bool:
    """Tell whether a version has a vector for each utterance, such as the speaker's."""
    is_float = spec.values_dtype.kind == "f" and not spec.is_quantized
    is_vector = spec.kind == "clip" and len(spec.item_shape) == 1
    return is_float and is_vector and not spec.named_units


def _unit_vectors(cache: Cache) -> Iterator[tuple[slice, Vectors]]:
    """Yield the vectors of each shard's utterances, of length 1, and their positions."""
    start = 0
    for block, _ in read_blocks(cache):
        for first in range(0, len(block), _AT_ONCE):
            vectors = _normalised(block[first : first + _AT_ONCE].astype(np.float64))
            yield slice(start, start + len(vectors)), vectors
            start += len(vectors)


def _normalised(vectors: Vectors) -> Vectors:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def compare_speakers(
    cache: Cache, numbers: Ints, names: Sequence[str]
) -> tuple[Floats, dict[str, Any]]:
    """Compare each vector with the mean of its speaker's other vectors, and with the nearest
    mean of another speaker, by cosine. At most 1,000 speakers take part, and at least two.

    Args:
        numbers: The number of each utterance's speaker, int64 `[utterances]`; -1 for none.
        names: The speakers' names.

    Returns:
        The cosine with the own mean less the cosine with the nearest other, `[utterances]`;
        NaN if a vector has no other of its speaker. And the speakers as JSON.
    """
    counts = np.bincount(numbers[numbers >= 0], minlength=len(names))
    compared = np.argsort(-counts, kind="stable")[:_MOST_SPEAKERS]
    place_of = np.full(len(names) + 1, -1)
    place_of[compared] = np.arange(len(compared))
    places, counts = place_of[numbers], counts[compared]
    sums = np.zeros((len(compared), *cache.spec.item_shape))
    for span, vectors in _unit_vectors(cache):
        is_known = places[span] >= 0
        np.add.at(sums, places[span][is_known], vectors[is_known])
    means = _normalised(sums)
    own, other, nearest = _cosines(cache, places, counts, sums)
    between = means @ means.T
    np.fill_diagonal(between, -np.inf)
    has_own = np.isfinite(own)
    own_sums = np.bincount(places[has_own], own[has_own], len(compared))
    names_of = [names[number] for number in compared.tolist()]
    of_speakers = zip(names_of, counts, own_sums, between, strict=True)
    speakers = [
        {
            "speaker": name,
            "utterances": int(count),
            "own_cosine": float(own_sum / count) if count > 1 else math.nan,
            "nearest": names_of[int(cosines.argmax())],
            "cosine": float(cosines.max()),
        }
        for name, count, own_sum, cosines in of_speakers
    ]
    margins = (own - other).astype(np.float32)
    wrong = np.flatnonzero(margins < 0)
    worst_first = wrong[np.argsort(margins[wrong], kind="stable")]
    confused = [
        {
            "id": cache.ids[position],
            "speaker": names_of[places[position]],
            "own_cosine": float(own[position]),
            "nearest": names_of[nearest[position]],
            "cosine": float(other[position]),
        }
        for position in worst_first[:_MOST_CONFUSED].tolist()
    ]
    document = {
        "compared": int(has_own.sum()),
        "speakers": sorted(speakers, key=lambda speaker: -speaker["cosine"]),
        "nearer_to_another": len(wrong),
        "confused": confused,
    }
    return margins, document


def _cosines(
    cache: Cache, places: Ints, counts: Ints, sums: Vectors
) -> tuple[Vectors, Vectors, Ints]:
    """Compute each vector's cosine with the mean of its speaker's others, its cosine with the
    nearest mean of another speaker, and that speaker's place, `[utterances]` each."""
    means = _normalised(sums)
    own, other = np.full((2, len(cache)), np.nan)
    nearest = np.full(len(cache), -1)
    for span, vectors in _unit_vectors(cache):
        rows = np.flatnonzero((places[span] >= 0) & (counts[places[span]] > 1))
        of_rows, vectors = places[span.start + rows], vectors[rows]
        rest = _normalised(sums[of_rows] - vectors)
        cosines = vectors @ means.T
        cosines[np.arange(len(rows)), of_rows] = -np.inf
        own[span.start + rows] = (rest * vectors).sum(axis=1)
        nearest[span.start + rows] = cosines.argmax(axis=1)
        other[span.start + rows] = cosines.max(axis=1)
    return own, other, nearest


def nearest_voices(cache: Cache, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Find for each of some ids the other utterance with the nearest vector, by cosine."""
    positions = [position for id_ in ids if (position := cache.index.find_one(id_)) >= 0]
    if not positions:
        return []
    chosen = np.stack([cache[position] for position in positions]).astype(np.float64)
    best, nearest = np.full(len(positions), -np.inf), np.zeros(len(positions), np.int64)
    for span, vectors in _unit_vectors(cache):
        cosines = _normalised(chosen) @ vectors.T
        for row, position in enumerate(positions):
            if span.start <= position < span.stop:
                cosines[row, position - span.start] = -np.inf
        most = cosines.max(axis=1)
        nearest = np.where(most > best, span.start + cosines.argmax(axis=1), nearest)
        best = np.maximum(best, most)
    return [
        {"id": cache.ids[position], "nearest": cache.ids[like], "cosine": cosine}
        for position, like, cosine in zip(positions, nearest.tolist(), best.tolist(), strict=True)
        if math.isfinite(cosine)
    ]
