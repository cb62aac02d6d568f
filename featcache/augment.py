"""Augmentation of features on their device: noise, SpecAugment, mixing; vectorised,
without waiting for the device.

    augment = featcache.augment.SpecAugment(seed=0)
    features = augment(features, lengths, step=step)  # in eval mode, they are not changed

The random numbers depend only on the seed, the step and the shapes, not on torch's global
generators. Give two augmentations of the same kind different seeds, and each rank of a
distributed run too. A CPU and a GPU draw different numbers.

Frames beyond an utterance's length, its padding, are not changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from featcache.errors import ArgumentError, is_number, require_int, require_number
from featcache.manifest.strings import hash_of
from featcache.masks import check_floats, expand, frame_mask

__all__ = [
    "Augmentation",
    "GaussianNoise",
    "MixEnergies",
    "Mixed",
    "Mixup",
    "SpecAugment",
    "VaeNoise",
]

_LARGE = 1 << 62


class Draws:
    """The random numbers of one call, drawn on the device in the order of the requests;
    other numbers for each kind of augmentation."""

    def __init__(self, kind: str, seed: int, step: int, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(hash_of(f"{kind} {seed} {step}"))
        self.options: dict[str, Any] = {"generator": generator, "device": device}

    def uniform(self, count: int, limits: Any = (0.0, 1.0)) -> Tensor:
        """Draw numbers from the first limit up to below the second, float32 `[count]`."""
        low, high = limits
        drawn = torch.rand(count, dtype=torch.float32, **self.options)
        scaled: Tensor = drawn * (high - low) + low
        return scaled

    def normal(self, like: Tensor) -> Tensor:
        """Draw standard normal numbers of a tensor's shape, float64 if it is, else float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.randn(like.shape, dtype=dtype, **self.options)

    def up_to(self, most: Tensor) -> Tensor:
        """Draw a whole number from 0 to each integer in `most`, inclusive, int64."""
        return torch.randint(_LARGE, most.shape, **self.options) % (most + 1)

    def beta(self, alpha: float, count: int) -> Tensor:
        """Draw numbers from the distribution Beta(alpha, alpha), float32 `[count]`."""
        both = torch.full((count, 2), alpha, device=self.device, dtype=torch.float32)
        # as torch.distributions.Beta does
        return torch._sample_dirichlet(both, generator=self.options["generator"])[:, 0]

    def partners(self, count: int) -> Tensor:
        """Draw another row for each row, each once, int64 `[count]`; for a single row, itself."""
        order = self.uniform(count).argsort()
        return torch.empty_like(order).scatter_(0, order, order.roll(1))


@dataclass(eq=False, repr=False, kw_only=True)
class Augmentation(nn.Module):
    """The base of augmentations.

    They are called with features, floats `[batch, frames, ...]`; with `lengths` in frames,
    integers `[batch]` on the features' device, unless no row has padding; and with the
    `step` of the training. Raises ArgumentError if shapes, dtypes, devices or arguments of
    the class do not fit."""

    seed: int = 0
    """The seed, a whole number."""
    probability: float = 1.0
    """The probability, 0 to 1, that a row is augmented, independently for each row."""

    def __post_init__(self) -> None:
        super().__init__()
        self.seed = require_int("seed", self.seed)
        self.probability = require_number("probability", self.probability, 0, 1)

    def draws(self, step: Any, device: torch.device) -> Draws:
        """Return the random numbers of one call."""
        if isinstance(step, Tensor):  # reading a tensor would wait for the GPU
            raise ArgumentError("step is a tensor: give the step of the training, an int")
        return Draws(type(self).__name__, self.seed, require_int("step", step), device)

    def chosen(self, draws: Draws, rows: int) -> Tensor:
        """Choose the rows to augment, bool `[rows]`."""
        if self.probability == 1:
            return torch.ones(rows, dtype=torch.bool, device=draws.device)
        return draws.uniform(rows) < self.probability

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)


def require_range(name: str, value: float | tuple[float, float]) -> tuple[float, float]:
    """Return a range (low, high) as it is, a number as the range from it to itself."""
    low, high = value if isinstance(value, tuple) else (value, value)
    if not (is_number(low) and is_number(high) and low <= high):
        raise ArgumentError(f"{name} is {value!r}: give a number, or a range (low, high)")
    return low, high


@dataclass(eq=False, repr=False)
class GaussianNoise(Augmentation):
    """Adds Gaussian noise, of a given size or at a given signal-to-noise ratio.

    Takes any float tensor with a batch dimension. Gradients pass through. Give either `std`
    or `snr_db`, as a number, or as a range `(low, high)` from which each row draws."""

    std: float | tuple[float, float] | None = None
    """The standard deviation of the noise, or its range."""
    snr_db: float | tuple[float, float] | None = field(default=None, kw_only=True)
    """The signal-to-noise ratio in dB, or its range: the mean square of a row's values, not
    of its speech, over the mean square of its noise. Zero rows get no noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.std is None) == (self.snr_db is None):
            raise ArgumentError("give the noise's std, or its snr_db, and not both")
        if self.std is not None:
            self.std = require_range("std", self.std)
            require_number("std", self.std[0], 0)
        if self.snr_db is not None:
            self.snr_db = require_range("snr_db", self.snr_db)

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Tensor:
        """Add noise to floats `[batch, ...]`; with `lengths`, `[batch, frames, ...]`."""
        if not self.training:
            return features
        check_floats(features, "batch", "...")
        is_frame = None if lengths is None else frame_mask(features, lengths)
        draws = self.draws(step, features.device)
        size = draws.uniform(len(features), self.std or self.snr_db)
        noise = draws.normal(features)
        if self.std is None:
            ratio = _power(features.detach(), is_frame) / _power(noise, is_frame)
            # rows without a signal or without frames get no noise
            size = (ratio * 10 ** (-size / 10)).sqrt().nan_to_num(0.0, 0.0, 0.0)
        sizes = expand(size * self.chosen(draws, len(features)), features)
        if is_frame is not None:
            sizes = sizes * expand(is_frame, features)
        return torch.addcmul(features, noise, sizes).to(features.dtype)


@dataclass(eq=False, repr=False)
class VaeNoise(Augmentation):
    """Draws the latents of a variational autoencoder around their stored means.

    Adds Gaussian noise whose strength is drawn for each row from N(0, std²), as
    `VibeVoiceAcousticTokenizerModel.encode` does unless told not to."""

    std: float = 0.625
    """The standard deviation of the strengths: `vae_std` in VibeVoice's config."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.std = require_number("std", self.std, 0)

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Tensor:
        """Add noise to floats `[batch, frames, ...]`."""
        if not self.training:
            return features
        is_frame = frame_mask(features, lengths)
        draws = self.draws(step, features.device)
        strengths = self.std * draws.normal(features.new_empty(len(features)))
        chosen = strengths * self.chosen(draws, len(features))
        sizes = expand(chosen, features) * expand(is_frame, features)
        return torch.addcmul(features, draws.normal(features), sizes).to(features.dtype)


def _power(values: Tensor, is_frame: Tensor | None) -> Tensor:
    """Sum the squares of each row's values, `[batch]`, without copying `values`."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    values = values.unsqueeze(-1)
    frames = values.flatten(1)[:, None] if is_frame is None else values.flatten(2)
    norms: Tensor = torch.linalg.vector_norm(frames, dim=2, dtype=dtype)
    if is_frame is not None:
        norms = norms.where(is_frame, 0)
    return norms.square().sum(1)


_NEPERS = {"power": 1.0, "magnitude": 2.0, "power10": math.log(10), "db": math.log(10) / 10}
"""The natural logarithm of power that one unit of the features stands for."""


class Mixed(NamedTuple):
    """A mixed batch, with the partner and weight of each row.

    For a loss of mixed labels: `weight * loss(output, labels) + (1 - weight) *
    loss(output, labels[partner])`."""

    features: Tensor
    """The mixed features."""
    partner: Tensor
    """The index of the row mixed into each row, int64 `[batch]`."""
    weight: Tensor
    """The share of a row's own features, float32 `[batch]`; 1 for a row that was not mixed."""


@dataclass(eq=False, repr=False)
class Mixup(Augmentation):
    """A weighted mean of each row and another row of the batch, each a partner once.

    From Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412."""

    alpha: float = 0.2
    """The parameter of Beta(alpha, alpha), from which weights are drawn: if small, near 0
    or 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha = require_number("alpha", self.alpha, 0.01)

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Mixed:
        """Mix a batch."""
        if not self.training:
            return _unmixed(features)
        is_frame = frame_mask(features, lengths)
        draws = self.draws(step, features.device)
        partner = draws.partners(len(features))
        weight = draws.beta(self.alpha, len(features))
        weight = weight.where(self.chosen(draws, len(features)), 1.0)
        both = expand(is_frame & is_frame[partner], features)
        mixed = torch.lerp(features[partner], features, expand(weight, features).to(features.dtype))
        return Mixed(mixed.where(both, features), partner, weight)


@dataclass(eq=False, repr=False)
class MixEnergies(Augmentation):
    """Adds the powers of another row of the batch to each, as background, in features
    that are logarithms: for log mel energies, as the sum of both waveforms, apart from
    phase. Every row is a partner once."""

    snr_db: float | tuple[float, float] = (10.0, 20.0)
    """The ratio in dB of a row's mean power to its partner's, or its range."""
    log: str = field(default="power", kw_only=True)
    """The kind of the features: natural logarithms of "power", as in Kaldi's fbank, or of
    "magnitude", as in vocoders; "power10", logarithms of power to base 10; or "db"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log not in _NEPERS:
            raise ArgumentError(f"log is {self.log!r}: it must be one of {', '.join(_NEPERS)}")
        self.snr_db = require_range("snr_db", self.snr_db)

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Mixed:
        """Mix a batch, in float32; a row's weight is its share of the power."""
        if not self.training:
            return _unmixed(features)
        is_frame = frame_mask(features, lengths)
        draws = self.draws(step, features.device)
        partner = draws.partners(len(features))
        snr = draws.uniform(len(features), self.snr_db) * _NEPERS["db"]
        chosen = self.chosen(draws, len(features))
        both = is_frame & is_frame[partner] & chosen[:, None]
        powers = features.float() * _NEPERS[self.log]
        levels = _mean_power(powers, is_frame)
        gain = expand(levels - levels[partner] - snr, powers)
        mixed = torch.logaddexp(powers, powers[partner] + gain) / _NEPERS[self.log]
        weight = torch.sigmoid(snr).where(chosen, 1.0)
        mixed = mixed.to(features.dtype).where(expand(both, features), features)
        return Mixed(mixed, partner, weight)


def _unmixed(features: Tensor) -> Mixed:
    rows = torch.arange(len(features), device=features.device)
    return Mixed(features, rows, torch.ones(len(rows), dtype=torch.float32, device=features.device))


def _mean_power(powers: Tensor, is_frame: Tensor) -> Tensor:
    """Compute the logarithm of each row's mean power, `[batch]`; 0 without frames."""
    total = powers.where(expand(is_frame, powers), -torch.inf).flatten(1).logsumexp(1)
    values = is_frame.sum(1) * math.prod(powers.shape[2:])
    return torch.where(values > 0, total - values.clamp(min=1).float().log(), 0.0)


@dataclass(eq=False, repr=False, kw_only=True)
class SpecAugment(Augmentation):
    """Masks bands of time and of frequency, independently for each row.

    Source: Park et al. 2019, "SpecAugment: A Simple Data Augmentation Method for
    Automatic Speech Recognition", arXiv:1904.08779. The defaults are the paper's policy
    LD, except for `time_warp` (80 in the paper) and `max_time_fraction` (1.0 in the paper).
    The width and then the position of a mask are drawn uniformly; masks may overlap. Widths
    and shifts are in frames and dimensions."""

    time_masks: int = 2
    """The number of time masks in each row."""
    time_width: int = 100
    """The largest width of a time mask."""
    max_time_fraction: float = 0.2
    """The largest share of a row's own frames that one time mask may cover."""
    freq_masks: int = 2
    """The number of frequency masks in each row."""
    freq_width: int = 27
    """The largest width of a frequency mask."""
    time_warp: int = 0
    """The largest shift by time warping (see `warp_time`). 0 turns it off."""
    value: float | Literal["mean"] = 0.0
    """The value of masked bands; "mean" is the mean of the row's own values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("time_masks", "time_width", "freq_masks", "freq_width", "time_warp"):
            setattr(self, name, require_int(name, getattr(self, name), 0))
        self.max_time_fraction = require_number("max_time_fraction", self.max_time_fraction, 0, 1)
        if self.value != "mean" and not is_number(self.value):
            raise ArgumentError(f"value is {self.value!r}: give a number, or 'mean'")

    def forward(self, features: Tensor, lengths: Tensor | None = None, *, step: int) -> Tensor:
        """Mask a batch `[batch, frames, dims]`; time masks stay within `lengths`."""
        if not self.training:
            return features
        check_floats(features, "batch", "frames", "dims")
        is_frame = frame_mask(features, lengths)
        lengths = is_frame.sum(1)
        draws = self.draws(step, features.device)
        chosen = self.chosen(draws, len(features))
        if self.time_warp:
            features = warp_time(features, lengths * chosen, self.time_warp, draws)
        fill = self._fill(features, is_frame)
        longest = (lengths.float() * self.max_time_fraction).long().clamp(max=self.time_width)
        in_time = _stretches(draws, self.time_masks, lengths, longest, features.shape[1])
        bins = torch.full_like(lengths, features.shape[2])
        widest = bins.clamp(max=self.freq_width)
        in_freq = _stretches(draws, self.freq_masks, bins, widest, features.shape[2])
        # all masks in one comparison: a frame of level 0 is not masked, of level 1 in masked
        # dimensions, of level 2 in all
        level = (is_frame.to(torch.int8) + (is_frame & in_time)) * chosen[:, None]
        return torch.where((~in_freq).to(torch.int8)[:, None] < level[:, :, None], fill, features)

    def _fill(self, features: Tensor, is_frame: Tensor) -> Tensor:
        """Return the value for masked bands, `[]` or `[batch, 1, 1]`."""
        if not isinstance(self.value, str):
            return torch.full((), self.value, dtype=features.dtype, device=features.device)
        total = features.where(expand(is_frame, features), 0).sum((1, 2), dtype=torch.float32)
        means = total / (is_frame.sum(1) * features.shape[2]).clamp(min=1)
        return expand(means, features).to(features.dtype)


def _stretches(draws: Draws, count: int, lengths: Tensor, longest: Tensor, size: int) -> Tensor:
    """Mark `count` stretches of each row, 0 to `longest` wide and within `lengths`, bool
    `[batch, size]`."""
    widths = draws.up_to(longest[:, None].expand(-1, count))
    starts = draws.up_to(lengths[:, None] - widths)
    ends = starts + widths
    positions = torch.arange(size, device=lengths.device)
    inside = (positions >= starts[..., None]) & (positions < ends[..., None])
    return inside.any(1)


def warp_time(features: Tensor, lengths: Tensor, window: int, draws: Draws) -> Tensor:
    """Move one point of each row by up to `window` frames, and stretch or compress both
    sides of it, by linear interpolation. Features are `[batch, frames, ...]`, lengths int64
    `[batch]`.

    As in SpecAugment (Park et al. 2019, section 2), the point is drawn from the frames
    further than `window` from both ends, and its shift uniformly. Rows of up to 2 * window
    + 2 frames have no such point and are not changed."""
    lengths = lengths[:, None]
    room = lengths - 2 * window - 2
    point = (draws.up_to(room.clamp(min=1) - 1) + window + 1).float()
    moved = point + draws.up_to(torch.full_like(lengths, 2 * window)) - window
    last = (lengths - 1).float()
    positions = torch.arange(features.shape[1], device=features.device, dtype=torch.float32)
    positions = positions.expand(len(lengths), -1)
    before = positions * (point / moved)
    after = last - (last - positions) * ((last - point) / (last - moved))
    source = torch.where(positions < moved, before, after)
    stays = (room < 1) | (positions > last)
    source = torch.where(stays, positions, source).clamp(min=0)
    left = source.floor().clamp(max=max(features.shape[1] - 1, 0))
    right = torch.minimum(left + 1, last).clamp(min=0)
    rows = torch.arange(len(lengths), device=features.device)[:, None]
    weight = expand((source - left).to(features.dtype), features)
    warped = torch.lerp(features[rows, left.long()], features[rows, right.long()], weight)
    return torch.where(expand(stays, features), features, warped)
