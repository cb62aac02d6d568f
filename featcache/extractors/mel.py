"""From windowed frames to mel energies. Filters are computed in float64 and rounded once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from featcache.errors import ConfigError, listing
from featcache.extractors.frames import COLUMN_MULTIPLE, with_whole_columns

if TYPE_CHECKING:  # torch is executed when it is used
    from torch import Tensor

MelScale = Literal["htk", "slaney"]
MelNorm = Literal["slaney", "none"]
Band = tuple[float, float]

MOST_BINS = 1024
"""The most filters of a bank: a typing error could ask for a matrix of gigabytes."""


_UPDATES = 100
_TINY = 1e-30


def power_spectrum(frames: Tensor, fft_length: int) -> Tensor:
    """Return the squared magnitude of the Fourier transform, of length `N`, of real
    frames, float32 `[B, L]`, `L <= N`, padded with zeros: float32 `[B, N // 2 + 1]`."""
    real, imaginary = torch.view_as_real(torch.fft.rfft(frames, n=fft_length)).square_().unbind(-1)
    return real + imaginary


class MelBank:
    """A bank of filters, float64 `[F, M]`, from `kaldi_filters` or `hertz_filters`, applied
    to spectra. Raises ConfigError if a filter contains no frequency of the spectrum.

    On a CPU, products of 16 neighbouring filters with only the frequencies that they touch
    take less than half the time; on a GPU, one product is faster."""

    def __init__(self, filters: Tensor, device: torch.device) -> None:
        empty = (filters == 0).all(dim=0).nonzero().flatten().tolist()
        if empty:
            raise ConfigError(
                f"params.num_mel_bins: {filters.shape[1]} bins are too many: no frequency is in "
                f"bin {listing(map(str, empty))} (from 0); ask for fewer, a wider band, or a "
                "longer frame"
            )
        self._num_bins = filters.shape[1]
        self._num_frequencies = len(filters)
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

    def __call__(self, spectrum: Tensor) -> Tensor:
        energies = spectrum.new_empty(len(spectrum), self._num_columns)
        for frequencies, weights, bins in self._bands:
            torch.mm(spectrum[:, frequencies], weights, out=energies[:, bins])
        return energies[:, : self._num_bins]

    def spectra_of(self, energies: Tensor) -> Tensor:
        """Estimate the spectra `[T, N // 2 + 1]`, at least 0, that have these energies, at
        least 0, `[T, M]`, by the updates of Lee and Seung (2001, "Algorithms for
        non-negative matrix factorization")."""
        filters = energies.new_zeros(self._num_frequencies, self._num_columns)
        for frequencies, weights, bins in self._bands:
            filters[frequencies, bins] = weights
        filters = filters[:, : self._num_bins]
        wanted = energies @ filters.T
        spectra = wanted / filters.square().sum().clamp(min=_TINY)
        for _ in range(_UPDATES):
            spectra = spectra * wanted / (spectra @ filters @ filters.T).clamp(min=_TINY)
        return spectra


def frequency_band(low_freq: float, high_freq: float, sample_rate: int) -> Band:
    """Return the band of a mel bank in Hz; `high_freq <= 0` is an offset from the Nyquist
    frequency, as in Kaldi. Raises ConfigError if the band is empty, or reaches below 0 or
    above Nyquist."""
    nyquist = sample_rate / 2
    high = high_freq if high_freq > 0 else nyquist + high_freq
    if high > nyquist:
        raise ConfigError(
            f"params.high_freq: {high_freq:g} Hz is above {nyquist:g} Hz, the Nyquist frequency "
            f"at audio.sample_rate {sample_rate}; 0 stands for it, and -400 for 400 Hz below it"
        )
    if not 0 <= low_freq < high:
        raise ConfigError(
            f"params.low_freq: {low_freq:g} Hz is not between 0 and {high:g} Hz, where the "
            f"filters end (high_freq {high_freq:g}, audio.sample_rate {sample_rate})"
        )
    return low_freq, high


def hertz_to_mel(hertz: Tensor, scale: MelScale) -> Tensor:
    """Convert frequencies to mel.

    `htk` is O'Shaughnessy's formula as in HTK and Kaldi: 1127 ln(1 + f / 700). `slaney` is
    the scale of Slaney's Auditory Toolbox, librosa's default: linear to 1 kHz, or 15 mel.
    Above, it is logarithmic: 27 mel are a factor of 6.4."""
    if scale == "htk":
        return 1127 * torch.log1p(hertz / 700)
    logarithmic = 15 + torch.log(hertz.clamp(min=1000) / 1000) * (27 / math.log(6.4))
    return torch.where(hertz < 1000, hertz * (15 / 1000), logarithmic)


def mel_to_hertz(mel: Tensor, scale: MelScale) -> Tensor:
    """Invert `hertz_to_mel`."""
    if scale == "htk":
        return 700 * torch.expm1(mel / 1127)
    return torch.where(
        mel < 15, mel * (1000 / 15), 1000 * torch.exp((mel - 15) * (math.log(6.4) / 27))
    )


def kaldi_filters(num_bins: int, band: Band, fft_length: int, sample_rate: int) -> Tensor:
    """Compute Kaldi's bank: triangles over *mel* with a peak of 1 (`MelBanks` in
    `mel-computations.cc`), float64 `[N // 2 + 1, M]`.

    The first of `M` filters begins and the last ends at the frequencies of `band`, in Hz;
    `fft_length` is `N`, in samples. Kaldi leaves out the Nyquist frequency, at which all
    filters are 0 anyway."""
    corners = _corners(num_bins, band, "htk")
    return _triangles(hertz_to_mel(_frequencies(fft_length, sample_rate), "htk"), corners)


def hertz_filters(
    num_bins: int,
    fft_length: int,
    sample_rate: int,
    band: Band | None = None,
    scale: MelScale = "slaney",
    norm: MelNorm = "slaney",
) -> Tensor:
    """Compute the Auditory Toolbox's bank, as in librosa: triangles over *Hz* whose
    corners are equidistant in mel of `scale`; by default up to Nyquist. With norm `slaney`,
    each filter has area 1 in Hz; with `none`, peak 1. Otherwise as `kaldi_filters`."""
    corners = mel_to_hertz(_corners(num_bins, band or (0.0, sample_rate / 2), scale), scale)
    filters = _triangles(_frequencies(fft_length, sample_rate), corners)
    if norm == "slaney":
        filters = filters * (2 / (corners[2:] - corners[:-2]))
    return filters


def _frequencies(fft_length: int, sample_rate: int) -> Tensor:
    return torch.arange(fft_length // 2 + 1, dtype=torch.float64) * (sample_rate / fft_length)


def _corners(num_bins: int, band: Band, scale: MelScale) -> Tensor:
    """Return the filters' corners in mel, `[M + 2]`: filter `m` rises from corner `m`,
    peaks at `m + 1`, ends at `m + 2`."""
    first, last = hertz_to_mel(torch.tensor(band, dtype=torch.float64), scale).tolist()
    return torch.linspace(first, last, num_bins + 2, dtype=torch.float64)


def _triangles(positions: Tensor, corners: Tensor) -> Tensor:
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    rising = (positions[:, None] - left) / (peak - left)
    falling = (right - positions[:, None]) / (right - peak)
    # just above 0, so a filter is 0 on its corner, however that was rounded
    return torch.threshold(torch.minimum(rising, falling), 1e-12, 0)
