"""The values of features that are stored as uint8, with numpy alone; `featcache.quantize` says what the levels are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_REPEATED = 4096
"""Half the number of values that numpy's buffer holds."""


def dequantize_array(
    levels: NDArray[np.uint8],
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The values of a numpy array of levels, as float32.

    Args:
        levels: The stored levels, uint8 `[frames, *item_shape]`.
        scale: The scale, float32 `[*item_shape]`; or that of each frame, `[frames, *item_shape]`.
        offset: The offset, of the same shape as `scale`.
        out: A contiguous float32 array of the levels' shape to write to, instead of a new one.
    """
    values = np.empty(levels.shape, np.float32) if out is None else out
    values[...] = levels
    _with_frames(np.multiply, values, scale)
    _with_frames(np.add, values, offset)
    return values


def _with_frames(function: np.ufunc, frames: NDArray[np.float32], parameter: NDArray[np.float32]) -> None:
    """Replace each frame by `function(frame, parameter)`.

    When numpy broadcasts an array over many rows, it copies the array into its buffer again for every 8,192 values,
    unless the array fills more than half the buffer. So for long items, the parameter is repeated once here and then
    applied to many frames at a time: a quarter less time for 12 s of 80 dimensions.
    """
    if parameter.ndim < frames.ndim and len(frames) >= 6 * (count := _REPEATED // parameter.size + 1):
        repeated = np.empty((count, *parameter.shape), np.float32)
        repeated[...] = parameter
        in_blocks = len(frames) // count * count
        blocks = frames[:in_blocks].reshape(-1, repeated.size)
        function(blocks, repeated.reshape(-1), out=blocks)
        frames, parameter = frames[in_blocks:], repeated[: len(frames) - in_blocks]
    function(frames, parameter, out=frames)
