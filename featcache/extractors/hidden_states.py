"""The base of extractors whose features are a transformer's hidden states: one layer,
several stacked layers, or a weighted sum of layers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn

from featcache.errors import ConfigError
from featcache.extractors.model import Chunk, ModelExtractor, ModelParams, computing
from featcache.extractors.ragged import Length, normalized
from featcache.extractors.rows import Rows
from featcache.spec import FeatureSpec

_Numbers = tuple[float, ...] | None


class Encoder(ABC):
    """A model that runs on padded rows, each as if it were alone."""

    hop: int
    layers: nn.ModuleList
    """The transformer's layers. Later ones that are not wanted may be cut off."""

    most_samples: int | None = None
    """The length to which every row must be padded, and the most that the model takes;
    None for any length."""

    @abstractmethod
    def num_frames(self, num_samples: Length) -> Length:
        """Return the number of frames of so many samples; below 1 if they are too few."""

    @abstractmethod
    def hidden_states(self, waveforms: Tensor, num_samples: Tensor) -> Iterator[Tensor]:
        """Run the model on rows, float32 `[R, P]`, with lengths int64 `[R]`, each enough
        for a frame, as far as its results are consumed.

        Yield float `[R, F, D]`: the input of the first layer, the output of each layer,
        and last the model's output. What follows a row's end does not matter, and frames
        after its `num_frames` are meaningless."""


class HiddenStatesParams(ModelParams):
    """The parameters of extractors of hidden states. Layer N is the output of the N-th
    transformer layer, and layer 0 the input of the first: `hidden_states[N]` of
    transformers, and `extract_features` of torchaudio, where its number is N - 1."""

    taken: ClassVar[frozenset[str]] = frozenset({"layer", "layers", "weights_per_layer"})

    layer: int | None = Field(default=None, ge=0)
    """One layer: features `[frames, D]`. Without `layer` and `layers`, the features are the
    model's output (`last_hidden_state`): the last layer, after the final layer norm if the
    model has one. Numbered layers are taken before this norm. Only Whisper's last layer is
    taken after it, as in transformers 5 and torchaudio."""
    layers: tuple[int, ...] | None = None
    """Several layers, stacked in this order: features `[frames, layers, D]`."""
    weights_per_layer: tuple[float, ...] | None = None
    """A weight for each of `layers`. The features are the weighted sum, `[frames, D]`."""

    @field_validator("layers")
    @classmethod
    def _distinct(cls, layers: _Numbers, info: ValidationInfo) -> _Numbers:
        if layers is None:
            return None
        if info.data.get("layer") is not None:
            raise ValueError("give layer or layers, not both")
        if not layers or len(set(layers)) < len(layers) or min(layers) < 0:
            raise ValueError("give one or more different numbers, none below 0")
        return layers

    @field_validator("weights_per_layer")
    @classmethod
    def _one_weight_per_layer(cls, weights: _Numbers, info: ValidationInfo) -> _Numbers:
        num_layers = len(info.data.get("layers") or ())
        if weights is not None and "layers" in info.data and len(weights) != num_layers:
            raise ValueError(
                f"{len(weights)} given for {num_layers} layers; give one for each layer"
            )
        return weights


H = TypeVar("H", bound=HiddenStatesParams)


class HiddenStates(ModelExtractor[H]):
    """The base of extractors of hidden states. A subclass's `_prepare` ends with
    `_set_encoder`."""

    def _set_encoder(self, encoder: Encoder, size: int, name: str, epsilon: float | None) -> None:
        """Take a model whose hidden states have `size` dimensions. If it wants normalised
        waveforms, `epsilon` is added to their variance. Raises ConfigError if a chosen
        layer does not exist."""
        params, num_layers = self.params, len(encoder.layers)
        key = "layer" if params.layers is None else "layers"
        numbers = [n for n in params.layers or (params.layer,) if n is not None]
        highest = max(numbers, default=0)
        if highest > num_layers:
            raise ConfigError(f"params.{key}: {highest}; the model has layers 0 to {num_layers}")
        # one layer after the last stands for the model's output
        self._numbers = numbers or [num_layers + 1]
        encoder.layers = encoder.layers[: max(self._numbers)]
        self._encoder, self._epsilon = encoder, epsilon
        self.granularity = encoder.hop
        shape: tuple[int, ...] = (size,)
        if params.layers is not None and not params.weights_per_layer:
            shape = (len(numbers), size)
        units = f"{name}, {_title(params)}"
        if epsilon is not None:
            units += ", of the normalised waveform"
        frame_rate = self.sample_rate / encoder.hop
        # The frame length is 0: attention looks at the whole clip.
        self.spec = FeatureSpec(shape, "float32", frame_rate, 0, self.sample_rate, units)
        if params.chunk is not None:
            self._require_fitting(params.chunk)
        elif encoder.most_samples is not None:
            self.max_seconds = encoder.most_samples / self.sample_rate

    def _require_fitting(self, chunk: Chunk) -> None:
        most_seconds = (self._encoder.most_samples or math.inf) / self.sample_rate
        if chunk.seconds > most_seconds:
            raise ConfigError(
                f"params.chunk.seconds: {chunk.seconds:g}; the model takes {most_seconds:g} s "
                "at a time"
            )
        size = self._samples(chunk.seconds)
        lost = size - self._encoder.num_frames(size) * self.granularity
        if self._samples(chunk.overlap) < lost:
            seconds = lost / self.sample_rate
            raise ConfigError(
                f"params.chunk.overlap: {chunk.overlap:g}; the model needs {seconds:g} s"
            )
        self.pieces(size + 1)  # raises if the overlap is too long

    def num_frames(self, num_samples: int) -> int:
        return max(0, self._encoder.num_frames(num_samples))

    def padded_length(self, num_samples: int) -> int:
        return self._encoder.most_samples or super().padded_length(num_samples)

    def encode(self, waveforms: Tensor, num_samples: Tensor) -> Rows:
        return self.run(waveforms, num_samples)

    def run_for(self, takers: Sequence[Any], waveforms: Tensor, num_samples: Tensor) -> list[Rows]:
        # the others' models may be cut off before the layers that this one needs
        deepest = max(takers, key=lambda taker: max(taker._numbers))
        numbers = {number for taker in takers for number in taker._numbers}
        with computing(self.params.precision, waveforms.device):
            states = deepest._states(waveforms, num_samples, numbers)
            return [taker._take(states) for taker in takers]

    def _states(
        self, waveforms: Tensor, num_samples: Tensor, numbers: set[int]
    ) -> dict[int, Tensor]:
        if self._epsilon is not None:
            waveforms = normalized(waveforms, num_samples, self._epsilon)
        hidden_states = self._encoder.hidden_states(waveforms, num_samples)
        return {  # the model runs only as far as they need
            number: state.float()
            for number, state in enumerate(islice(hidden_states, max(numbers) + 1))
            if number in numbers
        }

    def _take(self, states: Mapping[int, Tensor]) -> Rows:
        """Return the features of hidden states by their numbers, which it does not change."""
        states_RFD = [states[number] for number in self._numbers]
        weights = self.params.weights_per_layer
        if self.params.layers is None:
            return Rows(states_RFD[0])
        if weights is None:
            return Rows(torch.stack(states_RFD, dim=2))
        sum_RFD = states_RFD[0] * weights[0]
        for hidden_RFD, weight in zip(states_RFD[1:], weights[1:], strict=True):
            sum_RFD.add_(hidden_RFD, alpha=weight)
        return Rows(sum_RFD)


def _title(params: HiddenStatesParams) -> str:
    if params.layers is None:
        return "output" if params.layer is None else f"hidden state {params.layer}"
    names = ", ".join(map(str, params.layers))
    if params.weights_per_layer is None:
        return f"hidden states {names}"
    weights = ", ".join(f"{weight:g}" for weight in params.weights_per_layer)
    return f"sum of hidden states {names}, weighted {weights}"
