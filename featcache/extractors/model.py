"""What extractors that load a model have in common: weights, precision, and chunks of long clips."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors.base import Params, absolute
from featcache.extractors.precision import Precision, computing
from featcache.extractors.rows import Piece, RowExtractor, Rows

LONGEST_SECONDS = 120.0
"""Of a clip, where the config does not say how to cut long ones into chunks: a model's memory grows with the clip, and
an attention's with its square."""


class Chunk(Params):
    """How clips longer than a chunk are cut."""

    seconds: float = Field(gt=0)
    """Length of a chunk."""
    overlap: float = Field(ge=0)
    """Seconds that neighbouring chunks share. Of each chunk of a causal model, the frames of the first `overlap`
    seconds are left out; with other models, half of them at each end. Chunks are exact if the model's receptive field
    is no longer than the overlap."""

    @model_validator(mode="after")
    def _moves_on(self) -> Chunk:
        if self.overlap >= self.seconds:
            raise ValueError(f"an overlap of {self.overlap:g} s leaves nothing of chunks of {self.seconds:g} s")
        return self


class ModelParams(Params):
    """The parameters of every extractor that loads a model."""

    locations: ClassVar[frozenset[str]] = frozenset({"weights", "revision"})

    weights: str
    """A folder written by `save_pretrained`, a file in such a folder, or a Hugging Face model id. A relative path is
    relative to the config file. The fingerprint includes the content of the weights, not their location."""
    revision: str | None = None
    """The commit, 40 hex digits. Required with a model id."""
    precision: Precision = "fp32"
    """The precision of the model. `tf32` lets a GPU round the inputs of matrix products and convolutions to ten bits;
    `bf16` and `fp16` use torch's autocast. All except fp32 change values: `featcache probe` says how much."""
    chunk: Chunk | None = None
    """Cut long clips into overlapping chunks. Without it, long clips fail."""

    @field_validator("weights")
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        """A path as an absolute one; a hub's id as it is."""
        return absolute(value, info)


M = TypeVar("M", bound=ModelParams)


class ModelExtractor(RowExtractor[M]):
    """The base of extractors that load a model.

    A subclass's `__init__` calls this one, and sets `spec` and `granularity`: if a chunk begins at sample
    `t * granularity`, its first frame is the clip's frame `t`.

    Attributes:
        causal: whether a frame depends on no later samples; decides the overlap that chunks need.
    """

    causal: bool = False

    def __init__(self, params: M, sample_rate: int, device: torch.device) -> None:
        self.params = params
        self.max_seconds = None if params.chunk else LONGEST_SECONDS
        self.tf32 = params.precision == "tf32"

    @classmethod
    def weights_digest(cls, params: M) -> str | None:
        """A hash of the weights and of everything else in their folder that decides values."""
        return weights.digest(weights.locate(params.weights, params.revision))

    @property
    def chunks_are_exact(self) -> bool:
        """Whether a frame in a chunk sees everything that it would see in the whole clip."""
        chunk, receptive = self.params.chunk, self.spec.frame_length
        return chunk is None or 0 < receptive <= self._samples(chunk.overlap)

    def chunk_warning(self, name: str) -> str | None:
        """A warning for the user if frames depend on more than the chunks' overlap."""
        chunk = self.params.chunk
        if chunk is None:
            return None
        self.pieces(round(3 * chunk.seconds * self.spec.sample_rate))  # raises now, not in the middle of a run
        if self.chunks_are_exact:
            return None
        return (
            f"chunks with {chunk.overlap:g} s of overlap are not exact for {name}, whose frames depend on more than "
            "that: `featcache probe` measures the difference"
        )

    def pieces(self, num_samples: int) -> list[Piece]:
        """The clip whole, or its chunks.

        Raises:
            ConfigError: chunks are shorter than what they share, in whole hops.
        """
        chunk = self.params.chunk
        if chunk is None or num_samples <= (size := self._samples(chunk.seconds)):
            return [Piece(0, num_samples, 0, self.num_frames(num_samples))]
        overlap = self._samples(chunk.overlap)
        if overlap >= size:
            hop = self.granularity / self.spec.sample_rate
            raise ConfigError(
                f"params.chunk: {chunk.overlap:g} s of overlap leave nothing of {chunk.seconds:g} s, "
                f"in whole hops of {hop:g} s"
            )
        left = overlap if self.causal else overlap // 2 // self.granularity * self.granularity
        starts = range(0, num_samples - overlap, size - overlap)
        kept_from = [0, *((start + left) // self.granularity for start in starts[1:]), self.num_frames(num_samples)]
        return [
            Piece(
                start=start,
                num_samples=min(size, num_samples - start),
                skip=kept_from[i] - start // self.granularity,
                num_frames=kept_from[i + 1] - kept_from[i],
            )
            for i, start in enumerate(starts)
        ]

    def _samples(self, seconds: float) -> int:
        """Whole hops in so many seconds, as samples."""
        return round(seconds * self.spec.sample_rate) // self.granularity * self.granularity

    def run(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """`encode`, at the config's precision."""
        with computing(self.params.precision, waveforms.device):
            return self.encode(waveforms, num_samples)


class CodecParams(ModelParams):
    """The parameters of every codec."""

    codebooks: int | None = Field(default=None, ge=1)
    """Number of codebooks, from the first on. Default: all that the model has."""


class CodecExtractor(ModelExtractor[M]):
    """The base of extractors whose model turns latents into codes: vectors in, the nearest codewords' numbers out.

    The two steps are apart so that they can be looked at apart: where codes differ, and latents do not, by more than
    rounding, two codewords were tied. Codes are always looked up in float32, also where `precision` is another.
    """

    @abstractmethod
    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """What is quantised: floats `[R, F, D]`, of what `encode` gets."""

    @abstractmethod
    def quantize(self, latents: torch.Tensor) -> torch.Tensor:
        """Codes, int64 `[R, F, Q]`, of latents float32 `[R, F, D]`."""

    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """Codes `[R, F, Q]` of `spec.dtype`."""
        latents = self.latents(waveforms, num_samples)
        with computing("fp32", waveforms.device):
            codes = self.quantize(latents.float())
        return Rows(codes.to(getattr(torch, self.spec.dtype)))

    @classmethod
    def stored_dtype(cls, params: M) -> str:
        """The smallest that holds the numbers of the model's codewords."""
        config = weights.read_json(weights.locate(params.weights, params.revision), "config.json")
        return code_dtype(int(config.get("codebook_size", 1024)))


def code_dtype(codebook_size: int) -> str:
    """The smallest unsigned dtype, by its numpy name, that numbers so many codewords."""
    return np.min_scalar_type(codebook_size - 1).name


def load_codec(name: str, model_class: str, params: ModelParams, sample_rate: int, device: torch.device) -> Any:
    """A codec's model of transformers, for audio at its own rate.

    Args:
        name: the extractor's, for messages.
        model_class: `EncodecModel`, say.
        params: the extractor's.
        sample_rate: of the waveforms, in Hz.
        device: to compute on.

    Raises:
        ConfigError: the weights cannot be loaded, or the audio is not at the model's rate.
        MissingDependencyError: transformers is not installed.
    """
    found = weights.transformers_class(model_class, f"the extractor {name}")
    model = weights.load(found, weights.locate(params.weights, params.revision), device)
    config = model.config
    require_sample_rate(params, sample_rate, getattr(config, "sampling_rate", None) or config.sample_rate)
    return model


def require_sample_rate(params: ModelParams, sample_rate: int, expected: int) -> None:
    """Raise ConfigError where audio is not at the model's rate."""
    if sample_rate != expected:
        raise ConfigError(f"audio.sample_rate: {sample_rate}; {params.weights} is for {expected}")
