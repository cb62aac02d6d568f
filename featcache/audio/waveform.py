"""An utterance's waveform as its config wants it: resampled, at its copy's speed, with its
copy's noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from featcache.audio.blocks import Samples
from featcache.audio.noise import Noise, NoisePolicy, distinct
from featcache.audio.resample import AudioPolicy, WaveformBuilder
from featcache.manifest.copies import Copies, copies_of
from featcache.sections import Section


class AugmentPolicy(Section):
    """The `augment` section: which copies of every utterance are made, at other speeds
    and with noise."""

    speed: Annotated[
        tuple[Annotated[float, Field(ge=0.5, le=2.0)], ...], AfterValidator(distinct)
    ] = (1.0,)
    """Speed factors: 1.1 is faster, shorter and higher in pitch. Without 1, the utterance
    itself is not extracted."""
    noise: NoisePolicy | None = None
    """Noise to add: see below."""

    @model_validator(mode="after")
    def _makes_copies(self) -> Self:
        if self.speed == (1.0,) and self.noise is None:
            raise ValueError("makes no copies: leave it out, or give another speed, or noise")
        return self


@dataclass(frozen=True)
class WaveformMaker:
    """Makes the waveforms of one config from decoded samples, in several threads. Equal
    makers make the same waveforms."""

    audio: AudioPolicy  # without its `max_seconds`
    augment: AugmentPolicy | None

    def __hash__(self) -> int:
        return self._hash  # used several times a clip

    @cached_property
    def _hash(self) -> int:
        return hash((self.audio, self.augment))

    @classmethod
    def of(cls, audio: AudioPolicy, augment: AugmentPolicy | None) -> WaveformMaker:
        """Return the maker for these two sections of a config."""
        return cls(audio.model_copy(update={"max_seconds": None}), augment)

    @cached_property
    def copies(self) -> Copies:
        """The copies that `augment` makes of every utterance."""
        return copies_of({"augment": self.augment and self.augment.model_dump()})

    def speed(self, id_: str) -> float:
        """Return the speed factor of a copy, by its id."""
        return self.copies.copy_of(id_).speed

    @property
    def fastest(self) -> float:
        """The highest speed of a copy."""
        return float(self.copies.speeds.max())

    @property
    def seconds_per_second(self) -> float:
        """The seconds of waveforms, of all speeds, for a second of a recording."""
        return math.fsum(1 / speed for speed in {*self.copies.speeds.tolist()})

    def with_noise(self, waveform: Samples, id_: str) -> Samples:
        """Add a copy's noise, if it has any. Raises ConfigError if the noise cannot be
        decoded, or has changed."""
        copy = self.copies.copy_of(id_)
        if copy.snr is None or self._noise is None:
            return waveform
        return self._noise.add_to(waveform, id_, copy.snr)

    def builder(
        self, rate: int, speed: float, channel: int | None, num_samples: int
    ) -> WaveformBuilder:
        """Start a waveform, without noise. The arguments are the same as for
        `WaveformBuilder`."""
        return WaveformBuilder(rate, self.audio, channel, speed=speed, num_samples=num_samples)

    @cached_property
    def _noise(self) -> Noise | None:
        if self.augment is None or self.augment.noise is None:
            return None
        return Noise(self.augment.noise, self.audio)
