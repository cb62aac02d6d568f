"""wav2vec 2.0, HuBERT and WavLM over padded rows, each row as if it were alone.

The three share one design (Baevski et al. 2020, "wav2vec 2.0"; Hsu et al. 2021, "HuBERT"; Chen et al. 2022, "WavLM"):
convolutions without padding over the waveform, a projection, a wide convolution that tells positions, a transformer.
What follows a row's last sample reaches it in four places, and is kept out of each:

* the group norm over time behind the first convolution, of the "base" models: its mean and variance are taken over the
  row's own steps. (An attention mask does not help here: naive padding moves every frame of the row.)
* the projection makes something of padding: it is set to zero again;
* the positional convolution reaches half its width beyond the end: it finds zeros there, as it does when it runs alone;
* attention: what is behind the end has no weight, exactly.

The models' own modules are called one by one, with the rows' lengths passed along: nothing of a call is kept on a
module, so threads can share one, and nothing on the way waits for a GPU. All rows get the attention mask, those without
padding too, because kernels without one round differently, and a row's bits must not tell whether its neighbours are
shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from featcache.extractors.ragged import Length, Padding, output_lengths

_UNPADDED = Padding(0, 0)

_VECTOR = 32
"""Numbers that a CPU's vectorised functions take at a time, at most. Channels are a multiple of it in all published
models, and so there is nothing left over elsewhere."""


class Wav2Vec2:
    """A model of the family, to be run on rows.

    Shapes: `R` rows, `P` samples of a padded row, `F` frames of it, `D` dimensions of a hidden state.

    Args:
        model: transformers' `Wav2Vec2Model`, `HubertModel` or `WavLMModel`, in eval mode. The attention of a WavLM is
            replaced in it (see `WavLMAttention`).

    Attributes:
        receptive: samples that one step of the convolutions looks at.
        hop: samples from one frame to the next.
        most_samples: None: a row may have any length.
        layers: the transformer's. May be cut short, where the later ones' hidden states are not wanted.
    """

    most_samples: int | None = None

    def __init__(self, model: Any) -> None:
        if model.config.model_type == "wavlm":
            for layer in model.encoder.layers:
                layer.attention = WavLMAttention(layer.attention)
        self._set_convolutions(model.feature_extractor.conv_layers)
        self._projection = model.feature_projection
        self._positions = model.encoder.pos_conv_embed
        self._layer_norm = model.encoder.layer_norm
        self._norm_is_last = model.config.do_stable_layer_norm
        self.layers = model.encoder.layers

    def _set_convolutions(self, convolutions: Iterable[Any]) -> None:
        self._convolutions = list(convolutions)
        self.receptive, self.hop = 1, 1
        for layer in self._convolutions:
            kernel, stride = layer.conv.kernel_size[0], layer.conv.stride[0]
            self.receptive += (kernel - 1) * self.hop
            self.hop *= stride

    def num_frames(self, num_samples: Length) -> Length:
        """How many frames so many samples give: a number, or an int64 tensor. Below 1 where they are too few."""
        for layer in self._convolutions:
            num_samples = _steps(num_samples, layer)
        return num_samples

    def hidden_states(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Iterator[torch.Tensor]:
        """Run the model, as far as its results are asked for.

        Args:
            waveforms: float32 `[R, P]`, normalised as the model wants them. What is behind a row's end does not matter.
            num_samples: int64 `[R]`, on the same device; every row's own, each enough for a frame.

        Yields:
            Float `[R, F, D]`: what goes into the first transformer layer; what each of them gives; and last the model's
            output, which is the last layer's, through a final layer norm where there is one ("stable layer norm").
            Frames behind a row's `num_frames` mean nothing.
        """
        hidden, num_frames = self._convolved(waveforms, num_samples)
        hidden = self._projected(hidden.transpose(1, 2))
        inside = torch.arange(hidden.shape[1], device=hidden.device) < num_frames[:, None]
        hidden = hidden.masked_fill(~inside[..., None], 0)
        hidden = hidden + self._positioned(hidden, inside)
        if not self._norm_is_last:
            hidden = self._layer_norm(hidden)
        yield hidden
        mask = hidden.new_zeros(inside.shape).masked_fill_(~inside, -torch.inf)[:, None, None, :]
        for hidden in self._transformed(hidden, mask):  # noqa: B020
            yield hidden
        yield self._layer_norm(hidden) if self._norm_is_last else hidden

    def _convolved(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolutions' `[R, C, F]`, and how many frames of it are each row's own, int64 `[R]`."""
        steps, num_steps = waveforms[:, None], num_samples
        for layer in self._convolutions:
            num_steps = _steps(num_steps, layer)
            norm = getattr(layer, "layer_norm", None)
            if isinstance(norm, nn.GroupNorm):
                steps = self._activated(layer, group_norm(norm, layer.conv(steps), num_steps))
            else:
                steps = self._convolution(layer, steps)
        return steps, num_steps

    def _convolution(self, layer: Any, steps: torch.Tensor) -> torch.Tensor:
        """A convolution, with its layer norm and activation."""
        convolved: torch.Tensor = layer(steps)
        return convolved

    def _activated(self, layer: Any, steps: torch.Tensor) -> torch.Tensor:
        """The activation of a convolution."""
        activated: torch.Tensor = layer.activation(steps)
        return activated

    def _projected(self, steps: torch.Tensor) -> torch.Tensor:
        projected = self._projection(steps)
        hidden: torch.Tensor = projected[0] if isinstance(projected, tuple) else projected  # and its input's norm
        return hidden

    def _positioned(self, hidden: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """What the positional convolution adds to `[R, F, D]`; `inside`, `[R, F]`, is where rows have frames."""
        channels = hidden.transpose(1, 2)
        if getattr(self._positions, "batch_norm", None) is not None:  # it makes something else of the zeros
            channels = self._positions.batch_norm(channels).masked_fill(~inside[:, None], 0)
        convolved = self._positions.padding(self._positions.conv(channels))
        added: torch.Tensor = self._positions.activation(convolved)
        return added.transpose(1, 2)

    def _transformed(self, hidden: torch.Tensor, mask: torch.Tensor) -> Iterator[torch.Tensor]:
        """What each layer gives; `mask`, `[R, 1, 1, F]`, is added to the logarithms of attention weights."""
        options: dict[str, Any] = {}
        for layer in self.layers:
            outputs = layer(hidden, attention_mask=mask, **options)
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs
            if isinstance(outputs, tuple) and len(outputs) > 1:  # WavLM's first layer has the distances' bias
                options["position_bias"] = outputs[1]
            yield hidden


class WavLMAttention(nn.Module):
    """WavLM's attention, with a gated bias for the distance of two frames, in place of transformers' `WavLMAttention`.

    The formulas are section 3.1 of the WavLM paper, the weights the given module's. Transformers' own warns in every
    layer that has a mask, and computes the mean of all attention weights to throw it away.

    Args:
        attention: the module that this one stands for.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self._own: Any = attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """What attention gives, nothing in place of its weights, and the bias `[H, F, F]` for the next layers.

        Args:
            hidden_states: `[R, F, D]`.
            attention_mask: `[R, 1, 1, F]`; zero, or minus infinity where a row has no frame.
            position_bias: as the first layer gave it.
            options: what else transformers passes; not used.
        """
        query, key, value = map(self._heads, self._projected(hidden_states))
        bias = self._bias(hidden_states.shape[1]) if position_bias is None else position_bias
        mask = (self._gates(hidden_states) * bias + attention_mask).to(query.dtype)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self._joined(attended.transpose(1, 2).flatten(2)), None, bias

    def _projected(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, each `[R, F, D]`."""
        return tuple(project(hidden_states) for project in (self._own.q_proj, self._own.k_proj, self._own.v_proj))

    def _joined(self, attended: torch.Tensor) -> torch.Tensor:
        """The output, of what the heads attended to, `[R, F, D]`."""
        joined: torch.Tensor = self._own.out_proj(attended)
        return joined

    def _bias(self, frames: int) -> torch.Tensor:
        bias: torch.Tensor = self._own.compute_bias(frames, frames)
        return bias

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        """`[R, H, F, D / H]`, of `[R, F, D]`."""
        rows, frames, _ = states.shape
        return states.view(rows, frames, self._own.num_heads, self._own.head_dim).transpose(1, 2)

    def _gates(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the bias is multiplied by for each frame: `[R, H, F, 1]`."""
        projected = self._own.gru_rel_pos_linear(self._heads(hidden_states))
        scores = projected.unflatten(-1, (2, 4)).sum(-1)
        # Torch computes what is left over of a tensor behind its last whole vectors by another function, that is, the
        # last frames of the last row: so they are followed by as many frames as make the vectors whole.
        frames = scores.shape[2]
        gates = functional.pad(scores, (0, 0, 0, -frames % _VECTOR)).sigmoid()[:, :, :frames]
        gate_a, gate_b = gates.chunk(2, dim=-1)
        gated: torch.Tensor = gate_a * (gate_b * self._own.gru_rel_pos_const - 1) + 2
        return gated


def normalized(waveforms: torch.Tensor, num_samples: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Rows `[R, P]` with zero mean and unit variance over each row's own samples, and zero behind its end.

    `(x - mean) / sqrt(variance + epsilon)`, with the variance over n: as `Wav2Vec2FeatureExtractor` of transformers
    (1e-7) and `layer_norm` over a whole waveform in torchaudio's bundles (1e-5).
    """
    outside = torch.arange(waveforms.shape[1], device=waveforms.device) >= num_samples[:, None]
    waveforms = waveforms.masked_fill(outside, 0)
    mean = waveforms.sum(1, keepdim=True) / num_samples[:, None]
    centred = (waveforms - mean).masked_fill_(outside, 0)
    variance = centred.square().sum(1, keepdim=True) / num_samples[:, None]
    return centred / (variance + epsilon).sqrt()


def group_norm(norm: nn.GroupNorm, steps: torch.Tensor, num_steps: torch.Tensor) -> torch.Tensor:
    """A group norm over time of `[R, C, T]`, each row's statistics taken over its own steps, `num_steps` `[R]`.

    In float32, also under autocast. `steps` may be overwritten; what is behind a row's end means nothing.
    """
    steps = steps.float()
    if steps.device.type == "cpu":  # four times as fast as the other way, and the very bits of the row alone
        for row, length in zip(steps, num_steps.tolist(), strict=True):
            row[:, :length] = functional.group_norm(
                row[None, :, :length], norm.num_groups, norm.weight, norm.bias, norm.eps
            )
        return steps
    return group_norm_on_device(norm, steps, num_steps)


def group_norm_on_device(norm: nn.GroupNorm, steps: torch.Tensor, num_steps: torch.Tensor) -> torch.Tensor:
    """`group_norm`, of float32, in a few kernels, and without waiting for the lengths."""
    rows, _, length = steps.shape
    grouped = steps.view(rows, norm.num_groups, -1, length)
    outside = (torch.arange(length, device=steps.device) >= num_steps[:, None])[:, None, None]
    count = (num_steps * grouped.shape[2])[:, None, None, None]
    mean = grouped.masked_fill(outside, 0).sum((2, 3), keepdim=True) / count
    centred = (grouped - mean).masked_fill_(outside, 0)
    variance = centred.square().sum((2, 3), keepdim=True) / count
    scaled = centred.mul_((variance + norm.eps).rsqrt_()).view(steps.shape)
    return torch.addcmul(norm.bias[:, None], scaled, norm.weight[:, None])


def _steps(num_steps: Length, layer: Any) -> Length:
    """Steps that a convolution makes of so many."""
    return output_lengths(num_steps, layer.conv, _UNPADDED)
