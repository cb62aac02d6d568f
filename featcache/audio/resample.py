"""Decoded samples -> the mono waveform that an extractor takes: channels mixed,
resampled, at another speed."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from featcache.errors import AudioError, MissingDependencyError, Reason

if TYPE_CHECKING:
    from featcache.audio.waveform import AudioPolicy

_SILENT = 1e-4  # where silence begins: 80 dB below full scale
# the part of its channels' peak below which a mix has lost what was in them: 40 dB
_CANCELLED = 0.01

_FEW = 64

Channel = Literal["mix", "first"] | int
"""Which channel to take, from 0; `mix` for the mean of all."""


def to_waveform(
    samples: NDArray[np.float32],
    source_rate: int,
    policy: AudioPolicy,
    channel: int | None = None,
    *,
    speed: float = 1,
) -> NDArray[np.float32]:
    """Turn C-contiguous samples, float32 `[num_samples, channels]`, into a waveform at
    the config's rate, float32 `[num_samples]`, contiguous, maybe in their memory.
    `channel` is the utterance's, from 0; None for the policy's.

    A mix is the sum of channels 0, 1, … in float32, divided by their number. soxr
    resamples it to num_samples * rate / source_rate samples, rounded to the nearest
    number (half a sample up or down, always the same way), and gives the same bits in any
    thread.

    Another speed, a number of at most six digits, takes no further step: the recording is
    resampled as if its rate were source_rate * speed Hz. So it lasts 1 / speed as long,
    and pitch and formants change with it, as with sox's `speed` (Ko et al., Audio
    augmentation for speech recognition, Interspeech 2015).

    Raises AudioError (RATE_REFUSED or NO_SUCH_CHANNEL; `max_seconds` is the caller's to
    hold to), or MissingDependencyError if it takes soxr."""
    if source_rate < (least := policy.min_source_rate):
        raise AudioError(
            Reason.RATE_REFUSED,
            f"its header says {source_rate} Hz: audio.min_source_rate is {least}",
        )
    if source_rate != policy.sample_rate and policy.resample == "forbid":
        wanted = f"the config wants {policy.sample_rate} Hz and forbids resampling"
        raise AudioError(Reason.RATE_REFUSED, f"sampled at {source_rate} Hz; {wanted}")
    mono = to_mono(samples, policy.channel if channel is None else channel)
    rates = source_rate, policy.sample_rate
    if speed != 1:
        rates = (Fraction(f"{speed:g}") * source_rate / policy.sample_rate).as_integer_ratio()
    if rates[0] == rates[1]:
        return mono
    try:
        import soxr
    except ImportError as error:
        raise MissingDependencyError("soxr", "resampling") from error
    resampled: NDArray[np.float32] = soxr.resample(
        mono, *rates, policy.resample.removeprefix("soxr_").upper()
    )
    return resampled


def why_silent(samples: NDArray[np.float32], waveform: NDArray[np.float32]) -> str:
    """Why a waveform, made of `samples` `[num_samples, channels]`, is as good as silent;
    empty if it is not. Of one that is not, few samples are looked at."""
    if _peak(waveform[::_FEW]) >= max(_SILENT, _CANCELLED * _peak(samples[::_FEW])):
        return ""
    if (loudest := _peak(samples)) < _SILENT:
        return "there is no sound in it"
    if _peak(waveform) < _CANCELLED * loudest:
        return "its channels have sound, and what is taken of them (audio.channel) has next to none"
    return ""


def _peak(samples: NDArray[np.float32]) -> float:
    return float(np.abs(samples).max(initial=0.0))


def error_if_too_long(
    num_samples: int, rate: float, max_seconds: float | None
) -> AudioError | None:
    """The error for a clip that lasts longer than `max_seconds`; None for one that does
    not, or without a limit."""
    if max_seconds is None or num_samples <= max_seconds * rate:
        return None
    lasts = (
        f"lasts {num_samples / rate:.3f} s or more at {rate:g} Hz, but may last at most "
        f"{max_seconds:g} s"
    )
    return AudioError(
        Reason.TOO_LONG, f"{lasts}: see audio.max_seconds, params.chunk and params.pad_to_seconds"
    )


def to_mono(samples: NDArray[np.float32], channel: Channel) -> NDArray[np.float32]:
    """Mix channels, `[num_samples, channels]`, or take one (NO_SUCH_CHANNEL): contiguous
    float32 `[num_samples]`."""
    num_channels = samples.shape[1]
    if channel == "mix" and num_channels > 1:
        mixed = samples[:, 0] + samples[:, 1]
        for other in range(2, num_channels):
            mixed += samples[:, other]
        mixed /= num_channels
        return mixed
    index = channel if isinstance(channel, int) else 0
    if not 0 <= index < num_channels:
        raise AudioError(
            Reason.NO_SUCH_CHANNEL,
            f"no channel {index}: the file has {num_channels}, counted from 0",
        )
    return np.ascontiguousarray(samples[:, index])
