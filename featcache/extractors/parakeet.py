"""Parakeet's encoder, a FastConformer (Rekesh et al. 2023, "Fast Conformer with Linearly
Scalable Attention for Efficient Speech Recognition"), over padded rows.

The model keeps padding out of its convolutions and its attention by a mask. Its front end
is that of `ParakeetFeatureExtractor`: log mel energies, each with zero mean and unit
variance over the clip's own frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from featcache.extractors import mel
from featcache.extractors.hidden_states import Encoder
from featcache.extractors.ragged import Length, centred_rows, is_inside

_RATE = 16000
_FFT_LENGTH, _LENGTH, _SHIFT = 512, 400, 160
_PREEMPHASIS = 0.97
_FLOOR, _EPSILON = 2.0**-24, 1e-5


class Parakeet(Encoder):
    """transformers' `ParakeetEncoder`, in eval mode, on rows. `T` are mel frames, `M` mel
    bins.

    A clip has a frame for each 1,280 samples that have begun, counted in its whole mel
    frames. For some clips, the model gives one frame more, which its own mask leaves
    out."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._factor: int = config.subsampling_factor
        self.hop = _SHIFT * self._factor
        filters = mel.hertz_filters(config.num_mel_bins, _FFT_LENGTH, _RATE)
        self._filters = filters.to(model.device, torch.float32)
        window = torch.hann_window(_LENGTH, periodic=False, device=model.device)
        sides = (_FFT_LENGTH - _LENGTH) // 2
        self._window = functional.pad(window, (sides, sides))
        self._subsampling = model.subsampling
        self._scale: float = model.input_scale
        self._positions = model.encode_positions
        self.layers = model.layers

    def num_frames(self, num_samples: Length) -> Length:
        mels = num_samples // _SHIFT
        # of a single mel frame there is no variance
        return -(-mels // self._factor) * (mels > 1)

    def hidden_states(self, waveforms: Tensor, num_samples: Tensor) -> Iterator[Tensor]:
        mels_RTM = self._mel_energies(waveforms, num_samples)
        inside_RT = is_inside(num_samples // _SHIFT, mels_RTM.shape[1])
        hidden_RFD = self._subsampling(mels_RTM, inside_RT) * self._scale
        yield hidden_RFD
        inside_RF = is_inside(self.num_frames(num_samples), hidden_RFD.shape[1])
        options = {
            "attention_mask": (inside_RF[:, None] & inside_RF[:, :, None])[:, None],
            "position_embeddings": self._positions(hidden_RFD),
        }
        for layer in self.layers:
            hidden_RFD = layer(hidden_RFD, **options)
            yield hidden_RFD
        yield hidden_RFD

    def _mel_energies(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        """Compute normalised log mel energies, float32 `[R, T, M]`, zero after each row's
        last whole frame."""
        emphasized_RP = waveforms_RP.clone()
        emphasized_RP[:, 1:] -= _PREEMPHASIS * waveforms_RP[:, :-1]
        outside_RP = ~is_inside(num_samples, waveforms_RP.shape[1])
        emphasized_RP = emphasized_RP.masked_fill_(outside_RP, 0)
        half = _FFT_LENGTH // 2
        frames_RTL = functional.pad(emphasized_RP, (half, half)).unfold(1, _FFT_LENGTH, _SHIFT)
        rows, steps = frames_RTL.shape[:2]
        windowed = frames_RTL.reshape(rows * steps, _FFT_LENGTH) * self._window
        spectrum = mel.power_spectrum(windowed, _FFT_LENGTH)
        mels_RTM = (spectrum @ self._filters + _FLOOR).log_().view(rows, steps, -1)
        centred_RTM, variance = centred_rows(mels_RTM, num_samples // _SHIFT, correction=1)
        return centred_RTM / (variance.sqrt() + _EPSILON)
