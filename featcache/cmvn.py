"""Cepstral mean and variance normalisation on the features' device: global, by speaker,
or by utterance.

    cmvn = featcache.Cmvn.load("speakers.cmvn.npz", cache=cache)   # written by `featcache stats -o`
    normalised = cmvn(features, lengths, groups=batch["speaker"])  # float32 [batch, frames, dims]
    normalised = normalize_utterances(features, lengths)           # each by its own frames

Frames beyond an utterance's length are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcache.errors import ArgumentError, StoreError, listing, naming
from featcache.masks import check_floats, described, expand, frame_mask
from featcache.stats import Stats

if TYPE_CHECKING:
    from featcache.loader.cache import Cache

__all__ = ["Cmvn", "normalize_utterances"]

_CONSTANT = 1e-6
"""A dimension whose standard deviation is at most this part of its mean counts as
constant: it varies by rounding."""


Groups = Sequence[str] | Tensor
"""The group of each row, by its name or its number."""


class GroupStatistics(TypedDict, total=False):
    """The statistics of groups, as `Cmvn` takes them."""

    groups: Sequence[str]
    group_mean: Any
    group_std: Any


class Cmvn(nn.Module):
    """Normalisation by the statistics of a version: subtracts each dimension's mean,
    divides by its standard deviation.

    The statistics are float32 buffers. They are in `state_dict`, with the names of the
    groups, so a trained model does not need their file: a `Cmvn(torch.zeros(80),
    torch.ones(80))` accepts any such state. They stay float32 when the model is cast to
    half precision. A dimension that does not vary is centred but not scaled.

    Args:
        mean: The means over all frames, `[*item_shape]`.
        std: The standard deviations over all frames, `[*item_shape]`.
        norm_means: Whether to subtract means (Kaldi's name).
        norm_vars: Whether to divide by standard deviations (Kaldi's name).
        unknown: What to do with rows of unknown groups: "error" raises an error, "global"
            uses the statistics of all frames.
        dtype: The dtype of the result; by default float32, or float64 for float64 features.

    Keyword Args:
        groups: The names of groups with their own statistics; unique.
        group_mean: The groups' means, `[groups, *item_shape]`.
        group_std: The groups' standard deviations, `[groups, *item_shape]`.

    Raises:
        ArgumentError: Shapes or names do not fit together, or the statistics are not finite.
    """

    mean: Tensor
    """The means, float32 `[1 + groups, *item_shape]`: row 0 is that of all frames."""
    std: Tensor
    """The standard deviations, of the same shape."""
    group_numbers: Tensor
    """The groups' numbers, int64 `[groups]`, ascending."""
    group_names: Tensor
    """The groups' names in the order of their numbers, uint8: UTF-8, a zero byte after
    each name."""
    _number_of: dict[str, int]
    """The number of each group by its name; reading `group_numbers` would wait for a GPU."""

    @naming({"groups": (), "group_mean": None, "group_std": None})
    def __init__(
        self,
        mean: Any,
        std: Any,
        *,
        norm_means: bool = True,
        norm_vars: bool = True,
        unknown: Literal["error", "global"] = "error",
        dtype: torch.dtype | None = None,
        **groups: Unpack[GroupStatistics],
    ) -> None:
        super().__init__()
        if unknown not in ("error", "global"):
            raise ArgumentError(f"unknown is {unknown!r}: it must be 'error' or 'global'")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"dtype is {dtype!r}: give a float dtype, such as torch.float16")
        self.norm_means, self.norm_vars, self.unknown, self.dtype = (
            norm_means,
            norm_vars,
            unknown,
            dtype,
        )
        self._set_statistics(mean, std, **groups)

    def _set_statistics(
        self,
        mean: Any,
        std: Any,
        groups: Sequence[str] = (),
        group_mean: Any = None,
        group_std: Any = None,
    ) -> None:
        if len(set(groups)) < len(groups):
            raise ArgumentError("groups: two groups have the same name")
        numbers = _group_numbers(groups)
        order = np.argsort(numbers, kind="stable")
        means, stds = _stacked(mean, group_mean, order), _stacked(std, group_std, order)
        if means.shape != stds.shape or not (
            means.isfinite().all() and stds.isfinite().all() and (stds >= 0).all()
        ):
            both = f"mean is {list(means.shape[1:])} and std {list(stds.shape[1:])}"
            raise ArgumentError(
                f"{both}: they must be finite and of the same shape, and std must not be negative"
            )
        names = "".join(f"{groups[at]}\0" for at in order).encode()
        self.register_buffer("mean", means.float())
        self.register_buffer("std", torch.where(stds <= _CONSTANT * means.abs(), 1.0, stds).float())
        self.register_buffer("group_numbers", torch.from_numpy(numbers[order]))
        self.register_buffer(
            "group_names", torch.tensor(list(names), dtype=torch.uint8, device="cpu")
        )
        self._number_of = _numbers_by_name(self.group_names)

    @classmethod
    def load(cls, path: str | Path, *, cache: Cache | None = None, **options: Any) -> Self:
        """Read the statistics that `featcache stats -o` wrote.

        Args:
            path: The file.
            cache: A cache; statistics of any other version than its own are refused.
            options: `norm_means`, `norm_vars`, `unknown` and `dtype`, as for the class.

        Raises:
            StoreError: The file cannot be read, is not such a file, or is of another version.
        """
        stats = Stats.load(path)
        if cache is not None and cache.version.info.fingerprint != stats.fingerprint:
            remedy = f"`featcache stats {quote(str(cache.version.path))} -o FILE` computes its own"
            raise StoreError(
                f"{path}: is of {stats.version}, but the cache is "
                f"{cache.version.path.name}: {remedy}"
            )
        groups: GroupStatistics = {}
        if stats.by is not None:
            group_std = np.sqrt(stats.group_variance)
            groups = {
                "groups": stats.groups,
                "group_mean": stats.group_mean,
                "group_std": group_std,
            }
        return cls(stats.mean, stats.std, **groups, **options)

    @property
    def groups(self) -> list[str]:
        """The names of the groups with their own statistics."""
        return list(self._number_of)

    def find(self, names: Sequence[str]) -> Tensor:
        """The numbers of groups, which can be moved to the device ahead of time and
        passed as `groups`.

        Returns:
            int64 `[names]`, on the CPU. If the names of all groups are whole numbers,
            these are the numbers, as in the batches of a `FeatureDataset`; otherwise
            groups are numbered from 0. An unknown name is -1.

        Raises:
            ArgumentError: A name is unknown, and `unknown` is "error"; up to ten are listed.
        """
        if isinstance(names, str):
            raise ArgumentError(f"names is one name, {names!r}: give a list, one name for each row")
        if self.unknown == "error" and (
            strange := sorted({name for name in names if name not in self._number_of})
        ):
            known = listing(map(repr, self.groups)) or "no groups"
            what = f"no statistics for {listing(map(repr, strange))}: there are some for {known}"
            raise ArgumentError(f"{what}; unknown='global' uses those of all frames instead")
        return torch.tensor(
            [self._number_of.get(name, -1) for name in names], dtype=torch.int64, device="cpu"
        )

    def forward(
        self, features: Tensor, lengths: Tensor | None = None, groups: Groups | None = None
    ) -> Tensor:
        """Normalise a batch. Computed in float32, or in float64 for float64 features.

        Args:
            features: Floats `[batch, frames, *item_shape]`.
            lengths: The lengths in frames, integers `[batch]`; frames beyond them are not
                changed. Without it, all frames are normalised.
            groups: The group of each row: names, or integers `[batch]` as returned by
                `find`, on the features' device. Without it, the statistics of all frames
                are used. On a GPU, unknown numbers cannot be reported without waiting: if
                `unknown` is "error", rows of unknown groups become NaN.

        Returns:
            The normalised features, `[batch, frames, *item_shape]`.

        Raises:
            ArgumentError: Shapes or dtypes do not fit, or a group is unknown and
                `unknown` is "error".
        """
        mean, std = self._statistics(features, groups)
        normalised = (
            features - mean
            if self.norm_means
            else features.to(torch.promote_types(features.dtype, std.dtype))
        )
        return _finish(
            normalised / std if self.norm_vars else normalised, features, lengths, self.dtype
        )

    def unnormalize(
        self, features: Tensor, lengths: Tensor | None = None, groups: Groups | None = None
    ) -> Tensor:
        """The inverse of `forward`, with the same arguments."""
        mean, std = self._statistics(features, groups)
        restored = (
            features * std
            if self.norm_vars
            else features.to(torch.promote_types(features.dtype, std.dtype))
        )
        return _finish(
            restored + mean if self.norm_means else restored, features, lengths, self.dtype
        )

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{list(self.mean.shape[1:])}, {len(self._number_of)} groups"

    def _statistics(self, features: Tensor, groups: Groups | None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, `[1, *item_shape]`; with groups, of each row,
        `[batch, 1, *item_shape]`."""
        check_floats(features, "batch", "frames", *self.mean.shape[1:])
        if groups is None:
            # a tensor without dimensions would not promote half precision
            return self.mean[:1], self.std[:1]
        numbers = groups
        if not isinstance(numbers, Tensor):
            numbers = self.find(numbers)
            if features.device.type == "cuda":
                numbers = numbers.pin_memory()
            numbers = numbers.to(features.device, non_blocking=True)
        if (
            numbers.shape != features.shape[:1]
            or numbers.dtype.is_floating_point
            or numbers.dtype == torch.bool
        ):
            raise ArgumentError(
                f"groups is {described(numbers)}: give {len(features)} names or integers, "
                "one per row"
            )
        known = self.group_numbers
        if not len(known):
            rows = torch.zeros_like(numbers)
        else:
            at = torch.searchsorted(known, numbers).clamp_(max=len(known) - 1)
            rows = torch.where(known[at] == numbers, at + 1, 0)
        mean, std = self.mean[rows][:, None], self.std[rows][:, None]
        if self.unknown == "error":
            strange = rows == 0
            if strange.device.type == "cpu" and strange.any():
                names = map(str, sorted(set(numbers[strange].tolist())))
                raise ArgumentError(f"no statistics for groups {listing(names)}")
            strange = strange.view(-1, *[1] * (mean.ndim - 1))
            mean, std = mean.masked_fill(strange, torch.nan), std.masked_fill(strange, torch.nan)
        return mean, std

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Accept whatever groups the state has: their number may differ from that of this
        module."""
        for name, buffer in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if buffer is not None and loaded is not None and loaded.shape[1:] == buffer.shape[1:]:
                self._buffers[name] = buffer.new_empty(loaded.shape)
        super()._load_from_state_dict(state_dict, prefix, *more)
        self._number_of = _numbers_by_name(self.group_names)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the buffers to another device, and never to another dtype: half precision
        would change the means."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self


def normalize_utterances(
    features: Tensor,
    lengths: Tensor | None = None,
    *,
    norm_means: bool = True,
    norm_vars: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise each utterance by the mean and the standard deviation of its own frames.

    The result is bit-identical to that of the utterance alone, whatever the padding, and
    the same on any device: sums are exact (see `_exact_sum`). A dimension that does not
    vary within an utterance is centred but not scaled.

    Args:
        features: Floats `[batch, frames, *item_shape]`.
        lengths: The lengths in frames, integers `[batch]`; frames beyond them do not
            count and are not changed. Without it, all frames count.
        norm_means: Whether to subtract means.
        norm_vars: Whether to divide by standard deviations.
        dtype: The dtype of the result; by default float32, or float64 for float64
            features. Computed in float64.

    Returns:
        The normalised features, `[batch, frames, *item_shape]`.

    Raises:
        ArgumentError: Shapes or dtypes do not fit.
    """
    is_frame = expand(frame_mask(features, lengths), features)
    counts = is_frame.sum(1, keepdim=True).clamp(min=1).double()
    values = features.double()
    means = _exact_sum(values.where(is_frame, 0), counts) / counts
    centred = (values - means).where(is_frame, 0)
    normalised = centred if norm_means else values
    if norm_vars:
        stds = (_exact_sum(centred.square(), counts) / counts).sqrt()
        normalised = normalised / stds.where(stds > _CONSTANT * means.abs(), 1)
    kept = torch.promote_types(features.dtype, torch.float32)
    return _finish(normalised.to(kept), features, lengths, dtype)


def _stacked(of_all: Any, of_groups: Any, order: Any) -> Tensor:
    """The statistics of all frames, then those of the groups in this order, float64 `[1 +
    groups, *item_shape]`."""
    table: Tensor = torch.as_tensor(of_all, dtype=torch.float64, device="cpu").detach()[None]
    if (of_groups is None) != (not len(order)):
        raise ArgumentError("give groups, group_mean and group_std together, or none of them")
    if of_groups is None:
        return table
    groups = torch.as_tensor(of_groups, dtype=torch.float64, device="cpu").detach()
    if groups.shape != (len(order), *table.shape[1:]):
        what = f"statistics of {len(order)} groups are {list(groups.shape)}"
        raise ArgumentError(f"{what}: there must be {list(table.shape[1:])} of each")
    return torch.cat([table, groups[torch.from_numpy(order)]])


def _group_numbers(groups: Sequence[str]) -> NDArray[np.int64]:
    """The groups' numbers, int64 `[groups]`: their names if all are whole numbers, and
    otherwise 0, 1, 2 …"""
    are_numbers = all(
        name.isascii() and name.isdigit() and str(int(name)) == name for name in groups
    )
    # so that they fit into int64
    are_numbers = are_numbers and all(len(name) < 19 for name in groups)
    return np.array([int(name) for name in groups] if are_numbers else range(len(groups)), np.int64)


def _numbers_by_name(names: Tensor) -> dict[str, int]:
    """The number of each group by its name, from the buffer `group_names`."""
    groups = bytes(names.tolist()).decode().split("\0")[:-1]
    return dict(zip(groups, _group_numbers(groups).tolist(), strict=True))


def _exact_sum(values: Tensor, counts: Tensor) -> Tensor:
    """The sums over frames, float64 `[batch, 1, ...]`, with the same bits however a
    device orders them, and with any padding, which is zeros in `values`, float64 `[batch,
    frames, ...]`; `counts` has the number of other frames.

    Values are rounded to multiples of a power of two: 2^-52 of the largest size that the
    sum can have. That is small enough to lose nothing that matters, and large enough for
    float64 to hold all partial sums exactly."""
    if not values.shape[1]:
        return values.sum(1, keepdim=True)
    largest = values.abs().amax(1, keepdim=True)
    exponent = torch.frexp(largest).exponent.long() + torch.frexp(counts).exponent.long()
    scale = ((52 - exponent + 1023) << 52).view(torch.float64)  # a power of two, by its bits
    total: Tensor = (values * scale).round().sum(1, keepdim=True)
    return total / scale


def _finish(
    normalised: Tensor, features: Tensor, lengths: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """Put the padding back as it was, and convert to `dtype` if it is given."""
    if lengths is not None:
        normalised = torch.where(
            expand(frame_mask(features, lengths), features), normalised, features
        )
    return normalised if dtype is None else normalised.to(dtype)
