"""The continuous latents of Pocket TTS (Kyutai, 2026), as in transformers: Mimi's encoder
without a quantiser."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from featcache import weights
from featcache.extractors.codec import LatentExtractor
from featcache.extractors.dac import in_whole_hops
from featcache.extractors.mimi import CausalEncoder
from featcache.extractors.model import ModelParams
from featcache.spec import MAIN


class PocketTTS(LatentExtractor[ModelParams]):
    """Pocket TTS's latents: those of `PocketTTSAudioTokenizerModel.encode` for the clip
    alone, padded with zeros to whole frames. Latents are float32 `[T, 32]`,
    ceil(num_samples / 1920) frames."""

    Params = ModelParams
    revision = 1
    _model_name = "PocketTTSAudioTokenizerModel"
    gpu_factor = 2
    causal = True

    def _prepare(self) -> None:
        model = self._load_model()
        if model.encoder is None:
            raise weights.weights_error(self.params.weights, "holds a decoder only")
        self._encoder = CausalEncoder(model)
        self.granularity = self._encoder.hop
        self._set_latent_spec("Pocket TTS", model.config.latent_dim, self._encoder.frame_length)

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        return self._encoder(*in_whole_hops(waveforms, num_samples, self.granularity))

    def synthesize(self, tracks: Mapping[str, Tensor]) -> Tensor:
        decoded: Tensor = self._load_model().decode(tracks[MAIN][None].float()).audio_values
        return decoded.flatten()
