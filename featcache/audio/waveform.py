"""An utterance's waveform as its config wants it: resampled, at the speed of its copy,
with the noise of its copy.

Two sections of a config say this: `audio`, how an utterance becomes a waveform;
`augment`, which copies of it are made.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from featcache.audio.noise import Noise, noise_content, read_noise
from featcache.audio.resample import WaveformBuilder
from featcache.errors import listing, refuse_url
from featcache.manifest.copies import Copies, copies_of
from featcache.sections import Section

Resampler = Literal["soxr_mq", "soxr_hq", "soxr_vhq", "forbid"]

SLOWEST, FASTEST = 0.5, 2.0
QUIETEST, LOUDEST = -50.0, 100.0  # dB


class AudioPolicy(Section):
    """The `audio` section: how one utterance becomes one mono waveform."""

    sample_rate: int = Field(default=16000, ge=1000, le=384000)
    """Sample rate of the extractor's input, in Hz."""
    channel: Literal["mix", "first"] | Annotated[int, Field(ge=0, lt=1 << 31, strict=True)] = "mix"
    """`mix` averages the channels, `first` takes channel 0, a number takes that channel
    (from 0). A `channel` in the manifest's row takes precedence."""
    resample: Resampler = "soxr_hq"
    """Quality with which files at another rate are resampled; with `forbid`, such files
    fail."""
    max_seconds: float | None = Field(default=21600.0, gt=0)
    """Longer utterances fail; null is no limit. It decides which utterances are
    extracted, not their values, so the fingerprint leaves it out."""
    min_source_rate: int = Field(default=1000, ge=1)
    """Files at a lower sample rate, in Hz, fail: such a header is wrong, and resampling
    would stretch a few samples to hours. The fingerprint leaves it out, too."""


def _distinct(values: tuple[float, ...]) -> tuple[float, ...]:
    """Check numbers that become suffixes of ids, and sort them: their order in a config
    decides nothing."""
    faults = [] if values else ["expected one number at least"]
    faults += [
        f"{value!r} has more than six digits" for value in values if float(f"{value:g}") != value
    ]
    faults += [
        f"{value:g} is there {count} times"
        for value, count in sorted(Counter(values).items())
        if count > 1
    ]
    if faults:
        raise ValueError(listing(faults))
    return tuple(sorted(value + 0.0 for value in values))


class NoisePolicy(Section):
    """`noise` in the `augment` section: which noise is added."""

    manifest: str
    """A manifest of noise files, in the same format as any manifest. A relative path is
    relative to the config file. The fingerprint includes the content of the noise, not
    its location."""
    snr: Annotated[
        tuple[Annotated[float, Field(ge=QUIETEST, le=LOUDEST)], ...], AfterValidator(_distinct)
    ]
    """Signal-to-noise ratios in dB, over the whole clip. There is one copy for each."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """The seed and the copy's id decide which noise a copy gets, and from which sample of
    the noise it is taken."""
    content: str | None = Field(default=None, validate_default=True)
    """A hash of the noise. Leave it out: featcache fills it in. If it is given, any other
    noise is refused."""

    @field_validator("manifest")
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        refuse_url("the file", value)
        path = Path((info.context or {}).get("folder") or "", os.path.expanduser(value)).absolute()
        read_noise(path)
        return str(path)

    @field_validator("content")
    @classmethod
    def _holds(cls, value: str | None, info: ValidationInfo) -> str | None:
        # it has a fault of its own, which pydantic reports
        if (manifest := info.data.get("manifest")) is None:
            return value
        found = noise_content(read_noise(manifest))
        if value not in (None, found):
            raise ValueError(
                f"{manifest}: the noise has changed: it is {found[:12]} now, and was {value[:12]}"
            )
        return found


class AugmentPolicy(Section):
    """The `augment` section: which copies of every utterance are made, at other speeds
    and with noise."""

    speed: Annotated[
        tuple[Annotated[float, Field(ge=SLOWEST, le=FASTEST)], ...], AfterValidator(_distinct)
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
    """Makes the waveforms of one config from decoded samples. Equal makers make the same
    waveforms.

    Its methods may be called from several threads. It takes clips of any length: limits
    are the caller's."""

    audio: AudioPolicy  # without its `max_seconds`
    augment: AugmentPolicy | None

    def __hash__(self) -> int:
        return self._hash  # which is asked for several times a clip

    @cached_property
    def _hash(self) -> int:
        return hash((self.audio, self.augment))

    @classmethod
    def of(cls, audio: AudioPolicy, augment: AugmentPolicy | None) -> WaveformMaker:
        """The maker for these two sections of a config."""
        return cls(audio.model_copy(update={"max_seconds": None}), augment)

    @cached_property
    def copies(self) -> Copies:
        """The copies that `augment` makes of every utterance."""
        return copies_of({"augment": self.augment and self.augment.model_dump()})

    def speed(self, id_: str) -> float:
        """How many times as fast as its recording a copy is, by its id."""
        return self.copies.copy_of(id_).speed

    @property
    def fastest(self) -> float:
        """The highest speed of a copy."""
        return float(self.copies.speeds.max())

    @property
    def seconds_per_second(self) -> float:
        """How many seconds the waveforms of a recording last that are resampled, in all
        speeds, for each of its seconds."""
        return float((1 / np.unique(self.copies.speeds)).sum())

    def with_noise(self, waveform: NDArray[np.float32], id_: str) -> NDArray[np.float32]:
        """Add a copy's noise to its waveform; that of a clean copy is returned as it is.
        Raises ConfigError if the noise cannot be decoded, or has changed."""
        copy = self.copies.copy_of(id_)
        return (
            waveform
            if copy.snr is None or self._noise is None
            else self._noise.add_to(waveform, id_, copy.snr)
        )

    def builder(
        self, rate: int, speed: float, channel: int | None, num_samples: int
    ) -> WaveformBuilder:
        """Start a waveform, without noise. The arguments are those of `WaveformBuilder`."""
        return WaveformBuilder(rate, self.audio, channel, speed=speed, num_samples=num_samples)

    @cached_property
    def _noise(self) -> Noise | None:
        return (
            Noise(self.augment.noise, self.audio) if self.augment and self.augment.noise else None
        )
