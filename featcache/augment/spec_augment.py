"""SpecAugment: stretches of time and of frequency are masked, and time may be warped."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from featcache.augment.base import Augmentation, expand, frames_of, in_range
from featcache.augment.draws import Draws
from featcache.augment.time_warp import warp_time
from featcache.errors import ArgumentError

__all__ = ["SpecAugment"]


class SpecAugment(Augmentation):
    """Masks stretches of time and of frequency, in every row others.

    Source: Park et al. 2019, "SpecAugment: A Simple Data Augmentation Method for Automatic Speech Recognition",
    arXiv:1904.08779. The defaults are its policy LD, but for the warping of time, 80 frames there, and for
    `max_time_fraction`, 1.0 there. As there, widths and then places are drawn uniformly; masks may overlap.

    Args:
        time_masks: how many, in each row.
        time_width: of a mask, at most, in frames.
        max_time_fraction: of a row's own frames that one time mask may cover, at most.
        freq_masks: how many, in each row.
        freq_width: of a mask, at most, in dimensions.
        time_warp: by how many frames time is warped, at most; see `featcache.augment.time_warp`. 0 is for not at all.
        value: what masked values become; "mean" for the mean of the row's own values, where features are not
            normalised to a mean of 0.
        seed: see `featcache.augment`.
        probability: with which a row is augmented.

    Raises:
        ArgumentError: a number is out of range.
    """

    def __init__(
        self,
        *,
        time_masks: int = 2,
        time_width: int = 100,
        max_time_fraction: float = 0.2,
        freq_masks: int = 2,
        freq_width: int = 27,
        time_warp: int = 0,
        value: float | Literal["mean"] = 0.0,
        seed: int = 0,
        probability: float = 1.0,
    ) -> None:
        super().__init__(seed=seed, probability=probability)
        self.time_masks, self.time_width, self.max_time_fraction = time_masks, time_width, max_time_fraction
        self.freq_masks, self.freq_width, self.time_warp, self.value = freq_masks, freq_width, time_warp, value
        for name in ("time_masks", "time_width", "freq_masks", "freq_width", "time_warp"):
            in_range(name, getattr(self, name), 0)
        in_range("max_time_fraction", max_time_fraction, 0, 1)
        if isinstance(value, str) and value != "mean":
            raise ArgumentError(f"value is {value!r}: give a number, or 'mean'")

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Tensor:
        """Mask a batch.

        Args:
            features: floats `[batch, frames, dims]`.
            lengths: integers `[batch]`, in frames, on the features' device; no time mask goes beyond. Without it, all
                are of full length.
            step: of the training.

        Returns:
            Of the features' shape and dtype.

        Raises:
            ArgumentError: shapes, dtypes or devices do not fit.
        """
        if not self.training:
            return features
        own = frames_of(features, lengths, dimensions=3)
        if lengths is None:
            lengths = torch.full(features.shape[:1], features.shape[1], device=features.device)
        lengths = lengths.clamp(0, features.shape[1])
        draws = self.draws(step, features.device)
        chosen = self.chosen(draws, len(features))
        if self.time_warp:
            features = warp_time(features, lengths, self.time_warp, draws, chosen)
        fill = self._fill(features, own)
        longest = (lengths.float() * self.max_time_fraction).long().clamp(max=self.time_width)
        in_time = _stretches(draws, self.time_masks, lengths, longest, features.shape[1])
        bins = torch.full_like(lengths, features.shape[2])
        in_freq = _stretches(draws, self.freq_masks, bins, bins.clamp(max=self.freq_width), features.shape[2])
        # what is masked, in one comparison: of a frame of level 0 nothing, of 1 the masked dimensions, of 2 all
        level = own.to(torch.int8) + (own & in_time)
        if chosen is not None:
            level = level * chosen[:, None]
        return torch.where((~in_freq).to(torch.int8)[:, None] < level[:, :, None], fill, features)

    def _fill(self, features: Tensor, own: Tensor) -> Tensor:
        """What masked values become, `[]` or `[batch, 1, 1]`."""
        if not isinstance(self.value, str):
            return torch.full((), self.value, dtype=features.dtype, device=features.device)
        total = features.where(expand(own, features), 0).sum((1, 2), dtype=torch.float32)
        means = total / (own.sum(1) * features.shape[2]).clamp(min=1)
        return expand(means, features).to(features.dtype)


def _stretches(draws: Draws, count: int, lengths: Tensor, longest: Tensor, size: int) -> Tensor:
    """So many stretches of each row, bool `[batch, size]`: each from 0 to `longest` wide, anywhere within `lengths`."""
    most = longest[:, None].expand(-1, count)
    widths = draws.up_to(most)
    starts = draws.up_to(lengths[:, None] - widths)
    at = torch.arange(size, device=lengths.device)
    return ((at >= starts[..., None]) & (at < (starts + widths)[..., None])).any(1)
