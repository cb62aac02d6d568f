"""From windowed frames to mel energies: the power spectrum, the mel scales, and banks of
triangular filters.

Filters are computed in float64 and rounded to float32 once: features come closer to the
formula than by float32."""

from __future__ import annotations

import math
from typing import Literal

import torch

from featcache.errors import ConfigError, listing
from featcache.extractors.frames import COLUMN_MULTIPLE, with_whole_columns

MelScale = Literal["htk", "slaney"]
MelNorm = Literal["slaney", "none"]
Band = tuple[float, float]

MOST_BINS = 1024
"""The most filters of a bank, several times what speech has been given. Without a limit,
a typing error would ask for a matrix of gigabytes before anything could be said about
it."""


def power_spectrum(frames: torch.Tensor, fft_length: int) -> torch.Tensor:
    """The squared magnitude of the Fourier transform of length `N` of real frames,
    float32 `[B, L]`, `L <= N`, padded with zeros: float32 `[B, N // 2 + 1]`."""
    real, imaginary = torch.view_as_real(torch.fft.rfft(frames, n=fft_length)).square_().unbind(-1)
    return real + imaginary


class MelBank:
    """A bank of filters, float64 `[F, M]`, from `kaldi_filters` or `hertz_filters`,
    applied to spectra.

    A filter overlaps only its neighbours, so most of the bank's matrix is zeros. On a CPU
    it is applied as a few narrow products, each of 16 neighbouring filters with only the
    frequencies that they touch, in less than half the time of the whole product. (Fewer
    filters make products too narrow for the CPU's kernels; more filters multiply more
    zeros.) On a GPU, one product is faster than several.

    Raises ConfigError if a filter contains no frequency of the spectrum, so that its bin
    would be constant."""

    def __init__(self, filters: torch.Tensor, device: torch.device) -> None:
        if empty := (filters == 0).all(dim=0).nonzero().flatten().tolist():
            what = (
                f"{filters.shape[1]} bins are too many: no frequency is in bin "
                f"{listing(map(str, empty))} (from 0)"
            )
            raise ConfigError(
                f"params.num_mel_bins: {what}; ask for fewer, a wider band, or a longer frame"
            )
        self._num_bins = filters.shape[1]
        filters = with_whole_columns(filters)
        self._num_columns = filters.shape[1]
        self._bands = []
        step = COLUMN_MULTIPLE if device.type == "cpu" else self._num_columns
        for first in range(0, self._num_columns, step):
            bins = slice(first, first + step)
            touched = filters[:, bins].any(dim=1).nonzero().flatten()
            frequencies = slice(int(touched[0]), int(touched[-1]) + 1)
            weights = filters[frequencies, bins].to(device, torch.float32).contiguous()
            self._bands.append((frequencies, weights, bins))

    def __call__(self, spectrum: torch.Tensor) -> torch.Tensor:
        """The energies of a spectrum, float32 `[B, F]`, under each filter: float32 `[B,
        M]`."""
        energies = spectrum.new_empty(len(spectrum), self._num_columns)
        for frequencies, weights, bins in self._bands:
            torch.mm(spectrum[:, frequencies], weights, out=energies[:, bins])
        return energies[:, : self._num_bins]


def frequency_band(low_freq: float, high_freq: float, sample_rate: int) -> Band:
    """The band of a mel bank in Hz; `high_freq <= 0` is an offset from the Nyquist
    frequency, as in Kaldi. Raises ConfigError if it is empty, or reaches below 0 or above
    Nyquist."""
    nyquist = sample_rate / 2
    high = high_freq if high_freq > 0 else nyquist + high_freq
    if high > nyquist:
        what = (
            f"{high_freq:g} Hz is above {nyquist:g} Hz, the Nyquist frequency at "
            f"audio.sample_rate {sample_rate}"
        )
        raise ConfigError(
            f"params.high_freq: {what}; 0 stands for it, and -400 for 400 Hz below it"
        )
    if not 0 <= low_freq < high:
        end = (
            f"{high:g} Hz, where the filters end (high_freq {high_freq:g}, "
            f"audio.sample_rate {sample_rate})"
        )
        raise ConfigError(f"params.low_freq: {low_freq:g} Hz is not between 0 and {end}")
    return low_freq, high


def hertz_to_mel(hertz: torch.Tensor, scale: MelScale) -> torch.Tensor:
    """Frequencies in mel.

    `htk` is O'Shaughnessy's formula as in HTK and Kaldi: 1127 ln(1 + f / 700). `slaney`
    is that of Slaney's Auditory Toolbox, librosa's default: linear to 1 kHz, or 15 mel;
    logarithmic above, where 27 mel are a factor of 6.4."""
    if scale == "htk":
        return 1127 * torch.log1p(hertz / 700)
    logarithmic = 15 + torch.log(hertz.clamp(min=1000) / 1000) * (27 / math.log(6.4))
    return torch.where(hertz < 1000, hertz * (15 / 1000), logarithmic)


def mel_to_hertz(mel: torch.Tensor, scale: MelScale) -> torch.Tensor:
    """The inverse of `hertz_to_mel`."""
    if scale == "htk":
        return 700 * torch.expm1(mel / 1127)
    return torch.where(
        mel < 15, mel * (1000 / 15), 1000 * torch.exp((mel - 15) * (math.log(6.4) / 27))
    )


def kaldi_filters(num_bins: int, band: Band, fft_length: int, sample_rate: int) -> torch.Tensor:
    """Kaldi's bank: triangles over *mel* with a peak of 1 (`MelBanks` in
    `mel-computations.cc`).

    The first of `M` filters begins and the last ends at the frequencies of `band`, in Hz;
    `fft_length` is `N`, in samples. Float64 `[N // 2 + 1, M]`: Kaldi leaves out the
    Nyquist frequency, at which all filters are 0 anyway."""
    corners = _corners(num_bins, band, "htk")
    return _triangles(hertz_to_mel(_frequencies(fft_length, sample_rate), "htk"), corners)


def hertz_filters(
    num_bins: int, band: Band, fft_length: int, sample_rate: int, scale: MelScale, norm: MelNorm
) -> torch.Tensor:
    """The Auditory Toolbox's bank, as in librosa: triangles over *Hz* whose corners are
    equidistant in mel of `scale`. With norm `slaney`, each filter has area 1 in Hz; with
    `none`, peak 1. Otherwise as `kaldi_filters`."""
    corners = mel_to_hertz(_corners(num_bins, band, scale), scale)
    filters = _triangles(_frequencies(fft_length, sample_rate), corners)
    return filters * (2 / (corners[2:] - corners[:-2])) if norm == "slaney" else filters


def _frequencies(fft_length: int, sample_rate: int) -> torch.Tensor:
    return torch.arange(fft_length // 2 + 1, dtype=torch.float64) * (sample_rate / fft_length)


def _corners(num_bins: int, band: Band, scale: MelScale) -> torch.Tensor:
    """The filters' corners in mel, `[M + 2]`: filter `m` rises from corner `m`, peaks at
    `m + 1`, ends at `m + 2`."""
    first, last = hertz_to_mel(torch.tensor(band, dtype=torch.float64), scale).tolist()
    return torch.linspace(first, last, num_bins + 2, dtype=torch.float64)


def _triangles(positions: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    rising = (positions[:, None] - left) / (peak - left)
    falling = (right - positions[:, None]) / (right - peak)
    # The threshold is just above 0, so a filter is 0 at a frequency on its corner,
    # however the corner was rounded.
    return torch.threshold(torch.minimum(rising, falling), 1e-12, 0)
