"""SpecAugment: masks bands of time and of frequency, and can warp time within each utterance."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from featcache.augment.base import Augmentation, Draws, expand, frame_mask
from featcache.errors import ArgumentError, is_number, require_int, require_number

__all__ = ["SpecAugment"]


class SpecAugment(Augmentation):
    """Masks bands of time and of frequency, independently for each row.

    Source: Park et al. 2019, "SpecAugment: A Simple Data Augmentation Method for Automatic Speech Recognition",
    arXiv:1904.08779. The defaults are the paper's policy LD, except for time warping (80 frames in the paper) and
    `max_time_fraction` (1.0 in the paper). As in the paper, the width and then the position of a mask are drawn
    uniformly; masks may overlap.

    Args:
        time_masks: The number of time masks in each row.
        time_width: The largest width of a time mask, in frames.
        max_time_fraction: The largest share of a row's own frames that one time mask may cover.
        freq_masks: The number of frequency masks in each row.
        freq_width: The largest width of a frequency mask, in dimensions.
        time_warp: The largest shift by time warping, in frames, as described for `warp_time`. 0 turns it off.
        value: What replaces masked values; "mean" is the mean of the row's own values, for features whose mean is not
            0.
        seed: The seed; see `featcache.augment`.
        probability: The probability that a row is augmented.

    Raises:
        ArgumentError: A number is out of range.
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
        """Mask a batch `[batch, frames, dims]`: a tensor of its shape and dtype. Time masks stay within `lengths`. See
        `Augmentation` for the arguments."""
        if not self.training:
            return features
        is_frame = frame_mask(features, lengths, dimensions=3)
        if lengths is None:
            lengths = torch.full(features.shape[:1], features.shape[1], device=features.device)
        lengths = lengths.clamp(0, features.shape[1])
        draws = self.draws(step, features.device)
        chosen = self.chosen(draws, len(features))
        if self.time_warp:
            features = warp_time(features, lengths, self.time_warp, draws, chosen)
        fill = self._fill(features, is_frame)
        longest = (lengths.float() * self.max_time_fraction).long().clamp(max=self.time_width)
        in_time = _stretches(draws, self.time_masks, lengths, longest, features.shape[1])
        bins = torch.full_like(lengths, features.shape[2])
        in_freq = _stretches(draws, self.freq_masks, bins, bins.clamp(max=self.freq_width), features.shape[2])
        # all masks in one comparison: a frame of level 0 is not masked, one of 1 in masked dimensions, one of 2 in all
        level = is_frame.to(torch.int8) + (is_frame & in_time)
        if chosen is not None:
            level = level * chosen[:, None]
        return torch.where((~in_freq).to(torch.int8)[:, None] < level[:, :, None], fill, features)

    def _fill(self, features: Tensor, is_frame: Tensor) -> Tensor:
        """What replaces masked values, `[]` or `[batch, 1, 1]`."""
        if not isinstance(self.value, str):
            return torch.full((), self.value, dtype=features.dtype, device=features.device)
        total = features.where(expand(is_frame, features), 0).sum((1, 2), dtype=torch.float32)
        means = total / (is_frame.sum(1) * features.shape[2]).clamp(min=1)
        return expand(means, features).to(features.dtype)


def _stretches(draws: Draws, count: int, lengths: Tensor, longest: Tensor, size: int) -> Tensor:
    """Mark `count` stretches in each row, each 0 to `longest` wide and within `lengths`: bool `[batch, size]`."""
    most = longest[:, None].expand(-1, count)
    widths = draws.up_to(most)
    starts = draws.up_to(lengths[:, None] - widths)
    at = torch.arange(size, device=lengths.device)
    return ((at >= starts[..., None]) & (at < (starts + widths)[..., None])).any(1)


def warp_time(features: Tensor, lengths: Tensor, window: int, draws: Draws, chosen: Tensor | None = None) -> Tensor:
    """Move one point of each row by up to `window` frames, and stretch or compress both sides of it accordingly.

    As in SpecAugment (Park et al. 2019, section 2), the point is drawn from the frames that are further than `window`
    from both ends, and its shift uniformly from -window to window; values between frames are interpolated linearly.
    First and last frames stay in place. Rows of up to 2 * window + 2 frames have no such point and are not changed, nor
    is padding. Features are `[batch, frames, ...]`, lengths int64 `[batch]`; of `chosen` rows, bool `[batch]`, or all.
    """
    room = lengths - 2 * window - 2
    drawn = draws.up_to(room.clamp(min=1) - 1), draws.up_to(torch.full_like(lengths, 2 * window))
    point = (drawn[0] + window + 1).float()
    moved = point + drawn[1] - window
    last = (lengths - 1).float()
    at = torch.arange(features.shape[1], device=features.device, dtype=torch.float32).expand(len(lengths), -1)
    point, moved, last = point[:, None], moved[:, None], last[:, None]
    before = at * (point / moved)
    after = last - (last - at) * ((last - point) / (last - moved))
    source = torch.where(at < moved, before, after)
    stays = (room < 1)[:, None] | (at > last)
    if chosen is not None:
        stays = stays | ~chosen[:, None]
    source = torch.where(stays, at, source).clamp(min=0)
    left = source.floor().clamp(max=max(features.shape[1] - 1, 0))
    right = torch.minimum(left + 1, last).clamp(min=0)
    rows = torch.arange(len(lengths), device=features.device)[:, None]
    weight = expand((source - left).to(features.dtype), features)
    warped = torch.lerp(features[rows, left.long()], features[rows, right.long()], weight)
    return torch.where(expand(stays, features), features, warped)
