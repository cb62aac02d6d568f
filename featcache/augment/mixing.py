"""Mixing each utterance with another one of the batch: as a weighted mean, or as if both were heard at once.

Lengths do not change. A longer partner is cut off; beyond the end of a shorter partner, a row is unchanged.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from featcache.augment.base import Augmentation, expand, frame_mask, require_range
from featcache.errors import ArgumentError, require_number

__all__ = ["MixEnergies", "Mixed", "Mixup"]

_NEPERS = {"power": 1.0, "magnitude": 2.0, "power10": math.log(10), "db": math.log(10) / 10}
"""The natural logarithm of power that one unit of the features stands for."""


class Mixed(NamedTuple):
    """A mixed batch, with the partner and weight of each row.

    For a loss of mixed labels: `weight * loss(output, labels) + (1 - weight) * loss(output, labels[partner])`.
    """

    features: Tensor
    """The mixed features, of the input's shape and dtype."""
    partner: Tensor
    """The index of the row mixed into each row, int64 `[batch]`."""
    weight: Tensor
    """The share of a row's own features, float32 `[batch]`; 1 for a row that was not mixed."""


class Mixup(Augmentation):
    """A weighted mean of each row and another row of the batch.

    Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412. Every row is a partner
    once.

    Args:
        alpha: The parameter of Beta(alpha, alpha), from which weights are drawn: the smaller, the nearer to 0 or 1.
        seed: The seed; see `featcache.augment`.
        probability: The probability that a row is mixed.

    Raises:
        ArgumentError: A number is out of range.
    """

    def __init__(self, alpha: float = 0.2, *, seed: int = 0, probability: float = 1.0) -> None:
        super().__init__(seed=seed, probability=probability)
        self.alpha = require_number("alpha", alpha, 0.01)

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Mixed:
        """Mix a batch. See `Augmentation` for the arguments."""
        if not self.training:
            return _unmixed(features)
        is_frame = frame_mask(features, lengths)
        draws = self.draws(step, features.device)
        partner, weight = draws.partners(len(features)), draws.beta(self.alpha, len(features))
        chosen = self.chosen(draws, len(features))
        if chosen is not None:
            weight = weight.where(chosen, 1.0)
        both = expand(is_frame & is_frame[partner], features)
        mixed = torch.lerp(features[partner], features, expand(weight, features).to(features.dtype))
        return Mixed(mixed.where(both, features), partner, weight)


class MixEnergies(Augmentation):
    """Mixes another row of the batch into each as background: adds the powers of features that are logarithms.

    For log mel energies: the result is that of the sum of both waveforms, apart from phase. Every row is a partner
    once.

    Args:
        snr_db: The ratio in dB of a row's mean power to its partner's, each over its own frames and dimensions; with
            `(low, high)`, drawn from that range for each row.
        log: What the features are: natural logarithms of "power", as in Kaldi's fbank, or of "magnitude", as in the
            mels of vocoders; "power10", logarithms of power to base 10; or "db".
        seed: The seed; see `featcache.augment`.
        probability: The probability that a row is mixed.

    Raises:
        ArgumentError: A number is out of range, or `log` is none of these.
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
        self.snr_db, self.log = require_range("snr_db", snr_db), log

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Mixed:
        """Mix a batch of logarithms `[batch, frames, dims]`, in float32; a row's weight is its share of the power. See
        `Augmentation` for the arguments."""
        if not self.training:
            return _unmixed(features)
        is_frame = frame_mask(features, lengths)
        draws = self.draws(step, features.device)
        partner = draws.partners(len(features))
        snr = draws.uniform(len(features), low=self.snr_db[0], high=self.snr_db[1]) * _NEPERS["db"]
        chosen = self.chosen(draws, len(features))
        both = is_frame & is_frame[partner]
        if chosen is not None:
            both = both & chosen[:, None]
        powers = features.float() * _NEPERS[self.log]
        levels = _mean_power(powers, is_frame)
        gain = expand(levels - levels[partner] - snr, powers)
        mixed = torch.logaddexp(powers, powers[partner] + gain) / _NEPERS[self.log]
        weight = torch.sigmoid(snr)
        if chosen is not None:
            weight = weight.where(chosen, 1.0)
        return Mixed(mixed.to(features.dtype).where(expand(both, features), features), partner, weight)


def _unmixed(features: Tensor) -> Mixed:
    rows = torch.arange(len(features), device=features.device)
    return Mixed(features, rows, torch.ones(len(rows), dtype=torch.float32, device=features.device))


def _mean_power(powers: Tensor, is_frame: Tensor) -> Tensor:
    """The logarithm of the mean power of each row's frames, `[batch]`; 0 for a row without frames."""
    total = powers.where(expand(is_frame, powers), -torch.inf).flatten(1).logsumexp(1)
    values = is_frame.sum(1) * math.prod(powers.shape[2:])
    return torch.where(values > 0, total - values.clamp(min=1).float().log(), 0.0)
