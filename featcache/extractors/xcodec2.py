"""X-Codec2 (Ye et al., 2025, "Llasa: Scaling Train-Time and Inference-Time Compute for
Llama-based Speech Synthesis") and NeuCodec (Julian et al., 2025, "Finite Scalar
Quantization Enables Redundant and Transmission-Robust Neural Audio Compression at
Low Bit-rates"), as in transformers.

Two encoders hear a clip. One is w2v-BERT, with a few convolutions behind it. The other is
DAC's; its activation runs at twice the rate and repeats the last step at both ends of a
clip. Finite scalar quantization of both gives one code a frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from featcache.extractors import dac, ragged
from featcache.extractors.codec import CodecExtractor, CodecParams, num_codebooks
from featcache.extractors.ssl import W2vBert

_LENGTH, _SHIFT, _FFT_LENGTH = 400, 160, 512
_SCALE, _PREEMPHASIS = 32768.0, 0.97
_FLOOR, _EPSILON = 2.0**-23, 1e-7
"""The constants of the feature extractors' mel energies."""


class _Fsq(CodecExtractor[CodecParams]):
    """The base of both. transformers' feature extractors append a zero, then zeros up to
    whole hops."""

    Params = CodecParams

    _mel_padding: ClassVar[int]
    """Zeros at both ends of what w2v-BERT hears."""

    def _prepare(self) -> None:
        model = self._load_model()
        config = model.config
        num_codebooks(self.params, 1)
        self._semantic = _Semantic(model.semantic_encoder)
        self._adapter = model.semantic_adapter
        self._acoustic = model.acoustic_encoder
        self._fc = model.fc_encoder
        self._project = model.quantizer.project_in
        self._fsq = model.quantizer.quantizer
        self.granularity = math.prod(config.downsampling_ratios)
        levels = config.quantization_levels
        name = type(self).__name__
        self._set_spec(name, 1, math.prod(levels), latent_size=len(levels))

    @classmethod
    def stored_dtype(cls, params: CodecParams) -> str:
        return "float32" if params.output == "latents" else "uint16"

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        hop = self.granularity
        hops = num_samples // hop + 1
        waveforms_RP = F.pad(waveforms, (0, hop - waveforms.shape[1] % hop))
        x_RCT = waveforms_RP[:, None]
        acoustic_RDF, _ = dac.run(self._acoustic.children(), x_RCT, hops * hop, _anti_aliased)
        semantic_RDF = self._encode_semantic(waveforms_RP, hops * hop)
        frames = min(acoustic_RDF.shape[2], semantic_RDF.shape[2])
        both_RDF = torch.cat([semantic_RDF[..., :frames], acoustic_RDF[..., :frames]], dim=1)
        latents_RFD: Tensor = self._project(self._fc(both_RDF.mT))
        return latents_RFD

    def _encode_semantic(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        padding = self._mel_padding
        waveforms_RP = F.pad(waveforms_RP, (padding, padding))
        num_samples = num_samples + 2 * padding
        for hidden_RFD in self._semantic.hidden_states(waveforms_RP, num_samples):
            last_RFD = hidden_RFD
        lengths = self._semantic.num_frames(num_samples)
        convolved = partial(ragged.zero_padded_conv1d, lengths=lengths)
        adapter = self._adapter
        x_RDF = adapter.act1(convolved(adapter.conv1, last_RFD.mT.contiguous())[0])
        y_RDF = adapter.act2(convolved(adapter.conv2, x_RDF)[0])
        y_RDF = convolved(adapter.conv3, y_RDF)[0] + x_RDF
        return convolved(adapter.conv4, y_RDF)[0]

    def quantize(self, latents: Tensor) -> Tensor:
        codes_RF: Tensor = self._fsq(self._fsq.bound(latents))[1]  # bounds them again, as trained
        return codes_RF[..., None]


class Xcodec2(_Fsq):
    """X-Codec2's codes: those of `Xcodec2Model.encode` for the clip alone, as its feature
    extractor prepares it. Codes are `[T, 1]`, floor(num_samples / 320) + 1 frames. Every
    frame sees the whole clip."""

    revision = 1
    _model_name = "Xcodec2Model"
    _mel_padding = 160

    def num_frames(self, num_samples: int) -> int:
        return num_samples // self.granularity + 1 if num_samples else 0


class NeuCodec(_Fsq):
    """NeuCodec's codes: those of `NeuCodecModel.encode` for the clip alone, as its feature
    extractor prepares it. Codes are `[T, 1]`, floor(num_samples / 320) frames: one frame
    less than the acoustic encoder makes. Every frame sees the whole clip."""

    revision = 1
    _model_name = "NeuCodecModel"
    _mel_padding = 0

    def num_frames(self, num_samples: int) -> int:
        return num_samples // self.granularity

    def decode(self, codes_1QF: Tensor, tracks: Mapping[str, Tensor]) -> Tensor:
        """Bring the decoder's sound, at 24 kHz, to the encoder's rate, by cutting its
        spectrum."""
        decoded = super().decode(codes_1QF, tracks)
        num_samples = codes_1QF.shape[-1] * self.granularity
        spectrum = torch.fft.rfft(decoded)[..., : num_samples // 2 + 1]
        at_rate: Tensor = torch.fft.irfft(spectrum, n=num_samples)
        return at_rate * (num_samples / decoded.shape[-1])


class _Semantic(W2vBert):
    """w2v-BERT with the mel energies of `torchaudio.compliance.kaldi.fbank`, in float32, of
    each row by itself: in bands without sound, other roundings would give other codes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        window = torch.hann_window(_LENGTH, periodic=False, device=model.device)
        self._window = window.pow(0.85)
        self._filters = self._filters.float()

    def mel_energies(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        frames = int(self.num_frames(waveforms_RP.shape[1]))
        scaled_RFM = waveforms_RP.new_zeros(len(waveforms_RP), frames, 2 * self._filters.shape[1])
        for row, samples, length in zip(
            scaled_RFM, waveforms_RP, num_samples.tolist(), strict=True
        ):
            energies = self._scaled_mels(samples[:length])
            row[: len(energies)] = energies
        return scaled_RFM

    def _scaled_mels(self, samples: Tensor) -> Tensor:
        """Compute the mel energies of a row `[n]` with zero mean and unit variance in each
        bin, two frames in one: `[F, 2 M]`."""
        frames = (samples * _SCALE).unfold(0, _LENGTH, _SHIFT)
        frames = frames - frames.mean(1, keepdim=True)
        previous = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
        frames = (frames - _PREEMPHASIS * previous) * self._window
        spectrum = torch.fft.rfft(frames, n=_FFT_LENGTH).abs().pow(2)
        mels: Tensor = (spectrum @ self._filters).clamp(min=_FLOOR).log()
        mels = (mels - mels.mean(0)) / torch.sqrt(mels.var(0) + _EPSILON)
        pairs = len(mels) // 2
        return mels[: 2 * pairs].reshape(pairs, 2 * mels.shape[1])


def _anti_aliased(activation: Any, x_RCT: Tensor, lengths: Tensor) -> Tensor:
    """Compute `Xcodec2AntiAliasedActivation1d` of each row. Before each of its filters, a
    row's first and last columns are repeated at its ends."""
    up, down = activation.upsample, activation.downsample
    padded_RCT = _replicated(x_RCT, lengths, up.pad, up.pad)
    y_RCT = F.conv_transpose1d(
        padded_RCT, _by_channel(up.filter, x_RCT), stride=up.stride, groups=x_RCT.shape[1]
    )
    y_RCT = activation.act(up.ratio * y_RCT[..., up.pad_left : -up.pad_right])
    padded_RCT = _replicated(y_RCT, up.ratio * lengths, down.pad_left, down.pad_right)
    return F.conv1d(
        padded_RCT, _by_channel(down.filter, x_RCT), stride=down.stride, groups=x_RCT.shape[1]
    )


def _by_channel(filter_11T: Tensor, x_RCT: Tensor) -> Tensor:
    return filter_11T.to(x_RCT.dtype).expand(x_RCT.shape[1], -1, -1)


def _replicated(x_RCT: Tensor, lengths: Tensor, left: int, right: int) -> Tensor:
    """Pad rows by repeating the first column, and the last one from each row's own end on."""
    padded_RCT = F.pad(x_RCT, (left, right), mode="replicate")
    last_RCT = x_RCT.gather(2, (lengths - 1)[:, None, None].expand(-1, x_RCT.shape[1], 1))
    after_RN = left + lengths[:, None] + torch.arange(right, device=x_RCT.device)
    after_RCN = after_RN[:, None].expand(-1, x_RCT.shape[1], -1)
    return padded_RCT.scatter_(2, after_RCN, last_RCT.expand(-1, -1, right))
