"""What a version's features are: shared by the extractors that make them and the loader
that reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

QUANTIZATION = "quantization"
"""The side array that every version of quantised features has, and no other version: see
`featcache.quantize`."""

DTYPES = ("float16", "float32", "float64", "uint8", "uint16", "uint32", "uint64", "int32", "int64")
"""What stored arrays may be of."""

Shape = Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 22)], ...], Meta(max_length=8)]
Dtype = Annotated[str, Meta(pattern=rf"^({'|'.join(DTYPES)})\Z")]
"""The types of the fields say what documents of strangers may hold; see
`featcache.version.version`."""

_BLOCK = 1 << 20
"""The number of values that `all_finite` looks at in one step."""


@dataclass(frozen=True)
class SideSpec:
    """A side array: an output of an extractor besides the features, with some entries for
    each utterance."""

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*\Z", max_length=70)]

    item_shape: Shape
    """The shape of one entry; `()` for a number."""

    dtype: Dtype
    """The numpy name of the dtype."""

    units: str
    """What an entry means, for a reader."""


@dataclass(frozen=True)
class FeatureSpec:
    """A description of an extractor's features; it is stored with every version."""

    item_shape: Shape
    """The shape of one frame: `(80,)` for 80 mel bins, `(8,)` for 8 codebooks."""

    dtype: Dtype
    """The numpy name of the dtype: what `extract` returns (in an extractor's spec) or
    what is read (in a version's)."""

    frame_rate: Annotated[float, Meta(ge=1e-6, le=1e9)]
    """The number of frames per second."""

    frame_length: Annotated[int, Meta(ge=0, le=1 << 40)]
    """The number of samples that one frame depends on; 0 if it is unlimited or unknown."""

    sample_rate: Annotated[int, Meta(ge=1, le=10**9)]
    """The sample rate in Hz of the waveforms that `extract` takes."""

    units: str
    """What a value means, for a reader: "log mel energy (natural log)"."""

    codebook_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1 << 24)], ...], Meta(max_length=4096)
    ] = ()
    """The size of each codebook, for codes; empty for other features."""

    side: Annotated[tuple[SideSpec, ...], Meta(max_length=64)] = ()
    """The arrays that are stored beside the features."""

    padded_to: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """The number of samples to which the extractor pads shorter clips, so that all of
    these have equally many frames; 0 if it does not."""

    kind: Literal["frames"] = "frames"
    """What an item is: frames along time."""

    @property
    def outputs(self) -> tuple[SideSpec, ...]:
        """The side arrays that the extractor gives."""
        return tuple(side for side in self.side if side.name != QUANTIZATION)

    @property
    def is_quantized(self) -> bool:
        """Whether a version's features are stored as uint8, each item with a scale and an
        offset."""
        return any(side.name == QUANTIZATION for side in self.side)

    @property
    def stored_dtype(self) -> str:
        """The numpy name of the dtype on disk: `dtype`, unless the features are quantised."""
        return "uint8" if self.is_quantized else self.dtype

    @property
    def bytes_per_frame(self) -> int:
        """The number of bytes that one frame takes on disk."""
        return math.prod(self.item_shape) * np.dtype(self.stored_dtype).itemsize

    @property
    def bytes_per_second(self) -> float:
        """The number of bytes that the frames of a second of audio take on disk."""
        return self.frame_rate * self.bytes_per_frame

    @property
    def bytes_per_item(self) -> int:
        """The number of bytes that every item takes besides its frames: its scales and
        offsets, if it is quantised."""
        scales = [side for side in self.side if side.name == QUANTIZATION]
        return sum(math.prod(side.item_shape) * np.dtype(side.dtype).itemsize for side in scales)


def all_finite(array: NDArray[Any]) -> bool:
    """Whether no value of a C-contiguous array is NaN or infinite, at memory speed.

    NaN and infinity have all exponent bits set. So as signed integers, the positive ones
    are at least the bits of +inf; as unsigned integers, the negative ones are at least
    the bits of -inf. Two maxima over blocks take a tenth of the time of
    `np.isfinite(array).all()`, which converts each value of float16."""
    if array.dtype.kind != "f":
        return True
    positive, negative = _bits_of_infinity(array.dtype)
    flat = array.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK]
        if (
            block.view(positive.dtype).max() >= positive
            or block.view(negative.dtype).max() >= negative
        ):
            return False
    return True


@cache
def _bits_of_infinity(
    dtype: np.dtype[Any],
) -> tuple[np.signedinteger[Any], np.unsignedinteger[Any]]:
    """The bits of +inf as a signed integer, and those of -inf as an unsigned one."""
    positive, negative = np.array([np.inf, -np.inf], dtype)[:, None]
    return positive.view(f"i{dtype.itemsize}")[0], negative.view(f"u{dtype.itemsize}")[0]
