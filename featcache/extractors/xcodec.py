"""X-Codec (Ye et al., 2024, "Codec Does Matter: Exploring the Semantic Shortcoming of
Codec for Audio Language Model"), as in transformers.

Two encoders hear a clip: DAC's; and a HuBERT or a WavLM, whose hidden states, averaged
over its layers, go through a few more convolutions. Their outputs are quantised together.
The tokenizer of Higgs Audio v2 (Boson AI, 2025) has the same design, at 24 kHz."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors import dac, ragged
from featcache.extractors.codec import BandwidthParams, CodecExtractor, num_codebooks_at_bandwidth
from featcache.extractors.ragged import Length, is_inside
from featcache.extractors.wav2vec2 import Wav2Vec2

_PADDING = 160
"""Zeros on either side of what the HuBERT of `higgs2` hears."""

_ZERO_CROSSINGS, _ROLLOFF = 6, 0.99
"""The filter of `torchaudio.functional.resample`: its width and its band."""


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
        preprocessing = weights.read_preprocessing(self.params.locate())
        self.granularity = int(preprocessing.get("hop_length", self._hop))
        self._require_one_frame_per_hop()
        self.granule_frames = self.granularity // self._hop
        self._set_spec(self._name, count, config.codebook_size, latent_size=model.fc.out_features)

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        waveforms, num_samples = dac.in_whole_hops(waveforms, num_samples, self.granularity)
        acoustic_RDF, _ = dac.run(self._acoustic.children(), waveforms[:, None], num_samples)
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


class Higgs2(Xcodec):
    """The codes of Higgs Audio v2's tokenizer: those of `HiggsAudioV2TokenizerModel.encode`
    for the clip alone, as its `DacFeatureExtractor` prepares it. HuBERT hears the clip at
    16 kHz; every second frame of it is used. Each codebook has projections around it.

    Codes are `[T, Q]`, ceil(num_samples / 960) frames. Every frame sees the whole clip."""

    revision = 1
    _name = "Higgs Audio v2"

    def _model_class(self) -> Any:
        config = weights.transformers_class("HiggsAudioV2TokenizerConfig", "the extractor higgs2")
        return _make_class(super()._model_class(), config)

    def _prepare_semantic(self, model: Any) -> None:
        config = model.config
        self._semantic_step = max(1, config.semantic_downsample_factor)
        common = math.gcd(config.sample_rate, config.semantic_sample_rate)
        self._from: int = config.sample_rate // common
        self._to: int = config.semantic_sample_rate // common
        if self._from == self._to:
            raise ConfigError(f"params.weights: {self.params.weights} does not resample")
        self._kernel, self._width = _sinc_kernel(self._from, self._to, self.device)

    def num_heard(self, num_samples: Length) -> Length:
        return -(-num_samples * self._to // self._from) + 2 * _PADDING

    def heard(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        """Resample rows as `torchaudio.functional.resample` does, and pad them."""
        padded_RP = F.pad(waveforms_RP, (self._width, self._width + self._from))
        phases_RCT = F.conv1d(padded_RP[:, None], self._kernel, stride=self._from)
        resampled_RP = phases_RCT.mT.flatten(1)
        lengths = self.num_heard(num_samples) - 2 * _PADDING
        inside_RP = is_inside(lengths, resampled_RP.shape[1])
        return F.pad(resampled_RP.masked_fill(~inside_RP, 0), (_PADDING, _PADDING))

    def decode(self, codes_1QF: Tensor, tracks: Mapping[str, Tensor]) -> Tensor:
        model = self._load_model()
        layers = model.quantizer.quantizers[: codes_1QF.shape[1]]
        quantized_1FD = torch.zeros((), device=codes_1QF.device)
        for layer, codes_1F in zip(layers, codes_1QF.unbind(1), strict=True):
            quantized_1FD = quantized_1FD + layer.project_out(layer.codebook.decode(codes_1F))
        decoded: Tensor = model.acoustic_decoder(model.fc2(quantized_1FD).mT)
        return decoded

    def _look_up(self, codebook: Any, residual_RDF: Tensor) -> tuple[Tensor, Tensor]:
        codes_RF = codebook.codebook.encode(codebook.project_in(residual_RDF.mT))
        return codes_RF, codebook.project_out(codebook.codebook.decode(codes_RF)).mT


def _make_class(xcodec: Any, config: Any) -> Any:
    """Make the model's class. transformers' own imports torchaudio, for its resampler."""

    class HiggsAudioV2TokenizerModel(xcodec):  # type: ignore[misc]
        config_class = config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.quantizer.quantizers:
                layer.project_in = nn.Linear(config.hidden_size, config.codebook_dim)
                layer.project_out = nn.Linear(config.codebook_dim, config.hidden_size)

    return HiggsAudioV2TokenizerModel


def _sinc_kernel(rate: int, new_rate: int, device: torch.device) -> tuple[Tensor, int]:
    """Compute a windowed sinc for each phase, float32 `[new_rate, 1, 2 width + rate]`, and
    its width, in float32 as `torchaudio.functional.resample` does."""
    base = min(rate, new_rate) * _ROLLOFF
    width = math.ceil(_ZERO_CROSSINGS * rate / base)
    steps = torch.arange(-width, width + rate, dtype=torch.float32)[None, None] / rate
    phases = torch.arange(0, -new_rate, -1, dtype=torch.float32)[:, None, None] / new_rate
    times = ((phases + steps) * base).clamp_(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(times * math.pi / _ZERO_CROSSINGS / 2) ** 2
    times *= math.pi
    sinc = torch.where(times == 0, torch.ones_like(times), times.sin() / times)
    return (sinc * (window * (base / rate))).to(device), width
