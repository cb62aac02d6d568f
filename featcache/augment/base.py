"""What all augmentations share: random numbers by seed and step, the choice of rows, checks of batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from featcache.errors import ArgumentError, is_number, require_int, require_number
from featcache.masks import padding_mask
from featcache.strings import hash_of

__all__ = ["Augmentation"]

_LARGE = 1 << 62


class Draws:
    """The random numbers of one call, drawn on the device in the order of the requests. Two kinds of augmentation draw
    different numbers from the same seed."""

    def __init__(self, kind: str, seed: int, step: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device)
        self.generator.manual_seed(hash_of(f"{kind} {seed} {step}"))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers in [low, high), float32."""
        drawn = torch.rand(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return drawn * (high - low) + low

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers of a tensor's shape, float32, or float64 if the tensor is."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.randn(like.shape, generator=self.generator, device=self.device, dtype=dtype)

    def up_to(self, most: Tensor) -> Tensor:
        """For each integer in `most` a whole number from 0 to it, inclusive, int64. The probabilities of any two
        numbers up to 10^6 differ by less than one part in 10^12."""
        drawn = torch.randint(_LARGE, most.shape, generator=self.generator, device=self.device)
        return drawn % (most + 1)

    def beta(self, alpha: float, count: int) -> Tensor:
        """Numbers from the distribution Beta(alpha, alpha), float32 `[count]`."""
        both = torch.full((count, 2), alpha, device=self.device, dtype=torch.float32)
        return torch._sample_dirichlet(both, generator=self.generator)[:, 0]  # as torch.distributions.Beta does

    def partners(self, count: int) -> Tensor:
        """Another row for each row, every row being a partner once, int64 `[count]`; a single row gets itself."""
        order = self.uniform(count).argsort()
        return torch.empty_like(order).scatter_(0, order, order.roll(1))


class Augmentation(nn.Module):
    """The base of augmentations.

    They are called with features, floats `[batch, frames, ...]`; with `lengths` in frames, integers `[batch]` on the
    features' device, or without if no row has padding; and with the `step` of the training. Raises ArgumentError if
    shapes, dtypes or devices do not fit.

    Args:
        seed: The seed, a whole number, which together with the step and the shapes determines all random numbers.
        probability: The probability, 0 to 1, that a row is augmented, independently for each row.
    """

    def __init__(self, *, seed: int = 0, probability: float = 1.0) -> None:
        super().__init__()
        self.seed = require_int("seed", seed)
        self.probability = require_number("probability", probability, 0, 1)

    def draws(self, step: Any, device: torch.device) -> Draws:
        """The random numbers of one call; an ArgumentError if `step` is not a whole number."""
        if isinstance(step, Tensor):  # reading a tensor would wait for the GPU
            raise ArgumentError("step is a tensor: give the step of the training, an int")
        return Draws(type(self).__name__, self.seed, require_int("step", step), device)

    def chosen(self, draws: Draws, rows: int) -> Tensor | None:
        """Which rows are augmented, bool `[rows]`; None for all."""
        return None if self.probability == 1 else draws.uniform(rows) < self.probability

    def extra_repr(self) -> str:
        """What `print` shows."""
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if _is_setting(name, value))


def frame_mask(features: Tensor, lengths: Tensor | None, *, dimensions: int | None = None) -> Tensor:
    """Check a batch, and mark what are frames and not padding: bool `[batch, frames]`. Raises ArgumentError if shapes,
    dtypes or devices do not fit.

    Features are floats `[batch, frames, ...]`, of so many `dimensions` if they are given; without lengths, there is no
    padding.
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
    """Refuse codes, and what is not a tensor."""
    if not isinstance(features, Tensor):
        raise ArgumentError(f"features is a {type(features).__name__}: give a tensor")
    if not features.is_floating_point():
        raise ArgumentError(f"features is {features.dtype}: only floats are augmented")


def expand(values: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of size 1 to `[batch]` or `[batch, frames]`, up to those of another tensor."""
    return values.view(*values.shape, *[1] * (like.ndim - values.ndim))


def require_range(name: str, value: float | tuple[float, float]) -> tuple[float, float]:
    """Return a range (low, high) as it is, and a number as the range from it to itself; an ArgumentError if it is
    neither."""
    low, high = value if isinstance(value, tuple) else (value, value)
    if not (is_number(low) and is_number(high) and low <= high):
        raise ArgumentError(f"{name} is {value!r}: give a number, or a range (low, high)")
    return low, high


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("_") and name != "training" and isinstance(value, (int, float, str, tuple))
