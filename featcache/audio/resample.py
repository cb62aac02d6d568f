"""Decoded samples -> the mono waveform of an extractor: mixed, resampled, at another
speed."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from featcache.audio.blocks import Joined, Samples
from featcache.errors import AudioError, MissingDependencyError, Reason, counted
from featcache.sections import Section

_SILENT = 1e-4  # where silence begins: 80 dB below full scale
_CANCELLED = 0.01  # of its channels' peak: a mix 40 dB below has lost their sound
_FEW = 64  # one of so many samples is enough to hear that a waveform is not silent

Channel = Literal["mix", "first"] | int
"""A channel, from 0; `mix` for the mean of all."""


class AudioPolicy(Section):
    """The `audio` section: how one utterance becomes one mono waveform."""

    sample_rate: int = Field(default=16000, ge=1000, le=384000)
    """Sample rate of the extractor's input, in Hz."""
    channel: Literal["mix", "first"] | Annotated[int, Field(ge=0, lt=1 << 31, strict=True)] = "mix"
    """`mix` averages the channels. `first` takes channel 0. A number takes that channel
    (from 0). A `channel` in the manifest's row takes precedence."""
    resample: Literal["soxr_mq", "soxr_hq", "soxr_vhq", "forbid"] = "soxr_hq"
    """Quality of resampling, for files at another rate. With `forbid`, such files fail."""
    max_seconds: float | None = Field(default=21600.0, gt=0)
    """Longer utterances fail. null sets no limit. The limit changes no values, so the
    fingerprint leaves it out."""
    min_source_rate: int = Field(default=1000, ge=1)
    """Files at a lower sample rate, in Hz, fail. Their header is wrong, and resampling
    would stretch a few samples to hours. The fingerprint leaves this key out, too."""


class WaveformBuilder:
    """Makes blocks of samples into a waveform at the config's rate.

    A mix is the sum of channels 0, 1, … in float32, divided by their number. soxr resamples
    it to num_samples * rate / source_rate samples, rounded to the nearest number, with the
    same bits in any thread, and in blocks of any size. At another speed, a number of at
    most six digits, the source rate is source_rate * speed Hz (see docs/configs.md).

    Args:
        channel: The utterance's, from 0; None for the policy's.
        num_samples: The approximate number of samples of a channel; 0 if not known.

    The caller enforces `max_seconds`. Raises AudioError (RATE_REFUSED), or
    MissingDependencyError if soxr is missing."""

    def __init__(
        self,
        source_rate: int,
        policy: AudioPolicy,
        channel: int | None = None,
        *,
        speed: float = 1,
        num_samples: int = 0,
    ) -> None:
        if source_rate < policy.min_source_rate:
            least = f"audio.min_source_rate is {policy.min_source_rate}"
            raise AudioError(Reason.RATE_REFUSED, f"its header says {source_rate} Hz: {least}")
        if source_rate != policy.sample_rate and policy.resample == "forbid":
            wanted = f"the config wants {policy.sample_rate} Hz and forbids resampling"
            raise AudioError(Reason.RATE_REFUSED, f"sampled at {source_rate} Hz; {wanted}")
        self._channel: Channel = policy.channel if channel is None else channel
        rates = source_rate, policy.sample_rate
        if speed != 1:
            rates = (Fraction(f"{speed:g}") * source_rate / policy.sample_rate).as_integer_ratio()
        self._rates = rates
        self._quality = policy.resample.removeprefix("soxr_").upper()
        self._first_block: Samples | None = None  # to be resampled
        self._stream: Any = None
        self._made = Joined(num_samples * rates[1] // rates[0] + 1)

    def add(self, samples: Samples) -> None:
        """Append a block, C-contiguous `[num_samples, channels]`, which must not change
        afterwards. Raises AudioError (NO_SUCH_CHANNEL)."""
        mono = to_mono(samples, self._channel)
        if self._rates[0] == self._rates[1]:
            self._made.add(mono)
        elif self._stream is not None:
            self._made.add(self._stream.resample_chunk(mono))
        elif self._first_block is None:
            self._first_block = mono
        else:
            self._stream = _soxr().ResampleStream(*self._rates, 1, "float32", self._quality)
            for block in (self._first_block, mono):
                self._made.add(self._stream.resample_chunk(block))
            self._first_block = None

    def finish(self) -> Samples:
        """Return the waveform, float32 `[num_samples]`, contiguous, maybe a block itself."""
        if self._first_block is not None:
            rates = self._rates
            whole: Samples = _soxr().resample(self._first_block, *rates, self._quality)
            return whole
        if self._stream is not None:
            self._made.add(self._stream.resample_chunk(np.empty(0, np.float32), last=True))
        return self._made.finish()


def to_waveform(
    samples: Samples,
    source_rate: int,
    policy: AudioPolicy,
    channel: int | None = None,
    *,
    speed: float = 1,
) -> Samples:
    """Make all samples of a clip into a waveform, as a `WaveformBuilder` does."""
    builder = WaveformBuilder(source_rate, policy, channel, speed=speed)
    builder.add(samples)
    return builder.finish()


def _soxr() -> Any:
    try:
        import soxr
    except ImportError as error:
        raise MissingDependencyError("soxr", "resampling") from error
    return soxr


def why_silent(loudest: float, waveform: Samples) -> str:
    """Say why a waveform is as good as silent, if it is. `loudest` is the peak of all
    channels."""
    if peak_of(waveform[::_FEW]) >= max(_SILENT, _CANCELLED * loudest):
        return ""
    if loudest < _SILENT:
        return "there is no sound in it"
    if peak_of(waveform) < _CANCELLED * loudest:
        return "its channels have sound, and what is taken of them (audio.channel) has next to none"
    return ""


def peak_of(samples: Samples) -> float:
    """Return the highest absolute value; 0 without samples."""
    return float(max(samples.max(initial=0.0), -samples.min(initial=0.0)))


def error_if_too_long(
    num_samples: int, rate: float, max_seconds: float | None
) -> AudioError | None:
    """Return an error for a clip that lasts longer than `max_seconds`, a limit or None."""
    if max_seconds is None or num_samples <= max_seconds * rate:
        return None
    return AudioError(
        Reason.TOO_LONG,
        f"lasts {num_samples / rate:.3f} s or more at {rate:g} Hz, but may last at most "
        f"{max_seconds:g} s: see audio.max_seconds, params.chunk and params.pad_to_seconds",
    )


def to_mono(samples: Samples, channel: Channel) -> Samples:
    """Mix channels, `[num_samples, channels]`, or take one. Returns contiguous
    `[num_samples]`. Raises AudioError (NO_SUCH_CHANNEL)."""
    num_channels = samples.shape[1]
    if channel == "mix" and num_channels > 1:
        mixed = samples[:, 0] + samples[:, 1]
        for other in range(2, num_channels):
            mixed += samples[:, other]
        mixed /= num_channels
        return mixed
    index = channel if isinstance(channel, int) else 0
    if not 0 <= index < num_channels:
        there = counted(num_channels, "channel")
        what = f"no channel {index}: the file has {there}, counted from 0"
        raise AudioError(Reason.NO_SUCH_CHANNEL, what)
    return np.ascontiguousarray(samples[:, index])
