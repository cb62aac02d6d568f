"""Normalisation of every utterance by its own frames, the same in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from featcache.cmvn.batches import CONSTANT, check, finish, own_frames


def normalize_utterances(
    features: Tensor,
    lengths: Tensor | None = None,
    *,
    norm_means: bool = True,
    norm_vars: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise each utterance by the mean and the standard deviation of its own frames.

    The result is bit-identical to that of the utterance alone, whatever the padding, on any device: sums are exact (see
    `_exact_sum`). A dimension that does not vary within an utterance is centred but not scaled.

    Args:
        features: floats `[batch, frames, *item_shape]`.
        lengths: integers `[batch]`, in frames; frames beyond do not count and are not changed. Without it, all frames
            count.
        norm_means: whether to subtract means.
        norm_vars: whether to divide by standard deviations.
        dtype: of the result; by default float32, or float64 for float64 features. Computed in float64.

    Returns:
        `[batch, frames, *item_shape]`.

    Raises:
        ArgumentError: shapes or dtypes do not fit.
    """
    check(features)
    if lengths is None:
        lengths = torch.full(features.shape[:1], features.shape[1], device=features.device)
    own = own_frames(features, lengths)
    counts = own.sum(1, keepdim=True).clamp(min=1).double()
    values = features.double()
    means = _exact_sum(values.where(own, 0), counts) / counts
    centred = (values - means).where(own, 0)
    normalised = centred if norm_means else values
    if norm_vars:
        stds = (_exact_sum(centred.square(), counts) / counts).sqrt()
        normalised = normalised / stds.where(stds > CONSTANT * means.abs(), 1)
    kept = torch.promote_types(features.dtype, torch.float32)
    return finish(normalised.to(kept), features, lengths, dtype)


def _exact_sum(values: Tensor, counts: Tensor) -> Tensor:
    """The sum over frames in float64, with the same bits in whatever order a device adds, and with any padding.

    Values are rounded to whole multiples of a power of two that is small enough to lose nothing that matters, 2^-52 of
    the sum's largest possible size, and large enough for float64 to hold all sums of them exactly.

    Args:
        values: float64 `[batch, frames, ...]`, zeros in the padding.
        counts: float64 `[batch, 1, ...]`, how many frames are not.

    Returns:
        `[batch, 1, ...]`.
    """
    if not values.shape[1]:
        return values.sum(1, keepdim=True)
    largest = values.abs().amax(1, keepdim=True)
    exponent = torch.frexp(largest).exponent.long() + torch.frexp(counts).exponent.long()
    scale = ((52 - exponent + 1023) << 52).view(torch.float64)  # a power of two, by its bits
    total: Tensor = (values * scale).round().sum(1, keepdim=True)
    return total / scale
