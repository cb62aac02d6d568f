"""Shared by both kinds of normalisation: checks of batches; padding, which is not changed."""

from __future__ import annotations

import torch
from torch import Tensor

from featcache.errors import ArgumentError
from featcache.masks import padding_mask

CONSTANT = 1e-6
"""A dimension whose standard deviation is at most this part of its mean does not vary, but for rounding."""


def check(features: Tensor, item_shape: tuple[int, ...] | None = None) -> None:
    """Refuse what is no batch of such features, or without `item_shape` of any.

    Raises:
        ArgumentError: it has another shape, or is not of floats.
    """
    if not isinstance(features, Tensor):
        raise ArgumentError(f"features is a {type(features).__name__}: give a tensor")
    is_other = item_shape is not None and tuple(features.shape[2:]) != item_shape
    if not features.is_floating_point() or features.ndim < 2 or is_other:
        shape = ", ".join(["batch", "frames", *map(str, ("...",) if item_shape is None else item_shape)])
        raise ArgumentError(f"features is {features.dtype} {list(features.shape)}: give floats [{shape}]")


def own_frames(features: Tensor, lengths: Tensor) -> Tensor:
    """Where a batch has frames and not padding, bool `[batch, frames, 1, ...]`.

    Raises:
        ArgumentError: `lengths` are not an integer for each row.
    """
    if not isinstance(lengths, Tensor):
        raise ArgumentError(f"lengths is a {type(lengths).__name__}: give a tensor")
    if lengths.shape != features.shape[:1]:
        raise ArgumentError(f"lengths is {list(lengths.shape)}, for features {list(features.shape)}")
    own = padding_mask(lengths, features.shape[1])
    return own.view(*own.shape, *[1] * (features.ndim - 2))


def finish(normalised: Tensor, features: Tensor, lengths: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Put back what is padding, and convert; without `dtype` nothing is converted.

    Raises:
        ArgumentError: `lengths` are not an integer for each row.
    """
    if lengths is not None:
        normalised = torch.where(own_frames(features, lengths), normalised, features)
    return normalised if dtype is None else normalised.to(dtype)
