"""Random numbers of one call, on the device: from a generator of their own, seeded by seed and step."""

from __future__ import annotations

import torch
from torch import Tensor

from featcache.strings import hash_of

_LARGE = 1 << 62


class Draws:
    """Draws for one call of an augmentation, in the order in which it asks.

    Args:
        kind: of augmentation: two kinds draw differently from one seed.
        seed: of the run.
        step: of the training.
        device: where numbers are drawn, and stay.
    """

    def __init__(self, kind: str, seed: int, step: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device)
        self.generator.manual_seed(hash_of(f"{kind} {seed} {step}"))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers in [low, high), float32."""
        drawn = torch.rand(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return drawn * (high - low) + low

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers of a tensor's shape, float32, or float64 as it is."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.randn(like.shape, generator=self.generator, device=self.device, dtype=dtype)

    def up_to(self, most: Tensor) -> Tensor:
        """For each of some integers a whole number from 0 to it, inclusive, int64; of 10^6, one is no more likely than
        another by over 10^-12.
        """
        drawn = torch.randint(_LARGE, most.shape, generator=self.generator, device=self.device)
        return drawn % (most + 1)

    def beta(self, alpha: float, count: int) -> Tensor:
        """Numbers from the distribution Beta(alpha, alpha), float32 `[count]`."""
        both = torch.full((count, 2), alpha, device=self.device, dtype=torch.float32)
        return torch._sample_dirichlet(both, generator=self.generator)[:, 0]  # as torch.distributions.Beta has it

    def partners(self, count: int) -> Tensor:
        """Another row for each of some rows, each taken once, int64 `[count]`; of one row, itself."""
        order = self.uniform(count).argsort()
        return torch.empty_like(order).scatter_(0, order, order.roll(1))
