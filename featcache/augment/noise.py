"""Gaussian noise: on features, or on a model's hidden activations."""

from __future__ import annotations

import torch
from torch import Tensor

from featcache.augment.base import Augmentation, check_floats, expand, frames_of, in_range, pair
from featcache.errors import ArgumentError

__all__ = ["GaussianNoise"]


class GaussianNoise(Augmentation):
    """Adds Gaussian noise, of a given size or at a given signal-to-noise ratio.

    Takes any floats with a batch dimension: features, or hidden activations, such as those before the pooling of an
    x-vector. Gradients go through it.

    Args:
        std: standard deviation of the noise; of `(low, high)`, each row draws its own from that range.
        snr_db: signal-to-noise ratio in dB, of every row by itself, exactly: the mean square of its own values, over
            that of the noise it gets. A range as for `std`. It is one of the values, whatever they are: log energies
            at 20 dB are not speech at 20 dB. A row of zeros gets no noise.
        seed: see `featcache.augment`.
        probability: with which a row gets noise.

    Raises:
        ArgumentError: not just one of `std` and `snr_db` is given, or a number is out of range.
    """

    def __init__(
        self,
        std: float | tuple[float, float] | None = None,
        *,
        snr_db: float | tuple[float, float] | None = None,
        seed: int = 0,
        probability: float = 1.0,
    ) -> None:
        super().__init__(seed=seed, probability=probability)
        if (std is None) == (snr_db is None):
            raise ArgumentError("give the noise's std, or its snr_db, and not both")
        self.std = None if std is None else pair("std", std)
        self.snr_db = None if snr_db is None else pair("snr_db", snr_db)
        if self.std is not None:
            in_range("std", self.std[0], 0)

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Tensor:
        """Add noise.

        Args:
            features: floats `[batch, ...]`; with `lengths`, `[batch, frames, ...]`.
            lengths: integers `[batch]`, in frames, on the features' device. Without it, all is signal.
            step: of the training.

        Returns:
            Of the features' shape and dtype.

        Raises:
            ArgumentError: shapes, dtypes or devices do not fit.
        """
        if not self.training:
            return features
        check_floats(features)
        own = None if lengths is None else frames_of(features, lengths)
        draws = self.draws(step, features.device)
        limits = self.std or self.snr_db
        assert limits is not None
        size = draws.uniform(len(features), low=limits[0], high=limits[1])
        noise = draws.normal(features)
        if self.std is None:
            signal_power, noise_power = (_power(values, own) for values in (features.detach(), noise))
            size = (signal_power / noise_power * 10 ** (-size / 10)).sqrt()
            size = size.nan_to_num(0.0, 0.0, 0.0)  # of no signal, or no frames
        chosen = self.chosen(draws, len(features))
        sizes = expand(size if chosen is None else size * chosen, features)
        if own is not None:
            sizes = sizes * expand(own, features)
        return torch.addcmul(features, noise, sizes).to(features.dtype)


def _power(values: Tensor, own: Tensor | None) -> Tensor:
    """The sum of the squares of each row's own values, `[batch]`; summed without a second tensor of that size."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    frames = values.unsqueeze(-1).flatten(1)[:, None] if own is None else values.unsqueeze(-1).flatten(2)
    norms: Tensor = torch.linalg.vector_norm(frames, dim=2, dtype=dtype)
    return (norms if own is None else norms.where(own, 0)).square().sum(1)
