"""Copies of utterances with another speed or noise, and their ids.

A config's `augment` section makes copies of each utterance. The id of a copy has a suffix,
as in Lhotse: `utt-1_sp0.9`, `utt-1_snr15`, `utt-1_sp0.9_snr15`. The clean copy at speed 1
is the utterance itself, and keeps its id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ManifestError, listing
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import Manifest


class Copy(NamedTuple):
    """A copy of an utterance."""

    speed: float = 1.0
    """The speed relative to the recording's."""
    snr: float | None = None
    """The ratio of speech to added noise in dB; None for a clean copy."""

    @property
    def suffix(self) -> str:
        """The end of the copy's id; empty for the utterance itself."""
        suffix = ""
        if self.speed != 1:
            suffix += f"_sp{self.speed:g}"
        if self.snr is not None:
            suffix += f"_snr{self.snr:g}"
        return suffix


PLAIN = Copy()  # the utterance itself


class Copies(tuple[Copy, ...]):
    """The copies of every utterance, all different, in the order of a version."""

    @cached_property
    def suffixes(self) -> list[str]:
        """The suffix of each copy's id."""
        return [copy.suffix for copy in self]

    @cached_property
    def _longest_first(self) -> list[int]:
        """The numbers of copies, long suffixes first: `_sp0.9_snr15` also ends in `_snr15`."""
        return sorted(range(len(self)), key=lambda number: -len(self.suffixes[number]))

    @property
    def are_plain(self) -> bool:
        """True if the utterance itself is the only copy."""
        return self.suffixes == [""]

    @property
    def speeds(self) -> NDArray[np.float64]:
        """The speed of each copy, float64 `[copies]`."""
        return np.array([copy.speed for copy in self])

    @property
    def snrs(self) -> NDArray[np.float64]:
        """The SNR of each copy in dB, float64 `[copies]`; NaN for clean copies."""
        return np.array([copy.snr for copy in self], np.float64)

    def copy_of(self, id_: str) -> Copy:
        """Return the copy that an id names, by default the utterance itself."""
        for number in self._longest_first:
            if id_.endswith(self.suffixes[number]):
                return self[number]
        return PLAIN

    def numbers(self, ids: Strings) -> NDArray[np.int64]:
        """Return the number of the copy that each id names, int64 `[n]`, or -1."""
        numbers = np.full(len(ids), -1, np.int64)
        for number in reversed(self._longest_first):  # what is written last counts
            numbers[_ending(ids, self.suffixes[number])] = number
        return numbers

    def plain_ids(self, ids: Strings) -> Strings:
        """Return the ids of the utterances that these are copies of."""
        return Strings.of(id_.removesuffix(self.copy_of(id_).suffix) for id_ in ids)

    def ids(self, ids: Strings) -> Strings:
        """Return the ids of all copies `[n * copies]`, an utterance's together."""
        if self.are_plain:
            return ids
        return Strings.of(f"{id_}{suffix}" for id_ in ids for suffix in self.suffixes)

    def refuse_suffixed(self, ids: Strings, source: str) -> None:
        """Raise a ManifestError if ids of utterances look like those of copies."""
        have_suffix = np.array([*map(bool, self.suffixes), False])  # the last is of -1
        rows = np.flatnonzero(have_suffix[self.numbers(ids)])
        if len(rows):
            raise ManifestError(
                f"{source}: {len(rows):,} of {len(ids):,} ids end in a suffix of the config's "
                f"copies ({listing(filter(None, self.suffixes))}), as "
                f"{listing(ids.take(rows[:10]))}: rename them, or leave out rows that are copies"
            )


def copies_of(config: Mapping[str, Any]) -> Copies:
    """Return the copies that a resolved config makes: at every speed the clean copy, then
    one for each SNR."""
    augment = config.get("augment") or {}
    snrs = (augment.get("noise") or {}).get("snr", [])
    return Copies(
        [Copy(speed, snr) for speed in augment.get("speed", [1.0]) for snr in (None, *snrs)]
    )


def noise_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the seed and a hash of the noise, which together with its id decide the noise
    of a copy; None for both without noise."""
    noise = (config.get("augment") or {}).get("noise") or {}
    return noise.get("seed"), noise.get("content")


def expand(manifest: Manifest, copies: Copies) -> Manifest:
    """Return a manifest with a row for every copy, an utterance's together. Raises
    ManifestError if an id ends in a copy's suffix. At any speed, `start` and `duration` are
    times of the recording."""
    if copies.are_plain:
        return manifest
    copies.refuse_suffixed(manifest.ids, manifest.source)
    rows = np.repeat(np.arange(len(manifest)), len(copies))
    return replace(manifest.take(rows), ids=copies.ids(manifest.ids))


def _ending(ids: Strings, suffix: str) -> NDArray[np.int64]:
    """Return the rows of ids with an ASCII suffix."""
    rows = np.flatnonzero(ids.byte_lengths() >= len(suffix))
    ends = ids.offsets[1:].astype(np.int64, copy=False)
    for back, byte in enumerate(suffix.encode()[::-1], 1):
        rows = rows[ids.blob[ends[rows] - back] == byte]
    return rows
