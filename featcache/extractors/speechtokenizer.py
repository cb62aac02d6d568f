"""SpeechTokenizer: Unified Speech Tokenizer for Speech Language Models (Zhang et al.,
2023), as in its own package.

A SEANet that looks to both sides, pads a clip by reflection at both ends, and has an LSTM
that runs in both directions. In a padded batch, the reflection would be lost, and the
backward LSTM would reach a short row's end with a memory of padding; here each row is
reflected where it ends, and the LSTM runs back from there (see `ragged`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import warnings
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch

from featcache import weights
from featcache.errors import ConfigError, MissingDependencyError
from featcache.extractors import ragged
from featcache.extractors.codec import CodecExtractor, CodecParams, num_codebooks

_PACKAGE = "speechtokenizer"
_ALIAS = "_featcache_speechtokenizer"
_importing = threading.Lock()


class SpeechTokenizerParams(CodecParams):
    """The parameters of `speechtokenizer`. Its `weights` are a folder with the two files
    that are published, `config.json` and `SpeechTokenizer.pt`, or the latter."""


class SpeechTokenizer(CodecExtractor[SpeechTokenizerParams]):
    """SpeechTokenizer's codes: those of `SpeechTokenizer.encode` for the clip alone.

    Codes are `[T, Q]`, ceil(num_samples / 320) frames, from one sample on. Every frame
    sees the whole clip."""

    Params = SpeechTokenizerParams
    revision = 1
    gpu_factor = 2

    def __init__(
        self, params: SpeechTokenizerParams, sample_rate: int, device: torch.device
    ) -> None:
        super().__init__(params, sample_rate, device)
        model = _load(weights.locate(params.weights, params.revision)).to(device)
        self.require_sample_rate(model.sample_rate)
        count = num_codebooks(params, model.n_q)
        self._encoder = ragged.seanet_layers(model.encoder.model)
        self._codebooks = model.quantizer.vq.layers[:count]
        self.granularity = int(model.downsample_rate)
        self._set_spec("SpeechTokenizer", count, model.quantizer.bins)

    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        return ragged.run(self._encoder, waveforms[:, None], num_samples)[0].mT


def _load(located: weights.Located) -> Any:
    """Build the package's model from its weights, on the CPU, as `weights.load` builds
    one of transformers."""
    model_class = _model_class()
    config, tensors = weights.read_json(located, "config.json"), weights.state_dict(located)
    if not config:
        raise ConfigError(
            f"params.weights: {located.folder}: holds no config.json that says what the model is"
        )
    # as in every config.json of transformers
    if (found := config.get("model_type")) is not None:
        raise ConfigError(
            f"params.weights: {located.folder}: holds a model of type {found!r}, not a "
            "SpeechTokenizer's"
        )
    with warnings.catch_warnings(action="ignore"):  # the package uses torch's old weight norm
        try:
            model = model_class(config)
            model.load_state_dict(tensors)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            said = shorten(str(error), 200, placeholder=" …")
            raise ConfigError(
                f"params.weights: {located.path}: not a SpeechTokenizer's: {said}"
            ) from error
    weights.fold_weight_norm(model)
    return model.eval().requires_grad_(False)


def _model_class() -> Any:
    """The package's class `SpeechTokenizer`, without the rest of the package.

    `import speechtokenizer` imports its trainer, which needs tensorboard and beartype,
    undeclared, and accelerate and matplotlib. The modules of the model import each other
    relatively, so they are imported here as submodules of a package with another name in
    the same folder."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            _PACKAGE, "the extractor speechtokenizer", extra="speechtokenizer"
        )
    with _importing, warnings.catch_warnings(action="ignore"):  # it uses torch.jit.script
        if _ALIAS not in sys.modules:
            sys.modules[_ALIAS] = ModuleType(_ALIAS)
            sys.modules[_ALIAS].__path__ = found.submodule_search_locations
        try:
            return importlib.import_module(f"{_ALIAS}.model").SpeechTokenizer
        except ImportError as error:
            missing = error.name or _PACKAGE
            raise MissingDependencyError(
                missing, "the extractor speechtokenizer", extra="speechtokenizer"
            ) from error
