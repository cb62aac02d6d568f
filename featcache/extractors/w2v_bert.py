"""w2v-BERT 2.0 over padded rows, each row as if it were alone.

The model (Barrault et al. 2023, "Seamless", section 3.2.1) is a Conformer over Kaldi's log mel energies. Its front end
is that of `SeamlessM4TFeatureExtractor` in transformers: 80 mel bins, each with zero mean and unit variance over the
clip, two frames of 10 ms stacked to one. Its convolutions look back only, so what follows a row's end reaches the row
through those means and variances and through attention, and is kept out of both. Where a clip has an odd number of mel
frames, the feature extractor adds one, and hides what the two are stacked to by its attention mask: here there is none.

The mel energies are computed in float64, as there. `fbank` computes them in float32, whose rounding is what is found in
bands that hold nothing, of speech from a telephone, say; and the division by each bin's variance makes much of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from featcache.extractors import mel
from featcache.extractors.frames import ROWS
from featcache.extractors.ragged import Length

_STACKED = 2
_LENGTH, _SHIFT = 400, 160
"""Samples of a frame of the mel energies, and from one to the next."""

_FFT_LENGTH = 512
_SCALE = 32768.0
_PREEMPHASIS = 0.97
_FLOOR = 1.192092955078125e-07

_EPSILON = 1e-7
"""Under the root of the variance."""


class W2vBert:
    """A w2v-BERT 2.0, to be run on rows.

    Shapes: `R` rows, `P` samples of a padded row, `F` frames of it, `D` dimensions of a hidden state, `T` frames of the
    mel energies, `M` mel bins.

    Args:
        model: transformers' `Wav2Vec2BertModel`, in eval mode.
        device: where it is.

    Attributes:
        hop: samples from one frame to the next.
        most_samples: None: a row may have any length.
        layers: the Conformer's. May be cut short, where the later ones' hidden states are not wanted.
    """

    most_samples: int | None = None
    hop = _STACKED * _SHIFT

    def __init__(self, model: Any, device: torch.device) -> None:
        num_bins = model.config.feature_projection_input_dim // _STACKED
        self._filters = mel.kaldi_filters(num_bins, (20.0, 8000.0), _FFT_LENGTH, 16000).to(device)
        self._window = torch.hann_window(_LENGTH, periodic=False, dtype=torch.float64).pow(0.85).to(device)
        self._projection = model.feature_projection
        self._embed_positions = model.encoder.embed_positions
        self._embedding = threading.Lock()
        self._last = model.intermediate_ffn
        self.layers = model.encoder.layers

    def num_frames(self, num_samples: Length) -> Length:
        """How many frames so many samples give: a number, or an int64 tensor. Below 1 where they are too few."""
        return _num_mels(num_samples) // _STACKED

    def hidden_states(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Iterator[torch.Tensor]:
        """Run the model, as far as its results are asked for.

        Args:
            waveforms: float32 `[R, P]`. What is behind a row's end does not matter.
            num_samples: int64 `[R]`, on the same device; every row's own, each enough for a frame.

        Yields:
            Float `[R, F, D]`: what goes into the first layer, what each of them gives, and last the model's output.
            Frames behind a row's `num_frames` mean nothing.
        """
        hidden = self._projection(self.mel_energies(waveforms, num_samples))[0]
        inside = torch.arange(hidden.shape[1], device=hidden.device) < self.num_frames(num_samples)[:, None]
        hidden = hidden.masked_fill(~inside[..., None], 0)
        yield hidden
        mask = hidden.new_zeros(inside.shape).masked_fill_(~inside, -torch.inf)[:, None, None, :]
        positions = self._positions(hidden)
        for layer in self.layers:
            outputs = layer(
                hidden, attention_mask=mask, relative_position_embeddings=positions, conv_attention_mask=inside
            )
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs
            yield hidden
        yield hidden + 0.5 * self._last(hidden) if self._last else hidden

    def mel_energies(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """What the model gets: log mel energies with zero mean and unit variance, float32 `[R, F, 2 M]`."""
        frames = waveforms.unfold(1, _LENGTH, _SHIFT)
        rows, num_mels = frames.shape[:2]
        mels = self._log_mels(frames.reshape(-1, _LENGTH)).view(rows, num_mels, -1)
        count = _num_mels(num_samples)[:, None, None]
        outside = torch.arange(num_mels, device=mels.device)[:, None] >= count
        mean = mels.masked_fill(outside, 0).sum(1, keepdim=True) / count
        centred = (mels - mean).masked_fill_(outside, 0)
        variance = centred.square().sum(1, keepdim=True) / (count - 1)
        scaled = (centred / (variance + _EPSILON).sqrt()).float()
        return scaled[:, : num_mels // _STACKED * _STACKED].reshape(rows, num_mels // _STACKED, -1)

    def _log_mels(self, frames: torch.Tensor) -> torch.Tensor:
        """Kaldi's log mel energies of frames `[n, 400]`: float64 `[n, M]`, with the values of float32.

        In blocks of one shape, as everything in `frames` is computed.
        """
        found = []
        rows = ROWS[frames.device.type]
        for block in torch.split(frames, rows):
            filled = functional.pad(block.double() * _SCALE, (0, 0, 0, rows - len(block)))
            filled -= filled.mean(dim=1, keepdim=True)
            filled[:, 1:] -= _PREEMPHASIS * filled[:, :-1]
            filled[:, 0] *= 1 - _PREEMPHASIS
            energies = mel.power_spectrum(filled * self._window, _FFT_LENGTH) @ self._filters
            found.append(energies.clamp_(min=_FLOOR).log_()[: len(block)].float())
        return torch.cat(found).double()

    def _positions(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The positions' embedding, where there is one. Its module keeps the last, so threads go in one by one."""
        if self._embed_positions is None:
            return None
        with self._embedding:
            positions: torch.Tensor = self._embed_positions(hidden)
            if positions.is_cuda:  # or another thread's stream reads what is not there yet, or no longer
                positions = positions.clone()
                torch.cuda.current_stream().synchronize()
            return positions


def _num_mels(num_samples: Length) -> Length:
    """Frames of the mel energies."""
    return (num_samples - _LENGTH) // _SHIFT + 1
