"""Layers over rows of different lengths, each row computed as if it were alone.

A batch of rows is a tensor `x`, `[R, C, T]`, and `lengths`, int64 `[R]` on the same device, each from 1 to `T`. Row r
is `x[r, :, : lengths[r]]`; what lies behind means nothing, and may be anything.

Why a row comes out as it would alone: take one layer, and suppose that its input is right before each row's end.
A convolution gives at step t a function of `span` columns of its padded input. For steps before the row's new end
these columns are the row's own, or among the few that its padding rule adds at its two ends; `pad` writes these few
where the row ends, not where the tensor does. So the output is right before each row's new end, and so on through any
number of layers: nothing behind a row's end ever gets before it. Norms take their statistics from the row's own steps,
and an LSTM that runs backwards starts at the row's own last step.

Shapes depend on `T` alone, and indices are computed from `lengths` on the device: the host never waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

Mode = Literal["constant", "reflect", "replicate"]
Activation = Callable[[torch.Tensor, torch.Tensor], None]
"""Computes a function of its first argument, element by element, into its second."""

Length = TypeVar("Length", int, torch.Tensor)


@dataclass(frozen=True)
class Padding:
    """What a convolution adds to the two ends of a row.

    Attributes:
        left: columns before the row.
        right: columns behind it.
        mode: what is in them, as `torch.nn.functional.pad` has it: `constant` is zero. A row too short to be reflected
            is followed by zeros first, as EnCodec does (`EncodecConv1d._pad1d`).
        whole_strides: add as many columns behind as complete the last stride, as EnCodec does. Without it, what does
            not fill a stride is left out.
    """

    left: int
    right: int
    mode: Mode = "constant"
    whole_strides: bool = False


def span(conv: nn.Conv1d) -> int:
    """Columns that one step of the output looks at."""
    return (conv.kernel_size[0] - 1) * conv.dilation[0] + 1


def own_padding(conv: nn.Conv1d) -> Padding:
    """The zero padding of a convolution that pads by itself."""
    columns = conv.padding[0]
    assert isinstance(columns, int)
    assert conv.padding_mode == "zeros"
    return Padding(columns, columns)


def output_lengths(lengths: Length, conv: nn.Conv1d, padding: Padding) -> Length:
    """Steps that a convolution makes of `lengths` steps; none or fewer where they are too few for it."""
    beyond_first = lengths + padding.left + padding.right - span(conv)
    if padding.whole_strides:
        beyond_first = beyond_first + conv.stride[0] - 1
    return beyond_first // conv.stride[0] + 1


def conv1d(
    conv: nn.Conv1d, x: torch.Tensor, lengths: torch.Tensor, padding: Padding, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution of each row, padded at its own ends; the module's own padding is not used.

    Args:
        conv: whose weights, stride, dilation and groups are used.
        x: `[R, C, T]`.
        lengths: int64 `[R]`.
        padding: of each row.
        activation: applied to `x` first. It costs no pass over memory of its own, since `x` is copied to be padded.

    Returns:
        `[R, C', T']` and the new lengths `[R]`.
    """
    nothing_to_add = not (padding.left or padding.right or (padding.whole_strides and conv.stride[0] > 1))
    if not nothing_to_add or activation:
        x = pad(x, lengths, padding, span(conv), conv.stride[0], activation)
    y = F.conv1d(x, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
    return y, output_lengths(lengths, conv, padding)


def pad(
    x: torch.Tensor,
    lengths: torch.Tensor,
    padding: Padding,
    span: int,
    stride: int,
    activation: Activation | None = None,
) -> torch.Tensor:
    """A copy of `x`, `[R, C, left + T + right]`, in which each row is padded at its own ends.

    With `whole_strides` it is longer by `stride - 1`, of which a row needs from none to all.
    """
    num_rows, channels, steps = x.shape
    behind = padding.right + (stride - 1 if padding.whole_strides else 0)
    padded = x.new_empty(num_rows, channels, padding.left + steps + behind)
    inside = padded[..., padding.left : padding.left + steps]
    if activation:
        activation(x, inside)
    else:
        inside.copy_(x)
    padded[..., padding.left + steps :] = 0  # so that nothing uninitialised gets into sums, even into those left out
    if padding.left:
        padded[..., : padding.left] = _before(inside, lengths, padding)
    if behind:
        at = lengths[:, None] + torch.arange(behind, device=x.device)
        added = _behind(inside, lengths, at, padding, span, stride)
        padded.scatter_(2, (padding.left + at)[:, None].expand(-1, channels, -1), added)
    return padded


def _before(x: torch.Tensor, lengths: torch.Tensor, padding: Padding) -> torch.Tensor | float:
    """The columns before the rows, `[R, C, left]`."""
    if padding.mode == "constant":
        return 0.0
    if padding.mode == "replicate":
        return x[..., :1]
    # From left to 1; those beyond the row's end are the zeros by which it was made long enough.
    at = torch.arange(padding.left, 0, -1, device=x.device)
    mirrored = x[..., at.clamp(max=x.shape[-1] - 1)]
    return mirrored.masked_fill_((at >= lengths[:, None])[:, None], 0)


def _behind(
    x: torch.Tensor, lengths: torch.Tensor, at: torch.Tensor, padding: Padding, span: int, stride: int
) -> torch.Tensor:
    """The columns that belong at steps `at`, `[R, n]`, behind the rows: `[R, C, n]`."""
    ends = lengths[:, None]
    if padding.mode == "constant":
        return x.new_zeros(()).expand(len(x), x.shape[1], at.shape[1])
    if padding.mode == "replicate":
        source, empty = (ends - 1).expand_as(at), None
    else:
        left, right = padding.left, padding.right
        mirror = (ends - 1).clamp(min=max(left, right))
        if padding.whole_strides:
            mirror = torch.maximum(mirror, right + (span - ends - left - right) % stride)
        source = (2 * mirror - at).clamp(min=0)  # below it: columns that the row does not need
        empty = (at <= mirror) | (source >= ends)
        source = source.clamp(max=x.shape[-1] - 1)
    found = x.gather(2, source[:, None].expand(-1, x.shape[1], -1))
    return found if empty is None else found.masked_fill_(empty[:, None], 0)


def zero_padded_conv1d(conv: nn.Conv1d, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution that pads with zeros by itself, of each row: `conv1d` without a copy.

    The columns behind each row's end that the convolution looks at are overwritten in `x`, `[R, C, T]`.

    Returns:
        `[R, C', T']` and the new lengths `[R]`.
    """
    padding = own_padding(conv)
    zero_behind_(x, lengths, padding.right)
    y = F.conv1d(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    return y, output_lengths(lengths, conv, padding)


def zero_behind_(x: torch.Tensor, lengths: torch.Tensor, columns: int) -> None:
    """Set so many columns behind each row's end to zero, in place; fewer where the tensor ends before."""
    if not columns:
        return
    last = x.shape[-1] - 1
    at = (lengths[:, None] + torch.arange(columns, device=x.device)).clamp_(max=last)
    at = at[:, None].expand(-1, x.shape[1], -1)
    # A row that ends where the tensor does gets its own last column again, and all others zeros.
    x.scatter_(2, at, x.gather(2, at).masked_fill_((lengths <= last)[:, None, None], 0))


def mask_(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Set everything behind each row's end to zero, in place; `x`, `[R, C, T]`, again."""
    inside = torch.arange(x.shape[-1], device=x.device) < lengths[:, None, None]  # [R, 1, T]
    # Bitwise, since a product would let NaN through, and masked_fill_ takes ten times as long on a CPU.
    bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    bits.bitwise_and_(-inside.to(bits.dtype))
    return x


def group_norm(norm: nn.GroupNorm, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A group norm with the mean and variance of each row's own steps; `x`, `[R, C, T]`, is overwritten if float32."""
    num_rows, channels, _ = x.shape
    x = mask_(x.float(), lengths)
    grouped = x.view(num_rows, norm.num_groups, -1)
    counts = lengths[:, None, None] * (channels // norm.num_groups)
    grouped -= grouped.sum(2, keepdim=True) / counts
    variance = mask_(x, lengths).view_as(grouped).square().sum(2, keepdim=True) / counts
    scale = (variance + norm.eps).rsqrt()  # [R, G, 1]
    if not norm.affine:
        grouped *= scale
        return x
    scale = scale.repeat_interleave(channels // norm.num_groups, 1) * norm.weight[:, None]  # [R, C, 1]
    return x.mul_(scale).add_(norm.bias[:, None])


class RaggedLSTM(nn.Module):
    """An LSTM, in one direction or in two, over rows of different lengths.

    Backwards, a row is reversed by its own length: `torch.nn.utils.rnn.pack_padded_sequence` would do it too, but in
    matrix products of as many rows as are still running, so that a row's bits depended on the others.

    Args:
        lstm: whose weights are used, in `eval` mode and without projections.
    """

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        layers = [[lstm]]
        if lstm.bidirectional:
            numbers = range(lstm.num_layers)
            layers = [[_one_direction(lstm, f"_l{n}"), _one_direction(lstm, f"_l{n}_reverse")] for n in numbers]
        self.layers = nn.ModuleList(map(nn.ModuleList, layers))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """`[R, C', T]`, of `[R, C, T]`: the output of the last layer, both directions one after the other."""
        steps = torch.arange(x.shape[-1], device=x.device)[:, None]
        source = torch.where(steps < lengths, lengths - 1 - steps, steps)[..., None]  # [T, R, 1], its own inverse
        hidden = x.permute(2, 0, 1)
        for directions in self.layers:
            assert isinstance(directions, nn.ModuleList)
            outputs = [directions[0](hidden)[0]]
            if len(directions) == 2:
                backward = directions[1](hidden.gather(0, source.expand_as(hidden)))[0]
                outputs.append(backward.gather(0, source.expand_as(backward)))
            hidden = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return hidden.permute(1, 2, 0)


def _one_direction(lstm: nn.LSTM, suffix: str) -> nn.LSTM:
    """One layer in one direction of an LSTM, as a module of its own."""
    names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"] if lstm.bias else ["weight_ih", "weight_hh"]
    weights = {f"{name}_l0": getattr(lstm, name + suffix) for name in names}
    first = weights["weight_ih_l0"]
    alone = nn.LSTM(first.shape[1], lstm.hidden_size, bias=lstm.bias, device=first.device, dtype=first.dtype)
    alone.load_state_dict(weights)
    return alone.eval().requires_grad_(False)
