"""Waveforms from magnitude spectra: Griffin and Lim (1984, "Signal estimation from modified
short-time Fourier transform"), with the momentum of Perraudin, Balazs and Søndergaard
(2013, "A fast Griffin-Lim algorithm")."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_ITERATIONS = 60
_MOMENTUM = 0.99

_LEAST_OVERLAP = 1e-2
"""The smallest sum of squared windows that samples are divided by, relative to the largest:
at the ends of a clip, windows begin at zero."""


def griffin_lim(magnitudes: Tensor, window: Tensor, hop: int, n_fft: int) -> Tensor:
    """Find a waveform, float32 `[(T - 1) * hop + L]`, whose spectra have about these
    magnitudes. The phases begin at random, and always the same.

    Args:
        magnitudes: Of the Fourier transform of each windowed frame, padded at its end to
            `n_fft` samples: float32 `[T, n_fft // 2 + 1]`.
        window: float32 `[L]`, `L <= n_fft`.
        hop: The samples from one frame to the next."""
    length, count = len(window), len(magnitudes)
    size = (1, (count - 1) * hop + length)
    kernel = {"kernel_size": (1, length), "stride": (1, hop)}

    def overlap_add(frames: Tensor) -> Tensor:
        return torch.nn.functional.fold(frames.mT[None], size, **kernel).flatten()

    weights = overlap_add(window.square().expand(count, length).contiguous())
    weights = weights.clamp(min=float(weights.max()) * _LEAST_OVERLAP)

    def waveform_of(spectra: Tensor) -> Tensor:
        frames = torch.fft.irfft(spectra, n=n_fft)[:, :length]
        return overlap_add(frames * window) / weights

    random = torch.Generator().manual_seed(0)
    phases = torch.rand(magnitudes.shape, generator=random) * (2 * math.pi)
    spectra = torch.polar(magnitudes, phases.to(magnitudes.device))
    before = torch.zeros_like(spectra)
    for _ in range(_ITERATIONS):
        frames = waveform_of(spectra).unfold(0, length, hop)
        consistent = torch.fft.rfft(frames * window, n=n_fft)
        ahead = consistent + _MOMENTUM * (consistent - before)
        before = consistent
        spectra = torch.polar(magnitudes, ahead.angle())
    return waveform_of(spectra)
