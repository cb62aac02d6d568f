"""What a version's features are: shared by the extractors that make them and the loader that reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

QUANTIZATION = "quantization"
"""The side array that a version of quantised features has, and no other: see `featcache.quantize`."""


@dataclass(frozen=True)
class SideSpec:
    """An array that an extractor gives beside the features, with some entries for each utterance.

    Attributes:
        name: of the array.
        item_shape: shape of one entry; `()` for a number.
        dtype: numpy name.
        units: what an entry means, for a reader.
    """

    name: str
    item_shape: tuple[int, ...]
    dtype: str
    units: str

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.item_shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class FeatureSpec:
    """What an extractor's features are; stored with every version, as it stands.

    Attributes:
        item_shape: shape of one frame: `(80,)` for 80 mel bins, `(8,)` for 8 codebooks.
        dtype: numpy name: an extractor's spec says what `extract` returns, a version's what its values are read as.
        frame_rate: frames per second.
        frame_length: samples that one frame looks at; 0 where it is not finite or not known.
        sample_rate: of the waveforms that `extract` takes, in Hz.
        units: what a value means, for a reader: "log mel energy (natural log)".
        codebook_sizes: of each codebook, for codes; empty for features.
        side: arrays that are kept beside the features.
        padded_to: samples to which the extractor pads shorter clips with zeros, so that these have as many frames; 0 if
            it does not.
    """

    item_shape: tuple[int, ...]
    dtype: str
    frame_rate: float
    frame_length: int
    sample_rate: int
    units: str
    codebook_sizes: tuple[int, ...] = ()
    side: tuple[SideSpec, ...] = ()
    padded_to: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether a version's features are stored as uint8, each item with a scale and an offset."""
        return any(side.name == QUANTIZATION for side in self.side)

    @property
    def stored_dtype(self) -> str:
        """Numpy name of the dtype of a version's `features` on disk: `dtype`, unless they are quantised."""
        return "uint8" if self.is_quantized else self.dtype

    @property
    def bytes_per_frame(self) -> int:
        """Bytes of one frame, as it is stored."""
        return math.prod(self.item_shape) * np.dtype(self.stored_dtype).itemsize

    @property
    def bytes_per_item(self) -> int:
        """Bytes that an utterance takes beside its frames, however long it is: its scales and offsets, if quantised."""
        return sum(side.bytes_per_entry for side in self.side if side.name == QUANTIZATION)
