"""DAC (Kumar et al., 2023, "High-Fidelity Audio Compression with Improved RVQGAN"), as in
transformers.

The encoder is convolutional, looks to both sides, and pads with zeros. A frame looks 0.1
to 0.2 s ahead. In a padded batch, it would find there what biases and kernels have made
of the zeros after a short row's end; so here every layer sets these columns to zero
again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from featcache.extractors import ragged
from featcache.extractors.codec import CodecExtractor, CodecParams, num_codebooks


class Dac(CodecExtractor[CodecParams]):
    """DAC's codes: those of `DacModel.encode` for the clip alone, as
    `DacFeatureExtractor` prepares it.

    Codes are `[T, Q]`. `DacFeatureExtractor` pads the clip with zeros to whole hops, so
    there is a frame for every hop that has begun: ceil(num_samples / hop), from one
    sample on."""

    Params = CodecParams
    revision = 1

    def __init__(self, params: CodecParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        model = self._load_model("DacModel")
        config = model.config
        count = num_codebooks(params, config.n_codebooks)
        self._encoder = model.encoder
        self._codebooks = model.quantizer.quantizers[:count]
        self.granularity = config.hop_length
        field, _ = ragged.receptive_field(ragged.convolutions(model.encoder))
        self._set_spec("DAC", count, config.codebook_size, frame_length=field)

    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        return encode_rows(
            self._encoder, *in_whole_hops(waveforms, num_samples, self.granularity)
        ).mT

    def _look_up(
        self, codebook: Any, residual_RDF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`DacVectorQuantize.forward` without its losses, to the same rounding."""
        projected = codebook.in_proj(residual_RDF)
        quantized, codes_RF = codebook.decode_latents(projected)
        return codes_RF, codebook.out_proj(projected + (quantized - projected))


def in_whole_hops(
    waveforms_RP: torch.Tensor, num_samples: torch.Tensor, hop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and their lengths, after padding with zeros to whole hops, as by
    `DacFeatureExtractor`."""
    return F.pad(waveforms_RP, (0, -waveforms_RP.shape[1] % hop)), -(-num_samples // hop) * hop


def encode_rows(encoder: Any, waveforms_RP: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Run a `DacEncoder` over rows `[R, P]`, zero after their lengths `[R]`: what it
    gives for each alone, `[R, D, F]`. The input of each convolution that looks to both
    sides is set to zero after each row's end."""
    x_RCT = encoder.conv1(waveforms_RP[:, None])
    lengths = ragged.steps_after(lengths, [encoder.conv1])
    for block in encoder.block:
        for unit in (block.res_unit1, block.res_unit2, block.res_unit3):
            y_RCT, _ = ragged.zero_padded_conv1d(unit.conv1, _snake(unit.snake1, x_RCT), lengths)
            x_RCT = unit.conv2(_snake(unit.snake2, y_RCT)).add_(x_RCT)
        x_RCT, lengths = ragged.zero_padded_conv1d(
            block.conv1, _snake(block.snake1, x_RCT), lengths
        )
    return ragged.zero_padded_conv1d(encoder.conv2, _snake(encoder.snake1, x_RCT), lengths)[0]


def _snake(activation: Any, x: torch.Tensor) -> torch.Tensor:
    """`x + sin²(alpha x) / alpha`, as in `Snake1d`, in fewer passes over memory."""
    squares = (activation.alpha * x).sin_().square_()
    return torch.addcmul(x, (activation.alpha + 1e-9).reciprocal(), squares, out=squares)
