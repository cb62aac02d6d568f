"""The tokenizer of Higgs Audio v2 (Boson AI, 2025), as in transformers.

X-Codec's design at 24 kHz. HuBERT hears the clip at 16 kHz; every second frame of it is
used. Each codebook has projections around it. transformers' own class imports torchaudio,
for its resampler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors.ragged import Length, is_inside
from featcache.extractors.xcodec import Xcodec

_PADDING = 160
"""Zeros on either side of what HuBERT hears."""

_ZERO_CROSSINGS, _ROLLOFF = 6, 0.99
"""The filter of `torchaudio.functional.resample`: its width and its band."""


class Higgs2(Xcodec):
    """The codes of Higgs Audio v2's tokenizer: those of `HiggsAudioV2TokenizerModel.encode`
    for the clip alone, as its `DacFeatureExtractor` prepares it.

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
