"""SpeechTokenizer: Unified Speech Tokenizer for Speech Language Models (Zhang et al.,
2023), as in its own package: a SEANet that pads a clip by reflection at both ends, with an
LSTM in both directions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from featcache import weights
from featcache.errors import MissingDependencyError
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

    Codes are `[T, Q]`, ceil(num_samples / 320) frames. Every frame sees the whole clip."""

    Params = SpeechTokenizerParams
    revision = 1
    gpu_factor = 2

    def _prepare(self) -> None:
        model = self._load()
        self.require_sample_rate(model.sample_rate)
        count = num_codebooks(self.params, model.n_q)
        self._encoder = ragged.seanet_layers(model.encoder.model)
        self._codebooks = model.quantizer.vq.layers[:count]
        self.granularity = int(model.downsample_rate)
        self._set_spec(
            "SpeechTokenizer", count, model.quantizer.bins, latent_size=model.quantizer.dimension
        )

    def _load(self) -> Any:
        return weights.load_module(
            _model_class(), self.params.locate(), self.device, "SpeechTokenizer"
        )

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        return ragged.run(self._encoder, waveforms[:, None], num_samples)[0].mT

    def decode(self, codes_1QF: Tensor, tracks: Mapping[str, Tensor]) -> Tensor:
        decoded: Tensor = self._load().decode(codes_1QF.transpose(0, 1))
        return decoded


def _model_class() -> Any:
    """Import the package's class `SpeechTokenizer` under another name: `import
    speechtokenizer` also imports its trainer, which needs undeclared packages."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(_PACKAGE)
    with _importing, warnings.catch_warnings(action="ignore"):  # it uses torch.jit.script
        if _ALIAS not in sys.modules:
            sys.modules[_ALIAS] = ModuleType(_ALIAS)
            sys.modules[_ALIAS].__path__ = spec.submodule_search_locations
        try:
            return importlib.import_module(f"{_ALIAS}.model").SpeechTokenizer
        except ImportError as error:
            raise _missing(error.name or _PACKAGE) from error


def _missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(package, "the extractor speechtokenizer", extra="speechtokenizer")
