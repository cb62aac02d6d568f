"""Mixing each utterance with another one of the batch: in proportion, or as if both were heard at once.

Lengths do not change. A longer partner is cut off; beyond the end of a shorter partner, a row is unchanged.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from featcache.arguments import require_number
from featcache.augment.base import Augmentation, expand, frames_of, pair
from featcache.errors import ArgumentError

__all__ = ["MixEnergies", "Mixed", "Mixup"]

_NEPERS = {"power": 1.0, "magnitude": 2.0, "power10": math.log(10), "db": math.log(10) / 10}
"""What one unit of the features is in natural logarithms of power."""


class Mixed(NamedTuple):
    """A mixed batch, with the partner and weight of each row.

    For a loss of mixed labels: `weight * loss(output, labels) + (1 - weight) * loss(output, labels[partner])`.

    Attributes:
        features: the mixed features, of the input's shape and dtype.
        partner: int64 `[batch]`, the index of the row mixed into each row.
        weight: float32 `[batch]`, the share of a row's own features; 1 for a row that was not mixed.
    """

    features: Tensor
    partner: Tensor
    weight: Tensor


class Mixup(Augmentation):
    """A weighted mean of each row and another row of the batch.

    Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412. Every row is a partner
    once.

    Args:
        alpha: weights are drawn from Beta(alpha, alpha): the smaller alpha, the nearer to 0 or 1.
        seed: see `featcache.augment`.
        probability: probability that a row is mixed.

    Raises:
        ArgumentError: a number is out of range.
    """

    def __init__(self, alpha: float = 0.2, *, seed: int = 0, probability: float = 1.0) -> None:
        super().__init__(seed=seed, probability=probability)
        self.alpha = require_number("alpha", alpha, 0.01)

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Mixed:
        """Mix a batch.

        Args:
            features: floats `[batch, frames, ...]`.
            lengths: integers `[batch]`, in frames, on the features' device. Without it, all rows have full length.
            step: of the training.

        Raises:
            ArgumentError: shapes, dtypes or devices do not fit.
        """
        if not self.training:
            return _unmixed(features)
        own = frames_of(features, lengths)
        draws = self.draws(step, features.device)
        partner, weight = draws.partners(len(features)), draws.beta(self.alpha, len(features))
        chosen = self.chosen(draws, len(features))
        if chosen is not None:
            weight = weight.where(chosen, 1.0)
        both = expand(own & own[partner], features)
        mixed = torch.lerp(features[partner], features, expand(weight, features).to(features.dtype))
        return Mixed(mixed.where(both, features), partner, weight)


class MixEnergies(Augmentation):
    """Mixes another row of the batch into each as background: adds the powers of features that are logarithms.

    For log mel energies: the result is that of the sum of both waveforms, apart from phase. Every row is a partner
    once.

    Args:
        snr_db: the mean power of a row over that of its partner, each over its own frames and dimensions, in dB; with
            `(low, high)`, drawn from that range for each row.
        log: what the features are: natural logarithms of "power", as in Kaldi's fbank, or of "magnitude", as in the
            mels of vocoders; "power10", logarithms of power to base 10; or "db".
        seed: see `featcache.augment`.
        probability: probability that a row is mixed.

    Raises:
        ArgumentError: a number is out of range, or `log` is none of these.
    """

    def __init__(
        self,
        snr_db: float | tuple[float, float] = (10.0, 20.0),
        *,
        log: str = "power",
        seed: int = 0,
        probability: float = 1.0,
    ) -> None:
        super().__init__(seed=seed, probability=probability)
        if log not in _NEPERS:
            raise ArgumentError(f"log is {log!r}: it must be one of {', '.join(_NEPERS)}")
        self.snr_db, self.log = pair("snr_db", snr_db), log

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Mixed:
        """Mix a batch. Computed in float32; a row's weight is its share of the power.

        Args:
            features: floats `[batch, frames, dims]`, logarithms.
            lengths: integers `[batch]`, in frames, on the features' device. Without it, all rows have full length.
            step: of the training.

        Raises:
            ArgumentError: shapes, dtypes or devices do not fit.
        """
        if not self.training:
            return _unmixed(features)
        own = frames_of(features, lengths)
        draws = self.draws(step, features.device)
        partner = draws.partners(len(features))
        snr = draws.uniform(len(features), low=self.snr_db[0], high=self.snr_db[1]) * _NEPERS["db"]
        chosen = self.chosen(draws, len(features))
        both = own & own[partner]
        if chosen is not None:
            both = both & chosen[:, None]
        powers = features.float() * _NEPERS[self.log]
        levels = _mean_power(powers, own)
        gain = expand(levels - levels[partner] - snr, powers)
        mixed = torch.logaddexp(powers, powers[partner] + gain) / _NEPERS[self.log]
        weight = torch.sigmoid(snr)
        if chosen is not None:
            weight = weight.where(chosen, 1.0)
        return Mixed(mixed.to(features.dtype).where(expand(both, features), features), partner, weight)


def _unmixed(features: Tensor) -> Mixed:
    rows = torch.arange(len(features), device=features.device)
    return Mixed(features, rows, torch.ones(len(rows), dtype=torch.float32, device=features.device))


def _mean_power(powers: Tensor, own: Tensor) -> Tensor:
    """The logarithm of the mean power of each row's own frames, `[batch]`; 0 of a row of none."""
    total = powers.where(expand(own, powers), -torch.inf).flatten(1).logsumexp(1)
    values = own.sum(1) * math.prod(powers.shape[2:])
    return torch.where(values > 0, total - values.clamp(min=1).float().log(), 0.0)
