"""Two sections of a config: `audio`, how an utterance becomes a waveform; `augment`, which copies of it are made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from featcache.audio.noise import noise_content, read_noise
from featcache.errors import listing
from featcache.sections import Section

Resampler = Literal["soxr_mq", "soxr_hq", "soxr_vhq", "forbid"]

SLOWEST, FASTEST = 0.5, 2.0
QUIETEST, LOUDEST = -50.0, 100.0  # dB


class AudioPolicy(Section):
    """The `audio` section: how one utterance becomes one mono waveform."""

    sample_rate: int = Field(default=16000, ge=1000, le=384000)
    """Sample rate of the extractor's input, in Hz."""
    channel: Literal["mix", "first"] | Annotated[int, Field(ge=0, lt=1 << 31, strict=True)] = "mix"
    """`mix` averages the channels, `first` takes channel 0, a number takes that channel (from 0). A `channel` in the
    manifest's row takes precedence."""
    resample: Resampler = "soxr_hq"
    """Quality with which files at another rate are resampled; with `forbid`, such files fail."""
    max_seconds: float | None = Field(default=21600.0, gt=0)
    """Longer utterances fail; null is no limit. It decides which utterances are extracted, not their values, so the
    fingerprint leaves it out."""
    min_source_rate: int = Field(default=1000, ge=1)
    """Files at a lower sample rate, in Hz, fail: such a header is wrong, and resampling would stretch a few samples to
    hours. The fingerprint leaves it out, too."""


class NoisePolicy(Section):
    """`noise` in the `augment` section: which noise is added."""

    manifest: str
    """A manifest of noise files, in the same format as any manifest. A relative path is relative to the config file.
    The fingerprint includes the content of the noise, not its location."""
    snr: tuple[float, ...]
    """Signal-to-noise ratios in dB, over the whole clip. There is one copy for each."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """The seed and the copy's id decide which noise a copy gets, and from which sample of the noise it is taken."""
    content: str | None = Field(default=None, validate_default=True)
    """A hash of the noise. Leave it out: featcache fills it in. If it is given, any other noise is refused."""

    @field_validator("snr")
    @classmethod
    def _fit(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        return _distinct(values, QUIETEST, LOUDEST, "dB")

    @field_validator("manifest")
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        path = Path((info.context or {}).get("folder") or "", os.path.expanduser(value)).absolute()
        read_noise(path)
        return str(path)

    @field_validator("content")
    @classmethod
    def _holds(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "manifest" not in info.data:  # the manifest has a fault of its own, which pydantic reports
            return value
        manifest = info.data["manifest"]
        found = noise_content(read_noise(manifest))
        if value not in (None, found):
            raise ValueError(f"{manifest}: the noise has changed: it is {found[:12]} now, and was {value[:12]}")
        return found


class AugmentPolicy(Section):
    """The `augment` section: which copies of every utterance are made, at other speeds and with noise."""

    speed: tuple[float, ...] = (1.0,)
    """Speed factors: 1.1 is faster, shorter and higher in pitch. Without 1, the utterance itself is not extracted."""
    noise: NoisePolicy | None = None
    """Noise to add: see below."""

    @field_validator("speed")
    @classmethod
    def _fit(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        return _distinct(values, SLOWEST, FASTEST, "times")

    @model_validator(mode="after")
    def _makes_copies(self) -> Self:
        if self.speed == (1.0,) and self.noise is None:
            raise ValueError("makes no copies: leave it out, or give another speed, or noise")
        return self


def _distinct(values: tuple[float, ...], lowest: float, highest: float, unit: str) -> tuple[float, ...]:
    """Check numbers that become suffixes of ids, and sort them: their order in a config decides nothing."""
    faults: list[Any] = []
    if not values:
        faults.append("expected one number at least")
    faults += [
        f"{value:g} is outside {lowest:g} to {highest:g} {unit}" for value in values if not lowest <= value <= highest
    ]
    faults += [f"{value!r} has more than six digits" for value in values if float(f"{value:g}") != value]
    faults += [
        f"{value:g} is there {values.count(value)} times" for value in sorted({*values}) if values.count(value) > 1
    ]
    if faults:
        raise ValueError(listing(faults))
    return tuple(sorted(value + 0.0 for value in values))
