"""X-Codec (Ye et al., 2024, "Codec Does Matter: Exploring the Semantic Shortcoming of Codec for Audio Language Model"),
as in transformers.

Two encoders hear a clip: DAC's; and a HuBERT or a WavLM, whose hidden states, averaged over its layers, go through a
few convolutions more. What both say of a frame is quantised together. A row is kept from its padding by `dac` in the
one, and by `wav2vec2` in the other, which attends to all of a clip, and whose first norm is over all of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors import dac, ragged
from featcache.extractors.bandwidth import BandwidthParams, num_codebooks
from featcache.extractors.model import CodecExtractor, code_dtype, load_codec
from featcache.extractors.wav2vec2 import Wav2Vec2
from featcache.spec import FeatureSpec


class XcodecParams(BandwidthParams):
    """The parameters of `xcodec`."""


class Xcodec(CodecExtractor[XcodecParams]):
    """X-Codec's codes: those of `XcodecModel.encode` for the clip alone, as its `DacFeatureExtractor` prepares it.

    Codes are `[T, Q]`. That class follows the clip by zeros up to a whole hop, so that there is a frame to every hop
    that has begun: ceil(num_samples / 320), from one sample on. Every frame sees the whole clip.

    Args:
        params: see `XcodecParams`.
        sample_rate: of the waveforms, in Hz: the model's.
        device: to compute on.

    Raises:
        ConfigError: the weights cannot be loaded, the parameters do not go with the model, or its two encoders have not
            got a frame each for every hop.
        MissingDependencyError: transformers is not installed.
    """

    Params = XcodecParams
    revision = 1

    def __init__(self, params: XcodecParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        model = load_codec("xcodec", "XcodecModel", params, sample_rate, device)
        config = model.config
        count = num_codebooks(params, model)
        self._acoustic = model.acoustic_encoder
        self._semantic = Wav2Vec2(model.semantic_model)
        self._semantic_encoder = model.encoder_semantic
        self._fc = model.fc
        self._codebooks = model.quantizer.quantizers[:count]
        self._beside = int(model.pad)  # zeros on either side of what the semantic model hears
        self._hop = config.hop_length
        preprocessing = weights.read_preprocessing(weights.locate(params.weights, params.revision))
        self.granularity = int(preprocessing.get("hop_length", self._hop))
        self._require_a_frame_to_every_hop()
        self.spec = FeatureSpec(
            item_shape=(count,),
            dtype=code_dtype(config.codebook_size),
            frame_rate=sample_rate / self._hop,
            frame_length=0,
            sample_rate=sample_rate,
            units="X-Codec code",
            codebook_sizes=(config.codebook_size,) * count,
        )

    def num_frames(self, num_samples: int) -> int:
        """How many frames `num_samples` samples give: one to every hop that has begun."""
        return dac.encoded_length(self._acoustic, self._whole_hops(num_samples))

    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """What the quantizer gets, float `[R, F, D]`."""
        waveforms = F.pad(waveforms, (0, -waveforms.shape[1] % self.granularity))
        num_samples = self._whole_hops(num_samples)
        acoustic = dac.encode_rows(self._acoustic, waveforms, num_samples)
        latents: torch.Tensor = self._fc(torch.cat([acoustic, self._meaning(waveforms, num_samples)], dim=1).mT)
        return latents

    def quantize(self, latents: torch.Tensor) -> torch.Tensor:
        """Codes, int64 `[R, F, Q]`, by the model's own codebooks."""
        residual = latents.mT
        codes = []
        for codebook in self._codebooks:
            codes.append(codebook.encode(residual))
            residual = residual - codebook.decode(codes[-1])
        return torch.stack(codes, dim=2)

    def _meaning(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """What the semantic encoder gives for rows `[R, P]`, zero behind their lengths `[R]`: `[R, D, F]`."""
        waveforms, num_samples = F.pad(waveforms, (self._beside, self._beside)), num_samples + 2 * self._beside
        states = self._semantic.hidden_states(waveforms, num_samples)
        in_and_out_of_layers = list(islice(states, len(self._semantic.layers) + 1))
        x, lengths = torch.stack(in_and_out_of_layers).mean(0).mT, self._semantic.num_frames(num_samples)
        x, lengths = ragged.zero_padded_conv1d(self._semantic_encoder.conv, x, lengths)
        for block in self._semantic_encoder.conv_blocks:
            for unit in block.res_units:
                y, _ = ragged.zero_padded_conv1d(unit.conv1, unit.activation(x), lengths)
                x = unit.conv2(unit.activation(y)).add_(x)
            x, lengths = ragged.zero_padded_conv1d(block.conv, x, lengths)
        return x

    def _whole_hops(self, num_samples: ragged.Length) -> ragged.Length:
        return -(-num_samples // self.granularity) * self.granularity

    def _require_a_frame_to_every_hop(self) -> None:
        """Raise ConfigError unless either encoder gives a frame to each hop of a clip of whole hops.

        `XcodecModel.encode` pads the waveform for the acoustic encoder where it would give another number than the
        semantic one. With the strides of the published models that never happens. What holds of clips of up to `hop`
        hops holds of all, because a product of strides other than `hop` is by then off by one frame.
        """
        for hops in range(1, self._hop + 1):
            semantic = self._semantic.num_frames(hops * self._hop + 2 * self._beside)
            for conv in _convolutions(self._semantic_encoder):
                semantic = ragged.output_lengths(semantic, conv, ragged.own_padding(conv))
            acoustic = dac.encoded_length(self._acoustic, hops * self._hop)
            if not hops == semantic == acoustic or self.granularity % self._hop:
                raise ConfigError(
                    f"params.weights: {self.params.weights}: of {hops} × {self._hop} samples its acoustic encoder "
                    f"makes {acoustic} frames and its semantic one {semantic}, its clips padded to multiples of "
                    f"{self.granularity}; featcache needs a model that makes one frame of each hop"
                )


def _convolutions(encoder: Any) -> Iterator[nn.Conv1d]:
    """Those of a `SemanticEncoder` on the longest way through."""
    yield encoder.conv
    for block in encoder.conv_blocks:
        for unit in block.res_units:
            yield unit.conv1
        yield block.conv
