"""Extractors that give one vector for each utterance: of a speaker, a score, a level."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from featcache.extractors.base import Batching, Clip, Extractor, P

if TYPE_CHECKING:
    from torch import Tensor


class VectorExtractor(Extractor[P]):
    """The base of extractors that turn a clip into one vector, or one number.

    A subclass sets `spec` in its `__init__`, with a main track along clips:

        FeatureSpec.of(sample_rate, Track("features", (256,), "float32", "speaker", spec.Clip()))

    It defines `vector`, which gets one clip at a time, so no neighbour changes a bit. To
    refuse short clips, it overrides `num_frames`.
    """

    batching: Batching = "single"

    @abstractmethod
    def vector(self, clip: Clip) -> Tensor:
        """Compute the vector of a clip, `[*item_shape]` of `spec.dtype`, on the device."""

    def num_frames(self, num_samples: int) -> int:
        """Return 1, or 0 if the clip is too short."""
        return min(num_samples, 1)

    def extract(self, clips: Sequence[Clip]) -> list[Tensor]:
        return [self.vector(clip) for clip in clips]
