"""`ssl`: the hidden states of self-supervised speech models, and of Whisper's encoder, through transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from featcache import weights
from featcache.errors import ConfigError, listing
from featcache.extractors.base import Clip
from featcache.extractors.hidden_states import Encoder, HiddenStates, HiddenStatesParams, LayerChoice
from featcache.extractors.log_mel import LogMel, LogMelParams
from featcache.extractors.ragged import Length
from featcache.extractors.w2v_bert import W2vBert
from featcache.extractors.wav2vec2 import Wav2Vec2

_EPSILON = 1e-7
"""What `Wav2Vec2FeatureExtractor` adds to a waveform's variance before the root."""


class SSLParams(HiddenStatesParams):
    """The parameters of `ssl`.

    config.json beside the weights says which model it is. `do_normalize` in preprocessor_config.json beside them says
    whether a clip first gets zero mean and unit variance; without this file, waveforms are not changed. With `chunk`,
    mean and variance are those of each chunk."""


class SSL(HiddenStates[SSLParams]):
    """Hidden states of HuBERT, wav2vec 2.0, WavLM, w2v-BERT 2.0, or Whisper's encoder.

    Features are float32 `[frames, D]`, or `[frames, layers, D]`, at 50 frames per second. Up to rounding they are what
    transformers gives for the clip alone, whatever clips are batched together. Whisper takes 30 s; the frames of the
    silence after a clip are left out, so n samples have n / 320 frames, rounded up. Longer clips fail, unless `chunk`
    cuts them.

    They are stored as float32 unless the config says otherwise. float16 halves the space and rounds by at most 1 in
    2000, but holds nothing above 65504. In some layers of large models, single dimensions grow that far (transformers
    clamps them if Whisper runs in float16); such clips would fail."""

    Params = SSLParams
    revision = 1

    def __init__(self, params: SSLParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        located = weights.locate(params.weights, params.revision)
        settings = weights.read_json(located, "config.json")
        model_type = settings.get("model_type")
        family = _FAMILIES.get(model_type or "")
        if family is None:
            raise ConfigError(
                f"params.weights: {located.folder}: config.json has model_type {model_type!r}; "
                f"ssl knows {listing(_FAMILIES)}"
            )
        preprocessing = weights.read_preprocessing(located)
        self.require_sample_rate(preprocessing.get("sampling_rate", 16000))
        model_class = weights.transformers_class(family.model_class, "extractor: ssl")
        default = model_class.config_class()
        layers = LayerChoice(params, settings.get(family.num_layers, getattr(default, family.num_layers)))
        if layers.want_output and settings.get("add_adapter"):
            raise ConfigError("params.layer: the output of this model comes from an adapter; choose a layer before it")
        model = weights.load(model_class, located, device)
        normalizes = family.takes_waveforms and preprocessing.get("do_normalize", bool(preprocessing))
        self._set_encoder(
            encoder=family.encoder(model),
            layers=layers,
            size=getattr(model.config, family.size),
            name=family.name,
            epsilon=_EPSILON if normalizes else None,
        )


class Whisper:
    """Whisper's encoder (Radford et al. 2022, "Robust speech recognition via large-scale weak supervision") over rows.

    The model, a `WhisperModel` in eval mode, always takes 30 s, and a shorter clip is followed by silence. So what
    follows a row's end is known, and does not depend on other rows. Frames of that silence are not kept. Shapes are
    those of `RowExtractor`, with `M` mel bins."""

    def __init__(self, model: Any) -> None:
        encoder = model.encoder
        params = LogMelParams(num_mel_bins=encoder.config.num_mel_bins)
        self._log_mel = LogMel(params, 16000, model.device)
        self._convolutions = (encoder.conv1, encoder.conv2)
        self._positions = encoder.embed_positions
        self._layer_norm = encoder.layer_norm
        self.hop: int = params.hop_length * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        self.most_samples: int = encoder.config.max_source_positions * self.hop
        self.layers = encoder.layers
        self._num_layers = len(encoder.layers)

    def num_frames(self, num_samples: Length) -> Length:
        """The number of frames that begin in so many samples."""
        return (num_samples + self.hop - 1) // self.hop

    def hidden_states(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Iterator[torch.Tensor]:
        """See `Encoder.hidden_states`. Those of the last layer go through the final layer norm, and are the output
        too."""
        convolved_RDF = self._mels(waveforms, num_samples).transpose(1, 2)
        for convolution in self._convolutions:
            convolved_RDF = functional.gelu(convolution(convolved_RDF))
        hidden_RFD = convolved_RDF.transpose(1, 2) + self._positions.weight
        yield hidden_RFD
        for number, layer in enumerate(self.layers, start=1):
            outputs = layer(hidden_RFD, None)
            hidden_RFD = outputs[0] if isinstance(outputs, tuple) else outputs
            if number < self._num_layers:
                yield hidden_RFD
        output_RFD = self._layer_norm(hidden_RFD)
        yield from (output_RFD, output_RFD)

    def _mels(self, waveforms_RP: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """Log mel spectrograms of 30 s, float32 `[R, 2 F, M]`."""
        outside = torch.arange(waveforms_RP.shape[1], device=waveforms_RP.device) >= num_samples[:, None]
        silent_RP = waveforms_RP.masked_fill(outside, 0)
        padded_RP = functional.pad(silent_RP, (0, self.most_samples - waveforms_RP.shape[1]))
        with torch.autocast(waveforms_RP.device.type, enabled=False):
            return torch.stack(self._log_mel.extract([Clip("", row) for row in padded_RP]))


@dataclass(frozen=True)
class _Family:
    """Models of one type."""

    name: str
    """The family's name, for people."""
    model_class: str
    """The name of the class in transformers."""
    encoder: Callable[[Any], Encoder]
    """Makes the encoder of a loaded model."""
    num_layers: str = "num_hidden_layers"
    """The key of config.json with the number of layers."""
    size: str = "hidden_size"
    """The key of config.json with the dimensions of a hidden state."""
    takes_waveforms: bool = True
    """Whether the model takes waveforms, which it may want normalised, and not mel energies."""


_FAMILIES = {
    "hubert": _Family("HuBERT", "HubertModel", Wav2Vec2),
    "wav2vec2": _Family("wav2vec 2.0", "Wav2Vec2Model", Wav2Vec2),
    "wav2vec2-bert": _Family("w2v-BERT", "Wav2Vec2BertModel", W2vBert, takes_waveforms=False),
    "wavlm": _Family("WavLM", "WavLMModel", Wav2Vec2),
    "whisper": _Family("Whisper", "WhisperModel", Whisper, "encoder_layers", "d_model", takes_waveforms=False),
}
"""The families, by `model_type` in config.json."""
