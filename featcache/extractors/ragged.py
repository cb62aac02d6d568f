"""Layers over rows of different lengths, each row computed as if it were alone.

A batch of rows is a tensor `x_RCT`, `[R, C, T]`, and `lengths`, int64 `[R]` on the same
device, each from 1 to `T`. Row r is `x_RCT[r, :, : lengths[r]]`; what follows it is
meaningless, and may be anything.

Why a row's result is the same as alone: take one layer, and suppose that its input is
right up to each row's end. A convolution's output at step t is a function of `span`
columns of its padded input. For steps before the row's new end, these columns are the
row's own, or among the few that its padding rule adds at its two ends; these few are
written where the row ends, not where the tensor ends. So the output is right up to each
row's new end, and so on through any number of layers: nothing from after a row's end ever
gets before it. Norms take their statistics from the row's own steps, and an LSTM that
runs backwards starts at the row's own last step.

Shapes depend on `T` alone, and indices are computed from `lengths` on the device, so the
host never waits for them.

`seanet_layers` and `run` put these layers together to SEANet encoders, which EnCodec,
Mimi and SpeechTokenizer have. The architecture is SoundStream's (Zeghidour et al., 2021)
in the form of EnCodec (Défossez et al., 2022, "High Fidelity Neural Audio Compression",
section 3.1): a convolution; residual blocks, each followed by a strided convolution; an
LSTM in some models; a last convolution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from featcache.errors import ExtractorError

Ragged = tuple[torch.Tensor, torch.Tensor]
"""Rows `x_RCT`, `[R, C, T]`, and their lengths, int64 `[R]`."""

Mode = Literal["constant", "reflect", "replicate"]
Activation = Callable[[torch.Tensor, torch.Tensor], None]
"""Computes a function of its first argument, element by element, and writes it to its
second."""

Length = TypeVar("Length", int, torch.Tensor)


def span(conv: nn.Conv1d) -> int:
    """The number of input columns that one step of the output depends on."""
    return (conv.kernel_size[0] - 1) * conv.dilation[0] + 1


def own_padding(conv: nn.Conv1d) -> int:
    """The columns of zeros that a convolution module adds to each end by itself."""
    columns = conv.padding[0]
    assert isinstance(columns, int)
    assert conv.padding_mode == "zeros"
    return columns


def convolutions(encoder: nn.Module) -> list[nn.Conv1d]:
    """The convolutions of an encoder, in the order in which they run: that in which all
    encoders here make them. (Those of shortcuts are one step wide, and change no
    length.)"""
    return [module for module in encoder.modules() if isinstance(module, nn.Conv1d)]


def steps_after(lengths: Length, convs: Iterable[nn.Conv1d]) -> Length:
    """The number of steps that convolutions, one after another, which pad with zeros by
    themselves, make of `lengths` steps; 0 or less if they are too few."""
    for conv in convs:
        lengths = (lengths + 2 * own_padding(conv) - span(conv)) // conv.stride[0] + 1
    return lengths


def receptive_field(convs: Iterable[nn.Conv1d]) -> tuple[int, int]:
    """The samples that one step depends on after convolutions, one after another; and the
    samples between two steps."""
    field, hop = 1, 1
    for conv in convs:
        field += (span(conv) - 1) * hop
        hop *= conv.stride[0]
    return field, hop


def is_inside(lengths: torch.Tensor, steps: int) -> torch.Tensor:
    """Which of so many steps are before each row's end: bool `[R, T]`."""
    return torch.arange(steps, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class Convolution:
    """A convolution of each row, padded at its own ends as in EnCodec: by as many columns
    as its span is longer than its stride, and by those that complete the last stride. So
    n steps become n / stride, rounded up."""

    conv: nn.Conv1d
    """The module, whose own padding is not used."""
    causal: bool
    """Whether all columns come before the row, but for those that complete a stride.
    Otherwise, half of them do."""
    mode: Mode
    """What the columns hold, as in `torch.nn.functional.pad`; `constant` is zero. A row
    too short to be reflected is first extended by zeros, as in EnCodec
    (`EncodecConv1d._pad1d`)."""
    activation: Activation | None = None
    """What is applied to the rows first, without a pass of its own: rows are copied
    anyway, to be padded."""

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of columns before and after a row, without those that complete a
        stride."""
        columns = span(self.conv) - self.conv.stride[0]
        right = 0 if self.causal else columns // 2
        return columns - right, right

    def __call__(self, x_RCT: torch.Tensor, lengths: torch.Tensor) -> Ragged:
        """The convolved rows, `[R, C', T']`, and their lengths `[R]`."""
        conv, (left, right) = self.conv, self.sides
        after = right + conv.stride[0] - 1
        if left or after or self.activation:
            x_RCT = self._padded(x_RCT, lengths, after)
        y_RCT = F.conv1d(x_RCT, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
        return y_RCT, -(-lengths // conv.stride[0])

    def _padded(self, x_RCT: torch.Tensor, lengths: torch.Tensor, after: int) -> torch.Tensor:
        """A copy of the rows, `[R, C, left + T + after]`, in which each row is padded at
        its own ends; `after` is `stride - 1` more than `right`: columns of which a row
        needs some, all or none."""
        num_rows, channels, steps = x_RCT.shape
        left, _ = self.sides
        padded_RCT = x_RCT.new_empty(num_rows, channels, left + steps + after)
        inside_RCT = padded_RCT[..., left : left + steps]
        if self.activation:
            self.activation(x_RCT, inside_RCT)
        else:
            inside_RCT.copy_(x_RCT)
        # nothing uninitialised may get into sums, even into those left out
        padded_RCT[..., left + steps :] = 0
        if self.mode == "constant":
            padded_RCT[..., :left] = 0
            zero_after_(padded_RCT, left + lengths, after)
            return padded_RCT
        before_RN = torch.arange(-left, 0, device=x_RCT.device).expand(num_rows, -1)
        at_RN = torch.cat(
            [before_RN, lengths[:, None] + torch.arange(after, device=x_RCT.device)], 1
        )
        columns_RCN = self._columns(inside_RCT, lengths, at_RN)
        return padded_RCT.scatter_(2, (left + at_RN)[:, None].expand(-1, channels, -1), columns_RCN)

    def _columns(
        self, x_RCT: torch.Tensor, lengths: torch.Tensor, at_RN: torch.Tensor
    ) -> torch.Tensor:
        """The columns that belong at the steps `at_RN`, before the rows (below 0) or
        after them: `[R, C, N]`."""
        ends, (left, right) = lengths[:, None], self.sides
        if self.mode == "replicate":
            source_RN, is_zero = at_RN.clamp(min=0).minimum(ends - 1), None
        else:
            mirror = (
                (ends - 1)
                .clamp(min=max(left, right))
                .maximum(right + (-ends) % self.conv.stride[0])
            )
            # Below 0 are columns that the row does not need; from its end on, zeros that
            # made it long enough.
            source_RN = torch.where(at_RN < 0, -at_RN, 2 * mirror - at_RN).clamp(min=0)
            is_zero = ((at_RN >= 0) & (at_RN <= mirror)) | (source_RN >= ends)
            source_RN = source_RN.clamp(max=x_RCT.shape[-1] - 1)
        columns_RCN = x_RCT.gather(2, source_RN[:, None].expand(-1, x_RCT.shape[1], -1))
        return columns_RCN if is_zero is None else columns_RCN.masked_fill_(is_zero[:, None], 0)


def zero_padded_conv1d(conv: nn.Conv1d, x_RCT: torch.Tensor, lengths: torch.Tensor) -> Ragged:
    """A convolution of each row that pads with zeros by itself: a `Convolution` without a
    copy. In `x_RCT`, the columns after each row's end that the convolution looks at are
    overwritten."""
    zero_after_(x_RCT, lengths, own_padding(conv))
    y_RCT = F.conv1d(
        x_RCT, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups
    )
    return y_RCT, steps_after(lengths, [conv])


def zero_after_(x_RCT: torch.Tensor, lengths: torch.Tensor, columns: int) -> None:
    """Set so many columns after each row's end to zero, in place; fewer if the tensor
    ends before."""
    last = x_RCT.shape[-1] - 1
    at = (lengths[:, None] + torch.arange(columns, device=x_RCT.device)).clamp_(max=last)
    at = at[:, None].expand(-1, x_RCT.shape[1], -1)
    # A row that ends where the tensor ends keeps its own last column; all other rows get
    # zeros.
    x_RCT.scatter_(2, at, x_RCT.gather(2, at).masked_fill_((lengths <= last)[:, None, None], 0))


def mask_(x_RCT: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Set everything after each row's end to zero, in place, and return `x_RCT`, float32."""
    inside_R1T = is_inside(lengths, x_RCT.shape[-1])[:, None]
    # Bitwise, since a product would keep NaN, and masked_fill_ takes ten times as long on
    # a CPU.
    x_RCT.view(torch.int32).bitwise_and_(-inside_R1T.int())
    return x_RCT


def group_norm(norm: nn.GroupNorm, x_RCT: torch.Tensor, lengths: torch.Tensor) -> Ragged:
    """A group norm with weights, by mean and variance of rows' own steps; the lengths.
    Overwrites float32 `x_RCT`."""
    num_rows, channels, _ = x_RCT.shape
    x_RCT = mask_(x_RCT.float(), lengths)
    grouped = x_RCT.view(num_rows, norm.num_groups, -1)
    counts = lengths[:, None, None] * (channels // norm.num_groups)
    grouped -= grouped.sum(2, keepdim=True) / counts
    variance = mask_(x_RCT, lengths).view_as(grouped).square().sum(2, keepdim=True) / counts
    scale = (variance + norm.eps).rsqrt()  # [R, G, 1]
    # [R, C, 1]
    scale = scale.repeat_interleave(channels // norm.num_groups, 1) * norm.weight[:, None]
    return x_RCT.mul_(scale).add_(norm.bias[:, None]), lengths


def normalized(
    x: torch.Tensor, lengths: torch.Tensor, epsilon: float, correction: int = 0
) -> torch.Tensor:
    """Rows `[R, T, ...]` with zero mean and unit variance over each row's own steps, and
    zero after its end: `(x - mean) / sqrt(variance + epsilon)`, with the variance over n
    - `correction`."""
    counts = lengths.view(-1, *[1] * (x.ndim - 1))
    outside = ~is_inside(lengths, x.shape[1]).view(*x.shape[:2], *[1] * (x.ndim - 2))
    mean = x.masked_fill(outside, 0).sum(1, keepdim=True) / counts
    centred = (x - mean).masked_fill_(outside, 0)
    variance = centred.square().sum(1, keepdim=True) / (counts - correction)
    return centred / (variance + epsilon).sqrt()


class RaggedLSTM:
    """The output of an LSTM plus its input, of as many channels, over rows of different
    lengths. The LSTM is in eval mode, has no projections, and runs in one direction or in
    two.

    To go backward, each row is reversed within its own length.
    `torch.nn.utils.rnn.pack_padded_sequence` would do this too, but its matrix products
    cover only the rows that have not ended, so a row's bits would depend on the
    others."""

    def __init__(self, lstm: nn.LSTM) -> None:
        self._layers: list[Sequence[nn.LSTM]] = [[lstm]]
        if lstm.bidirectional:
            # forward, backward, forward …
            every = [_one_direction(lstm, weights) for weights in lstm.all_weights]
            self._layers = list(zip(every[::2], every[1::2], strict=True))

    def __call__(self, x_RCT: torch.Tensor, lengths: torch.Tensor) -> Ragged:
        """The output of the last layer plus the input, `[R, C, T]`, and the lengths. If
        it runs in both directions, their outputs follow one another along `C`, and the
        input is added to each."""
        steps = torch.arange(x_RCT.shape[-1], device=x_RCT.device)[:, None]
        # its own inverse
        source_TR1 = torch.where(steps < lengths, lengths - 1 - steps, steps)[..., None]
        hidden_TRC = x_RCT.permute(2, 0, 1)
        for forward, *backward in self._layers:
            outputs = [forward(hidden_TRC)[0]]
            for lstm in backward:
                reversed_TRC = lstm(hidden_TRC.gather(0, source_TR1.expand_as(hidden_TRC)))[0]
                outputs.append(reversed_TRC.gather(0, source_TR1.expand_as(reversed_TRC)))
            hidden_TRC = torch.cat(outputs, dim=2) if backward else outputs[0]
        y_RCT = hidden_TRC.permute(1, 2, 0)
        return y_RCT + x_RCT.repeat(1, y_RCT.shape[1] // x_RCT.shape[1], 1), lengths


def _one_direction(lstm: nn.LSTM, weights: Sequence[nn.Parameter]) -> nn.LSTM:
    """One layer in one direction of an LSTM, which has these weights, as a separate
    module."""
    first = weights[0]
    alone = nn.LSTM(
        first.shape[1], lstm.hidden_size, bias=lstm.bias, device=first.device, dtype=first.dtype
    )
    alone.load_state_dict(dict(zip(alone.state_dict(), weights, strict=True)))
    return alone.eval().requires_grad_(False)


Layer = Callable[[torch.Tensor, torch.Tensor], Ragged]
"""Makes rows `[R, C', T']` of rows `[R, C, T]` with lengths int64 `[R]`, and returns them
with their own lengths."""


def seanet_layers(modules: Iterable[nn.Module]) -> list[Layer]:
    """What the modules of a SEANet encoder, in eval mode and without weight norm, do one
    after another; an ExtractorError if one is of another kind. Each codec has its own
    classes for them, which compute the same."""
    layers: list[Layer] = []
    activation: Activation | None = None
    for module in [*modules, None]:  # None is their end
        before, activation = activation, None
        if convolution := _convolution(module, before):
            layers += convolution
        elif isinstance(block := getattr(module, "block", None), Iterable):
            layers.append(
                partial(
                    _residual, seanet_layers(block), _convolution(getattr(module, "shortcut", None))
                )
            )
        elif isinstance(lstm := getattr(module, "lstm", None), nn.LSTM):
            layers.append(RaggedLSTM(lstm))
        elif isinstance(module, nn.ELU):
            activation = partial(_elu, module.alpha)
        elif isinstance(alpha := getattr(module, "alpha", None), nn.Parameter):
            activation = partial(_snake, alpha.detach(), (alpha.detach() + 1e-9).reciprocal())
        elif module is not None:
            raise ExtractorError(
                f"{type(module).__name__} is not a layer that featcache supports in a "
                "SEANet encoder"
            )
        if before is not None and not convolution:
            raise ExtractorError(
                "featcache supports no SEANet encoder with an activation that no "
                "convolution follows"
            )
    return layers


def _convolution(module: Any, activation: Activation | None = None) -> list[Layer]:
    """The convolution that a module is, as `EncodecConv1d`, `MimiConv1d` or
    SpeechTokenizer's `SConv1d` pads it, and its norm if it has one; nothing if it is
    something else."""
    conv, norm = getattr(module, "conv", None), getattr(module, "norm", None)
    conv = getattr(conv, "conv", conv)  # SpeechTokenizer has one more module around it
    if not isinstance(conv, nn.Conv1d):
        return []
    convolution = Convolution(conv, module.causal, module.pad_mode, activation)
    return (
        [convolution, partial(group_norm, norm)]
        if isinstance(norm, nn.GroupNorm)
        else [convolution]
    )


def run(layers: Iterable[Layer], x_RCT: torch.Tensor, lengths: torch.Tensor) -> Ragged:
    """Run rows `[R, C, T]` with lengths int64 `[R]` through layers: `[R, C', T']`, and
    the new lengths. What comes after a row's end does not matter in the input, and is
    meaningless in the result."""
    for layer in layers:
        x_RCT, lengths = layer(x_RCT, lengths)
    return x_RCT, lengths


def _residual(
    block: Sequence[Layer], shortcut: Sequence[Layer], x_RCT: torch.Tensor, lengths: torch.Tensor
) -> Ragged:
    """The sum of a block's output and its input, which may go through layers too, the
    block's shortcut."""
    through, _ = run(block, x_RCT, lengths)
    return through.add_(run(shortcut, x_RCT, lengths)[0]), lengths


def _elu(alpha: float, x: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.elu.out(x, alpha, out=out)


def _snake(alpha: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """`x + sin²(alpha x) / alpha` with an alpha for each channel, `[1, C, 1]` (Ziyin et
    al. 2020)."""
    torch.add(x, scale * torch.sin(alpha * x).pow_(2), out=out)
