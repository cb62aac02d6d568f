"""wav2vec 2.0, HuBERT, WavLM and their kin over padded rows, each row as if it were alone.

They share one design (Baevski et al. 2020, "wav2vec 2.0"; Hsu et al. 2021, "HuBERT"; Chen
et al. 2022, "WavLM"): convolutions without padding over the waveform, a projection, a wide
convolution that encodes positions, a transformer. What follows a row's last sample could
change the row in four places:

* the group norm over time of "base" models: its statistics are those of the row's own steps;
* the projection, which maps padding to something else: this is set to zero again;
* the positional convolution, which reaches beyond the end: it finds zeros there;
* attention: what follows the end has a weight of exactly zero.

All rows get the attention mask: kernels without a mask round differently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from featcache.extractors.hidden_states import Encoder
from featcache.extractors.ragged import Length, is_inside, own_padding, receptive_field, steps_after

_VECTOR = 32
"""The most numbers that a CPU's vectorised functions take at a time; a divisor of all
published models' number of channels."""

_BLOCK = 8
"""The steps that one product of a `WideConvolution` computes; 4 and 16 are slower on an
H100."""


class Wav2Vec2(Encoder):
    """transformers' `Wav2Vec2Model`, `HubertModel`, `WavLMModel`, `Data2VecAudioModel` or
    `UniSpeechSatModel`, in eval mode, on rows. It replaces a WavLM's attention."""

    def __init__(self, model: Any) -> None:
        if model.config.model_type == "wavlm":
            for layer in model.encoder.layers:
                layer.attention = WavLMAttention(layer.attention, layer.attention.out_proj)
        self._set_modules(
            model.feature_extractor,
            model.feature_projection,
            model.encoder,
            norm_is_last=getattr(model.config, "do_stable_layer_norm", False),
        )

    def _set_modules(
        self, feature_extractor: Any, projection: Any, transformer: Any, norm_is_last: bool
    ) -> None:
        self._convolutions = list(feature_extractor.conv_layers)
        _, self.hop = receptive_field(layer.conv for layer in self._convolutions)
        self._projection = projection
        embedding = transformer.pos_conv_embed
        # data2vec has several convolutions, one after another
        self._positions = list(getattr(embedding, "layers", [embedding]))
        for layer in self._positions:
            if layer.conv.weight.is_cuda:
                layer.conv = WideConvolution(layer.conv)
        self._layer_norm = transformer.layer_norm
        self._norm_is_last = norm_is_last
        self.layers = transformer.layers

    def num_frames(self, num_samples: Length) -> Length:
        return steps_after(num_samples, [layer.conv for layer in self._convolutions])

    def hidden_states(self, waveforms: Tensor, num_samples: Tensor) -> Iterator[Tensor]:
        """Run the model on waveforms that are normalised as it wants them. A final layer
        norm, if the model has one, follows the last layer."""
        steps_RCF, num_frames = self._convolved(waveforms, num_samples)
        hidden_RFD = first_of(self._projection(steps_RCF.transpose(1, 2)))
        inside_RF = is_inside(num_frames, hidden_RFD.shape[1])
        hidden_RFD = hidden_RFD.masked_fill(~inside_RF[..., None], 0)
        if self._positions:
            hidden_RFD = hidden_RFD + self._positioned(hidden_RFD, inside_RF)
        if not self._norm_is_last:
            hidden_RFD = self._layer_norm(hidden_RFD)
        yield hidden_RFD
        mask = attention_mask(hidden_RFD, inside_RF)
        for layer_RFD in self._transformed(hidden_RFD, mask):
            hidden_RFD = layer_RFD
            yield hidden_RFD
        if self._norm_is_last:
            hidden_RFD = self._layer_norm(hidden_RFD)
        yield hidden_RFD

    def _convolved(self, waveforms_RP: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the output of the convolutions, `[R, C, F]`, and each row's number of
        frames."""
        steps_RCT = waveforms_RP[:, None]
        num_steps = num_samples
        for layer in self._convolutions:
            steps_RCT = layer.conv(steps_RCT)
            num_steps = steps_after(num_steps, [layer.conv])
            norm = getattr(layer, "layer_norm", None)
            if isinstance(norm, nn.GroupNorm):
                steps_RCT = group_norm(norm, steps_RCT, num_steps)
            elif norm is not None:
                # torchaudio's own class would transpose again
                steps_RCT = nn.LayerNorm.forward(norm, steps_RCT.mT).mT
            steps_RCT = _activation(layer)(steps_RCT)
        return steps_RCT, num_steps

    def _positioned(self, hidden_RFD: Tensor, inside_RF: Tensor) -> Tensor:
        channels_RDF = hidden_RFD.transpose(1, 2)
        for number, layer in enumerate(self._positions):
            if number:
                channels_RDF = channels_RDF.masked_fill(~inside_RF[:, None], 0)
            batch_norm = getattr(layer, "batch_norm", None)
            if batch_norm is not None:  # it maps the zeros to something else
                channels_RDF = batch_norm(channels_RDF).masked_fill(~inside_RF[:, None], 0)
            # an even width adds a frame
            channels_RDF = layer.conv(channels_RDF)[..., : hidden_RFD.shape[1]]
            layer_norm = getattr(layer, "layer_norm", None)
            if layer_norm is not None:
                channels_RDF = layer_norm(channels_RDF.mT).mT
            channels_RDF = _activation(layer)(channels_RDF)
        return channels_RDF.transpose(1, 2)

    def _transformed(self, hidden_RFD: Tensor, mask: Tensor) -> Iterator[Tensor]:
        options: dict[str, Any] = {}
        for layer in self.layers:
            outputs = layer(hidden_RFD, attention_mask=mask, **options)
            hidden_RFD = first_of(outputs)
            # WavLM's first layer computes the distances' bias
            if isinstance(outputs, tuple) and len(outputs) > 1:
                options["position_bias"] = outputs[1]
            yield hidden_RFD


class Wav2Vec2Conformer(Wav2Vec2):
    """transformers' `Wav2Vec2ConformerModel`, in eval mode, on rows.

    Its layers have convolutions (Gulati et al. 2020, "Conformer"), which find zeros after a
    row's end. It has no positional convolution."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._positions, self._norm_is_last = [], True
        self._embedding = PositionEmbedding(model.encoder.embed_positions)

    def _transformed(self, hidden_RFD: Tensor, mask: Tensor) -> Iterator[Tensor]:
        outside_RF = mask[:, 0, 0] != 0
        positions = self._embedding(hidden_RFD)
        layer: Any
        for layer in self.layers:
            hidden_RFD = layer.ffn1(layer.ffn1_layer_norm(hidden_RFD)) * 0.5 + hidden_RFD
            attended = layer.self_attn(
                layer.self_attn_layer_norm(hidden_RFD),
                attention_mask=mask,
                relative_position_embeddings=positions,
            )
            hidden_RFD = first_of(attended) + hidden_RFD
            hidden_RFD = hidden_RFD + _conformer_convolution(
                layer.conv_module, hidden_RFD, outside_RF
            )
            hidden_RFD = layer.ffn2(layer.ffn2_layer_norm(hidden_RFD)) * 0.5 + hidden_RFD
            hidden_RFD = layer.final_layer_norm(hidden_RFD)
            yield hidden_RFD


def _conformer_convolution(module: Any, hidden_RFD: Tensor, outside_RF: Tensor) -> Tensor:
    x_RDF = module.glu(module.pointwise_conv1(module.layer_norm(hidden_RFD).transpose(1, 2)))
    x_RDF = module.depthwise_conv(x_RDF.masked_fill(outside_RF[:, None], 0))
    x_RDF = module.pointwise_conv2(module.activation(module.batch_norm(x_RDF)))
    convolved_RFD: Tensor = x_RDF.transpose(1, 2)
    return convolved_RFD


class PositionEmbedding:
    """The embedding of positions of a Conformer, which may have none. Its module keeps the
    last result, so one thread at a time computes it."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._lock = threading.Lock()

    def __call__(self, hidden_RFD: Tensor) -> Tensor | None:
        if self._module is None:
            return None
        with self._lock:
            positions: Tensor = self._module(hidden_RFD)
            if positions.is_cuda:  # another thread's stream could read it too early or late
                positions = positions.clone()
                torch.cuda.current_stream().synchronize()
            return positions


def _activation(module: Any) -> Callable[[Tensor], Tensor]:
    """Return the activation of a module. torchaudio's modules have no attribute for it."""
    return getattr(module, "activation", functional.gelu)


def first_of(outputs: Any) -> Tensor:
    """Return the first of a module's outputs; in some versions it is the only one, and no
    tuple."""
    output: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return output


def attention_mask(hidden_RFD: Tensor, inside_RF: Tensor) -> Tensor:
    """Return what is added to the logarithms of attention weights, `[R, 1, 1, F]`: minus
    infinity where a row has no frame."""
    mask_RF = hidden_RFD.new_zeros(inside_RF.shape).masked_fill_(~inside_RF, -torch.inf)
    return mask_RF[:, None, None, :]


class WideConvolution(nn.Module):
    """A convolution of rows `[R, C, T]` that is many steps wide, in groups of channels. On
    a GPU it replaces `conv`, which has stride 1, a bias, and zeros around the row.

    It multiplies windows by the weights. A window is wide enough for `_BLOCK` steps of the
    output; the weights are repeated for each step. cuDNN's repeatable kernels take 2 to 95
    × as long on an H100, and tens of GiB of memory."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        assert conv.bias is not None
        self._padding = own_padding(conv)
        self._width = conv.kernel_size[0] + _BLOCK - 1
        self._bias_C1 = conv.bias[:, None]
        weight_GOIK = conv.weight.detach().view(conv.groups, -1, *conv.weight.shape[1:])
        groups, outputs, inputs, steps = weight_GOIK.shape
        weight_GIWOB = weight_GOIK.new_zeros(groups, inputs, self._width, outputs, _BLOCK)
        for step in range(_BLOCK):
            weight_GIWOB[:, :, step : step + steps, :, step] = weight_GOIK.permute(0, 2, 3, 1)
        self._weight = weight_GIWOB.flatten(3).flatten(1, 2)

    def forward(self, x_RCT: Tensor) -> Tensor:
        rows, groups = len(x_RCT), len(self._weight)
        steps = x_RCT.shape[2] + 2 * self._padding - (self._width - _BLOCK)
        blocks = -(-steps // _BLOCK)
        padded_RCT = functional.pad(x_RCT, (self._padding, self._padding + blocks * _BLOCK - steps))
        windows_RGINW = padded_RCT.view(rows, groups, -1, padded_RCT.shape[2]).unfold(
            3, self._width, _BLOCK
        )
        windows = windows_RGINW.permute(1, 0, 3, 2, 4).reshape(groups, rows * blocks, -1)
        products_GRNOB = torch.bmm(windows, self._weight).view(groups, rows, blocks, -1, _BLOCK)
        y_RCT = products_GRNOB.permute(1, 0, 3, 2, 4).reshape(rows, -1, blocks * _BLOCK)
        return y_RCT[..., :steps] + self._bias_C1


class WavLMAttention(nn.Module):
    """WavLM's attention, with a gated bias for the distance of two frames (section 3.1 of
    the paper). transformers' own computes all attention weights' mean to discard it."""

    def __init__(self, attention: Any, out_projection: nn.Module) -> None:
        super().__init__()
        self._replaced: Any = attention
        self._out_projection = out_projection

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Return the output `[R, F, D]`, None in place of the attention weights, and the
        bias `[H, F, F]`, which the first layer computes for the next layers."""
        query, key, value = map(self._heads, self._projected(hidden_states))
        if position_bias is None:
            num_frames = hidden_states.shape[1]
            position_bias = self._replaced.compute_bias(num_frames, num_frames)
        mask = (self._gates(hidden_states) * position_bias + attention_mask).to(query.dtype)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self._out_projection(attended.transpose(1, 2).flatten(2)), None, position_bias

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        old = self._replaced
        return old.q_proj(hidden_states), old.k_proj(hidden_states), old.v_proj(hidden_states)

    def _heads(self, states: Tensor) -> Tensor:
        shape = (*states.shape[:2], self._replaced.num_heads, self._replaced.head_dim)
        return states.view(shape).transpose(1, 2)

    def _gates(self, hidden_states: Tensor) -> Tensor:
        """Compute the factors of the bias for each frame, `[R, H, F, 1]`."""
        scores = self._replaced.gru_rel_pos_linear(self._heads(hidden_states))
        scores = scores.unflatten(-1, (2, 4)).sum(-1)
        # Torch computes what remains of a tensor after its last full vector, here the last
        # frames of the last row, by another function. So frames are added to fill the vector.
        frames = scores.shape[2]
        gates = functional.pad(scores, (0, 0, 0, -frames % _VECTOR)).sigmoid()[:, :, :frames]
        gate_a, gate_b = gates.chunk(2, dim=-1)
        gated: Tensor = gate_a * (gate_b * self._replaced.gru_rel_pos_const - 1) + 2
        return gated


def group_norm(norm: nn.GroupNorm, steps_RCT: Tensor, num_steps: Tensor) -> Tensor:
    """Apply a group norm over time to `[R, C, T]`, by each row's own steps, in float32,
    even under autocast. May overwrite `steps_RCT`. `ragged.group_norm` rounds differently."""
    steps_RCT = steps_RCT.float()
    if steps_RCT.device.type == "cpu":  # four times as fast, with the bits of the row alone
        for row_CT, length in zip(steps_RCT, num_steps.tolist(), strict=True):
            row_CT[:, :length] = norm(row_CT[None, :, :length])
        return steps_RCT
    return group_norm_on_device(norm, steps_RCT, num_steps)


def group_norm_on_device(norm: nn.GroupNorm, steps_RCT: Tensor, num_steps: Tensor) -> Tensor:
    """Compute `group_norm` of float32 in a few kernels, without waiting for the lengths."""
    rows, _, length = steps_RCT.shape
    grouped = steps_RCT.view(rows, norm.num_groups, -1, length)
    outside = ~is_inside(num_steps, length)[:, None, None]
    count = (num_steps * grouped.shape[2])[:, None, None, None]
    mean = grouped.masked_fill(outside, 0).sum((2, 3), keepdim=True) / count
    centred = (grouped - mean).masked_fill_(outside, 0)
    variance = centred.square().sum((2, 3), keepdim=True) / count
    scaled_RCT = centred.mul_((variance + norm.eps).rsqrt_()).view(steps_RCT.shape)
    return torch.addcmul(norm.bias[:, None], scaled_RCT, norm.weight[:, None])
