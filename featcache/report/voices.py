"""Voices: how near the vector of each utterance is to its speaker's others, and whose it is
nearest to. Nearness is the cosine, and one shard is in memory at a time."""

from __future__ import annotations

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
    return is_float and spec.kind == "clip" and len(spec.item_shape) == 1 and not spec.named_units


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
    mean of another speaker, by cosine. At most 1,000 speakers take part.

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
    own, other = np.full((2, len(cache)), np.nan)
    nearest = np.full(len(cache), -1)
    for span, vectors in _unit_vectors(cache):
        rows = np.flatnonzero((places[span] >= 0) & (counts[places[span]] > 1))
        of_rows, vectors = places[span.start + rows], vectors[rows]
        others_of_own = _normalised(sums[of_rows] - vectors)
        own[span.start + rows] = (others_of_own * vectors).sum(axis=1)
        cosines = vectors @ means.T
        cosines[np.arange(len(rows)), of_rows] = -np.inf
        if len(compared) > 1:
            nearest[span.start + rows] = cosines.argmax(axis=1)
            other[span.start + rows] = cosines.max(axis=1)
    between = means @ means.T
    np.fill_diagonal(between, -np.inf)
    names_of = [names[number] for number in compared.tolist()]
    sums_of_own = np.bincount(places[places >= 0], np.nan_to_num(own[places >= 0]), len(compared))
    speakers = []
    for place, name in enumerate(names_of):
        like = int(between[place].argmax())
        has_own, has_other = counts[place] > 1, len(compared) > 1
        speakers.append(
            {
                "speaker": name,
                "utterances": int(counts[place]),
                "own_cosine": float(sums_of_own[place] / counts[place]) if has_own else None,
                "nearest": names_of[like] if has_other else None,
                "cosine": float(between[place, like]) if has_other else None,
            }
        )
    margins = (own - other).astype(np.float32)
    wrong = np.flatnonzero(margins < 0)
    confused = []
    for position in wrong[np.argsort(margins[wrong], kind="stable")][:_MOST_CONFUSED].tolist():
        confused.append(
            {
                "id": cache.ids[position],
                "speaker": names_of[places[position]],
                "own_cosine": float(own[position]),
                "nearest": names_of[nearest[position]],
                "cosine": float(other[position]),
            }
        )
    document = {
        "compared": int(np.isfinite(margins).sum()),
        "speakers": speakers,
        "nearer_to_another": len(wrong),
        "confused": confused,
    }
    return margins, document


def nearest_voices(cache: Cache, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Find for each of some ids the other utterance with the nearest vector, by cosine."""
    positions = [position for id_ in ids if (position := cache.index.find_one(id_)) >= 0]
    chosen = np.zeros((len(positions), *cache.spec.item_shape))
    for span, vectors in _unit_vectors(cache):
        for row, position in enumerate(positions):
            if span.start <= position < span.stop:
                chosen[row] = vectors[position - span.start]
    best, nearest = np.full(len(positions), -np.inf), np.zeros(len(positions), np.int64)
    for span, vectors in _unit_vectors(cache):
        cosines = chosen @ vectors.T
        for row, position in enumerate(positions):
            if span.start <= position < span.stop:
                cosines[row, position - span.start] = -np.inf
        of_span = cosines.argmax(axis=1)
        cosine = cosines[np.arange(len(positions)), of_span]
        nearest = np.where(cosine > best, of_span + span.start, nearest)
        best = np.maximum(best, cosine)
    return [
        {"id": cache.ids[position], "nearest": cache.ids[int(like)], "cosine": float(cosine)}
        for position, like, cosine in zip(positions, nearest, best, strict=True)
        if np.isfinite(cosine)
    ]
