"""Mimi (Défossez et al., 2024, "Moshi: a speech-text foundation model for real-time dialogue"), as in transformers.

A causal SEANet, a causal transformer with a sliding window, and a convolution that halves the frame rate. None of
them looks ahead, but each convolution that strides completes a clip's last stride, with zeros in the SEANet and with
copies of the last step behind the transformer. So in a padded batch the last frames of short rows look into padding;
here each row is padded where it ends (see `ragged`). The transformer needs no mask: padding comes behind all that a
row's steps look at.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import nn

from featcache.errors import ConfigError
from featcache.extractors import ragged, seanet
from featcache.extractors.model import CodecExtractor, CodecParams, code_dtype, load_codec
from featcache.extractors.ragged import Padding
from featcache.extractors.seanet import Convolution
from featcache.spec import FeatureSpec


class MimiParams(CodecParams):
    """The parameters of `mimi`."""

    codebooks: int | None = Field(default=8, ge=1)
    """Number of codebooks. The first holds the words, the others the sound. Moshi is trained on 8 codebooks, and the
    codec's authors report results for 8: 1.1 kbps. null means all 32, the default of `MimiModel.encode`. With fewer
    codebooks, the codes are the first columns of those with more."""


class Mimi(CodecExtractor[MimiParams]):
    """Mimi's codes: those of `MimiModel.encode` for the clip alone.

    Codes are `[T, Q]`, ceil(num_samples / 1920) frames, from one sample on. The receptive field is finite: that of the
    convolutions, and for each layer of the transformer a window less one step. It is 80 s of kyutai/mimi (8 layers,
    10 s each), so chunks that overlap by less are not exact.

    Args:
        params: see `MimiParams`.
        sample_rate: of the waveforms, in Hz: the model's.
        device: to compute on.

    Raises:
        ConfigError: the weights cannot be loaded, or the parameters do not go with the model.
        MissingDependencyError: transformers is not installed.
    """

    Params = MimiParams
    revision = 1
    causal = True

    def __init__(self, params: MimiParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        model = load_codec("mimi", "MimiModel", params, sample_rate, device)
        config = model.config
        at_least, at_most = config.num_semantic_quantizers, config.num_quantizers
        self._num_codebooks: int = params.codebooks or at_most
        if not at_least <= self._num_codebooks <= at_most:
            has = f"{at_most}, of which at least {at_least} must be taken" if at_least > 1 else at_most
            raise ConfigError(f"params.codebooks: {params.codebooks}, but {params.weights} has {has}")
        self._encoder = seanet.layers(model.encoder.encoder_seanet.layers, _convolution)
        self._transformer = model.encoder.encoder_transformer
        self._downsample = seanet.layers([model.encoder.downsample], _convolution)
        self._quantizer = model.quantizer
        for module in self._quantizer.modules():
            getattr(module, "embed", None)  # a codebook computes it when it is first asked for, and keeps it
        field, hop = seanet.receptive_field(self._encoder)
        field += config.num_hidden_layers * (config.sliding_window - 1) * hop
        last, stride = seanet.receptive_field(self._downsample)
        self.granularity = hop * stride
        self.spec = FeatureSpec(
            item_shape=(self._num_codebooks,),
            dtype=code_dtype(config.codebook_size),
            frame_rate=sample_rate / self.granularity,
            frame_length=field + (last - 1) * hop,
            sample_rate=sample_rate,
            units="Mimi code",
            codebook_sizes=(config.codebook_size,) * self._num_codebooks,
        )

    def num_frames(self, num_samples: int) -> int:
        """How many frames `num_samples` samples give: one to every hop that has begun."""
        return seanet.num_steps(self._downsample, seanet.num_steps(self._encoder, num_samples))

    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """What the quantizer gets, float `[R, F, D]`."""
        x, lengths = seanet.run(self._encoder, waveforms[:, None], num_samples)
        x = self._transformer(x.mT, use_cache=False).last_hidden_state.mT
        x, _ = seanet.run(self._downsample, x, lengths)
        return x.mT

    def quantize(self, latents: torch.Tensor) -> torch.Tensor:
        """Codes, int64 `[R, F, Q]`, by the model's own quantizer."""
        codes: torch.Tensor = self._quantizer.encode(latents.mT, self._num_codebooks)  # [Q, R, F]
        return codes.permute(1, 2, 0)


def _convolution(module: Any) -> Convolution | None:
    """A `MimiConv1d`, with the padding of its `forward`."""
    conv = getattr(module, "conv", None)
    if not isinstance(conv, nn.Conv1d):
        return None
    columns = ragged.span(conv) - conv.stride[0]
    right = 0 if module.causal else columns // 2
    return Convolution(conv, Padding(columns - right, right, module.pad_mode, whole_strides=True))
