"""SEANet encoders over rows of different lengths, as EnCodec, Mimi and SpeechTokenizer have them.

The architecture is SoundStream's (Zeghidour et al., 2021) as EnCodec's authors have it (Défossez et al., 2022, "High
Fidelity Neural Audio Compression", section 3.1): a convolution; residual blocks, each followed by a convolution that
strides; an LSTM, in some; a last convolution. Each codec brings classes of its own, but what they do is the same, so
here they become a list of a few kinds of layers, which `run` goes through with the rows' lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from featcache.errors import ExtractorError
from featcache.extractors import ragged
from featcache.extractors.ragged import Activation, Length, Padding, RaggedLSTM


@dataclass(frozen=True)
class Convolution:
    """A convolution, what it adds to the two ends of a row, and the norm over time behind it where there is one."""

    conv: nn.Conv1d
    padding: Padding
    norm: nn.GroupNorm | None = None


@dataclass(frozen=True)
class Residual:
    """The sum of two ways: through some layers, and past them or through another convolution."""

    block: list[Layer]
    shortcut: Convolution | None


@dataclass(frozen=True)
class Recurrence:
    """An LSTM whose input is added to its output; twice as wide, side by side, where it runs in both directions."""

    lstm: RaggedLSTM


Layer = Convolution | Residual | Recurrence | Activation


def layers(modules: Iterable[nn.Module], convolution: Callable[[nn.Module], Convolution | None]) -> list[Layer]:
    """What the modules of an encoder do, one after the other.

    Args:
        modules: a SEANet's own, in eval mode and without weight norm.
        convolution: what a module does if it is a convolution with its padding; else None.

    Raises:
        ExtractorError: there is a module of another kind.
    """
    found: list[Layer] = []
    for module in modules:
        if (padded := convolution(module)) is not None:
            found.append(padded)
        elif isinstance(block := getattr(module, "block", None), Iterable):
            shortcut = getattr(module, "shortcut", None)
            past = convolution(shortcut) if isinstance(shortcut, nn.Module) else None
            found.append(Residual(layers(block, convolution), past))
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


def run(layers: Sequence[Layer], x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run rows through layers: `[R, C, T]` and lengths int64 `[R]` to `[R, C', T']` and their lengths.

    What is behind a row's end does not matter in `x`, and means nothing in the result.
    """
    activation: Activation | None = None
    for layer in layers:
        if isinstance(layer, Convolution):
            x, lengths = ragged.conv1d(layer.conv, x, lengths, layer.padding, activation)
            if layer.norm:
                x = ragged.group_norm(layer.norm, x, lengths)
            activation = None
        elif isinstance(layer, Residual):
            through, _ = run(layer.block, x, lengths)
            x = through.add_(run([layer.shortcut], x, lengths)[0] if layer.shortcut else x)
        elif isinstance(layer, Recurrence):
            y = layer.lstm(x, lengths)
            x = y + x.repeat(1, y.shape[1] // x.shape[1], 1)
        else:
            activation = layer  # the convolution behind it applies it
    return x, lengths


def num_steps(layers: Sequence[Layer], num_samples: Length) -> Length:
    """Steps that layers make of so many samples: a number, or an int64 tensor."""
    for layer in layers:
        if isinstance(layer, Convolution):
            num_samples = ragged.output_lengths(num_samples, layer.conv, layer.padding)
    return num_samples


def receptive_field(layers: Sequence[Layer]) -> tuple[int, int]:
    """Samples that one step of the result looks at, where there is no LSTM; and samples from one step to the next."""
    field, hop = 1, 1
    for layer in layers:
        if isinstance(layer, Convolution):
            field += (ragged.span(layer.conv) - 1) * hop
            hop *= layer.conv.stride[0]
        elif isinstance(layer, Residual):
            field += (receptive_field(layer.block)[0] - 1) * hop
    return field, hop


def _elu(alpha: float) -> Activation:
    def elu(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.ops.aten.elu.out(x, alpha, out=out)

    return elu


def _snake(alpha: torch.Tensor) -> Activation:
    """`x + sin²(alpha x) / alpha`, for each channel its own alpha, `[1, C, 1]` (Ziyin et al. 2020)."""
    frequency, scale = alpha.detach(), (alpha.detach() + 1e-9).reciprocal()

    def snake(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(x, scale * torch.sin(frequency * x).pow_(2), out=out)

    return snake
