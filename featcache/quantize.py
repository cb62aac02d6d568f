"""Floats as uint8: each item has a scale and an offset for each of its dimensions.

Of the values x that one dimension has in one item, all in float32:

    offset = min(x)      scale = (max(x) - min(x)) / 255      level = round((x - offset) / scale)

and what is read is `offset + scale * level`: off by half a scale at most, 1/510 of the dimension's range in that item,
but for rounding in float32. Rounding is to even. A dimension that is constant has scale 0, and is exact.

Every step is one operation of IEEE 754 or a comparison, so any device gives the same bytes of the same features, and
the same values of the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ExtractorError
from featcache.spec import QUANTIZATION, FeatureSpec, SideSpec

LEVELS = 256

_REPEATED = 4096
"""Values: half of what numpy's buffer holds."""


def is_quantized(made: str, stored: str) -> bool:
    """Whether features that are made as one dtype are quantised to be stored as the other; codes never are."""
    return stored == "uint8" and np.dtype(made).kind == "f"


def stored_spec(spec: FeatureSpec, dtype: str) -> FeatureSpec:
    """What a version says of an extractor's features when `dtype` is stored.

    Raises:
        ExtractorError: a side array of the extractor has the name that quantisation needs.
    """
    if any(side.name == QUANTIZATION for side in spec.side):
        raise ExtractorError(
            f"side array {QUANTIZATION}: the name is reserved for the scale and offset of quantised features"
        )
    if not is_quantized(spec.dtype, dtype):
        return replace(spec, dtype=dtype)
    parameters = SideSpec(QUANTIZATION, (2, *spec.item_shape), "float32", "scale, offset: offset + scale * features")
    return replace(spec, dtype="float32", side=(*spec.side, parameters))


def quantize(features: torch.Tensor, num_frames: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise some items on the device where they are, each by itself.

    Args:
        features: float `[frames, *item_shape]`: the items' frames, one item after the other.
        num_frames: of each item, at least 1.

    Returns:
        The levels, uint8 `[frames, *item_shape]`; and the parameters, float32 `[items, 2, *item_shape]`: scale, offset.
        Parameters of an item that holds NaN or infinity, or spans more than float32 holds, are not all finite, and its
        levels mean nothing.
    """
    flat = features.float().reshape(len(features), math.prod(features.shape[1:]))
    items = torch.split(flat, list(num_frames))
    smallest, largest = flat.new_empty(2, len(items), flat.shape[1])
    for i, item in enumerate(items):
        torch.amin(item, 0, out=smallest[i])
        torch.amax(item, 0, out=largest[i])
    offset = smallest + 0.0  # which of 0.0 and -0.0 is the smaller depends on their order: now it is 0.0
    most = flat.new_tensor(LEVELS - 1.0)  # by a Python number a GPU would not divide, but multiply by 1/255
    scale = (largest - offset) / most + 0.0
    scale = torch.where((offset + scale * most).isfinite(), scale, torch.inf)  # its largest value is finite, too
    divisor = torch.where(scale == 0, 1.0, scale)
    levels = torch.empty_like(flat)
    for i, (item, level) in enumerate(zip(items, torch.split(levels, list(num_frames)), strict=True)):
        torch.sub(item, offset[i], out=level).div_(divisor[i])
    levels.round_().clamp_(0, LEVELS - 1)
    parameters = torch.stack([scale, offset], 1)
    return levels.to(torch.uint8).view(features.shape), parameters.view(len(items), 2, *features.shape[1:])


def dequantize(
    levels: torch.Tensor,
    parameters: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    lengths: torch.Tensor | None = None,
    padding_value: float = 0,
) -> torch.Tensor:
    """The values of a padded batch of levels, computed on its device.

    Args:
        levels: uint8 `[batch, frames, *item_shape]`.
        parameters: float32 `[batch, 2, *item_shape]`: scale, offset.
        dtype: of the result; values are computed in float32.
        lengths: `[batch]`, the length of each utterance in frames; frames beyond become `padding_value`. None if there
            is no padding.
        padding_value: the value of frames beyond the lengths.

    Returns:
        `[batch, frames, *item_shape]` of `dtype`.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit together.
    """
    _check_batch(levels, parameters, dtype, lengths)
    values = (levels * parameters[:, 0, None]).add_(parameters[:, 1, None])
    if lengths is not None:
        beyond = torch.arange(levels.shape[1], device=lengths.device) >= lengths[:, None]
        values.masked_fill_(beyond.view(*beyond.shape, *[1] * (levels.ndim - 2)), padding_value)
    return values.to(dtype)


def _check_batch(levels: object, parameters: object, dtype: object, lengths: object) -> None:
    if not isinstance(levels, torch.Tensor) or levels.dtype != torch.uint8 or levels.ndim < 2:
        raise ArgumentError(f"levels is {_described(levels)}: give uint8 [batch, frames, ...], from batch(raw=True)")
    batch, _, *item_shape = levels.shape
    expected = torch.float32, (batch, 2, *item_shape), levels.device
    if not isinstance(parameters, torch.Tensor) or (parameters.dtype, parameters.shape, parameters.device) != expected:
        raise ArgumentError(
            f"parameters is {_described(parameters)}: give float32 {[batch, 2, *item_shape]} on {levels.device}, from "
            "quantization"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}: give a float dtype, such as torch.float16")
    if lengths is not None and not (
        isinstance(lengths, torch.Tensor)
        and (lengths.shape, lengths.device) == ((batch,), levels.device)
        and not (lengths.is_floating_point() or lengths.dtype == torch.bool)
    ):
        raise ArgumentError(f"lengths is {_described(lengths)}: give integers [{batch}] on {levels.device}")


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {list(value.shape)} on {value.device}"


def dequantize_array(
    levels: NDArray[np.uint8],
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The values of a numpy array of levels, as float32.

    Args:
        levels: uint8 `[frames, *item_shape]`.
        scale: float32 `[*item_shape]`, or one for each frame, `[frames, *item_shape]`.
        offset: likewise.
        out: an array of the levels' shape for the values, contiguous, instead of a new one.
    """
    values = np.empty(levels.shape, np.float32) if out is None else out
    values[...] = levels
    _with_frames(np.multiply, values, scale)
    _with_frames(np.add, values, offset)
    return values


def _with_frames(function: np.ufunc, frames: NDArray[np.float32], parameter: NDArray[np.float32]) -> None:
    """Replace each frame by `function(frame, parameter)`.

    Where numpy broadcasts an array over many rows, it copies it into its buffer again for each 8,192 values, unless the
    array fills more than half of that. So in long items the parameter is repeated here, once, and applied to that many
    frames at a time: a quarter less time for 12 s of 80 dimensions.
    """
    if parameter.ndim < frames.ndim and len(frames) >= 6 * (count := _REPEATED // parameter.size + 1):
        repeated = np.empty((count, *parameter.shape), np.float32)
        repeated[...] = parameter
        whole = len(frames) // count * count
        blocks = frames[:whole].reshape(-1, repeated.size)
        function(blocks, repeated.reshape(-1), out=blocks)
        frames, parameter = frames[whole:], repeated[: len(frames) - whole]
    function(frames, parameter, out=frames)
