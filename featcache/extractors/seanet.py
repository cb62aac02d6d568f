"""SEANet encoders over rows of different lengths, as EnCodec, Mimi and SpeechTokenizer have them.

The architecture is SoundStream's (Zeghidour et al., 2021) in the form of EnCodec (Défossez et al., 2022, "High Fidelity
Neural Audio Compression", section 3.1): a convolution; residual blocks, each followed by a strided convolution; an LSTM
in some models; a last convolution. Each codec has its own classes for them, which compute the same. Here they become
a list of a few kinds of layers, through which `run` passes rows together with their lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featcache.errors import ExtractorError
from featcache.extractors import ragged
from featcache.extractors.ragged import Activation, Padding, RaggedLSTM


@dataclass(frozen=True)
class Convolution:
    """A convolution, its padding at the two ends of a row, and the norm over time after it, if there is one."""

    conv: nn.Conv1d
    padding: Padding
    norm: nn.GroupNorm | None = None


@dataclass(frozen=True)
class Residual:
    """The sum of a block's output and its input; the input goes through a convolution if there is a shortcut."""

    block: list[Layer]
    shortcut: Convolution | None


@dataclass(frozen=True)
class Recurrence:
    """An LSTM whose input is added to its output; twice, side by side, if it runs in both directions."""

    lstm: RaggedLSTM


Layer = Convolution | Residual | Recurrence | Activation


def layers(modules: Iterable[nn.Module]) -> list[Layer]:
    """What the modules of an encoder, in eval mode and without weight norm, do one after another; an ExtractorError if
    one is of another kind."""
    found: list[Layer] = []
    for module in modules:
        if (convolution := _convolution(module)) is not None:
            found.append(convolution)
        elif isinstance(block := getattr(module, "block", None), Iterable):
            found.append(Residual(layers(block), _convolution(getattr(module, "shortcut", None))))
        elif isinstance(lstm := getattr(module, "lstm", None), nn.LSTM):
            found.append(Recurrence(RaggedLSTM(lstm)))
        elif isinstance(module, nn.ELU):
            found.append(_elu(module.alpha))
        elif isinstance(alpha := getattr(module, "alpha", None), nn.Parameter):
            found.append(_snake(alpha))
        else:
            raise ExtractorError(f"{type(module).__name__} is not a layer that featcache supports in a SEANet encoder")
    for layer, following in zip(found, [*found[1:], None], strict=True):
        if not isinstance(layer, Convolution | Residual | Recurrence) and not isinstance(following, Convolution):
            raise ExtractorError(
                "featcache does not support a SEANet encoder with an activation that no convolution follows"
            )
    return found


def _convolution(module: Any) -> Convolution | None:
    """The convolution that a module is, as `EncodecConv1d`, `MimiConv1d` or SpeechTokenizer's `SConv1d` pads it."""
    conv, norm = getattr(module, "conv", None), getattr(module, "norm", None)
    conv = getattr(conv, "conv", conv)  # SpeechTokenizer has one more module around it
    if not isinstance(conv, nn.Conv1d):
        return None
    columns = ragged.span(conv) - conv.stride[0]
    right = 0 if module.causal else columns // 2
    padding = Padding(columns - right, right, module.pad_mode, whole_strides=True)
    return Convolution(conv, padding, norm if isinstance(norm, nn.GroupNorm) else None)


def run(layers: Sequence[Layer], x_RCT: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run rows `[R, C, T]` with lengths int64 `[R]` through layers: `[R, C', T']`, and the new lengths. What comes
    after a row's end does not matter in the input, and is meaningless in the result."""
    activation: Activation | None = None
    for layer in layers:
        if isinstance(layer, Convolution):
            x_RCT, lengths = ragged.conv1d(layer.conv, x_RCT, lengths, layer.padding, activation)
            if layer.norm:
                x_RCT = ragged.group_norm(layer.norm, x_RCT, lengths)
            activation = None
        elif isinstance(layer, Residual):
            through, _ = run(layer.block, x_RCT, lengths)
            x_RCT = through.add_(run([layer.shortcut], x_RCT, lengths)[0] if layer.shortcut else x_RCT)
        elif isinstance(layer, Recurrence):
            y_RCT = layer.lstm(x_RCT, lengths)
            x_RCT = y_RCT + x_RCT.repeat(1, y_RCT.shape[1] // x_RCT.shape[1], 1)
        else:
            activation = layer  # applied by the convolution that follows
    return x_RCT, lengths


def convolutions(layers: Sequence[Layer]) -> Iterator[nn.Conv1d]:
    """The convolutions on the longest way through layers."""
    for layer in layers:
        if isinstance(layer, Convolution):
            yield layer.conv
        elif isinstance(layer, Residual):
            yield from convolutions(layer.block)


def _elu(alpha: float) -> Activation:
    def elu(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.ops.aten.elu.out(x, alpha, out=out)

    return elu


def _snake(alpha: torch.Tensor) -> Activation:
    """`x + sin²(alpha x) / alpha` with an alpha for each channel, `[1, C, 1]` (Ziyin et al. 2020)."""
    frequency, scale = alpha.detach(), (alpha.detach() + 1e-9).reciprocal()

    def snake(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(x, scale * torch.sin(frequency * x).pow_(2), out=out)

    return snake
