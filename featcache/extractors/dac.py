"""DAC (Kumar et al., 2023, "High-Fidelity Audio Compression with Improved RVQGAN"), as in
transformers.

The encoder's convolutions pad with zeros at both ends. Biases and kernels turn the zeros
after a short row into something else, so every layer sets these columns to zero again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcache.extractors import ragged
from featcache.extractors.codec import CodecExtractor, CodecParams, num_codebooks


class Dac(CodecExtractor[CodecParams]):
    """DAC's codes: those of `DacModel.encode` for the clip alone, as `DacFeatureExtractor`
    prepares it; or its latents. Codes are `[T, Q]`, ceil(num_samples / hop) frames."""

    Params = CodecParams
    revision = 1
    _model_name = "DacModel"

    def _prepare(self) -> None:
        model = self._load_model()
        config = model.config
        count = num_codebooks(self.params, config.n_codebooks)
        self._encoder = model.encoder
        self._codebooks = model.quantizer.quantizers[:count]
        self.granularity = config.hop_length
        field, _ = ragged.receptive_field(ragged.convolutions(model.encoder))
        self._set_spec("DAC", count, config.codebook_size, field, config.hidden_size)

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        padded_RP, lengths = in_whole_hops(waveforms, num_samples, self.granularity)
        return run(self._encoder.children(), padded_RP[:, None], lengths)[0].mT

    def _look_up(self, codebook: Any, residual_RDF: Tensor) -> tuple[Tensor, Tensor]:
        return look_up(codebook, residual_RDF)


def look_up(codebook: Any, x_RDF: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `DacVectorQuantize.forward` without its losses, to the same rounding: the codes
    `[R, F]`, and the decoded vectors."""
    projected = codebook.in_proj(x_RDF)
    quantized, codes_RF = codebook.decode_latents(projected)
    return codes_RF, codebook.out_proj(projected + (quantized - projected))


def in_whole_hops(waveforms_RP: Tensor, num_samples: Tensor, hop: int) -> tuple[Tensor, Tensor]:
    """Pad rows with zeros to whole hops, as `DacFeatureExtractor` does. Returns also their
    lengths."""
    padded_RP = F.pad(waveforms_RP, (0, -waveforms_RP.shape[1] % hop))
    return padded_RP, -(-num_samples // hop) * hop


def snake(activation: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Compute `x + sin²(alpha x) / alpha`, with an alpha for each channel."""
    squares = (activation.alpha * x).sin_().square_()
    return torch.addcmul(x, (activation.alpha + 1e-9).reciprocal(), squares, out=squares)


Activate = Callable[[Any, Tensor, Tensor], Tensor]
"""A function from a module of an activation, rows and their lengths to the rows, activated."""


def run(
    modules: Iterable[nn.Module], x_RCT: Tensor, lengths: Tensor, activate: Activate = snake
) -> ragged.Ragged:
    """Run the modules of an encoder of DAC's design over rows, each as if alone. A module
    holds its own modules in the order in which it runs them."""
    for module in modules:
        name = type(module).__name__
        if isinstance(module, nn.Conv1d):
            x_RCT, lengths = ragged.zero_padded_conv1d(module, x_RCT, lengths)
        elif name.endswith("ResidualUnit"):
            x_RCT = run(module.children(), x_RCT, lengths, activate)[0].add_(x_RCT)
        elif name.endswith(("EncoderBlock", "ModuleList", "Sequential")):
            x_RCT, lengths = run(module.children(), x_RCT, lengths, activate)
        elif name == "LocalMHA":  # SNAC's rows are whole windows of its attention
            x_RCT = module(x_RCT)
        else:
            x_RCT = activate(module, x_RCT, lengths)
    return x_RCT, lengths
