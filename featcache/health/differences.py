"""The differences between two extractions of a clip, and whether rounding explains them.

Two computations of the same numbers differ in their last bits if their devices or the shapes of their batches differ:
sums are added in another order. For float features that is all. A code is the index of the nearest codeword, and if the
distances of two codewords are nearly equal, the last bits decide: the frame is a *tie*. The quantised latents
distinguish a tie from an error. Quantisation looks at one frame's latents and at nothing
else, so where they agree to rounding and the codes do not, the frame was tied, and nothing was wrong before it. (Behind
the first codebook in which two residual quantisations differ, they quantise different residuals, and differ by right.)

The measure is relative, a frame at a time: the norm of the difference over the norm of the reference. Padding that
leaks into a frame moves it by a thousandth and more; another shape of the batch, in float32, by 4e-8 to 3e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDING = 2e-5
"""What may differ in a frame by rounding, in float32, relative to the frame's norm."""

_DRAWS = 64
_TINY = 1e-30


@dataclass(frozen=True)
class Values:
    """What an extractor gave for a clip.

    Attributes:
        features: `[F, *item_shape]`.
        latents: for codes, float `[F, D]`, what was quantised, where the extractor tells; else None.
    """

    features: torch.Tensor
    latents: torch.Tensor | None = None

    @property
    def compared(self) -> torch.Tensor:
        """What tells rounding from errors: the latents; without them, the features."""
        return self.features if self.latents is None else self.latents


@dataclass(frozen=True)
class Difference:
    """How much differs, over some clips: of codes, each; of float features, frames.

    Attributes:
        values: codes, or frames, that were compared.
        differing: of them; for frames, in any bit.
        mismatched: of those, the ones that rounding does not account for. The others are ties.
        frames: that were compared.
        disturbed: of them, those whose latents or features differ by more than rounding, whether or not a code does.
        relative: the largest difference of a frame's latents or features, relative to the frame's norm.
        absolute: the largest difference of any latent or feature.
        first: how far into its clip a disturbed frame lies at most, in frames; 0 without any.
        last: how far from its clip's end, counted alike.
    """

    values: int = 0
    differing: int = 0
    mismatched: int = 0
    frames: int = 0
    disturbed: int = 0
    relative: float = 0.0
    absolute: float = 0.0
    first: int = 0
    last: int = 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.values + other.values,
            self.differing + other.differing,
            self.mismatched + other.mismatched,
            self.frames + other.frames,
            self.disturbed + other.disturbed,
            max(self.relative, other.relative),
            max(self.absolute, other.absolute),
            max(self.first, other.first),
            max(self.last, other.last),
        )


def difference(found: Values, reference: Values, rounding: float = ROUNDING) -> Difference:
    """How a clip's values differ from its reference's, of the same shape.

    Codes without latents are mismatched wherever they differ.
    """
    is_float = reference.features.is_floating_point()
    frames = len(reference.features)
    unequal = (found.features != reference.features).reshape(frames, -1)
    counts = unequal.any(1, keepdim=True) if is_float else unequal
    by_frame = counts.sum(1)
    relative = absolute = torch.zeros(frames)
    if is_float or reference.latents is not None:
        relative, absolute = frame_differences(found.compared, reference.compared)
        disturbed = relative > rounding
    else:
        disturbed = by_frame > 0
    at = disturbed.nonzero()[:, 0].tolist()
    return Difference(
        values=counts.numel(),
        differing=int(by_frame.sum()),
        mismatched=int(by_frame[disturbed].sum()),
        frames=frames,
        disturbed=len(at),
        relative=_largest(relative),
        absolute=_largest(absolute),
        first=at[-1] + 1 if at else 0,
        last=frames - at[0] if at else 0,
    )


def frame_differences(found: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each frame's difference, relative in norm and largest absolute: float64 `[F]` each, of tensors `[F, ...]`.

    NaN differs infinitely.
    """
    a, b = (tensor.reshape(len(tensor), -1).double() for tensor in (found, reference))
    apart = a - b
    relative = apart.norm(dim=1) / b.norm(dim=1).clamp(min=_TINY)
    return relative.nan_to_num(nan=torch.inf, posinf=torch.inf), apart.abs().amax(1)


def tied_frames(
    quantize: Callable[[torch.Tensor], torch.Tensor],
    latents: torch.Tensor,
    codes: torch.Tensor,
    others: torch.Tensor,
    rounding: float = ROUNDING,
) -> torch.Tensor:
    """Which frames have `others` instead of `codes` by rounding, where the latents of `others` are not known.

    A frame is tied if noise of the size of rounding, added to its latents, makes the first of its codes that differs
    what it is in `others`, and leaves those before it alone: in one of 64 draws, from a fixed seed. That asks the
    quantiser itself, so it holds for any of them: residual, factorised, scalar. (Two codewords that are nearly the same
    are tied whatever the latents are, which this does not see.)

    Args:
        quantize: latents `[R, F, D]` to codes `[R, F, Q]`, frame by frame.
        latents: float32 `[F, D]`, of `codes`.
        codes: `[F, Q]`; all frames differ from `others`.
        others: `[F, Q]`.
        rounding: norm of the noise, relative to the frame's.

    Returns:
        bool `[F]`.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_DRAWS, *latents.shape, generator=generator).to(latents.device)
    noise *= rounding * latents.norm(dim=1, keepdim=True) / latents.shape[1] ** 0.5
    drawn = quantize(latents + noise).to(others.device)
    first = (codes.to(others.device) != others).int().argmax(1)  # [F]
    later = torch.arange(others.shape[1], device=others.device) > first[:, None]
    return ((drawn == others) | later).all(2).any(0)


def _largest(values: torch.Tensor) -> float:
    """0 of none."""
    return float(values.max()) if len(values) else 0.0
