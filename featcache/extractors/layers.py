"""Which of a transformer's hidden states are the features: one layer, several, or a weighted sum."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import Field, ValidationInfo, field_validator

from featcache.errors import ConfigError
from featcache.extractors.base import Params


class LayerParams(Params):
    """The parameters that choose hidden states. Layer N is what the N-th transformer layer gives, 0 what goes into the
    first: `hidden_states[N]` of transformers, and `extract_features` of torchaudio, which calls it N - 1."""

    layer: int | None = Field(default=None, ge=0)
    """One layer: features `[frames, D]`. Without `layer` and `layers`, the features are the model's output
    (`last_hidden_state`): the last layer, after the final layer norm if the model has one. Numbered layers are taken
    before that norm, except Whisper's last layer, which is taken after it, as in transformers 5 and torchaudio."""
    layers: tuple[int, ...] | None = None
    """Several layers, stacked in this order: features `[frames, layers, D]`."""
    weights_per_layer: tuple[float, ...] | None = None
    """A weight for each of `layers`: the features are the weighted sum, `[frames, D]`."""

    @field_validator("layers")
    @classmethod
    def _distinct(cls, layers: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if layers is None:
            return layers
        if info.data.get("layer") is not None:
            raise ValueError("give layer or layers, not both")
        if not layers or len(set(layers)) < len(layers) or min(layers) < 0:
            raise ValueError("give one or more different numbers, none below 0")
        return layers

    @field_validator("weights_per_layer")
    @classmethod
    def _one_each(cls, weights: tuple[float, ...] | None, info: ValidationInfo) -> tuple[float, ...] | None:
        layers = info.data.get("layers")
        if weights is not None and "layers" in info.data and len(weights) != len(layers or ()):
            raise ValueError(f"{len(weights)} given for {len(layers or ())} layers; give one for each layer")
        return weights


class Layers:
    """The hidden states that are wanted of a model.

    Args:
        params: that choose them.
        num_layers: that the model has.

    Attributes:
        needed: how many of the model's transformer layers must be run.
        want_output: whether the model's output is wanted, and not a layer by its number.

    Raises:
        ConfigError: the model has not got one of them.
    """

    def __init__(self, params: LayerParams, num_layers: int) -> None:
        key, numbers = ("layer", (params.layer,)) if params.layers is None else ("layers", params.layers)
        for number in numbers:
            if number is not None and number > num_layers:
                raise ConfigError(f"params.{key}: {number}; the model has layers 0 to {num_layers}")
        self._numbers = [num_layers + 1 if number is None else number for number in numbers]
        self._stacked = params.layers is not None and params.weights_per_layer is None
        self._weights = params.weights_per_layer
        self.want_output = numbers == (None,)
        self.needed = min(max(self._numbers), num_layers)

    def item_shape(self, size: int) -> tuple[int, ...]:
        """The shape of a frame, of hidden states of `size` dimensions."""
        return (len(self._numbers), size) if self._stacked else (size,)

    @property
    def title(self) -> str:
        """What the features are, for a reader."""
        if self.want_output:
            return "output"
        names = ", ".join(map(str, self._numbers))
        if self._weights:
            return f"sum of hidden states {names}, weighted {', '.join(f'{weight:g}' for weight in self._weights)}"
        return f"hidden state{'s' if self._stacked else ''} {names}"

    def take(self, hidden_states: Iterable[torch.Tensor]) -> torch.Tensor:
        """Features, float32 `[R, F, *item_shape]`.

        Args:
            hidden_states: `[R, F, D]` each, from 0; behind the last layer's comes the model's output. It is left where
                nothing later is wanted.
        """
        found = {}
        for number, hidden in enumerate(hidden_states):
            if number in self._numbers:
                found[number] = hidden.float()
            if len(found) == len(self._numbers):
                break
        chosen = [found[number] for number in self._numbers]
        if self._stacked:
            return torch.stack(chosen, dim=2)
        if self._weights is None:
            return chosen[0]
        total = chosen[0] * self._weights[0]
        for hidden, weight in zip(chosen[1:], self._weights[1:], strict=True):
            total = total.add_(hidden, alpha=weight)
        return total
