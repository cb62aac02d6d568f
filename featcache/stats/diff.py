"""Compares two versions: their configs, their utterances, and their values."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, differing_keys
from featcache.loader.cache import Cache
from featcache.manifest.strings import Strings
from featcache.spec import LABELS, FeatureSpec


@dataclass
class ValuesDiff:
    """The differences of features that two versions have of the same rows: see docs/json.md."""

    utterances: int
    identical: int = 0
    other_lengths: int = 0
    largest: float = 0.0
    """The largest difference of a value; of codes, 0."""
    worst: str | None = None
    """The id of the utterance with that difference, or with the most codes that differ."""
    codes: int = 0
    differing: int = 0
    tracks: dict[str, ValuesDiff | None] = field(default_factory=dict)
    """The differences of the other tracks, by their names; None for a track that only one
    version has, or that has another form."""


@dataclass(frozen=True)
class VersionDiff:
    """The differences of two versions: see docs/json.md."""

    same_fingerprint: bool
    config: list[str]
    common: int
    gone: Strings
    added: Strings
    changed: Strings
    values: ValuesDiff | None


def diff(first: Cache, second: Cache, values: int = 0) -> VersionDiff:
    """Compare two versions, and the values of so many utterances, drawn at random, that
    both have of the same rows. Raises ArgumentError if these have other shapes, or only one
    version has codes; DamagedError if an utterance is not what was written."""
    a, b = first.index, second.index
    in_second = b.find(a.ids)
    common = np.flatnonzero(in_second >= 0)
    is_same_row = a.row_hash[common] == b.row_hash[in_second[common]]
    compared = None
    if values:
        first_kind, second_kind = _kind(first.spec), _kind(second.spec)
        if first_kind != second_kind:
            raise ArgumentError(
                f"{first.version.path} has {first_kind}, {second.version.path} {second_kind}: "
                "leave out --values"
            )
        comparable = common[is_same_row]
        chosen = sorted(random.sample(range(len(comparable)), min(values, len(comparable))))
        ids = a.ids.take(comparable[chosen])
        compared = _compare(first, second, ids)
        compared.tracks = _compare_tracks(first, second, ids)
    return VersionDiff(
        same_fingerprint=first.version.info.fingerprint == second.version.info.fingerprint,
        config=differing_keys(first.version.info.config, second.version.info.config),
        common=len(common),
        gone=a.ids.take(np.flatnonzero(in_second < 0)),
        added=b.ids.take(np.delete(np.arange(len(b)), in_second[common])),
        changed=a.ids.take(common[~is_same_row]),
        values=compared,
    )


def _compare_tracks(first: Cache, second: Cache, ids: Strings) -> dict[str, ValuesDiff | None]:
    """Compare the tracks besides the main one; the labels of events are compared with them."""
    kinds, other_kinds = _kinds_of_tracks(first), _kinds_of_tracks(second)
    compared: dict[str, ValuesDiff | None] = {}
    for name in dict.fromkeys([*kinds, *other_kinds]):
        if name == LABELS and first.spec.has_labels:
            continue
        compared[name] = None
        if kinds.get(name) == other_kinds.get(name):
            compared[name] = _compare(first.track(name), second.track(name), ids)
    return compared


def _kinds_of_tracks(cache: Cache) -> dict[str, str]:
    return {track.name: _kind(cache.track(track.name).spec) for track in cache.spec.outputs}


def _item(cache: Cache, id_: str) -> tuple[NDArray[Any], list[str] | None]:
    """Return the values of an utterance, and the labels of events."""
    if not cache.spec.axis.has_times:
        return cache.item(id_, check=True), None
    times, _, labels = cache.event_reader(check=True).read(np.array([cache.position(id_)]))
    return times, labels


def _kind(spec: FeatureSpec) -> str:
    values = "codes" if spec.codebook_sizes else "floats"
    return f"{values} {spec.main.shape_text()}"


def _compare(first: Cache, second: Cache, ids: Strings) -> ValuesDiff:
    has_codes = bool(first.spec.codebook_sizes)
    result = ValuesDiff(len(ids))
    for id_ in ids:
        a, labels = _item(first, id_)
        b, other_labels = _item(second, id_)
        if a.shape != b.shape or labels != other_labels:
            result.other_lengths += 1
            continue
        if has_codes:
            difference = float((a != b).sum())
            result.codes += a.size
            result.differing += int(difference)
            result.identical += int(difference == 0)
        else:
            difference = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))
            result.identical += a.dtype == b.dtype and a.tobytes() == b.tobytes()
        if difference > result.largest:
            result.largest, result.worst = difference, id_
    if has_codes:
        result.largest = 0.0
    return result
