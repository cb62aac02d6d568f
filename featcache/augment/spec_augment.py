"""SpecAugment: masks bands of time and of frequency, and may warp time."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from featcache.arguments import is_number, require_int, require_number
from featcache.augment.base import Augmentation, expand, frames_of
from featcache.augment.draws import Draws
from featcache.augment.time_warp import warp_time
from featcache.errors import ArgumentError

__all__ = ["SpecAugment"]


class SpecAugment(Augmentation):
    """Masks bands of time and of frequency, independently for each row.

    Source: Park et al. 2019, "SpecAugment: A Simple Data Augmentation Method for Automatic Speech Recognition",
    arXiv:1904.08779. The defaults are the paper's policy LD, except for time warping (80 frames in the paper) and
    `max_time_fraction` (1.0 in the paper). As in the paper, the width and then the position of a mask are drawn
    uniformly; masks may overlap.

    Args:
        time_masks: number of masks in each row.
        time_width: largest width of a mask, in frames.
        max_time_fraction: largest share of a row's own frames that one time mask may cover.
        freq_masks: number of masks in each row.
        freq_width: largest width of a mask, in dimensions.
        time_warp: largest shift by time warping, in frames; see `featcache.augment.time_warp`. 0 turns it off.
        value: replaces masked values; "mean" is the mean of the row's own values, for features without a mean of 0.
        seed: see `featcache.augment`.
        probability: probability that a row is augmented.

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
        self.time_masks = require_int("time_masks", time_masks, 0)
        self.time_width = require_int("time_width", time_width, 0)
        self.max_time_fraction = require_number("max_time_fraction", max_time_fraction, 0, 1)
        self.freq_masks = require_int("freq_masks", freq_masks, 0)
        self.freq_width = require_int("freq_width", freq_width, 0)
        self.time_warp = require_int("time_warp", time_warp, 0)
        if value != "mean" and not is_number(value):
            raise ArgumentError(f"value is {value!r}: give a number, or 'mean'")
        self.value = value

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Tensor:
        """Mask a batch.

        Args:
            features: floats `[batch, frames, dims]`.
            lengths: integers `[batch]`, in frames, on the features' device; time masks stay within. Without it, all
                rows have full length.
            step: of the training.

        Returns:
            A tensor of the features' shape and dtype.

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
