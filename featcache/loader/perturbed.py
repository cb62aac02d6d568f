"""Copies at other speeds and with noise, as a dataset sees them: which exist, and their columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ManifestError, listing
from featcache.loader.cache import Cache
from featcache.loader.columns import Column, select, take
from featcache.manifest import Manifest
from featcache.manifest.copies import Copies, copies_of
from featcache.strings import Strings

__all__ = ["of_cache", "of_manifest"]

_Names = Collection[str] | Mapping[str, type] | None


def of_manifest(
    manifest: Manifest, names: _Names, caches: Sequence[Cache], copies: bool
) -> tuple[Strings, dict[str, Column]]:
    """The ids of the copies that all versions have of a manifest's utterances, and the columns.

    The copies of an utterance are beside each other, each with the columns of its row.

    Args:
        manifest: with an id for each utterance.
        names: the columns to carry, as `select` takes them.
        caches: the versions.
        copies: whether to take other copies than the utterances themselves.

    Raises:
        ManifestError: what `select` raises; an id ends in a copy's suffix; or a column hides what is said of copies.
        ArgumentError: `names` is one name, or the versions have no copies in common.
    """
    if isinstance(names, str):
        raise ArgumentError(f"columns is one name, {names!r}: give a list of names")
    common = _common(caches) if copies else copies_of({})
    own = _columns(common, np.arange(len(common)))
    if hidden := [name for name in own if (names is None or name in names) and name in manifest.columns]:
        raise ManifestError(
            f"{manifest.source}: the column {hidden[0]!r} would hide the copies' own: rename it, leave it out of "
            "columns=, or take no copies: copies=False"
        )
    columns = select(manifest, _without(names, own))
    if common.are_plain:
        return manifest.ids, columns
    common.refuse_suffixed(manifest.ids, manifest.source)
    rows = np.repeat(np.arange(len(manifest)), len(common))
    repeated = {name: take(column, rows) for name, column in columns.items()}
    wanted = {name: np.tile(column, len(manifest)) for name, column in own.items() if names is None or name in names}
    return common.ids(manifest.ids), repeated | wanted


def of_cache(caches: Sequence[Cache], copies: bool) -> tuple[NDArray[np.int64] | None, dict[str, Column]]:
    """Which of the first version's utterances are copies that all versions have, and their columns.

    Returns:
        Their positions, int64 `[n]`, or None where they are all; and the columns.

    Raises:
        ArgumentError: there are none.
    """
    first = caches[0]
    there = copies_of(first.config)
    if there.are_plain and all(copies_of(cache.config).are_plain for cache in caches):
        return None, {}
    common = _common(caches)
    numbers = there.numbers(first.ids)
    wanted = common.suffixes if copies else [""]
    kept = np.isin(numbers, [number for number, suffix in enumerate(there.suffixes) if suffix in wanted])
    if not kept.any():
        raise ArgumentError(f"{first.version.path}: has no plain copies: it has {listing(there.suffixes)}")
    rows = np.flatnonzero(kept)
    return None if kept.all() else rows, _columns(there, numbers[rows]) if copies else {}


def _common(caches: Sequence[Cache]) -> Copies:
    """The copies that all versions have, in the first one's order."""
    first, *others = (copies_of(cache.config) for cache in caches)
    shared = [copy for copy in first if all(copy.suffix in other.suffixes for other in others)]
    if not shared:
        raise ArgumentError(f"the versions have no copies in common: their configs' augment sections make {first}")
    return Copies(shared)


def _columns(copies: Copies, numbers: NDArray[np.int64]) -> dict[str, Column]:
    """What is said of copies, by their numbers: float64 `[n]` each; nothing where there are no others than one."""
    if copies.are_plain:
        return {}
    columns: dict[str, Column] = {"speed": copies.speeds[numbers]}
    if not np.isnan(copies.snrs).all():
        columns["snr"] = copies.snrs[numbers]
    return columns


def _without(names: _Names, own: Collection[str]) -> _Names:
    """The names without those that are no columns of the manifest's."""
    if names is None:
        return None
    if isinstance(names, Mapping):
        return {name: kind for name, kind in names.items() if name not in own}
    return [name for name in names if name not in own]
