"""Layers over rows of different lengths, each row computed as if it were alone.

A batch of rows is a tensor `x_RCT`, `[R, C, T]`, and `lengths`, int64 `[R]` on the same device, each from 1 to `T`. Row
r is `x_RCT[r, :, : lengths[r]]`; what follows it is meaningless, and may be anything.

Why a row's result is the same as alone: take one layer, and suppose that its input is right up to each row's end. A
convolution's output at step t is a function of `span` columns of its padded input. For steps before the row's new end,
these columns are the row's own, or among the few that its padding rule adds at its two ends; `pad` writes these few
where the row ends, not where the tensor ends. So the output is right up to each row's new end, and so on through any
number of layers: nothing from after a row's end ever gets before it. Norms take their statistics from the row's own
steps, and an LSTM that runs backwards starts at the row's own last step.

Shapes depend on `T` alone, and indices are computed from `lengths` on the device, so the host never waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

Mode = Literal["constant", "reflect", "replicate"]
Activation = Callable[[torch.Tensor, torch.Tensor], None]
"""Computes a function of its first argument, element by element, and writes it to its second."""

Length = TypeVar("Length", int, torch.Tensor)


@dataclass(frozen=True)
class Padding:
    """What a convolution adds to the two ends of a row."""

    left: int
    """The number of columns before the row."""
    right: int
    """The number of columns after the row."""
    mode: Mode = "constant"
    """What the columns hold, as in `torch.nn.functional.pad`; `constant` is zero. A row too short to be reflected is
    first extended by zeros, as in EnCodec (`EncodecConv1d._pad1d`)."""
    whole_strides: bool = False
    """Whether further columns after the row complete the last stride, as in EnCodec. Otherwise, steps that do not fill
    a stride are left out."""


def span(conv: nn.Conv1d) -> int:
    """The number of input columns that one step of the output depends on."""
    return (conv.kernel_size[0] - 1) * conv.dilation[0] + 1


def own_padding(conv: nn.Conv1d) -> Padding:
    """The padding of a convolution module that pads with zeros by itself."""
    columns = conv.padding[0]
    assert isinstance(columns, int)
    assert conv.padding_mode == "zeros"
    return Padding(columns, columns)


def output_lengths(lengths: Length, conv: nn.Conv1d, padding: Padding) -> Length:
    """The number of steps that a convolution makes of `lengths` steps; 0 or less if they are too few."""
    beyond_first = lengths + padding.left + padding.right - span(conv)
    if padding.whole_strides:
        beyond_first = beyond_first + conv.stride[0] - 1
    return beyond_first // conv.stride[0] + 1


def steps_after(lengths: Length, convs: Iterable[nn.Conv1d]) -> Length:
    """The number of steps after convolutions, one after another, that pad with zeros by themselves."""
    for conv in convs:
        lengths = output_lengths(lengths, conv, own_padding(conv))
    return lengths


def receptive_field(convs: Iterable[nn.Conv1d]) -> tuple[int, int]:
    """The samples that one step depends on after convolutions, one after another; and the samples between two steps."""
    field, hop = 1, 1
    for conv in convs:
        field += (span(conv) - 1) * hop
        hop *= conv.stride[0]
    return field, hop


def conv1d(
    conv: nn.Conv1d, x_RCT: torch.Tensor, lengths: torch.Tensor, padding: Padding, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution of each row, padded at its own ends: `[R, C', T']`, and the new lengths `[R]`.

    The module's own padding is not used. The activation is applied to the rows first, without an extra pass over
    memory, since rows are copied anyway to be padded."""
    nothing_to_add = not (padding.left or padding.right or (padding.whole_strides and conv.stride[0] > 1))
    if not nothing_to_add or activation:
        x_RCT = pad(x_RCT, lengths, padding, span(conv), conv.stride[0], activation)
    y_RCT = F.conv1d(x_RCT, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
    return y_RCT, output_lengths(lengths, conv, padding)


def pad(
    x_RCT: torch.Tensor,
    lengths: torch.Tensor,
    padding: Padding,
    span: int,
    stride: int,
    activation: Activation | None = None,
) -> torch.Tensor:
    """A copy of the rows, `[R, C, left + T + right]`, in which each row is padded at its own ends. With `whole_strides`
    it has `stride - 1` more columns, of which a row needs some, all or none."""
    num_rows, channels, steps = x_RCT.shape
    after = padding.right + (stride - 1 if padding.whole_strides else 0)
    padded_RCT = x_RCT.new_empty(num_rows, channels, padding.left + steps + after)
    inside_RCT = padded_RCT[..., padding.left : padding.left + steps]
    if activation:
        activation(x_RCT, inside_RCT)
    else:
        inside_RCT.copy_(x_RCT)
    padded_RCT[..., padding.left + steps :] = 0  # nothing uninitialised may get into sums, even into those left out
    if padding.left:
        padded_RCT[..., : padding.left] = _columns_before(inside_RCT, lengths, padding)
    if after:
        at_RN = lengths[:, None] + torch.arange(after, device=x_RCT.device)
        added_RCN = _columns_after(inside_RCT, lengths, at_RN, padding, span, stride)
        padded_RCT.scatter_(2, (padding.left + at_RN)[:, None].expand(-1, channels, -1), added_RCN)
    return padded_RCT


def _columns_before(x_RCT: torch.Tensor, lengths: torch.Tensor, padding: Padding) -> torch.Tensor | float:
    """The columns before the rows, `[R, C, left]`."""
    if padding.mode == "constant":
        return 0.0
    if padding.mode == "replicate":
        return x_RCT[..., :1]
    # Steps left, ..., 1. Those after the row's end are the zeros that made it long enough to be reflected.
    at = torch.arange(padding.left, 0, -1, device=x_RCT.device)
    mirrored = x_RCT[..., at.clamp(max=x_RCT.shape[-1] - 1)]
    return mirrored.masked_fill_((at >= lengths[:, None])[:, None], 0)


def _columns_after(
    x_RCT: torch.Tensor, lengths: torch.Tensor, at_RN: torch.Tensor, padding: Padding, span: int, stride: int
) -> torch.Tensor:
    """The columns that belong at the steps `at_RN` after the rows: `[R, C, N]`."""
    ends = lengths[:, None]
    if padding.mode == "constant":
        return x_RCT.new_zeros(()).expand(len(x_RCT), x_RCT.shape[1], at_RN.shape[1])
    if padding.mode == "replicate":
        source_RN, is_zero = (ends - 1).expand_as(at_RN), None
    else:
        left, right = padding.left, padding.right
        mirror = (ends - 1).clamp(min=max(left, right))
        if padding.whole_strides:
            mirror = torch.maximum(mirror, right + (span - ends - left - right) % stride)
        source_RN = (2 * mirror - at_RN).clamp(min=0)  # below 0 are columns that the row does not need
        is_zero = (at_RN <= mirror) | (source_RN >= ends)
        source_RN = source_RN.clamp(max=x_RCT.shape[-1] - 1)
    found_RCN = x_RCT.gather(2, source_RN[:, None].expand(-1, x_RCT.shape[1], -1))
    return found_RCN if is_zero is None else found_RCN.masked_fill_(is_zero[:, None], 0)


def zero_padded_conv1d(
    conv: nn.Conv1d, x_RCT: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution of each row that pads with zeros by itself: `conv1d` without a copy. In `x_RCT`, the columns after
    each row's end that the convolution looks at are overwritten."""
    padding = own_padding(conv)
    zero_after_(x_RCT, lengths, padding.right)
    y_RCT = F.conv1d(x_RCT, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    return y_RCT, output_lengths(lengths, conv, padding)


def zero_after_(x_RCT: torch.Tensor, lengths: torch.Tensor, columns: int) -> None:
    """Set so many columns after each row's end to zero, in place; fewer if the tensor ends before."""
    if not columns:
        return
    last = x_RCT.shape[-1] - 1
    at = (lengths[:, None] + torch.arange(columns, device=x_RCT.device)).clamp_(max=last)
    at = at[:, None].expand(-1, x_RCT.shape[1], -1)
    # A row that ends where the tensor ends keeps its own last column; all other rows get zeros.
    x_RCT.scatter_(2, at, x_RCT.gather(2, at).masked_fill_((lengths <= last)[:, None, None], 0))


def mask_(x_RCT: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Set everything after each row's end to zero, in place, and return `x_RCT`."""
    inside_R1T = torch.arange(x_RCT.shape[-1], device=x_RCT.device) < lengths[:, None, None]
    # Bitwise, since a product would keep NaN, and masked_fill_ takes ten times as long on a CPU.
    bits = x_RCT.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x_RCT.element_size()])
    bits.bitwise_and_(-inside_R1T.to(bits.dtype))
    return x_RCT


def group_norm(norm: nn.GroupNorm, x_RCT: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A group norm with the mean and variance of each row's own steps; overwrites `x_RCT` if it is float32."""
    num_rows, channels, _ = x_RCT.shape
    x_RCT = mask_(x_RCT.float(), lengths)
    grouped = x_RCT.view(num_rows, norm.num_groups, -1)
    counts = lengths[:, None, None] * (channels // norm.num_groups)
    grouped -= grouped.sum(2, keepdim=True) / counts
    variance = mask_(x_RCT, lengths).view_as(grouped).square().sum(2, keepdim=True) / counts
    scale = (variance + norm.eps).rsqrt()  # [R, G, 1]
    if not norm.affine:
        grouped *= scale
        return x_RCT
    scale = scale.repeat_interleave(channels // norm.num_groups, 1) * norm.weight[:, None]  # [R, C, 1]
    return x_RCT.mul_(scale).add_(norm.bias[:, None])


def normalized(x: torch.Tensor, lengths: torch.Tensor, epsilon: float, correction: int = 0) -> torch.Tensor:
    """Rows `[R, T, ...]` with zero mean and unit variance over each row's own steps, and zero after its end: `(x -
    mean) / sqrt(variance + epsilon)`, with the variance over n - `correction`."""
    counts = lengths.view(-1, *[1] * (x.ndim - 1))
    outside = torch.arange(x.shape[1], device=x.device).view(-1, *[1] * (x.ndim - 2)) >= counts
    mean = x.masked_fill(outside, 0).sum(1, keepdim=True) / counts
    centred = (x - mean).masked_fill_(outside, 0)
    variance = centred.square().sum(1, keepdim=True) / (counts - correction)
    return centred / (variance + epsilon).sqrt()


class RaggedLSTM(nn.Module):
    """An LSTM, in eval mode and without projections, in one direction or in two, over rows of different lengths.

    For the backward direction, each row is reversed within its own length. `torch.nn.utils.rnn.pack_padded_sequence`
    would do this too, but each of its matrix products covers only the rows that have not ended, so a row's bits would
    depend on the others."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        layers = [[lstm]]
        if lstm.bidirectional:
            numbers = range(lstm.num_layers)
            layers = [[_one_direction(lstm, f"_l{n}"), _one_direction(lstm, f"_l{n}_reverse")] for n in numbers]
        self.layers = nn.ModuleList(map(nn.ModuleList, layers))

    def forward(self, x_RCT: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The output of the last layer, `[R, C', T]`: of both directions, one after the other along `C'`."""
        steps = torch.arange(x_RCT.shape[-1], device=x_RCT.device)[:, None]
        source_TR1 = torch.where(steps < lengths, lengths - 1 - steps, steps)[..., None]  # its own inverse
        hidden_TRC = x_RCT.permute(2, 0, 1)
        for directions in self.layers:
            assert isinstance(directions, nn.ModuleList)
            outputs = [directions[0](hidden_TRC)[0]]
            if len(directions) == 2:
                backward = directions[1](hidden_TRC.gather(0, source_TR1.expand_as(hidden_TRC)))[0]
                outputs.append(backward.gather(0, source_TR1.expand_as(backward)))
            hidden_TRC = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return hidden_TRC.permute(1, 2, 0)


def _one_direction(lstm: nn.LSTM, suffix: str) -> nn.LSTM:
    """One layer in one direction of an LSTM, as a separate module."""
    names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"] if lstm.bias else ["weight_ih", "weight_hh"]
    weights = {f"{name}_l0": getattr(lstm, name + suffix) for name in names}
    first = weights["weight_ih_l0"]
    alone = nn.LSTM(first.shape[1], lstm.hidden_size, bias=lstm.bias, device=first.device, dtype=first.dtype)
    alone.load_state_dict(weights)
    return alone.eval().requires_grad_(False)
