"""The base of extractors that load a model: weights, precision, and chunks of long clips."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from featcache import weights
from featcache.device import Tf32, get_tf32, set_tf32
from featcache.errors import ConfigError
from featcache.extractors.base import LocalPath, Params, Piece, Rows, require_rate
from featcache.extractors.rows import RowExtractor
from featcache.weights import Located

LONGEST_SECONDS = 120.0
"""The longest clip without `chunk`: memory grows with a clip's length, and an attention's
with its square."""

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

_switching_tf32 = threading.RLock()


class Chunk(Params):
    """How clips longer than a chunk are cut."""

    seconds: float = Field(gt=0)
    """Length of a chunk."""
    overlap: float = Field(ge=0)
    """Seconds that neighbouring chunks share. Each chunk of a causal model loses the frames
    of its first `overlap` seconds. A chunk of another model loses half as many at each end.
    Chunks are exact if the overlap is at least the model's receptive field."""

    @model_validator(mode="after")
    def _leaves_something(self) -> Chunk:
        if self.overlap >= self.seconds:
            raise ValueError(
                f"an overlap of {self.overlap:g} s leaves nothing of chunks of {self.seconds:g} s"
            )
        return self


class ModelParams(Params):
    """The parameters of every extractor that loads a model."""

    locations: ClassVar[frozenset[str]] = frozenset({"weights", "revision"})

    weights: LocalPath
    """A folder written by `save_pretrained`, a file in such a folder, or a Hugging Face
    model id. A relative path is relative to the config file. The fingerprint includes the
    content of the weights, not their location."""
    revision: str | None = None
    """The commit, 40 hex digits. Required with a model id."""
    precision: Precision = "fp32"
    """The precision of the model. `tf32` lets a GPU round the inputs of matrix products and
    convolutions to ten bits. `bf16` and `fp16` use torch's autocast. All except fp32 change
    values: `featcache probe` measures how much."""
    chunk: Chunk | None = None
    """Cut long clips into overlapping chunks. Without it, long clips fail."""

    def locate(self) -> Located:
        """Find the weights on this machine, or download them: see `weights.locate`."""
        return weights.locate(self.weights, self.revision)


M = TypeVar("M", bound=ModelParams)


class ModelExtractor(RowExtractor[M]):
    """The base of extractors that load a model.

    A subclass's `__init__` calls this one, and sets `spec` and `granularity`. If a chunk
    begins at sample `t * granularity`, its first frame must be the clip's frame
    `t * granule_frames`."""

    _model_name: str
    """The class of transformers that `_load_model` loads, unless a subclass makes one."""
    granule_frames: int = 1
    """The number of frames of `granularity` samples."""
    causal: bool = False
    """True if a frame depends on no later samples, which decides where chunks overlap."""

    def __init__(self, params: M, sample_rate: int, device: torch.device) -> None:
        self.params, self.sample_rate, self.device = params, sample_rate, device
        self.max_seconds = None if params.chunk else LONGEST_SECONDS
        self.tf32 = params.precision == "tf32"
        self._prepare()

    def _prepare(self) -> None:
        """Load the model, and set `spec` and `granularity`, unless `__init__` does so later."""

    def _model_class(self) -> Any:
        needed_for = f"the extractor {type(self).__name__.lower()}"
        return weights.transformers_class(self._model_name, needed_for)

    def _load_model(
        self, sample_rate: int | None = None, part: weights.Part = weights.WHOLE
    ) -> Any:
        """Load the model, or a part of it. Its config tells its sample rate, unless
        `sample_rate` does."""
        model = weights.load(self._model_class(), self.params.locate(), self.device, part)
        names = ("sampling_rate", "sample_rate", "input_sampling_rate")
        rates = (getattr(model.config, name, None) for name in names)
        self.require_sample_rate(next(filter(None, [sample_rate, *rates])))
        return model

    @classmethod
    def weights_digest(cls, params: M) -> str | None:
        return weights.digest(params.locate())

    @property
    def chunks_are_exact(self) -> bool:
        chunk, receptive = self.params.chunk, self.spec.frame_length
        return chunk is None or 0 < receptive <= self._samples(chunk.overlap)

    def chunk_warning(self, name: str) -> str | None:
        chunk = self.params.chunk
        if chunk is None:
            return None
        # raises now, not in the middle of a run
        self.pieces(round(3 * chunk.seconds * self.spec.sample_rate))
        if self.chunks_are_exact:
            return None
        return (
            f"chunks that share {chunk.overlap:g} s are not exact for {name}: `featcache "
            "probe` measures by how much"
        )

    def pieces(self, num_samples: int) -> list[Piece]:
        chunk = self.params.chunk
        if chunk is None or num_samples <= self._samples(chunk.seconds):
            return super().pieces(num_samples)
        size, overlap = self._samples(chunk.seconds), self._samples(chunk.overlap)
        if overlap >= size:
            hop = self.granularity / self.spec.sample_rate
            raise ConfigError(
                f"params.chunk: {chunk.overlap:g} s of overlap leave nothing of "
                f"{chunk.seconds:g} s, in whole hops of {hop:g} s"
            )
        left_out = overlap
        if not self.causal:
            left_out = overlap // 2 // self.granularity * self.granularity
        starts = range(0, num_samples - overlap, size - overlap)
        step, per_step = self.granularity, self.granule_frames
        firsts = [(start + left_out) // step * per_step for start in starts]
        firsts[0] = 0
        ends = [*firsts[1:], self.num_frames(num_samples)]
        pieces = []
        for start, first, end in zip(starts, firsts, ends, strict=True):
            length = min(size, num_samples - start)
            pieces.append(Piece(start, length, first - start // step * per_step, end - first))
        # without a last chunk in which no frame begins
        return [piece for piece in pieces if piece.num_frames]

    def _samples(self, seconds: float) -> int:
        hops = round(seconds * self.spec.sample_rate) // self.granularity
        return hops * self.granularity

    def require_sample_rate(self, expected: int, model: str = "") -> None:
        require_rate(self.sample_rate, expected, model or self.params.weights)

    def run_for(self, takers: Sequence[Any], waveforms: Tensor, num_samples: Tensor) -> list[Rows]:
        with computing(self.params.precision, waveforms.device):
            return super().run_for(takers, waveforms, num_samples)


@contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute the block at this precision. Of nested blocks, the inner one decides.

    TF32 is a switch of the whole process, so while it is on, only one thread launches
    kernels."""
    autocast = torch.autocast(device.type, _AUTOCAST.get(precision), enabled=precision in _AUTOCAST)
    with autocast, ExitStack() as stack:
        if device.type == "cuda":
            # holding the lock, these are not the switches of another thread's block
            stack.enter_context(_switching_tf32)
            before = get_tf32()
            is_tf32 = precision == "tf32"
            if is_tf32 or any(before):
                stack.callback(set_tf32, before)
                set_tf32(Tf32(is_tf32, is_tf32, is_tf32))
            else:
                stack.close()
        yield
