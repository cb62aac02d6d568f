"""What a batch is computed for, and the results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.audio.waveform import WaveformMaker
from featcache.config import Config
from featcache.extractors import Extractor, Params
from featcache.store.runs import Failure
from featcache.store.shard import Item
from featcache.store.version import Version


def longest(*limits: float | None) -> float | None:
    """The seconds that a clip may last under several limits, None being none."""
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class Target:
    """A version to fill, and what fills it."""

    config: Config
    extractor: Extractor[Params]
    version: Version

    @property
    def max_seconds(self) -> float | None:
        """The longest clip that the config allows, and the extractor."""
        return longest(self.config.audio.max_seconds, self.extractor.max_seconds)

    @cached_property
    def waveform_maker(self) -> WaveformMaker:
        """How waveforms are made for it."""
        return WaveformMaker.of(self.config.audio, self.config.augment)

    @property
    def max_source_seconds(self) -> float | None:
        """The longest that a recording may be, if its fastest copy is to be no longer than `max_seconds`."""
        return None if self.max_seconds is None else self.max_seconds * self.waveform_maker.fastest


@dataclass(frozen=True)
class Extracted:
    """What one target got from a part of a batch.

    Attributes:
        items: what was extracted.
        num_frames: of each item.
        features: `[sum(num_frames), *item_shape]` of the stored dtype.
        failures: what could not be.
        side: for each side array, the entries of all items one after the other, and how many each has.
    """

    items: list[Item]
    num_frames: list[int]
    features: NDArray[Any]
    failures: list[Failure]
    side: dict[str, tuple[NDArray[Any], list[int]]] = field(default_factory=dict)

    @classmethod
    def of_failures(cls, target: Target, failures: list[Failure]) -> Extracted:
        """What a target got where everything has failed."""
        spec = target.version.info.spec
        side = {one.name: (np.empty((0, *one.item_shape), one.dtype), list[int]()) for one in spec.side}
        return cls([], [], np.empty((0, *spec.item_shape), target.version.dtype), failures, side)


@dataclass
class Spent:
    """What one worker did so far, and the seconds that each stage took it.

    Attributes:
        decode: reading and decoding files.
        waveform: mixing down, resampling, adding noise.
        extract: computing features, with their way to the device and back, by the version's name.
        resampled: utterances whose source had another rate, by the version's name; their copies do not count.
    """

    decode: float = 0.0
    waveform: float = 0.0
    extract: dict[str, float] = field(default_factory=dict)
    resampled: dict[str, int] = field(default_factory=dict)
    _last_resampled: dict[str, str] = field(default_factory=dict)

    def count_resampled(self, target: Target, id_: str) -> None:
        """Count an utterance whose source has another rate than a version's; once, if its copies follow each other."""
        name, copies = target.config.name, target.waveform_maker.copies
        utterance = id_.removesuffix(copies.of(id_).suffix)
        if self._last_resampled.get(name) != utterance:
            self._last_resampled[name] = utterance
            self.resampled[name] = self.resampled.get(name, 0) + 1

    def add(self, other: Spent) -> None:
        """Count what was done elsewhere."""
        self.decode += other.decode
        self.waveform += other.waveform
        for name, seconds in other.extract.items():
            self.extract[name] = self.extract.get(name, 0.0) + seconds
        for name, count in other.resampled.items():
            self.resampled[name] = self.resampled.get(name, 0) + count

    @contextmanager
    def extracting(self, target: Target) -> Iterator[None]:
        """Count the time that a version's features take."""
        started = perf_counter()
        try:
            yield
        finally:
            name = target.config.name
            self.extract[name] = self.extract.get(name, 0.0) + perf_counter() - started
