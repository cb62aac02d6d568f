"""Whisper's encoder over rows.

The model (Radford et al. 2022, "Robust speech recognition via large-scale weak supervision") always takes 30 s, and a
shorter clip is followed by silence: what is behind a row's end is known, whatever is beside it. Frames of that silence
are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from featcache.extractors.base import Clip
from featcache.extractors.log_mel import LogMel, LogMelParams
from featcache.extractors.ragged import Length


class Whisper:
    """Whisper's encoder, to be run on rows.

    Shapes: `R` rows, `P` samples of a padded row, `F` frames of it, `D` dimensions of a hidden state.

    Args:
        encoder: of transformers' `WhisperModel`, in eval mode.
        device: where it is.

    Attributes:
        hop: samples from one frame to the next.
        most_samples: that the model takes: 30 s.
        layers: the transformer's. May be cut short, where the later ones' hidden states are not wanted.
    """

    def __init__(self, encoder: Any, device: torch.device) -> None:
        params = LogMelParams(num_mel_bins=encoder.config.num_mel_bins)
        self._log_mel = LogMel(params, 16000, device)
        self._convolutions = (encoder.conv1, encoder.conv2)
        self._positions = encoder.embed_positions
        self._layer_norm = encoder.layer_norm
        self.hop: int = params.hop_length * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        self._num_samples: int = encoder.config.max_source_positions * self.hop
        self.most_samples: int | None = self._num_samples
        self.layers = encoder.layers
        self._num_layers = len(encoder.layers)

    def num_frames(self, num_samples: Length) -> Length:
        """Frames that begin in so many samples."""
        return (num_samples + self.hop - 1) // self.hop

    def hidden_states(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Iterator[torch.Tensor]:
        """Run the model, as far as its results are asked for.

        Args:
            waveforms: float32 `[R, P]`, at most `most_samples`. What is behind a row's end does not matter.
            num_samples: int64 `[R]`, on the same device; every row's own.

        Yields:
            Float `[R, F, D]`, of 30 s: what goes into the first layer; what each of them gives, the last through the
            final layer norm; and that once more, being the model's output.
        """
        convolved = self._mels(waveforms, num_samples).transpose(1, 2)
        for convolution in self._convolutions:
            convolved = functional.gelu(convolution(convolved))
        hidden = convolved.transpose(1, 2) + self._positions.weight
        yield hidden
        for number, layer in enumerate(self.layers, start=1):
            outputs = layer(hidden, None)
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs
            if number < self._num_layers:
                yield hidden
        output = self._layer_norm(hidden)
        yield from (output, output)

    def _mels(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """Log mel spectrograms of 30 s, float32 `[R, 2 F, M]`."""
        outside = torch.arange(waveforms.shape[1], device=waveforms.device) >= num_samples[:, None]
        silent = waveforms.masked_fill(outside, 0)
        padded = functional.pad(silent, (0, self._num_samples - waveforms.shape[1]))
        with torch.autocast(waveforms.device.type, enabled=False):
            return torch.stack(self._log_mel.extract([Clip("", row) for row in padded]))
