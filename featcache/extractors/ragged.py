"""Layers over rows of different lengths, each row computed as if it were alone.

A batch of rows is a tensor `x_RCT`, `[R, C, T]`, and `lengths`, int64 `[R]` on the same
device, each from 1 to `T`. What follows a row's length is meaningless.

A convolution's output at step t depends on `span` columns of its padded input. The columns
that its padding rule adds are written where the row ends, not where the tensor ends. Norms
take their statistics from the row's own steps, and an LSTM that runs backwards starts at
the row's own last step. Indices are computed on the device, so the host never waits for it.

`seanet_layers` and `run` build SEANet encoders: SoundStream's (Zeghidour et al., 2021) in
the form of EnCodec (Défossez et al., 2022, "High Fidelity Neural Audio Compression",
section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcache.errors import ExtractorError

Ragged = tuple[Tensor, Tensor]

Mode = Literal["constant", "reflect", "replicate"]
Activation = Callable[[Tensor, Tensor], None]
"""A function that is applied to its first argument, and writes the result to its second."""

Length = TypeVar("Length", int, Tensor)


def span(conv: nn.Conv1d) -> int:
    """Return the number of input columns that one step of the output depends on."""
    return (conv.kernel_size[0] - 1) * conv.dilation[0] + 1


def own_padding(conv: nn.Conv1d) -> int:
    """Return the columns of zeros that a convolution itself adds to each end."""
    columns = conv.padding[0]
    assert isinstance(columns, int)
    assert conv.padding_mode == "zeros"
    return columns


def convolutions(encoder: nn.Module) -> list[nn.Conv1d]:
    """Return an encoder's convolutions, in the order in which all encoders here run them.
    (Shortcuts change no length.)"""
    return [module for module in encoder.modules() if isinstance(module, nn.Conv1d)]


def steps_after(lengths: Length, convs: Iterable[nn.Conv1d]) -> Length:
    """Return the steps that convolutions, one after another, make of `lengths` steps; 0 or
    less if they are too few. The convolutions pad with zeros by themselves."""
    for conv in convs:
        lengths = (lengths + 2 * own_padding(conv) - span(conv)) // conv.stride[0] + 1
    return lengths


def receptive_field(convs: Iterable[nn.Conv1d]) -> tuple[int, int]:
    """Return the samples that one step depends on after convolutions, one after another,
    and the samples between two steps."""
    field, hop = 1, 1
    for conv in convs:
        field += (span(conv) - 1) * hop
        hop *= conv.stride[0]
    return field, hop


def is_inside(lengths: Tensor, steps: int) -> Tensor:
    """Mark the steps before each row's end: bool `[R, T]`."""
    return torch.arange(steps, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class Convolution:
    """A convolution of each row, padded at its own ends as in EnCodec: by its span less
    its stride, and to whole strides. So n steps become n / stride, rounded up."""

    conv: nn.Conv1d
    causal: bool
    """True if all columns come before the row, except the columns that complete a stride;
    otherwise, half of the columns do."""
    mode: Mode
    """The mode of the padding, as in `torch.nn.functional.pad`; `constant` is zero. A row
    too short to be reflected is first extended by zeros."""
    activation: Activation | None = None

    @property
    def sides(self) -> tuple[int, int]:
        columns = span(self.conv) - self.conv.stride[0]
        right = 0 if self.causal else columns // 2
        return columns - right, right

    def __call__(self, x_RCT: Tensor, lengths: Tensor) -> Ragged:
        conv, (left, right) = self.conv, self.sides
        after = right + conv.stride[0] - 1
        if left or after or self.activation:
            x_RCT = self._padded(x_RCT, lengths, after)
        y_RCT = F.conv1d(x_RCT, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
        return y_RCT, -(-lengths // conv.stride[0])

    def _padded(self, x_RCT: Tensor, lengths: Tensor, after: int) -> Tensor:
        """Copy the rows to `[R, C, left + T + after]`, and pad each at its own ends."""
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
        before_RN = torch.arange(-left, 0, device=x_RCT.device).expand(num_rows, -1)
        after_RN = lengths[:, None] + torch.arange(after, device=x_RCT.device)
        at_RN = torch.cat([before_RN, after_RN], 1)
        columns_RCN = self._columns(inside_RCT, lengths, at_RN)
        return padded_RCT.scatter_(2, (left + at_RN)[:, None].expand(-1, channels, -1), columns_RCN)

    def _columns(self, x_RCT: Tensor, lengths: Tensor, at_RN: Tensor) -> Tensor:
        """Compute the columns at the steps `at_RN`, before the rows (below 0) or after
        them: `[R, C, N]`."""
        if self.mode == "constant":
            return x_RCT.new_zeros(*x_RCT.shape[:2], at_RN.shape[1])
        ends = lengths[:, None]
        if self.mode == "replicate":
            return _gathered(x_RCT, at_RN.clamp(min=0).minimum(ends - 1))
        left, right = self.sides
        last_stride = right + (-ends) % self.conv.stride[0]
        mirror = (ends - 1).clamp(min=max(left, right)).maximum(last_stride)
        # Below 0 are columns that the row does not need; from its end on, zeros that made it
        # long enough.
        source_RN = torch.where(at_RN < 0, -at_RN, 2 * mirror - at_RN).clamp(min=0)
        is_zero = ((at_RN >= 0) & (at_RN <= mirror)) | (source_RN >= ends)
        columns_RCN = _gathered(x_RCT, source_RN.clamp(max=x_RCT.shape[-1] - 1))
        return columns_RCN.masked_fill_(is_zero[:, None], 0)


def _gathered(x_RCT: Tensor, source_RN: Tensor) -> Tensor:
    return x_RCT.gather(2, source_RN[:, None].expand(-1, x_RCT.shape[1], -1))


def zero_padded_conv1d(conv: nn.Conv1d, x_RCT: Tensor, lengths: Tensor) -> Ragged:
    """Convolve each row by a module that pads with zeros by itself. Columns after each
    row's end in `x_RCT` are overwritten."""
    zero_after_(x_RCT, lengths, own_padding(conv))
    y_RCT = F.conv1d(
        x_RCT, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups
    )
    return y_RCT, steps_after(lengths, [conv])


def zero_after_(x_RCT: Tensor, lengths: Tensor, columns: int) -> None:
    """Set so many columns after each row's end to zero, as far as the tensor goes."""
    last = x_RCT.shape[-1] - 1
    after_RN = lengths[:, None] + torch.arange(columns, device=x_RCT.device)
    after_RCN = after_RN.clamp_(max=last)[:, None].expand(-1, x_RCT.shape[1], -1)
    # a row that ends where the tensor ends keeps its own last column
    has_room = (lengths <= last)[:, None, None]
    x_RCT.scatter_(2, after_RCN, x_RCT.gather(2, after_RCN).masked_fill_(has_room, 0))


def mask_(x_RCT: Tensor, lengths: Tensor) -> Tensor:
    """Set everything after each row's end to zero, in place; float32."""
    inside_R1T = is_inside(lengths, x_RCT.shape[-1])[:, None]
    # a product would keep NaN, and masked_fill_ takes ten times as long on a CPU
    x_RCT.view(torch.int32).bitwise_and_(-inside_R1T.int())
    return x_RCT


def group_norm(norm: nn.GroupNorm, x_RCT: Tensor, lengths: Tensor) -> Ragged:
    """Apply a group norm with weights, by the statistics of rows' own steps. Overwrites
    float32 `x_RCT`."""
    group_size = norm.num_channels // norm.num_groups
    x_RCT = mask_(x_RCT.float(), lengths)
    grouped = x_RCT.view(len(x_RCT), norm.num_groups, -1)
    counts = lengths[:, None, None] * group_size
    grouped -= grouped.sum(2, keepdim=True) / counts
    variance = mask_(x_RCT, lengths).view_as(grouped).square().sum(2, keepdim=True) / counts
    scale_RC1 = (variance + norm.eps).rsqrt().repeat_interleave(group_size, 1)
    scale_RC1 = scale_RC1 * norm.weight[:, None]
    return x_RCT.mul_(scale_RC1).add_(norm.bias[:, None]), lengths


def normalized(x: Tensor, lengths: Tensor, epsilon: float, correction: int = 0) -> Tensor:
    """Give rows `[R, T, ...]` zero mean and unit variance over each row's own steps, and
    zeros after its end: `(x - mean) / sqrt(variance + epsilon)`."""
    centred, variance = centred_rows(x, lengths, correction)
    return centred / (variance + epsilon).sqrt()


def centred_rows(x: Tensor, lengths: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    """Subtract from rows `[R, T, ...]` the mean over each row's own steps, with zeros after
    its end. Returns also the variance, over so many steps less than the row has."""
    counts = lengths.view(-1, *[1] * (x.ndim - 1))
    outside = ~is_inside(lengths, x.shape[1]).view(*x.shape[:2], *[1] * (x.ndim - 2))
    mean = x.masked_fill(outside, 0).sum(1, keepdim=True) / counts
    centred = (x - mean).masked_fill_(outside, 0)
    return centred, centred.square().sum(1, keepdim=True) / (counts - correction)


class RaggedLSTM:
    """The output of an LSTM plus its input, over rows of different lengths. The LSTM is in
    eval mode, has no projections, and one direction or two.

    To go backward, each row is reversed within its own length. With
    `torch.nn.utils.rnn.pack_padded_sequence`, a row's bits would depend on the other rows."""

    def __init__(self, lstm: nn.LSTM) -> None:
        self._layers: list[Sequence[nn.LSTM]] = [[lstm]]
        if lstm.bidirectional:
            # forward, backward, forward …
            every = [_one_direction(lstm, weights) for weights in lstm.all_weights]
            self._layers = list(zip(every[::2], every[1::2], strict=True))

    def __call__(self, x_RCT: Tensor, lengths: Tensor) -> Ragged:
        """Return the output plus the input, `[R, C, T]`, and the lengths. Two directions
        follow one another along `C`."""
        steps = torch.arange(x_RCT.shape[-1], device=x_RCT.device)[:, None]
        # reverses each row, and is its own inverse
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
    first = weights[0]
    alone = nn.LSTM(first.shape[1], lstm.hidden_size, bias=lstm.bias).to(first)
    alone.load_state_dict(dict(zip(alone.state_dict(), weights, strict=True)))
    return alone.eval().requires_grad_(False)


Layer = Callable[[Tensor, Tensor], Ragged]
"""A function from rows `[R, C, T]` with lengths int64 `[R]` to rows `[R, C', T']` with
theirs."""


def seanet_layers(modules: Iterable[nn.Module]) -> list[Layer]:
    """Turn the modules of a SEANet encoder, in eval mode and without weight norm, into
    layers. Raises ExtractorError for unknown ones."""
    layers: list[Layer] = []
    activation: Activation | None = None
    for module in [*modules, None]:
        convolution = _convolution(module, activation)
        if activation is not None and not convolution:
            raise ExtractorError(
                "featcache supports no SEANet encoder with an activation that no convolution "
                "follows"
            )
        activation = _activation(module)
        block = getattr(module, "block", None)
        lstm = getattr(module, "lstm", None)
        if convolution:
            layers += convolution
        elif isinstance(block, Iterable):
            shortcut = _convolution(getattr(module, "shortcut", None))
            layers.append(partial(_residual, seanet_layers(block), shortcut))
        elif isinstance(lstm, nn.LSTM):
            layers.append(RaggedLSTM(lstm))
        elif activation is None and module is not None:
            raise ExtractorError(
                f"featcache supports no SEANet encoder with a {type(module).__name__}"
            )
    return layers


def _activation(module: nn.Module | None) -> Activation | None:
    alpha: Any = getattr(module, "alpha", None)
    if isinstance(module, nn.ELU):
        return partial(_elu, alpha)
    if isinstance(alpha, nn.Parameter):
        return partial(_snake, alpha.detach(), (alpha.detach() + 1e-9).reciprocal())
    return None


def _convolution(module: Any, activation: Activation | None = None) -> list[Layer]:
    """Return the convolution that a module is, as `EncodecConv1d`, `MimiConv1d` or
    SpeechTokenizer's `SConv1d` pads it, and its norm if any; else nothing."""
    conv = getattr(module, "conv", None)
    conv = getattr(conv, "conv", conv)  # SpeechTokenizer has one more module around it
    if not isinstance(conv, nn.Conv1d):
        return []
    layers: list[Layer] = [Convolution(conv, module.causal, module.pad_mode, activation)]
    norm = getattr(module, "norm", None)
    if isinstance(norm, nn.GroupNorm):
        layers.append(partial(group_norm, norm))
    return layers


def run(layers: Iterable[Layer], x_RCT: Tensor, lengths: Tensor) -> Ragged:
    """Run rows through layers."""
    for layer in layers:
        x_RCT, lengths = layer(x_RCT, lengths)
    return x_RCT, lengths


def _residual(
    block: Sequence[Layer], shortcut: Sequence[Layer], x_RCT: Tensor, lengths: Tensor
) -> Ragged:
    through, _ = run(block, x_RCT, lengths)
    return through.add_(run(shortcut, x_RCT, lengths)[0]), lengths


def _elu(alpha: float, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.elu.out(x, alpha, out=out)


def _snake(alpha: Tensor, scale: Tensor, x: Tensor, out: Tensor) -> None:
    """Compute `x + sin²(alpha x) / alpha` with an alpha per channel, `[1, C, 1]` (Ziyin et
    al. 2020)."""
    torch.add(x, scale * torch.sin(alpha * x).pow_(2), out=out)
