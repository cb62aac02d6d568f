"""EnCodec (Défossez et al., 2022, "High Fidelity Neural Audio Compression"), as transformers has it.

The encoder is SEANet: convolutions that halve, quarter … the rate, residual blocks between them, an LSTM at the end.
Every convolution pads by reflection, up to a whole stride, so in a padded batch the last frames of short rows look into
padding; here each row is padded where it ends (see `ragged`).

The 48 kHz model takes stereo and computes each second by itself, with 1 % of overlap, normalised by its root mean square,
with group norms over all its time: a chunk is a row here, and its scale is kept beside its codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from featcache import weights
from featcache.errors import ConfigError, MissingDependencyError
from featcache.extractors import ragged
from featcache.extractors.model import CodecExtractor, CodecParams, code_dtype, require_sample_rate
from featcache.extractors.rows import Piece, Rows
from featcache.spec import FeatureSpec, SideSpec


class EncodecParams(CodecParams):
    """The parameters of `encodec`."""

    bandwidth: float | None = Field(default=None, gt=0)
    """kbps: so many codebooks as it allows, of those bandwidths that the model was trained for. Another way to say
    `codebooks`; with neither, all of them. Codes of fewer codebooks are the first columns of codes of more."""


class Encodec(CodecExtractor[EncodecParams]):
    """EnCodec's codes: those of `EncodecModel.encode` for the clip alone.

    Codes are `[T, Q]`. The 24 kHz model gives ceil(num_samples / 320) frames, from one sample on.

    Of the 48 kHz model, chunks of 48,000 samples begin every 47,520 samples, and the frames of one follow those of the
    other: 150 of each, and what the last one gives. `scales` holds a number for each chunk. (Of some lengths, a chunk before
    the last gives 149 frames, and the reference cannot stack them.) Mono is given to both of its channels.

    Args:
        params: see `EncodecParams`.
        sample_rate: of the waveforms, in Hz: the model's.
        device: to compute on.

    Raises:
        ConfigError: the weights cannot be loaded, or the parameters do not go with the model.
        MissingDependencyError: transformers is not installed.
    """

    Params = EncodecParams
    revision = 1
    causal = True

    def __init__(self, params: EncodecParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        try:
            from transformers import EncodecModel
        except ImportError as error:
            raise MissingDependencyError("transformers", "the extractor encodec", extra="models") from error
        located = weights.locate(params.weights, params.revision)
        model = weights.load(EncodecModel, located, device)
        config = model.config
        require_sample_rate(params, sample_rate, config.sampling_rate)
        if config.chunk_length and params.chunk:
            raise ConfigError(f"params.chunk: {params.weights} has chunks of its own, of {config.chunk_length_s:g} s")
        num_codebooks = _num_codebooks(params, model)
        self._channels = config.audio_channels
        self._normalize = config.normalize
        self._chunk_length = config.chunk_length
        self._chunk_stride = config.chunk_stride or config.chunk_length
        self._layers = encoder_layers(model.encoder)
        self._codebooks = model.quantizer.layers[:num_codebooks]
        self.granularity = config.hop_length
        frame_rate = sample_rate / config.hop_length
        if self._chunk_length:
            frame_rate = -(-self._chunk_length // config.hop_length) * sample_rate / self._chunk_stride
        self.spec = FeatureSpec(
            item_shape=(num_codebooks,),
            dtype=code_dtype(config.codebook_size),
            frame_rate=frame_rate,
            frame_length=0,
            sample_rate=sample_rate,
            units="EnCodec code",
            codebook_sizes=(config.codebook_size,) * num_codebooks,
            side=(SideSpec("scales", (), "float32", "what a chunk's samples were divided by"),)
            if self._normalize
            else (),
        )

    def num_frames(self, num_samples: int) -> int:
        """How many frames `num_samples` samples give: in each chunk, one to every hop that has begun."""
        if not self._chunk_length:
            return -(-num_samples // self.granularity)
        return sum(piece.num_frames for piece in self.pieces(num_samples))

    def pieces(self, num_samples: int) -> list[Piece]:
        """The clip whole, or its chunks, as `EncodecModel.encode` cuts them."""
        if not self._chunk_length:
            return super().pieces(num_samples)
        pieces = []
        for start in range(0, num_samples, self._chunk_stride):
            size = min(self._chunk_length, num_samples - start)
            pieces.append(Piece(start, size, 0, -(-size // self.granularity)))
        return pieces

    def padded_length(self, num_samples: int) -> int:
        """Samples of the padded row of a piece; a whole chunk, which most are, is not padded."""
        length = super().padded_length(num_samples)
        return min(length, self._chunk_length) if self._chunk_length else length

    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """Codes `[R, F, Q]`, and scales `[R, 1]` where the model normalises."""
        rows = super().encode(waveforms, num_samples)
        return Rows(rows.features, {"scales": _scales(waveforms, num_samples)} if self._normalize else {})

    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """What the quantizer gets, float `[R, F, D]`."""
        if self._normalize:
            waveforms = waveforms / _scales(waveforms, num_samples)
        x = waveforms[:, None].expand(-1, self._channels, -1)
        lengths = num_samples
        for layer in self._layers:
            x, lengths = layer(x, lengths)
        return x.mT

    def quantize(self, latents: torch.Tensor) -> torch.Tensor:
        """Codes, int64 `[R, F, Q]`, by the model's own codebooks."""
        residual = latents.mT
        codes = []
        for codebook in self._codebooks:
            codes.append(codebook.encode(residual))
            residual = residual - codebook.decode(codes[-1])
        return torch.stack(codes, dim=2)


def _num_codebooks(params: EncodecParams, model: Any) -> int:
    """How many codebooks the parameters ask for.

    Raises:
        ConfigError: more than there are, a bandwidth that the model was not trained for, or one that contradicts `codebooks`.
    """
    at_most, bandwidth = model.quantizer.num_quantizers, params.bandwidth
    if params.codebooks is not None and params.codebooks > at_most:
        raise ConfigError(f"params.codebooks: {params.codebooks}, but {params.weights} has {at_most}")
    if bandwidth is None:
        return params.codebooks or at_most
    if bandwidth not in model.config.target_bandwidths:
        known = ", ".join(f"{one:g}" for one in model.config.target_bandwidths)
        raise ConfigError(f"params.bandwidth: {bandwidth:g}; {params.weights} has {known} kbps")
    count = model.quantizer.get_num_quantizers_for_bandwidth(bandwidth)
    if params.codebooks not in (None, count):
        raise ConfigError(f"params.codebooks: {params.codebooks}, but a bandwidth of {bandwidth:g} kbps means {count}")
    return count


def _scales(waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
    """The root mean square of each row's own samples, `[R, 1]`, and a little, as `EncodecModel._encode_frame` has it."""
    return (waveforms.square().sum(1, keepdim=True) / num_samples[:, None]).sqrt() + 1e-8


@dataclass(frozen=True)
class _Convolution:
    """An `EncodecConv1d`, and the ELU before it where there is one."""

    conv: nn.Conv1d
    norm: nn.GroupNorm | None
    padding: ragged.Padding
    after_elu: bool

    def __call__(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, lengths = ragged.conv1d(self.conv, x, lengths, self.padding, _elu if self.after_elu else None)
        return ragged.group_norm(self.norm, x, lengths) if self.norm else x, lengths


@dataclass(frozen=True)
class _Residual:
    """An `EncodecResnetBlock`."""

    first: _Convolution
    second: _Convolution
    shortcut: _Convolution | None

    def __call__(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, _ = self.first(x, lengths)
        y, _ = self.second(F.elu_(y), lengths)
        return y.add_(self.shortcut(x, lengths)[0] if self.shortcut else x), lengths


@dataclass(frozen=True)
class _Recurrent:
    """An `EncodecLSTM`."""

    lstm: nn.LSTM

    def __call__(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.permute(2, 0, 1)
        return (self.lstm(x)[0] + x).permute(1, 2, 0), lengths


def encoder_layers(encoder: Any) -> list[_Convolution | _Residual | _Recurrent]:
    """The layers of an `EncodecEncoder`, each with the ELU before it."""
    from transformers.models.encodec import modeling_encodec as theirs

    layers: list[_Convolution | _Residual | _Recurrent] = []
    after_elu = False
    for layer in encoder.layers:
        if isinstance(layer, theirs.EncodecConv1d):
            layers.append(_convolution(layer, after_elu))
        elif isinstance(layer, theirs.EncodecResnetBlock):
            _, first, _, second = layer.block
            is_identity = isinstance(layer.shortcut, nn.Identity)
            shortcut = None if is_identity else _convolution(layer.shortcut, after_elu=False)
            layers.append(
                _Residual(_convolution(first, after_elu=True), _convolution(second, after_elu=False), shortcut)
            )
        elif isinstance(layer, theirs.EncodecLSTM):
            layers.append(_Recurrent(layer.lstm))
        after_elu = isinstance(layer, nn.ELU)
    return layers


def _convolution(layer: Any, after_elu: bool) -> _Convolution:
    total = int(layer.padding_total)
    right = 0 if layer.causal else total // 2
    padding = ragged.Padding(total - right, right, layer.pad_mode, whole_strides=True)
    norm = layer.norm if layer.norm_type == "time_group_norm" else None
    return _Convolution(layer.conv, norm, padding, after_elu)


def _elu(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.ops.aten.elu.out(source, out=target)
