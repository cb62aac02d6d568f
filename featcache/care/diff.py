"""How two versions differ: in their configs, in their utterances, and in their values."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from featcache.errors import ArgumentError
from featcache.format.documents import differing_keys
from featcache.loader.cache import Cache
from featcache.spec import FeatureSpec
from featcache.strings import Strings


@dataclass(frozen=True)
class ValuesDiff:
    """How the features of utterances differ that two versions have of the same rows."""

    utterances: int
    identical: int
    """The number of those that are the same bit for bit."""
    other_lengths: int
    """The number of those that have more or fewer frames in the other version. Of them,
    nothing else is compared."""
    largest: float
    """The largest difference of a value; of codes, 0."""
    worst: str | None
    """The id of the utterance with that difference, or with the most codes that differ;
    None if none does."""
    codes: int
    """The number of codes compared; 0 for features that are no codes."""
    differing: int


@dataclass(frozen=True)
class VersionDiff:
    """How a version differs from another one."""

    same_fingerprint: bool
    config: list[str]
    """The keys in which their configs differ, with both values: `params.low_freq: 20.0 ->
    0.0`."""
    common: int
    """The number of utterances in both."""
    gone: Strings
    """The ids of the utterances that only the first version has."""
    added: Strings
    """The ids of the utterances that only the second version has."""
    changed: Strings
    """The ids of the utterances in both that were extracted from other rows: another
    path, start, duration, channel."""
    values: ValuesDiff | None
    """How the values of common utterances differ; None if they were not compared."""


def diff(first: Cache, second: Cache, values: int = 0) -> VersionDiff:
    """Compare two versions; `values` is how many utterances that both have of the same
    rows are read and compared, drawn at random. Raises ArgumentError if their values are
    asked for, and have other shapes, or are codes in one of them only; DamagedError if an
    utterance is not what was written."""
    a, b = first.index, second.index
    at = b.find(a.ids)
    common = np.flatnonzero(at >= 0)
    same = a.row_hash[common] == b.row_hash[at[common]]
    drawn = None
    if values:
        if (ours := _kind(first.spec)) != (theirs := _kind(second.spec)):
            raise ArgumentError(
                f"{first.version.path} has {ours}, {second.version.path} {theirs}: leave "
                "out --values"
            )
        comparable = common[same]
        chosen = sorted(random.sample(range(len(comparable)), min(values, len(comparable))))
        drawn = _compare(first, second, a.ids.take(comparable[chosen]))
    return VersionDiff(
        same_fingerprint=first.version.info.fingerprint == second.version.info.fingerprint,
        config=differing_keys(first.version.info.config, second.version.info.config),
        common=len(common),
        gone=a.ids.take(np.flatnonzero(at < 0)),
        added=b.ids.take(np.delete(np.arange(len(b)), at[common])),
        changed=a.ids.take(common[~same]),
        values=drawn,
    )


def _kind(spec: FeatureSpec) -> str:
    values = "codes" if spec.codebook_sizes else "floats"
    return f"{values} {spec.main.shape_text()}"


def _compare(first: Cache, second: Cache, ids: Strings) -> ValuesDiff:
    identical = other_lengths = codes = differing = most = 0
    largest, worst = 0.0, None
    for id_ in ids:
        a, b = first.item(id_, check=True), second.item(id_, check=True)
        if a.shape != b.shape:
            other_lengths += 1
        elif first.spec.codebook_sizes:
            unequal = int((a != b).sum())
            codes, differing = codes + a.size, differing + unequal
            identical += not unequal
            if unequal > most:
                most, worst = unequal, id_
        else:
            difference = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))
            identical += a.dtype == b.dtype and a.tobytes() == b.tobytes()
            if difference > largest:
                largest, worst = difference, id_
    return ValuesDiff(len(ids), identical, other_lengths, largest, worst, codes, differing)
