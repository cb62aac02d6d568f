"""Statistics of each utterance's waveform, to find bad recordings by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from featcache.extractors.base import Clip, Params
from featcache.extractors.vectors import VectorExtractor
from featcache.spec import Clip as ClipAxis
from featcache.spec import FeatureSpec, Track

if TYPE_CHECKING:
    from torch import Tensor

STATISTICS = {
    "level": "dB of full scale",
    "peak": "dB of full scale",
    "clipped": "share of samples",
    "dc": "mean of samples",
    "silence": "share of time",
    "silent_start": "s",
    "silent_end": "s",
    "bandwidth": "Hz",
}
"""The statistics of a vector, in its order, with their units."""

FLOOR = -120.0
"""The lowest level, in dB of full scale."""

_FULL_SCALE = 32767 / 32768 - 1e-6
"""The least magnitude of a clipped sample: 16-bit files end here."""

_STEP = 1 / 32768
"""The step of 16-bit samples. Smaller samples are digital silence."""

_QUIET = -60.0
"""The level below which a window counts as silence, in dB of full scale."""

_WINDOW_SECONDS = 0.02

_SPECTRUM_DECIBELS = 70.0
"""How far below the loudest frequency the spectrum still counts as sound."""

_BLOCK = 4096
"""The windows that are transformed at once."""


class AudioStatsParams(Params):
    """The parameters of the statistics: none."""


class AudioStats(VectorExtractor[AudioStatsParams]):
    """Statistics of a waveform: float32 `[8]`.

    0. `level`: its root mean square, in dB of full scale, -120 or more;
    1. `peak`: its largest magnitude, in dB of full scale, -120 or more;
    2. `clipped`: the share of samples at full scale, 0 to 1;
    3. `dc`: the mean of its samples, -1 to 1;
    4. `silence`: the share of windows of 20 ms whose level is below -60 dB, 0 to 1;
    5. `silent_start`, 6. `silent_end`: seconds at its start and end where every sample is
       below a step of 16 bits;
    7. `bandwidth`: the highest frequency, in Hz, whose mean power is within 70 dB of the
       loudest frequency's, without the mean of the samples; 0 if all samples are equal.

    Set `audio.sample_rate` to the highest rate of the files, or resampling limits
    `bandwidth` and `clipped`."""

    Params = AudioStatsParams
    revision = 2

    def __init__(self, params: AudioStatsParams, sample_rate: int, device: torch.device) -> None:
        units = ", ".join(f"{name} ({unit})" for name, unit in STATISTICS.items())
        track = Track("features", (len(STATISTICS),), "float32", units, ClipAxis())
        self.spec = FeatureSpec.of(sample_rate, track)
        self._size = max(2, round(_WINDOW_SECONDS * sample_rate))
        # a Hann window between its samples: the zero at its start would hide a click
        steps = torch.arange(self._size, dtype=torch.float64, device=device) + 0.5
        self._taper = torch.sin(torch.pi / self._size * steps).square()

    def vector(self, clip: Clip) -> Tensor:
        waveform, rate = clip.waveform, self.spec.sample_rate
        magnitudes = waveform.abs()
        loud = torch.nonzero(magnitudes >= _STEP).flatten()
        ends = [len(waveform), 0]
        if len(loud):
            ends = [int(loud[0]), len(waveform) - 1 - int(loud[-1])]
        silence, bandwidth = self._by_windows(waveform)
        statistics = (
            _decibels(waveform.double().square().mean()),
            _decibels(magnitudes.max().double().square()),
            (magnitudes >= _FULL_SCALE).double().mean(),
            waveform.double().mean(),
            silence,
            torch.tensor(ends[0] / rate),
            torch.tensor(ends[1] / rate),
            bandwidth,
        )
        return torch.stack([value.float().to(waveform.device) for value in statistics])

    def _by_windows(self, waveform: Tensor) -> tuple[Tensor, Tensor]:
        """Return the share of silent windows, and the bandwidth in Hz."""
        num_quiet = torch.zeros((), dtype=torch.int64, device=waveform.device)
        for block in torch.split(waveform, _BLOCK * self._size):
            levels = _decibels(self._windows(block).square().mean(dim=1))
            num_quiet += (levels < _QUIET).sum()
        power = self._power(waveform - waveform.double().mean().float())
        power[:2] = 0  # a drift is no sound
        within = torch.nonzero(power > power.max() * 10 ** (-_SPECTRUM_DECIBELS / 10)).flatten()
        bandwidth = torch.zeros((), device=waveform.device)
        if len(within):
            bandwidth = within[-1] * (self.spec.sample_rate / self._size)
        return num_quiet / -(-len(waveform) // self._size), bandwidth

    def _power(self, sound: Tensor) -> Tensor:
        """Return the power at each frequency, float64 `[size // 2 + 1]`, summed over windows.
        The last window ends with the sound: padding would cut a tone off."""
        whole = len(sound) // self._size * self._size
        blocks = [*torch.split(sound[:whole], _BLOCK * self._size)] if whole else []
        if whole < len(sound):
            blocks.append(sound[-self._size :])
        power = torch.zeros(self._size // 2 + 1, dtype=torch.float64, device=sound.device)
        for block in blocks:
            power += torch.fft.rfft(self._windows(block) * self._taper).abs().square().sum(dim=0)
        return power

    def _windows(self, samples: Tensor) -> Tensor:
        """Cut samples into windows, float64 `[windows, size]`; the last is padded with zeros."""
        padding = -len(samples) % self._size
        return torch.nn.functional.pad(samples.double(), (0, padding)).view(-1, self._size)


def _decibels(power: Tensor) -> Tensor:
    """Return powers in dB of full scale, `FLOOR` or more."""
    return 10 * power.clamp(min=10 ** (FLOOR / 10)).log10()
