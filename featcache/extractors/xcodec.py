"""X-Codec (Ye et al., 2024, "Codec Does Matter: Exploring the Semantic Shortcoming of
Codec for Audio Language Model"), as in transformers.

Two encoders hear a clip: DAC's; and a HuBERT or a WavLM, whose hidden states, averaged
over its layers, go through a few more convolutions. Their outputs are quantised together."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors import dac, ragged
from featcache.extractors.codec import BandwidthParams, CodecExtractor, num_codebooks_at_bandwidth
from featcache.extractors.ragged import Length
from featcache.extractors.wav2vec2 import Wav2Vec2


class Xcodec(CodecExtractor[BandwidthParams]):
    """X-Codec's codes: those of `XcodecModel.encode` for the clip alone, as its
    `DacFeatureExtractor` prepares it.

    Codes are `[T, Q]`, ceil(num_samples / 320) frames. Every frame sees the whole clip."""

    Params = BandwidthParams
    revision = 1
    _model_name = "XcodecModel"
    _name = "X-Codec"
    _semantic_step = 1
    """One of so many frames of the semantic model is used."""

    def _prepare_semantic(self, model: Any) -> None:
        """Set the attributes that `heard` and `num_heard` use."""
        self._semantic_pad = int(model.pad)

    def _prepare(self) -> None:
        model = self._load_model()
        config = model.config
        count = num_codebooks_at_bandwidth(self.params, model)
        self._acoustic = model.acoustic_encoder
        self._semantic = Wav2Vec2(model.semantic_model)
        self._semantic_encoder = model.encoder_semantic
        self._fc = model.fc
        self._codebooks = model.quantizer.quantizers[:count]
        self._prepare_semantic(model)
        self._hop: int = config.hop_length
        preprocessing = weights.read_preprocessing(self._locate())
        self.granularity = int(preprocessing.get("hop_length", self._hop))
        self._require_one_frame_per_hop()
        self.granule_frames = self.granularity // self._hop
        self._set_spec(self._name, count, config.codebook_size, latent_size=model.fc.out_features)

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        waveforms, num_samples = dac.in_whole_hops(waveforms, num_samples, self.granularity)
        acoustic_RDF = dac.encode_rows(self._acoustic, waveforms, num_samples)
        semantic_RDF = self._encode_semantic(waveforms, num_samples)
        latents_RFD: Tensor = self._fc(torch.cat([acoustic_RDF, semantic_RDF], dim=1).mT)
        return latents_RFD

    def num_heard(self, num_samples: Length) -> Length:
        """Return the number of samples that the semantic model gets for a clip."""
        return num_samples + 2 * self._semantic_pad

    def heard(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        """Make the semantic model's input `[R, P']` of rows, which are zero after their ends."""
        return F.pad(waveforms_RP, (self._semantic_pad, self._semantic_pad))

    def _encode_semantic(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        waveforms_RP = self.heard(waveforms_RP, num_samples)
        num_samples = self.num_heard(num_samples)
        hidden_states = self._semantic.hidden_states(waveforms_RP, num_samples)
        in_and_out_of_layers = list(islice(hidden_states, len(self._semantic.layers) + 1))
        step = self._semantic_step
        x_RDF = torch.stack(in_and_out_of_layers).mean(0)[:, ::step].mT.contiguous()
        lengths = -(-self._semantic.num_frames(num_samples) // step)
        x_RDF, lengths = ragged.zero_padded_conv1d(self._semantic_encoder.conv, x_RDF, lengths)
        for block in self._semantic_encoder.conv_blocks:
            for unit in block.res_units:
                y_RDF, _ = ragged.zero_padded_conv1d(unit.conv1, unit.activation(x_RDF), lengths)
                x_RDF = unit.conv2(unit.activation(y_RDF)).add_(x_RDF)
            x_RDF, lengths = ragged.zero_padded_conv1d(block.conv, x_RDF, lengths)
        return x_RDF

    def _require_one_frame_per_hop(self) -> None:
        """Raise ConfigError unless both encoders give one frame for each hop: otherwise
        `XcodecModel.encode` pads the acoustic encoder's input. Clips of up to `hop` hops
        suffice: a product of strides other than `hop` is off by one frame by then."""
        for hops in range(1, self._hop + 1):
            samples = self.num_heard(hops * self._hop)
            semantic = -(-self._semantic.num_frames(samples) // self._semantic_step)
            semantic = ragged.steps_after(semantic, ragged.convolutions(self._semantic_encoder))
            acoustic = ragged.steps_after(hops * self._hop, ragged.convolutions(self._acoustic))
            if not hops == semantic == acoustic or self.granularity % self._hop:
                raise ConfigError(
                    f"params.weights: {self.params.weights}: of {hops} × {self._hop} samples, its "
                    f"encoders make {acoustic} and {semantic} frames; clips are padded to "
                    f"multiples of {self.granularity}: featcache needs one frame of each hop"
                )
