"""w2v-BERT 2.0 over padded rows, each row as if it were alone.

The model (Barrault et al. 2023, "Seamless", section 3.2.1) is a Conformer over Kaldi's log mel energies. Its front end
is that of `SeamlessM4TFeatureExtractor` in transformers: 80 mel bins, each with zero mean and unit variance over the
clip, two frames of 10 ms stacked into one. Its convolutions look back only. So what follows a row's end could change
the row through those means and variances and through attention, and is kept out of both. If a clip has an odd number of
mel frames, the feature extractor adds one, and its attention mask hides the stacked frame; here this frame is left out.

The mel energies are computed in float64, as in transformers. `fbank` computes them in float32. In bands without sound,
for example of speech from a telephone, their values are float32's rounding, which the division by each bin's variance
would amplify. Means and variances are taken in float64 too. transformers takes them in float32, which changes the
hidden states by up to some 1e-2 of their RMS where a bin hardly changes: in clips of 0.04 s, which have two frames, and
in quiet ones with an empty band.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from featcache.extractors import mel
from featcache.extractors.frames import BLOCK_ROWS
from featcache.extractors.ragged import Length, normalized

_STACKED = 2
"""Mel frames in one frame of the model."""

_LENGTH, _SHIFT = 400, 160
"""Samples of a mel frame, and samples from one mel frame to the next."""

_FFT_LENGTH = 512
_SCALE = 32768.0
_PREEMPHASIS = 0.97
_FLOOR = 1.192092955078125e-07

_EPSILON = 1e-7
"""Added to the variance before the root."""


class W2vBert:
    """transformers' `Wav2Vec2BertModel`, in eval mode, to be run on rows. Shapes are those of `RowExtractor`, with `T`
    mel frames and `M` mel bins."""

    most_samples: int | None = None
    hop = _STACKED * _SHIFT

    def __init__(self, model: Any) -> None:
        num_bins = model.config.feature_projection_input_dim // _STACKED
        self._filters = mel.kaldi_filters(num_bins, (20.0, 8000.0), _FFT_LENGTH, 16000).to(model.device)
        self._window = torch.hann_window(_LENGTH, periodic=False, dtype=torch.float64).pow(0.85).to(model.device)
        self._projection = model.feature_projection
        self._embed_positions = model.encoder.embed_positions
        self._embedding = threading.Lock()
        self._last = model.intermediate_ffn
        self.layers: nn.ModuleList = model.encoder.layers

    def num_frames(self, num_samples: Length) -> Length:
        """The number of frames of so many samples; below 1 if they are too few."""
        return _num_mels(num_samples) // _STACKED

    def hidden_states(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Iterator[torch.Tensor]:
        """Run the model on waveforms; see `Encoder.hidden_states`."""
        hidden_RFD = self._projection(self.mel_energies(waveforms, num_samples))[0]
        inside_RF = torch.arange(hidden_RFD.shape[1], device=hidden_RFD.device) < self.num_frames(num_samples)[:, None]
        hidden_RFD = hidden_RFD.masked_fill(~inside_RF[..., None], 0)
        yield hidden_RFD
        mask = hidden_RFD.new_zeros(inside_RF.shape).masked_fill_(~inside_RF, -torch.inf)[:, None, None, :]
        positions = self._positions(hidden_RFD)
        for layer in self.layers:
            outputs = layer(
                hidden_RFD, attention_mask=mask, relative_position_embeddings=positions, conv_attention_mask=inside_RF
            )
            hidden_RFD = outputs[0] if isinstance(outputs, tuple) else outputs
            yield hidden_RFD
        yield hidden_RFD + 0.5 * self._last(hidden_RFD) if self._last else hidden_RFD

    def mel_energies(self, waveforms_RP: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """The model's input: log mel energies with zero mean and unit variance, float32 `[R, F, 2 M]`."""
        frames_RTL = waveforms_RP.unfold(1, _LENGTH, _SHIFT)
        rows, num_mels = frames_RTL.shape[:2]
        mels_RTM = self._log_mels(frames_RTL.reshape(-1, _LENGTH)).view(rows, num_mels, -1)
        scaled_RTM = normalized(mels_RTM, _num_mels(num_samples), _EPSILON, correction=1).float()
        return scaled_RTM[:, : num_mels // _STACKED * _STACKED].reshape(rows, num_mels // _STACKED, -1)

    def _log_mels(self, frames: torch.Tensor) -> torch.Tensor:
        """Kaldi's log mel energies of frames `[n, 400]`: float64 `[n, M]`, rounded to values of float32. They are
        computed in blocks of one shape, as in `frames`."""
        found = []
        rows = BLOCK_ROWS[frames.device.type]
        for block in torch.split(frames, rows):
            filled = functional.pad(block.double() * _SCALE, (0, 0, 0, rows - len(block)))
            filled -= filled.mean(dim=1, keepdim=True)
            filled[:, 1:] -= _PREEMPHASIS * filled[:, :-1]
            filled[:, 0] *= 1 - _PREEMPHASIS
            energies = mel.power_spectrum(filled * self._window, _FFT_LENGTH) @ self._filters
            found.append(energies.clamp_(min=_FLOOR).log_()[: len(block)].float())
        return torch.cat(found).double()

    def _positions(self, hidden_RFD: torch.Tensor) -> torch.Tensor | None:
        """The embedding of positions, if the model has one. Its module keeps the last one, so one thread at a time."""
        if self._embed_positions is None:
            return None
        with self._embedding:
            positions: torch.Tensor = self._embed_positions(hidden_RFD)
            if positions.is_cuda:  # else another thread's stream may read it too early or too late
                positions = positions.clone()
                torch.cuda.current_stream().synchronize()
            return positions


def _num_mels(num_samples: Length) -> Length:
    """The number of mel frames."""
    return (num_samples - _LENGTH) // _SHIFT + 1
