"""The bases of codecs, and of other models of continuous latents."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors.base import Clip, main_track
from featcache.extractors.model import ModelExtractor, ModelParams, computing
from featcache.extractors.rows import Rows
from featcache.spec import MAIN, FeatureSpec


class CodecParams(ModelParams):
    """The parameters of every codec."""

    added_later: ClassVar[frozenset[str]] = frozenset({"output"})
    taken: ClassVar[frozenset[str]] = frozenset({"output", "codebooks", "bandwidth"})

    output: Literal["codes", "latents"] = "codes"
    """`latents` are the continuous vectors before the quantiser, float32 `[T, D]`. They do
    not depend on `codebooks`, which is ignored then."""
    codebooks: int | None = Field(default=None, ge=1)
    """Number of codebooks, from the first on. Default: all."""

    @field_validator("codebooks", "bandwidth", check_fields=False)
    @classmethod
    def _of_codes(cls, value: float | None, info: ValidationInfo) -> float | None:
        """Leave out what decides no value of latents, so that it is not in fingerprints."""
        return None if info.data.get("output") == "latents" else value


class BandwidthParams(CodecParams):
    """The parameters of codecs that were trained for several bandwidths."""

    bandwidth: float | None = Field(default=None, gt=0)
    """Another way to choose the number of codebooks: a bandwidth that the model was trained
    for, in kbps. Without `bandwidth` and `codebooks`, all codebooks. The codes of fewer
    codebooks are the first columns of all codes."""


C = TypeVar("C", bound=CodecParams)
M = TypeVar("M", bound=ModelParams)

_SILENCE_SECONDS = 30.0
"""The length of a silence. Latents settle within its first 80 frames or so."""


class LatentExtractor(ModelExtractor[M]):
    """The base of extractors whose model computes latents: `granule_frames` for every
    `granularity` samples that have begun."""

    def _set_latent_spec(self, name: str, size: int, frame_length: int) -> None:
        units, rate = f"{name} latent", self.sample_rate
        self.spec = FeatureSpec((size,), "float32", self._frame_rate, frame_length, rate, units)

    @property
    def _frame_rate(self) -> float:
        return self.sample_rate * self.granule_frames / self.granularity

    def num_frames(self, num_samples: int) -> int:
        return -(-num_samples // self.granularity) * self.granule_frames

    @abstractmethod
    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        """Compute latents, float `[R, F, D]`; a codec's are the input of its quantizer."""

    def encode(self, waveforms: Tensor, num_samples: Tensor) -> Rows:
        return self.run(waveforms, num_samples)

    def run_for(self, takers: Sequence[Any], waveforms: Tensor, num_samples: Tensor) -> list[Rows]:
        with computing(self.params.precision, waveforms.device):
            latents_RFD = self.latents(waveforms, num_samples)
            return [taker.take(latents_RFD) for taker in takers]

    def take(self, latents_RFD: Tensor) -> Rows:
        """Return the features of latents, float `[R, F, D]`."""
        return Rows(latents_RFD.float())

    def silence(self) -> Tensor | None:
        if self.spec.codebook_sizes:
            return None
        zeros = torch.zeros(round(_SILENCE_SECONDS * self.sample_rate), device=self.device)
        (extracted,) = self.extract([Clip("silence", zeros)])
        latents = main_track(extracted)
        # far from the beginning, and from an end that the model may see
        return latents[len(latents) * 3 // 4]


class CodecExtractor(LatentExtractor[C]):
    """The base of extractors whose model computes latents, and codes from the latents,
    always in float32. If codes differ where latents differ by rounding only, two codewords
    were tied."""

    _codebooks: Iterable[Any]
    """The model's codebooks in use, unless a subclass has its own `quantize`."""

    def _set_spec(
        self,
        name: str,
        num_codebooks: int,
        codebook_size: int,
        frame_length: int = 0,
        latent_size: int = 0,
    ) -> None:
        """Set the spec of codes or latents."""
        if self.params.output == "latents":
            self._set_latent_spec(name, latent_size, frame_length)
            return
        self.spec = FeatureSpec(
            (num_codebooks,),
            code_dtype(codebook_size),
            self._frame_rate,
            frame_length,
            self.sample_rate,
            f"{name} code",
            (codebook_size,) * num_codebooks,
        )

    @property
    def quantizes_latents(self) -> bool:
        return bool(self.spec.codebook_sizes)

    def codes_and_latents(self, clips: Sequence[Clip]) -> list[tuple[Tensor, Tensor]]:
        of_clips = self.extract_rows(clips, self._run_with_latents)
        return [(rows.features, rows.side["latents"]) for rows in of_clips]

    def _run_with_latents(self, waveforms: Tensor, num_samples: Tensor) -> Rows:
        """Compute rows of codes `[R, F, Q]`, with their latents as a side array."""
        with computing(self.params.precision, waveforms.device):
            latents_RFD = self.latents(waveforms, num_samples)
            codes_RFQ = self.codes_of(latents_RFD)
        return Rows(codes_RFQ, {"latents": latents_RFD.float()}, {"latents": 1})

    def quantize(self, latents: Tensor) -> Tensor:
        residual_RDF = latents.mT
        codes = []
        for codebook in self._codebooks:
            codes_RF, decoded_RDF = self._look_up(codebook, residual_RDF)
            residual_RDF = residual_RDF - decoded_RDF
            codes.append(codes_RF)
        return torch.stack(codes, dim=2)

    def _look_up(self, codebook: Any, residual_RDF: Tensor) -> tuple[Tensor, Tensor]:
        codes_RF = codebook.encode(residual_RDF)
        return codes_RF, codebook.decode(codes_RF)

    def take(self, latents_RFD: Tensor) -> Rows:
        if self.params.output == "latents":
            return super().take(latents_RFD)
        return Rows(self.codes_of(latents_RFD))

    def codes_of(self, latents_RFD: Tensor) -> Tensor:
        """Quantise latents, to codes of `spec.dtype`, `[R, F, Q]`."""
        with computing("fp32", latents_RFD.device):
            codes_RFQ = self.quantize(latents_RFD.float())
        return codes_RFQ.to(getattr(torch, self.spec.dtype))

    def synthesize(self, tracks: Mapping[str, Tensor]) -> Tensor:
        """Decode by the codec's own decoder, which is loaded for this; latents are
        quantised first."""
        features_1F = tracks[MAIN][None]
        if self.params.output == "latents":
            features_1F = self.quantize(features_1F.float())
        decoded = self.decode(features_1F.long().mT, tracks)
        return decoded.reshape(-1, decoded.shape[-1]).mean(dim=0)

    def decode(self, codes_1QF: Tensor, tracks: Mapping[str, Tensor]) -> Tensor:
        """Decode codes, int64 `[1, Q, F]`, to `[1, num_samples]` or `[1, C, num_samples]`."""
        decoded: Tensor = self._load_model().decode(audio_codes=codes_1QF).audio_values
        return decoded

    @classmethod
    def stored_dtype(cls, params: C) -> str:
        if params.output == "latents":
            return "float32"
        config = weights.read_json(params.locate(), "config.json")
        return code_dtype(int(config.get("codebook_size", 1024)))


def code_dtype(codebook_size: int) -> str:
    """Return the numpy name of the smallest unsigned dtype for a codebook's codes."""
    return np.min_scalar_type(codebook_size - 1).name


def num_codebooks(params: CodecParams, at_most: int) -> int:
    """Return the number of codebooks in use. Raises ConfigError if the model has fewer."""
    count = params.codebooks or at_most
    if count > at_most:
        raise ConfigError(f"params.codebooks: {count}, but {params.weights} has {at_most}")
    return count


def num_codebooks_at_bandwidth(params: BandwidthParams, model: Any) -> int:
    """Return the number of codebooks in use, by `codebooks` or `bandwidth`. Raises
    ConfigError if the model lacks them, or the two contradict."""
    count = num_codebooks(params, int(model.quantizer.num_quantizers))
    bandwidth = params.bandwidth
    if bandwidth is None:
        return count
    targets = model.config.target_bandwidths
    if bandwidth not in targets:
        known = ", ".join(f"{target:g}" for target in targets)
        raise ConfigError(f"params.bandwidth: {bandwidth:g}; {params.weights} has {known} kbps")
    count = int(model.quantizer.get_num_quantizers_for_bandwidth(bandwidth))
    if params.codebooks not in (None, count):
        raise ConfigError(
            f"params.codebooks: {params.codebooks}, but a bandwidth of {bandwidth:g} kbps "
            f"means {count}"
        )
    return count
