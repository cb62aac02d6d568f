"""`torchaudio`: the hidden states of the models in `torchaudio.pipelines`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from featcache import weights
from featcache.errors import ConfigError, MissingDependencyError, did_you_mean, first_line, listing
from featcache.extractors.base import LocalPath
from featcache.extractors.hidden_states import HiddenStates, HiddenStatesParams
from featcache.extractors.wav2vec2 import Wav2Vec2, WavLMAttention
from featcache.weights import Located, weights_error

_EPSILON = 1e-5
"""A number that bundles, by `layer_norm`, add to a waveform's variance."""

_PAIRS = (
    "torchaudio 2.11.1 needs torch 2.13 or later, and 2.11.0 needs torch 2.11.0, each as built "
    "for CUDA, also on a machine without a GPU"
)

_URL = "https://download.pytorch.org/torchaudio/models/"


class TorchaudioSSLParams(HiddenStatesParams):
    """The parameters of `torchaudio`."""

    bundle: str
    """The model's name in `torchaudio.pipelines`: HUBERT_BASE, WAV2VEC2_XLSR_300M,
    WAVLM_LARGE … It decides the model's structure, and whether waveforms get zero mean and
    unit variance."""
    weights: LocalPath = ""
    """A file with the bundle's weights. Default: the file that torchaudio has put into
    torch hub's cache. featcache does not download it."""
    revision: None = None
    """Not used: `bundle` names the weights."""

    def locate(self) -> Located:
        if self.weights:
            located = super().locate()
            if located.file is None:
                raise weights_error(self.weights, "name the file with the bundle's weights")
            return located
        path = _bundle(self.bundle)._path
        file = Path(torch.hub.get_dir(), "checkpoints", Path(path).name)
        if not file.is_file():
            url = path if path.startswith("https:") else _URL + path
            missing = f"the weights of {self.bundle} are missing"
            raise ConfigError(f"params.weights: {missing}: download {url} to {file}")
        return weights.locate(str(file), None)


class TorchaudioSSL(HiddenStates[TorchaudioSSLParams]):
    """Hidden states of a wav2vec 2.0, HuBERT or WavLM of `torchaudio.pipelines`.

    Features are float32 `[frames, D]`, or `[frames, layers, D]`, at 50 frames per second.
    Up to rounding, layer N is what the model's `extract_features` gives for the clip
    alone at N - 1. See `SSL` about float16."""

    Params = TorchaudioSSLParams
    revision = 1

    def _prepare(self) -> None:
        name = self.params.bundle
        bundle = _bundle(name)
        self.require_sample_rate(bundle.sample_rate, name)
        encoder = TorchaudioWav2Vec2(_load(bundle, self.params.locate(), self.device))
        epsilon = _EPSILON if bundle._normalize_waveform else None
        self._set_encoder(encoder, bundle._params["encoder_embed_dim"], name, epsilon)


class TorchaudioWav2Vec2(Wav2Vec2):
    """torchaudio's `Wav2Vec2Model`, in eval mode, on rows. It replaces a WavLM's
    attention."""

    def __init__(self, model: Any) -> None:
        from torchaudio.models.wav2vec2.wavlm_attention import WavLMSelfAttention

        transformer = model.encoder.transformer
        for layer in transformer.layers:
            if isinstance(layer.attention, WavLMSelfAttention):
                out_projection = layer.attention.attention.out_proj
                layer.attention = TorchaudioWavLMAttention(layer.attention, out_projection)
        self._set_modules(
            model.feature_extractor,
            model.encoder.feature_projection,
            transformer,
            norm_is_last=not transformer.layer_norm_first,
        )

    def _transformed(self, hidden_RFD: Tensor, mask: Tensor) -> Iterator[Tensor]:
        # as torchaudio requires
        return super()._transformed(hidden_RFD, mask.expand(-1, -1, mask.shape[-1], -1))


class TorchaudioWavLMAttention(WavLMAttention):
    """WavLM's attention in place of torchaudio's `WavLMSelfAttention`."""

    def forward(self, *inputs: Any, **options: Any) -> tuple[Any, ...]:
        attended, _, bias = super().forward(*inputs, **options)
        return attended, bias

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        joined = self._replaced.attention
        projected = functional.linear(hidden_states, joined.in_proj_weight, joined.in_proj_bias)
        return projected.chunk(3, dim=-1)


def _bundle(name: str) -> Any:
    """Return a bundle of torchaudio. Its private fields are read, since its public
    `get_model` downloads and unpickles."""
    try:
        from torchaudio import pipelines
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "torchaudio", "the extractor torchaudio", extra="torchaudio"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:  # it was built for another torch
        raise ConfigError(
            f"torchaudio {version('torchaudio')} does not import beside torch "
            f"{torch.__version__}: {first_line(error)}: {_PAIRS}"
        ) from error
    bundles = vars(pipelines)
    known = [key for key in bundles if isinstance(bundles[key], pipelines.Wav2Vec2Bundle)]
    if name not in known:
        raise ConfigError(
            f"params.bundle: torchaudio has no {name!r}{did_you_mean(name, known)}; it has "
            f"{listing(sorted(known), at_most=40)}"
        )
    return bundles[name]


def _load(bundle: Any, located: Located, device: torch.device) -> Any:
    from torchaudio import models

    builder = {"Wav2Vec2": models.wav2vec2_model, "WavLM": models.wavlm_model}[bundle._model_type]
    model = builder(**{**bundle._params, "aux_num_out": None})
    tensors = weights.state_dict(located).items()
    try:
        model.load_state_dict({name: x for name, x in tensors if not name.startswith("aux.")})
    except RuntimeError as error:
        what = f"not the bundle's weights: {str(error).splitlines()[-1].strip()}"
        raise weights_error(located.path, what) from error
    weights.fold_weight_norm(model)
    return model.float().eval().requires_grad_(False).to(device)
