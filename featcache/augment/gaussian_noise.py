"""Gaussian noise, on features or on a model's hidden activations."""

from __future__ import annotations

import torch
from torch import Tensor

from featcache.augment.base import Augmentation, check_floats, expand, frame_mask, require_range
from featcache.errors import ArgumentError, require_number

__all__ = ["GaussianNoise"]


class GaussianNoise(Augmentation):
    """Adds Gaussian noise, of a given size or at a given signal-to-noise ratio.

    Takes any float tensor with a batch dimension: features, or hidden activations, such as those before the pooling of
    an x-vector network. Gradients pass through.

    Args:
        std: The standard deviation of the noise; with `(low, high)`, drawn from that range for each row.
        snr_db: The signal-to-noise ratio in dB, exact for each row: the mean square of the row's values over that of
            its noise. May be a range, like `std`. The ratio is of feature values: 20 dB on log energies is not 20 dB
            on speech. A row of zeros gets no noise.
        seed: The seed; see `featcache.augment`.
        probability: The probability that a row gets noise.

    Raises:
        ArgumentError: Both or neither of `std` and `snr_db` are given, or a number is out of range.
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
        self.std = None if std is None else require_range("std", std)
        self.snr_db = None if snr_db is None else require_range("snr_db", snr_db)
        if self.std is not None:
            require_number("std", self.std[0], 0)

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Tensor:
        """Add noise to floats `[batch, ...]`, or with `lengths`, `[batch, frames, ...]`: a tensor of their shape and
        dtype. See `Augmentation` for the arguments."""
        if not self.training:
            return features
        check_floats(features)
        is_frame = None if lengths is None else frame_mask(features, lengths)
        draws = self.draws(step, features.device)
        limits = self.std or self.snr_db
        assert limits is not None
        size = draws.uniform(len(features), low=limits[0], high=limits[1])
        noise = draws.normal(features)
        if self.std is None:
            signal_power, noise_power = (_power(values, is_frame) for values in (features.detach(), noise))
            size = (signal_power / noise_power * 10 ** (-size / 10)).sqrt()
            size = size.nan_to_num(0.0, 0.0, 0.0)  # for rows without a signal or without frames
        chosen = self.chosen(draws, len(features))
        sizes = expand(size if chosen is None else size * chosen, features)
        if is_frame is not None:
            sizes = sizes * expand(is_frame, features)
        return torch.addcmul(features, noise, sizes).to(features.dtype)


def _power(values: Tensor, is_frame: Tensor | None) -> Tensor:
    """The sum of squares of each row's values, `[batch]`, without copying `values`."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    frames = values.unsqueeze(-1).flatten(1)[:, None] if is_frame is None else values.unsqueeze(-1).flatten(2)
    norms: Tensor = torch.linalg.vector_norm(frames, dim=2, dtype=dtype)
    return (norms if is_frame is None else norms.where(is_frame, 0)).square().sum(1)
