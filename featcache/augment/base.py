"""What all augmentations have in common: seed and step, the choice of rows, padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from featcache.arguments import is_number, require_int, require_number
from featcache.augment.draws import Draws
from featcache.errors import ArgumentError
from featcache.masks import padding_mask

__all__ = ["Augmentation"]


class Augmentation(nn.Module):
    """The base of augmentations.

    Args:
        seed: with the step and the shapes, decides all random numbers.
        probability: probability that a row is augmented, independently for each row.

    Raises:
        ArgumentError: `probability` is not from 0 to 1, or `seed` is not a whole number.
    """

    def __init__(self, *, seed: int = 0, probability: float = 1.0) -> None:
        super().__init__()
        self.seed = require_int("seed", seed)
        self.probability = require_number("probability", probability, 0, 1)

    def draws(self, step: Any, device: torch.device) -> Draws:
        """The random numbers of one call.

        Raises:
            ArgumentError: `step` is no whole number.
        """
        if isinstance(step, Tensor):  # to read one, a GPU would be waited for
            raise ArgumentError("step is a tensor: give the step of the training, an int")
        return Draws(type(self).__name__, self.seed, require_int("step", step), device)

    def chosen(self, draws: Draws, rows: int) -> Tensor | None:
        """Which rows are augmented, bool `[rows]`; None for all."""
        return None if self.probability == 1 else draws.uniform(rows) < self.probability

    def extra_repr(self) -> str:
        """What `print` shows."""
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if _is_setting(name, value))


def frames_of(features: Tensor, lengths: Tensor | None, *, dimensions: int | None = None) -> Tensor:
    """Where a batch has frames and not padding, bool `[batch, frames]`, after it has been checked.

    Args:
        features: floats `[batch, frames, ...]`.
        lengths: integers `[batch]`, in frames, on the features' device; None where all are frames.
        dimensions: how many the features must have.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.
    """
    check_floats(features)
    if features.ndim < 2 or dimensions not in (None, features.ndim):
        shape = "[batch, frames, dims]" if dimensions else "[batch, frames, ...]"
        raise ArgumentError(f"features is {list(features.shape)}: give {shape}")
    if lengths is None:
        return torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
    if not isinstance(lengths, Tensor):
        raise ArgumentError(f"lengths is a {type(lengths).__name__}: give a tensor")
    if lengths.shape != features.shape[:1] or lengths.device != features.device:
        raise ArgumentError(
            f"lengths is {list(lengths.shape)} on {lengths.device}, and features {list(features.shape)} on "
            f"{features.device}: give one length for each row, on the features' device"
        )
    return padding_mask(lengths, features.shape[1])


def check_floats(features: Tensor) -> None:
    """Refuse codes.

    Raises:
        ArgumentError: they are not floats.
    """
    if not isinstance(features, Tensor):
        raise ArgumentError(f"features is a {type(features).__name__}: give a tensor")
    if not features.is_floating_point():
        raise ArgumentError(f"features is {features.dtype}: only floats are augmented")


def expand(values: Tensor, like: Tensor) -> Tensor:
    """`[batch]` or `[batch, frames]`, with as many dimensions as another tensor."""
    return values.view(*values.shape, *[1] * (like.ndim - values.ndim))


def pair(name: str, value: float | tuple[float, float]) -> tuple[float, float]:
    """A number or a range, as a range.

    Raises:
        ArgumentError: it is neither, or ends before it begins.
    """
    low, high = value if isinstance(value, tuple) else (value, value)
    if not (is_number(low) and is_number(high) and low <= high):
        raise ArgumentError(f"{name} is {value!r}: give a number, or a range (low, high)")
    return low, high


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("_") and name != "training" and isinstance(value, (int, float, str, tuple))
