"""The base of extractors whose features are a transformer's hidden states: `ssl` and `torchaudio`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

import torch
from torch import nn

from featcache.errors import ConfigError
from featcache.extractors.layers import LayerParams, Layers
from featcache.extractors.model import ModelExtractor, ModelParams
from featcache.extractors.rows import Piece, Rows
from featcache.extractors.wav2vec2 import normalized
from featcache.spec import FeatureSpec


class Encoder(Protocol):
    """A model that runs on padded rows, each as if it were alone: `Wav2Vec2`, `W2vBert`, `Whisper`.

    Attributes:
        hop: samples from one frame to the next.
        layers: may be cut short, where the later ones' hidden states are not wanted.
        most_samples: of a row; such a model pads all rows to this. None where any length will do.
    """

    hop: int
    layers: nn.ModuleList
    most_samples: int | None

    def num_frames(self, num_samples: int) -> int:
        """How many frames so many samples give; below 1 where they are too few."""

    def hidden_states(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Iterator[torch.Tensor]:
        """Hidden states `[R, F, D]` of rows `[R, P]`, from 0; and behind the last layer's, the model's output."""


class HiddenStatesParams(LayerParams, ModelParams):
    """The parameters of extractors of hidden states."""


H = TypeVar("H", bound=HiddenStatesParams)


class HiddenStates(ModelExtractor[H]):
    """The base of extractors of hidden states; a subclass's `__init__` ends in `_use`."""

    _encoder: Encoder
    _layers: Layers
    _epsilon: float | None

    def _use(
        self, encoder: Encoder, layers: Layers, size: int, name: str, sample_rate: int, epsilon: float | None
    ) -> None:
        """Take a model, and set what depends on it.

        Args:
            encoder: the model.
            layers: those that are wanted.
            size: dimensions of a hidden state.
            name: of the model, for a reader.
            sample_rate: that the model is for, in Hz.
            epsilon: under the root of the variance, where the model wants normalised waveforms; else None.

        Raises:
            ConfigError: the chunks do not go with the model.
        """
        self._encoder, self._layers, self._epsilon = encoder, layers, epsilon
        encoder.layers = encoder.layers[: layers.needed]
        self.granularity = encoder.hop
        self.spec = FeatureSpec(
            item_shape=layers.item_shape(size),
            dtype="float32",
            frame_rate=sample_rate / encoder.hop,
            frame_length=0,  # attention looks at the whole clip
            sample_rate=sample_rate,
            units=f"{name}, {layers.title}{'' if epsilon is None else ', of the normalised waveform'}",
        )
        most = None if encoder.most_samples is None else encoder.most_samples / self.spec.sample_rate
        if self.params.chunk is not None:
            self._check_chunks(self.params.chunk.seconds, self.params.chunk.overlap, most)
        elif most is not None:
            self.max_seconds = most

    def _check_chunks(self, seconds: float, overlap: float, most: float | None) -> None:
        if most is not None and seconds > most:
            raise ConfigError(f"params.chunk.seconds: {seconds:g}; the model takes {most:g} s at a time")
        size = self._samples(seconds)
        lost = size - self._encoder.num_frames(size) * self.granularity
        if self._samples(overlap) < lost:
            shared = lost / self.spec.sample_rate
            raise ConfigError(
                f"params.chunk.overlap: {overlap:g} s; chunks of this model must share {shared:g} s, or frames are lost"
            )
        self.pieces(size + 1)  # raises what is wrong with them

    def num_frames(self, num_samples: int) -> int:
        """How many frames `num_samples` samples give; 0 where there are too few for one."""
        return max(0, self._encoder.num_frames(num_samples))

    def pieces(self, num_samples: int) -> list[Piece]:
        """The clip whole, or its chunks; a last one in which no frame begins is left out."""
        return [piece for piece in super().pieces(num_samples) if piece.num_frames]

    def padded_length(self, num_samples: int) -> int:
        """Samples of the padded row of a piece of `num_samples`: as many as the model takes, where that is fixed."""
        return self._encoder.most_samples or super().padded_length(num_samples)

    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """The chosen hidden states, float32 `[R, F, *item_shape]`, of rows `[R, P]`."""
        if self._epsilon is not None:
            waveforms = normalized(waveforms, num_samples, self._epsilon)
        return Rows(self._layers.take(self._encoder.hidden_states(waveforms, num_samples)))
