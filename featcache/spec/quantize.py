"""Floats as uint8: each item has a scale and an offset for each of its dimensions.

For the values x of one dimension in one item, all in float32:

    offset = min(x)      scale = (max(x) - min(x)) / 255      level = round((x - offset) / scale)

`offset + scale * level` is off by at most half a scale, apart from rounding in float32.
Rounding is to even. A constant dimension has scale 0, and is exact. Every step is a
comparison or one operation of IEEE 754, so all devices give the same bytes and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from featcache.errors import ArgumentError, ExtractorError
from featcache.spec import QUANTIZATION, FeatureSpec, Track, numpy_dtype

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 256


def is_quantized(made: str, stored: str) -> bool:
    """Tell whether features of the dtype `made` are quantised when stored as `stored`."""
    return stored == "uint8" and numpy_dtype(made).kind == "f"


def stored_spec(spec: FeatureSpec, dtype: str) -> FeatureSpec:
    """Return the spec of a version that stores an extractor's features as `dtype`. Raises
    ExtractorError if a side array has the name that quantisation needs."""
    if any(side.name == QUANTIZATION for side in spec.side):
        what = f"side array {QUANTIZATION}: the name is reserved for quantised features"
        raise ExtractorError(what)
    if not is_quantized(spec.dtype, dtype):
        return replace(spec, dtype=dtype)
    units = "scale, offset: offset + scale * features"
    parameters = Track(QUANTIZATION, (2, *spec.item_shape), "float32", units)
    return replace(spec, dtype="float32", side=(*spec.side, parameters))


def quantize(features: Tensor, num_frames: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Quantise items on their device: float `[frames, *item_shape]`, one after the other,
    each of so many frames, at least 1.

    Returns the levels, uint8 `[frames, *item_shape]`; the parameters, float32 `[items, 2,
    *item_shape]`: scale, offset. If an item holds NaN or infinity, or its range exceeds
    float32, its parameters are not all finite and its levels have no meaning."""
    flat = features.float().reshape(len(features), math.prod(features.shape[1:]))
    items = torch.split(flat, list(num_frames))
    smallest, largest = flat.new_empty(2, len(items), flat.shape[1])
    for i, item in enumerate(items):
        torch.amin(item, 0, out=smallest[i])
        torch.amax(item, 0, out=largest[i])
    # which of 0.0 and -0.0 is the smaller depends on their order: now it is 0.0
    offset = smallest + 0.0
    # by a Python number a GPU would not divide, but multiply by 1/255
    most = flat.new_full((), LEVELS - 1.0)
    scale = (largest - offset) / most + 0.0
    # so that the largest value read is finite too
    is_finite = (offset + scale * most).isfinite()
    scale = torch.where(is_finite, scale, torch.inf)
    divisor = torch.where(scale == 0, 1.0, scale)
    levels = torch.empty_like(flat)
    for i, level in enumerate(torch.split(levels, list(num_frames))):
        torch.sub(items[i], offset[i], out=level).div_(divisor[i])
    levels.round_().clamp_(0, LEVELS - 1)
    parameters = torch.stack([scale, offset], 1).view(len(items), 2, *features.shape[1:])
    return levels.to(torch.uint8).view(features.shape), parameters


def dequantize(
    levels: Tensor,
    parameters: Tensor,
    dtype: torch.dtype | None = None,
    *,
    lengths: Tensor | None = None,
    padding_value: float = 0,
) -> Tensor:
    """Compute the values of a padded batch of levels, on its device.

    Args:
        levels: The stored levels, uint8 `[batch, frames, *item_shape]`.
        parameters: The scale and offset of each utterance, float32 `[batch, 2, *item_shape]`.
        dtype: The dtype of the result, by default float32, in which values are computed.
        lengths: The length of each utterance in frames, integers `[batch]`; None if there is
            no padding.
        padding_value: The value of frames beyond the lengths.

    Returns:
        `[batch, frames, *item_shape]` of `dtype`.

    Raises:
        ArgumentError: Shapes, dtypes or devices do not fit together.
    """
    dtype = torch.float32 if dtype is None else dtype
    _check_batch(levels, parameters, dtype, lengths)
    values = (levels * parameters[:, 0, None]).add_(parameters[:, 1, None])
    if lengths is not None:
        beyond = torch.arange(levels.shape[1], device=lengths.device) >= lengths[:, None]
        values.masked_fill_(beyond.view(*beyond.shape, *[1] * (levels.ndim - 2)), padding_value)
    return values.to(dtype)


def _check_batch(levels: object, parameters: object, dtype: object, lengths: object) -> None:
    if not isinstance(levels, torch.Tensor) or levels.dtype != torch.uint8 or levels.ndim < 2:
        raise _fault("levels", levels, "uint8 [batch, frames, ...], from batch(raw=True)")
    batch, _, *item_shape = levels.shape
    where = f"on {levels.device}"
    expected = torch.float32, (batch, 2, *item_shape), levels.device
    if (
        not isinstance(parameters, torch.Tensor)
        or (parameters.dtype, parameters.shape, parameters.device) != expected
    ):
        fitting = f"float32 {[batch, 2, *item_shape]} {where}, from quantization"
        raise _fault("parameters", parameters, fitting)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}: give a float dtype, such as torch.float16")
    if lengths is not None and not (
        isinstance(lengths, torch.Tensor)
        and (lengths.shape, lengths.device) == ((batch,), levels.device)
        and not (lengths.is_floating_point() or lengths.dtype == torch.bool)
    ):
        raise _fault("lengths", lengths, f"integers [{batch}] {where}")


def _fault(name: str, value: object, fitting: str) -> ArgumentError:
    return ArgumentError(f"{name} is {_described(value)}: give {fitting}")


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {list(value.shape)} on {value.device}"
