"""VibeVoice's acoustic tokenizer (Peng et al., 2025, "VibeVoice Technical Report"), as in
transformers: the encoder of a variational autoencoder.

Its convolutions pad with zeros before a row only, and its norms are over channels, so a row
needs no padding of its own. The level of the whole clip is set before chunks are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors import ragged
from featcache.extractors.codec import LatentExtractor
from featcache.extractors.dac import in_whole_hops
from featcache.extractors.model import ModelParams
from featcache.spec import MAIN

_SAMPLE_RATE = 24000

_BLOCK = 1 << 20
"""The number of samples that are squared at once."""


class VibeVoiceParams(ModelParams):
    """The parameters of `vibevoice`. `normalize_audio`, `target_dB_FS` and `eps` in
    preprocessor_config.json beside the weights say which level a clip gets: by default an
    RMS of -25 dBFS, or less if its peak would pass 1."""


class VibeVoice(LatentExtractor[VibeVoiceParams]):
    """VibeVoice's acoustic latents: the means of `VibeVoiceAcousticTokenizerModel.encode`
    for the clip alone, as `VibeVoiceAcousticTokenizerFeatureExtractor` prepares it.
    `featcache.augment.VaeNoise` adds the model's noise in training.

    Latents are float32 `[T, 64]`, ceil(num_samples / 3200) frames."""

    Params = VibeVoiceParams
    revision = 1
    _model_name = "VibeVoiceAcousticTokenizerModel"
    gpu_factor = 2
    causal = True

    def _prepare(self) -> None:
        settings = weights.read_preprocessing(self.params.locate())
        sample_rate = settings.get("sampling_rate", _SAMPLE_RATE)
        model = self._load_model(sample_rate)
        self._encoder = model.encoder
        self._is_normalized = bool(settings.get("normalize_audio", True))
        self._target = 10 ** (float(settings.get("target_dB_FS", -25)) / 20)
        self._epsilon = float(settings.get("eps", 1e-6))
        field, self.granularity = ragged.receptive_field(ragged.convolutions(model.encoder))
        padded_to = settings.get("pad_to_multiple_of", self.granularity)
        if padded_to != self.granularity:
            raise ConfigError(
                f"params.weights: {self.params.weights}: clips are padded to multiples of "
                f"{padded_to} samples, and a frame has {self.granularity}: featcache needs one "
                "frame of each"
            )
        self._set_latent_spec("VibeVoice", model.config.hidden_size, field)

    def prepare(self, waveform: Tensor) -> Tensor:
        if not self._is_normalized:
            return waveform
        blocks = torch.split(waveform, _BLOCK)
        energy = sum(float(block.double().square().sum()) for block in blocks)
        gain = self._target / (math.sqrt(energy / len(waveform)) + self._epsilon)
        peak = float(waveform.abs().max()) * gain
        if peak > 1:
            gain /= peak + self._epsilon
        return waveform * gain

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        whole_RP, _ = in_whole_hops(waveforms, num_samples, self.granularity)
        latents_RFD: Tensor = self._encoder(whole_RP[:, None]).latents
        return latents_RFD

    def synthesize(self, tracks: Mapping[str, Tensor]) -> Tensor:
        model = self._load_model(self.sample_rate)
        decoded: Tensor = model.decode(tracks[MAIN][None].float()).audio
        return decoded.flatten()
