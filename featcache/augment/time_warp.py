"""Time warped within each utterance: one part of it faster, the rest slower, its length the same."""

from __future__ import annotations

import torch
from torch import Tensor

from featcache.augment.base import expand
from featcache.augment.draws import Draws

__all__ = ["warp_time"]


def warp_time(features: Tensor, lengths: Tensor, window: int, draws: Draws, chosen: Tensor | None = None) -> Tensor:
    """Move one point of each row by up to `window` frames, and stretch what lies on both sides of it.

    The point is drawn from the frames that are further than `window` from both ends, and how far it moves uniformly
    from -window to window, as in SpecAugment (Park et al. 2019, section 2); frames in between are interpolated
    linearly. Rows of up to 2 * window + 2 frames have no such point, and stay as they are, as does padding. First and
    last frames stay where they are.

    Args:
        features: floats `[batch, frames, ...]`.
        lengths: int64 `[batch]`, in frames.
        window: in frames, at least 1.
        draws: of this call.
        chosen: bool `[batch]`, which rows are warped; None for all.

    Returns:
        Of the features' shape and dtype.
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
