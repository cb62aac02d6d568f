"""`ssl`: the hidden states of self-supervised speech models, and of Whisper's encoder, through transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from featcache import weights
from featcache.errors import ConfigError, listing
from featcache.extractors.hidden_states import Encoder, HiddenStates, HiddenStatesParams
from featcache.extractors.layers import Layers
from featcache.extractors.model import require_sample_rate
from featcache.extractors.w2v_bert import W2vBert
from featcache.extractors.wav2vec2 import Wav2Vec2
from featcache.extractors.whisper import Whisper

_EPSILON = 1e-7
"""Of `Wav2Vec2FeatureExtractor`, under the root of a waveform's variance."""


@dataclass(frozen=True)
class _Family:
    """Models of one type.

    Attributes:
        name: for a reader.
        model_class: in transformers.
        encoder: of the loaded model, on its device.
        num_layers: the key of config.json that says how many layers there are.
        size: the key that says how many dimensions a hidden state has.
        takes_waveforms: and may want them normalised.
    """

    name: str
    model_class: str
    encoder: Callable[[Any, torch.device], Encoder]
    num_layers: str = "num_hidden_layers"
    size: str = "hidden_size"
    takes_waveforms: bool = True


def _wav2vec2(model: Any, _: torch.device) -> Encoder:
    return Wav2Vec2(model)


def _whisper(model: Any, device: torch.device) -> Encoder:
    return Whisper(model.encoder, device)


_FAMILIES = {
    "hubert": _Family("HuBERT", "HubertModel", _wav2vec2),
    "wav2vec2": _Family("wav2vec 2.0", "Wav2Vec2Model", _wav2vec2),
    "wav2vec2-bert": _Family("w2v-BERT", "Wav2Vec2BertModel", W2vBert, takes_waveforms=False),
    "wavlm": _Family("WavLM", "WavLMModel", _wav2vec2),
    "whisper": _Family("Whisper", "WhisperModel", _whisper, "encoder_layers", "d_model", takes_waveforms=False),
}
"""By `model_type` of config.json."""


class SSLParams(HiddenStatesParams):
    """The parameters of `ssl`. Which model it is, config.json beside the weights says.

    Whether a clip gets zero mean and unit variance first, preprocessor_config.json beside them says (`do_normalize`);
    where there is no such file, waveforms go in as they are. With `chunk`, mean and variance are each chunk's own.
    """


class SSL(HiddenStates[SSLParams]):
    """Hidden states of HuBERT, wav2vec 2.0, WavLM, w2v-BERT 2.0, or Whisper's encoder.

    Features are float32 `[frames, D]`, or `[frames, layers, D]`; there are 50 frames to a second. They are those that
    transformers gives for the clip alone, to rounding, whatever it is batched with. Whisper takes 30 s, and what it
    makes of the silence behind a clip is left out: n samples have n / 320 frames, rounded up. Clips that are longer are
    failures for it, unless `chunk` cuts them.

    They are stored as float32 where the config does not say otherwise. float16 halves the space and rounds by 1 in 2000
    at most, but holds nothing above 65504: in some layers of large models single dimensions grow that far (transformers
    clamps them there, when Whisper runs in float16), and such clips would be failures.

    Args:
        params: see `SSLParams`.
        sample_rate: of the waveforms, in Hz; 16000.
        device: to compute on.

    Raises:
        ConfigError: the weights cannot be had, are of no such model, or have not got the layer; or the parameters do
            not go with the model.
        MissingDependencyError: there is no transformers.
    """

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
        require_sample_rate(params, sample_rate, preprocessing.get("sampling_rate", 16000))
        model_class = weights.transformers_class(family.model_class, "extractor: ssl")
        default = model_class.config_class()
        layers = Layers(params, settings.get(family.num_layers, getattr(default, family.num_layers)))
        if layers.want_output and settings.get("add_adapter"):
            raise ConfigError("params.layer: the output of this model comes from an adapter; choose a layer before it")
        model = weights.load(model_class, located, device)
        normalizes = family.takes_waveforms and preprocessing.get("do_normalize", bool(preprocessing))
        self._use(
            encoder=family.encoder(model, device),
            layers=layers,
            size=getattr(model.config, family.size),
            name=family.name,
            sample_rate=sample_rate,
            epsilon=_EPSILON if normalizes else None,
        )
