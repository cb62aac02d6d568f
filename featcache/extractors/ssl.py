"""`ssl`: the hidden states of self-supervised speech models, and of the encoders of Whisper
and Parakeet, through transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from featcache import weights
from featcache.errors import ConfigError, listing
from featcache.extractors import mel
from featcache.extractors.base import Clip
from featcache.extractors.frames import BLOCK_ROWS
from featcache.extractors.hidden_states import Encoder, HiddenStates, HiddenStatesParams
from featcache.extractors.log_mel import LogMel, LogMelParams
from featcache.extractors.ragged import Length, centred_rows, is_inside, normalized
from featcache.extractors.wav2vec2 import (
    PositionEmbedding,
    Wav2Vec2,
    Wav2Vec2Conformer,
    attention_mask,
    first_of,
)

_EPSILON = 1e-7
"""A number that transformers' feature extractors add to the variance of a waveform, and of
a mel bin."""

# The mel energies of w2v-BERT and Parakeet
_LENGTH, _SHIFT, _FFT_LENGTH = 400, 160, 512
_PREEMPHASIS = 0.97

# The mel energies of w2v-BERT
_STACKED = 2
_SCALE = 32768.0
_FLOOR = 1.192092955078125e-07


class SSLParams(HiddenStatesParams):
    """The parameters of `ssl`.

    config.json beside the weights says which model it is. `do_normalize` in
    preprocessor_config.json beside them says whether a clip first gets zero mean and unit
    variance; without this file, waveforms are not changed. With `chunk`, mean and
    variance are those of each chunk."""


class SSL(HiddenStates[SSLParams]):
    """Hidden states of HuBERT, wav2vec 2.0, WavLM, data2vec, UniSpeech-SAT, wav2vec 2.0
    Conformer, w2v-BERT 2.0, or the encoders of Parakeet and Whisper.

    Features are float32 `[frames, D]`, or `[frames, layers, D]`, at 50 frames per second,
    and at 12.5 for Parakeet: up to rounding what transformers gives for the clip alone. For
    Whisper, n samples have n / 320 frames, rounded up. Clips above 30 s fail, unless
    `chunk` cuts them.

    float16 holds nothing above 65504. In some layers of large models, single dimensions
    grow that far; such clips would fail."""

    Params = SSLParams
    revision = 1

    def _prepare(self) -> None:
        params, located = self.params, self.params.locate()
        settings = weights.read_json(located, "config.json")
        model_type = settings.get("model_type")
        if model_type not in _FAMILIES:
            known = f"config.json has model_type {model_type!r}; ssl knows {listing(_FAMILIES)}"
            raise weights.weights_error(located.folder, known)
        name, self._model_name, encoder = _FAMILIES[model_type]
        preprocessing = weights.read_preprocessing(located)
        if params.layer is None and params.layers is None and settings.get("add_adapter"):
            raise ConfigError(
                "params.layer: the output of this model comes from an adapter; choose a "
                "layer before it"
            )
        part = _PARTS.get(model_type, weights.WHOLE)
        model = self._load_model(preprocessing.get("sampling_rate", 16000), part)
        epsilon = None
        takes_waveforms = isinstance(encoder, type) and issubclass(encoder, Wav2Vec2)
        if takes_waveforms and preprocessing.get("do_normalize", bool(preprocessing)):
            epsilon = _EPSILON
        self._set_encoder(encoder(model), model.config.hidden_size, name, epsilon)


class Whisper(Encoder):
    """Whisper's encoder (Radford et al. 2022, "Robust speech recognition via large-scale
    weak supervision") over rows.

    The model, a `WhisperModel` in eval mode, always takes 30 s: silence follows a shorter
    clip, and its frames are not kept. `M` are mel bins."""

    def __init__(self, model: Any) -> None:
        encoder = model.encoder
        params = LogMelParams(num_mel_bins=encoder.config.num_mel_bins)
        self._log_mel = LogMel(params, 16000, model.device)
        self._convolutions = (encoder.conv1, encoder.conv2)
        self._positions = encoder.embed_positions
        self._layer_norm = encoder.layer_norm
        self.hop = params.hop_length * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        self.most_samples: int = encoder.config.max_source_positions * self.hop
        self.layers = encoder.layers
        self._num_layers = len(encoder.layers)

    def num_frames(self, num_samples: Length) -> Length:
        return (num_samples + self.hop - 1) // self.hop

    def hidden_states(self, waveforms: Tensor, num_samples: Tensor) -> Iterator[Tensor]:
        convolved_RDF = self._mels(waveforms, num_samples).transpose(1, 2)
        for convolution in self._convolutions:
            convolved_RDF = functional.gelu(convolution(convolved_RDF))
        hidden_RFD = convolved_RDF.transpose(1, 2) + self._positions.weight
        yield hidden_RFD
        for number, layer in enumerate(self.layers, start=1):
            hidden_RFD = first_of(layer(hidden_RFD, None))
            if number < self._num_layers:
                yield hidden_RFD
        # the last layer's hidden states are the output too
        output_RFD = self._layer_norm(hidden_RFD)
        yield from (output_RFD, output_RFD)

    def _mels(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        silent_RP = waveforms_RP.masked_fill(~is_inside(num_samples, waveforms_RP.shape[1]), 0)
        with torch.autocast(waveforms_RP.device.type, enabled=False):
            return torch.stack(self._log_mel.extract([Clip("", row) for row in silent_RP]))


class W2vBert(Encoder):
    """w2v-BERT 2.0 over rows: transformers' `Wav2Vec2BertModel`, in eval mode. `T` are mel
    frames, `M` mel bins.

    The model (Barrault et al. 2023, "Seamless", section 3.2.1) is a Conformer over Kaldi's
    log mel energies. Its front end is that of `SeamlessM4TFeatureExtractor`: 80 mel bins,
    each with zero mean and unit variance over the clip, two frames of 10 ms stacked into
    one. Its convolutions look back only, so what follows a row's end is kept out of means,
    variances and attention.

    The mel energies are computed in float64, as in transformers: the division by a small
    variance would amplify float32's rounding. transformers takes means and variances in
    float32, which changes hidden states by up to some 1e-2 of their RMS where a bin hardly
    changes."""

    hop = _STACKED * _SHIFT

    def __init__(self, model: Any) -> None:
        num_bins = model.config.feature_projection_input_dim // _STACKED
        filters = mel.kaldi_filters(num_bins, (20.0, 8000.0), _FFT_LENGTH, 16000)
        window = torch.hann_window(_LENGTH, periodic=False, dtype=torch.float64).pow(0.85)
        self._filters = filters.to(model.device)
        self._window = window.to(model.device)
        self._projection = model.feature_projection
        self._positions = PositionEmbedding(model.encoder.embed_positions)
        self._last = model.intermediate_ffn
        self.layers = model.encoder.layers

    def num_frames(self, num_samples: Length) -> Length:
        return self._num_mels(num_samples) // _STACKED

    def hidden_states(self, waveforms: Tensor, num_samples: Tensor) -> Iterator[Tensor]:
        hidden_RFD = self._projection(self.mel_energies(waveforms, num_samples))[0]
        inside_RF = is_inside(self.num_frames(num_samples), hidden_RFD.shape[1])
        hidden_RFD = hidden_RFD.masked_fill(~inside_RF[..., None], 0)
        yield hidden_RFD
        mask = attention_mask(hidden_RFD, inside_RF)
        options = {
            "relative_position_embeddings": self._positions(hidden_RFD),
            "conv_attention_mask": inside_RF,
        }
        for layer in self.layers:
            hidden_RFD = first_of(layer(hidden_RFD, attention_mask=mask, **options))
            yield hidden_RFD
        if self._last:
            hidden_RFD = hidden_RFD + 0.5 * self._last(hidden_RFD)
        yield hidden_RFD

    def mel_energies(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        """Compute normalised log mel energies, the model's input, float32 `[R, F, 2 M]`."""
        frames_RTL = waveforms_RP.unfold(1, _LENGTH, _SHIFT)
        rows, num_mels = frames_RTL.shape[:2]
        mels_RTM = self._log_mels(frames_RTL.reshape(-1, _LENGTH)).view(rows, num_mels, -1)
        lengths = self._num_mels(num_samples)
        scaled_RTM = normalized(mels_RTM, lengths, _EPSILON, correction=1).float()
        num_frames = num_mels // _STACKED
        return scaled_RTM[:, : num_frames * _STACKED].reshape(rows, num_frames, -1)

    def _log_mels(self, frames: Tensor) -> Tensor:
        """Compute Kaldi's log mel energies of frames `[n, 400]`, in blocks of one shape:
        float64 `[n, M]`, rounded to values of float32."""
        log_mels = []
        rows = BLOCK_ROWS[frames.device.type]
        for block in torch.split(frames, rows):
            filled = functional.pad(block.double() * _SCALE, (0, 0, 0, rows - len(block)))
            filled -= filled.mean(dim=1, keepdim=True)
            filled[:, 1:] -= _PREEMPHASIS * filled[:, :-1]
            filled[:, 0] *= 1 - _PREEMPHASIS
            energies = mel.power_spectrum(filled * self._window, _FFT_LENGTH) @ self._filters
            log_mels.append(energies.clamp_(min=_FLOOR).log_()[: len(block)].float())
        return torch.cat(log_mels).double()

    def _num_mels(self, num_samples: Length) -> Length:
        return (num_samples - _LENGTH) // _SHIFT + 1


class Parakeet(Encoder):
    """Parakeet's encoder over rows: transformers' `ParakeetEncoder`, in eval mode. `T` are mel
    frames, `M` mel bins.

    The model is a FastConformer (Rekesh et al. 2023, "Fast Conformer with Linearly Scalable
    Attention for Efficient Speech Recognition"). It keeps padding out of its convolutions and
    its attention by a mask. Its front end is that of `ParakeetFeatureExtractor`: log mel
    energies, each with zero mean and unit variance over the clip's own frames.

    A clip has a frame for each 1,280 samples that have begun, counted in its whole mel
    frames. For some clips, the model gives one frame more, which its own mask leaves
    out."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._factor: int = config.subsampling_factor
        self.hop = _SHIFT * self._factor
        filters = mel.hertz_filters(config.num_mel_bins, _FFT_LENGTH, 16000)
        self._filters = filters.to(model.device, torch.float32)
        window = torch.hann_window(_LENGTH, periodic=False, device=model.device)
        sides = (_FFT_LENGTH - _LENGTH) // 2
        self._window = functional.pad(window, (sides, sides))
        self._subsampling = model.subsampling
        self._scale: float = model.input_scale
        self._positions = model.encode_positions
        self.layers = model.layers

    def num_frames(self, num_samples: Length) -> Length:
        mels = num_samples // _SHIFT
        # of a single mel frame there is no variance
        return -(-mels // self._factor) * (mels > 1)

    def hidden_states(self, waveforms: Tensor, num_samples: Tensor) -> Iterator[Tensor]:
        mels_RTM = self._mel_energies(waveforms, num_samples)
        inside_RT = is_inside(num_samples // _SHIFT, mels_RTM.shape[1])
        hidden_RFD = self._subsampling(mels_RTM, inside_RT) * self._scale
        yield hidden_RFD
        inside_RF = is_inside(self.num_frames(num_samples), hidden_RFD.shape[1])
        options = {
            "attention_mask": (inside_RF[:, None] & inside_RF[:, :, None])[:, None],
            "position_embeddings": self._positions(hidden_RFD),
        }
        for layer in self.layers:
            hidden_RFD = layer(hidden_RFD, **options)
            yield hidden_RFD
        yield hidden_RFD

    def _mel_energies(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        """Compute normalised log mel energies, float32 `[R, T, M]`, zero after each row's
        last whole frame."""
        emphasized_RP = waveforms_RP.clone()
        emphasized_RP[:, 1:] -= _PREEMPHASIS * waveforms_RP[:, :-1]
        outside_RP = ~is_inside(num_samples, waveforms_RP.shape[1])
        emphasized_RP = emphasized_RP.masked_fill_(outside_RP, 0)
        half = _FFT_LENGTH // 2
        frames_RTL = functional.pad(emphasized_RP, (half, half)).unfold(1, _FFT_LENGTH, _SHIFT)
        rows, steps = frames_RTL.shape[:2]
        windowed = frames_RTL.reshape(rows * steps, _FFT_LENGTH) * self._window
        spectrum = mel.power_spectrum(windowed, _FFT_LENGTH)
        mels_RTM = (spectrum @ self._filters + 2.0**-24).log_().view(rows, steps, -1)
        centred_RTM, variance = centred_rows(mels_RTM, num_samples // _SHIFT, correction=1)
        return centred_RTM / (variance.sqrt() + 1e-5)


_FAMILIES: dict[str, tuple[str, str, Callable[[Any], Encoder]]] = {
    "data2vec-audio": ("data2vec", "Data2VecAudioModel", Wav2Vec2),
    "hubert": ("HuBERT", "HubertModel", Wav2Vec2),
    **dict.fromkeys(
        ("parakeet_encoder", "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt"),
        ("Parakeet", "ParakeetEncoder", Parakeet),
    ),
    "unispeech-sat": ("UniSpeech-SAT", "UniSpeechSatModel", Wav2Vec2),
    "wav2vec2": ("wav2vec 2.0", "Wav2Vec2Model", Wav2Vec2),
    "wav2vec2-bert": ("w2v-BERT", "Wav2Vec2BertModel", W2vBert),
    "wav2vec2-conformer": ("wav2vec 2.0 Conformer", "Wav2Vec2ConformerModel", Wav2Vec2Conformer),
    "wavlm": ("WavLM", "WavLMModel", Wav2Vec2),
    "whisper": ("Whisper", "WhisperModel", Whisper),
}

_PARTS = dict.fromkeys(
    ("parakeet_ctc", "parakeet_rnnt", "parakeet_tdt"), weights.Part("encoder_config", "encoder.")
)
"""Models of which `ssl` takes a part, by `model_type`."""
