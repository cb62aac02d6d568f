"""DAC (Kumar et al., 2023, "High-Fidelity Audio Compression with Improved RVQGAN"), as in transformers.

The encoder is convolutional, looks to both sides, and pads with zeros. Behind a short row's end a padded batch has no
zeros but what biases and kernels have made of them, and a frame looks 0.1 to 0.2 s ahead: so zeros are put there again
in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from featcache.errors import ConfigError
from featcache.extractors import ragged
from featcache.extractors.model import CodecExtractor, CodecParams, code_dtype, load_codec
from featcache.spec import FeatureSpec


class DacParams(CodecParams):
    """The parameters of `dac`."""


class Dac(CodecExtractor[DacParams]):
    """DAC's codes: those of `DacModel.encode` for the clip alone, as `DacFeatureExtractor` prepares it.

    Codes are `[T, Q]`. That class follows the clip by zeros up to a whole hop, so that there is a frame to every hop
    that has begun: ceil(num_samples / hop), from one sample on.

    Args:
        params: see `DacParams`.
        sample_rate: of the waveforms, in Hz: the model's.
        device: to compute on.

    Raises:
        ConfigError: the weights cannot be loaded, or the parameters do not go with the model.
        MissingDependencyError: transformers is not installed.
    """

    Params = DacParams
    revision = 1

    def __init__(self, params: DacParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        model = load_codec("dac", "DacModel", params, sample_rate, device)
        config = model.config
        num_codebooks = params.codebooks or config.n_codebooks
        if num_codebooks > config.n_codebooks:
            raise ConfigError(f"params.codebooks: {num_codebooks}, but {params.weights} has {config.n_codebooks}")
        self._encoder = model.encoder
        self._codebooks = model.quantizer.quantizers[:num_codebooks]
        self.granularity = config.hop_length
        self.spec = FeatureSpec(
            item_shape=(num_codebooks,),
            dtype=code_dtype(config.codebook_size),
            frame_rate=sample_rate / config.hop_length,
            frame_length=receptive_field(model.encoder),
            sample_rate=sample_rate,
            units="DAC code",
            codebook_sizes=(config.codebook_size,) * num_codebooks,
        )

    def num_frames(self, num_samples: int) -> int:
        """How many frames `num_samples` samples give: one to every hop that has begun."""
        return encoded_length(self._encoder, self._whole_hops(num_samples))

    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """What the quantizer gets, float `[R, F, D]`."""
        waveforms = F.pad(waveforms, (0, -waveforms.shape[1] % self.granularity))
        return encode_rows(self._encoder, waveforms, self._whole_hops(num_samples)).mT

    def quantize(self, latents: torch.Tensor) -> torch.Tensor:
        """Codes, int64 `[R, F, Q]`: `DacVectorQuantize.forward` without its losses, to the same rounding."""
        residual = latents.mT
        codes = []
        for codebook in self._codebooks:
            projected = codebook.in_proj(residual)
            quantized, found = codebook.decode_latents(projected)
            residual = residual - codebook.out_proj(projected + (quantized - projected))
            codes.append(found)
        return torch.stack(codes, dim=2)

    def _whole_hops(self, num_samples: ragged.Length) -> ragged.Length:
        return -(-num_samples // self.granularity) * self.granularity


def encode_rows(encoder: Any, waveforms: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A `DacEncoder` over rows `[R, P]`, zero behind their lengths `[R]`: what it gives for each alone, `[R, D, F]`."""
    x = encoder.conv1(waveforms[:, None])
    lengths = ragged.output_lengths(lengths, encoder.conv1, ragged.own_padding(encoder.conv1))
    for block in encoder.block:
        for unit in _units(block):
            y, _ = ragged.zero_padded_conv1d(unit.conv1, _snake(unit.snake1, x), lengths)
            y = unit.conv2(_snake(unit.snake2, y))
            x = y.add_(x)
        x, lengths = ragged.zero_padded_conv1d(block.conv1, _snake(block.snake1, x), lengths)
    return ragged.zero_padded_conv1d(encoder.conv2, _snake(encoder.snake1, x), lengths)[0]


def encoded_length(encoder: Any, num_samples: int) -> int:
    """Frames that a `DacEncoder` makes of so many samples; none or fewer where they are too few."""
    for conv in _convolutions(encoder):
        num_samples = ragged.output_lengths(num_samples, conv, ragged.own_padding(conv))
    return num_samples


def receptive_field(encoder: Any) -> int:
    """Samples that one frame of a `DacEncoder` looks at."""
    samples, hop = 1, 1
    for conv in _convolutions(encoder):
        samples += (ragged.span(conv) - 1) * hop
        hop *= conv.stride[0]
    return samples


def _convolutions(encoder: Any) -> Iterator[nn.Conv1d]:
    """Those on the longest way through."""
    yield encoder.conv1
    for block in encoder.block:
        for unit in _units(block):
            yield unit.conv1
            yield unit.conv2
        yield block.conv1
    yield encoder.conv2


def _units(block: Any) -> tuple[Any, Any, Any]:
    return block.res_unit1, block.res_unit2, block.res_unit3


def _snake(activation: Any, x: torch.Tensor) -> torch.Tensor:
    """x + sin²(alpha x) / alpha, as `Snake1d` has it, in fewer passes over memory."""
    squares = (activation.alpha * x).sin_().square_()
    return torch.addcmul(x, (activation.alpha + 1e-9).reciprocal(), squares, out=squares)
