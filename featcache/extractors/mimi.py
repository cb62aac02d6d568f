"""Mimi (Défossez et al., 2024, "Moshi: a speech-text foundation model for real-time
dialogue"), as in transformers.

A causal SEANet, a causal transformer with a sliding window, and a convolution that halves
the frame rate. The transformer does not look ahead, so it needs no mask.

The tokenizer of Qwen3-TTS at 12.5 Hz (Qwen team, 2026, "Qwen3-TTS Technical Report") has
the encoder of a Mimi, and a decoder of its own. Pocket TTS has Mimi's encoder without a
quantiser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from torch import Tensor

from featcache import weights
from featcache.errors import ExtractorError
from featcache.extractors import ragged
from featcache.extractors.codec import CodecExtractor, CodecParams, LatentExtractor, num_codebooks
from featcache.extractors.dac import in_whole_hops
from featcache.extractors.model import ModelParams
from featcache.spec import MAIN

_QWEN = "qwen3_tts_tokenizer_12hz"
_ENCODER_OF_QWEN = weights.Part("encoder_config", "encoder.", unused=("decoder",))


class CausalEncoder:
    """A causal SEANet, transformer and downsampling convolution, over rows: the encoder of
    a model of transformers in eval mode."""

    def __init__(self, model: Any) -> None:
        encoder, config = model.encoder, model.config
        self._seanet = ragged.seanet_layers(encoder.encoder_seanet.layers)
        self._transformer = encoder.encoder_transformer
        self._downsample = ragged.seanet_layers([encoder.downsample])
        field, hop = ragged.receptive_field(ragged.convolutions(encoder.encoder_seanet))
        # each layer of the transformer sees a window
        field += config.num_hidden_layers * (config.sliding_window - 1) * hop
        last, stride = ragged.receptive_field(ragged.convolutions(encoder.downsample))
        self.hop = hop * stride
        """The samples from one frame to the next."""
        self.frame_length = field + (last - 1) * hop
        """The samples that one frame depends on."""

    def __call__(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        """Compute latents, float `[R, F, D]`, of rows with lengths int64 `[R]`."""
        x_RDT, lengths = ragged.run(self._seanet, waveforms_RP[:, None], num_samples)
        x_RDT = self._transformer(x_RDT.mT, use_cache=False).last_hidden_state.mT
        return ragged.run(self._downsample, x_RDT, lengths)[0].mT


class MimiParams(CodecParams):
    """The parameters of `mimi`. Its `weights` are those of a Mimi, or of
    Qwen3-TTS-Tokenizer-12Hz."""

    codebooks: int | None = Field(default=8, ge=1, validate_default=True)
    """Number of codebooks. The first holds the words, the others the sound. Moshi is
    trained on 8, and the codec's authors report results for 8: 1.1 kbps. null means all:
    32, the default of `MimiModel.encode`, or 16 for Qwen3-TTS. The codes of fewer codebooks
    are the first columns of all codes."""


class Mimi(CodecExtractor[MimiParams]):
    """Mimi's codes: those of `MimiModel.encode` for the clip alone; or its latents.

    Codes are `[T, Q]`, ceil(num_samples / 1920) frames. A frame of kyutai/mimi sees 80 s."""

    Params = MimiParams
    revision = 1
    _model_name = "MimiModel"
    gpu_factor = 2
    causal = True

    def _prepare(self) -> None:
        settings = weights.read_json(self.params.locate(), "config.json")
        self._is_qwen = settings.get("model_type") == _QWEN
        model = self._load_model(part=_ENCODER_OF_QWEN if self._is_qwen else weights.WHOLE)
        config = model.config
        most = settings.get("encoder_valid_num_quantizers", config.num_quantizers)
        self._num_codebooks = num_codebooks(self.params, most)
        self._encoder = CausalEncoder(model)
        self._quantizer = model.quantizer
        for module in self._quantizer.modules():
            # a codebook computes this on first access, which threads would share
            getattr(module, "embed", None)
        self.granularity = self._encoder.hop
        self._set_spec(
            "Mimi",
            self._num_codebooks,
            config.codebook_size,
            self._encoder.frame_length,
            config.hidden_size,
        )

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        return self._encoder(waveforms, num_samples)

    def decode(self, codes_1QF: Tensor, tracks: Mapping[str, Tensor]) -> Tensor:
        if self._is_qwen:
            raise ExtractorError("codes of Qwen3-TTS: only its own package can decode them")
        return super().decode(codes_1QF, tracks)

    def quantize(self, latents: Tensor) -> Tensor:
        codes_QRF: Tensor = self._quantizer.encode(latents.mT, self._num_codebooks)
        return codes_QRF.permute(1, 2, 0)


class PocketTTS(LatentExtractor[ModelParams]):
    """The continuous latents of Pocket TTS (Kyutai, 2026): those of
    `PocketTTSAudioTokenizerModel.encode` for the clip alone, padded with zeros to whole
    frames. Latents are float32 `[T, 32]`, ceil(num_samples / 1920) frames."""

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
