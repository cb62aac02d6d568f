"""Copies of utterances that differ in speed or have noise: their ids, and which copy an
id is.

A config's `augment` section makes copies of each utterance of a manifest: at every speed
a clean copy, and one for every signal-to-noise ratio. The id of a copy is the utterance's
id with a suffix, as in Lhotse: `utt-1_sp0.9`, `utt-1_snr15`, `utt-1_sp0.9_snr15`. The
clean copy at speed 1 is the utterance itself, and keeps its id.

The section alone gives the copies, an id's suffix its copy. Extraction, checks and the
loader all use this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ManifestError, listing
from featcache.manifest.utterances import Manifest
from featcache.strings import Strings


class Copy(NamedTuple):
    """How one of an utterance's copies differs from the utterance itself."""

    speed: float = 1.0
    """How many times as fast as the recording the copy is."""
    snr: float | None = None
    """The ratio of the speech and the noise that is added, in dB; None for a clean copy."""

    @property
    def suffix(self) -> str:
        """What follows the utterance's id in the copy's id; empty for the utterance
        itself."""
        speed = "" if self.speed == 1 else f"_sp{self.speed:g}"
        return speed if self.snr is None else f"{speed}_snr{self.snr:g}"


PLAIN = Copy()  # the utterance itself


class Copies(tuple[Copy, ...]):
    """The copies that are made of every utterance, all different, in the order in which a
    version stores them."""

    @cached_property
    def suffixes(self) -> list[str]:
        """The suffix of each copy's id."""
        return [copy.suffix for copy in self]

    @cached_property
    def _longest_first(self) -> list[int]:
        """The numbers of the copies by their suffixes: `_sp0.9_snr15` also ends in
        `_snr15`, and every id in none."""
        return sorted(range(len(self)), key=lambda number: -len(self.suffixes[number]))

    @property
    def are_plain(self) -> bool:
        """Whether the utterance itself is the only copy."""
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
        """The copy that an id names; the utterance itself if the id has none of the
        suffixes."""
        for number in self._longest_first:
            if id_.endswith(self.suffixes[number]):
                return self[number]
        return PLAIN

    def numbers(self, ids: Strings) -> NDArray[np.int64]:
        """The number of the copy that each id names, int64 `[n]`; -1 if there is no such
        copy."""
        found = np.full(len(ids), -1, np.int64)
        # the longest suffix is written last, so it counts
        for number in reversed(self._longest_first):
            found[_end_in(ids, self.suffixes[number])] = number
        return found

    def ids(self, ids: Strings) -> Strings:
        """The ids of all copies of some utterances `[n * copies]`, those of an utterance
        next to each other."""
        return (
            ids
            if self.are_plain
            else Strings.of(f"{id_}{suffix}" for id_ in ids for suffix in self.suffixes)
        )

    def refuse_suffixed(self, ids: Strings, source: str) -> None:
        """Raise a ManifestError, which names some, if ids of utterances would be taken
        for those of copies."""
        # the last one if there is no such copy, as -1 says
        have_suffix = np.array([*map(bool, self.suffixes), False])
        rows = np.flatnonzero(have_suffix[self.numbers(ids)])
        if len(rows):
            suffixes, names = listing(filter(None, self.suffixes)), listing(ids.take(rows[:10]))
            what = (
                f"{len(rows):,} of {len(ids):,} ids end in a suffix of the config's copies "
                f"({suffixes}), as {names}"
            )
            raise ManifestError(f"{source}: {what}: rename them, or leave out rows that are copies")


def copies_of(config: Mapping[str, Any]) -> Copies:
    """The copies that a resolved config makes: at every speed the clean one, then one for
    each SNR; without an `augment` section, the utterance itself alone."""
    augment = config.get("augment") or {}
    snrs = (augment.get("noise") or {}).get("snr", [])
    return Copies(
        [Copy(speed, snr) for speed in augment.get("speed", [1.0]) for snr in (None, *snrs)]
    )


def expand(manifest: Manifest, copies: Copies) -> Manifest:
    """A manifest with a row for every copy, an utterance's together; a ManifestError if
    an id ends in a copy's suffix.

    The `start` and `duration` of a copy are those of the recording, whatever the copy's
    speed."""
    if copies.are_plain:
        return manifest
    copies.refuse_suffixed(manifest.ids, manifest.source)
    rows = np.repeat(np.arange(len(manifest)), len(copies))
    return replace(manifest.take(rows), ids=copies.ids(manifest.ids))


def _end_in(ids: Strings, suffix: str) -> NDArray[np.bool_]:
    """Which ids end in a suffix, bool `[n]`."""
    wanted = np.frombuffer(suffix.encode(), np.uint8)
    rows = np.flatnonzero(ids.byte_lengths() >= len(wanted))
    ends = ids.offsets[1:].astype(np.int64, copy=False)
    for back, byte in enumerate(wanted[::-1].tolist(), 1):
        rows = rows[ids.blob[ends[rows] - back] == byte]
    found = np.zeros(len(ids), bool)
    found[rows] = True
    return found
