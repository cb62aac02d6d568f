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
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcache.errors import ArgumentError, StoreError, counted, did_you_mean, listing
from featcache.masks import check_floats, described, expand, frame_mask, is_whole
from featcache.stats import Stats

if TYPE_CHECKING:
    from featcache.loader.cache import Cache

__all__ = ["Cmvn", "normalize_utterances"]

_CONSTANT = 1e-6
"""The largest share of a mean that a standard deviation may be by rounding alone: such a
dimension counts as constant."""

Groups = Sequence[str] | Tensor
"""The group of each row, by its name or its number."""


class Cmvn(nn.Module):
    """Normalisation by the statistics of a version: subtracts each dimension's mean,
    divides by its standard deviation. A dimension that does not vary is centred but not
    scaled.

    The statistics are float32 buffers in `state_dict`, also in a model of half precision,
    with the names of the groups: a `Cmvn(torch.zeros(80), torch.ones(80))` accepts any
    trained state, without a file.

    Args:
        mean, std: The means and standard deviations over all frames, `[*item_shape]`.
        norm_means, norm_vars: False not to subtract means, or not to divide by standard
            deviations (Kaldi's names).
        unknown: For rows of unknown groups, "error" raises an error, "global" uses the
            statistics of all frames.
        dtype: The dtype of the result; by default float32, or float64 for float64 features.
        groups: The names of groups with their own statistics; unique.
        group_mean, group_std: The groups' means and standard deviations, `[groups,
            *item_shape]`.

    Raises:
        ArgumentError: Shapes or names do not fit together, or the statistics are not finite.
    """

    mean: Tensor
    """The means, float32 `[1 + groups, *item_shape]`: row 0 is the mean of all frames."""
    std: Tensor
    """The standard deviations, of the same shape."""
    group_numbers: Tensor
    """The groups' numbers, int64 `[groups]`, ascending."""
    group_names: Tensor
    """The groups' names in the order of their numbers, uint8: UTF-8, each ended by a zero
    byte."""
    _number_of: dict[str, int]
    """The numbers of groups by name; reading `group_numbers` would wait for a GPU."""

    def __init__(
        self,
        mean: Any,
        std: Any,
        *,
        norm_means: bool = True,
        norm_vars: bool = True,
        unknown: Literal["error", "global"] = "error",
        dtype: torch.dtype | None = None,
        groups: Sequence[str] = (),
        group_mean: Any = None,
        group_std: Any = None,
    ) -> None:
        super().__init__()
        if unknown not in ("error", "global"):
            raise ArgumentError(f"unknown is {unknown!r}: it must be 'error' or 'global'")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"dtype is {dtype!r}: give a float dtype, such as torch.float16")
        self.norm_means = norm_means
        self.norm_vars = norm_vars
        self.unknown = unknown
        self.dtype = dtype
        if len(set(groups)) < len(groups):
            raise ArgumentError("groups: two groups have the same name")
        numbers = _group_numbers(groups)
        order = np.argsort(numbers, kind="stable")
        means = _stacked(mean, group_mean, order)
        stds = _stacked(std, group_std, order)
        are_finite = means.isfinite().all() and stds.isfinite().all()
        if means.shape != stds.shape or not are_finite or (stds < 0).any():
            raise ArgumentError(
                f"mean is {list(means.shape[1:])} and std {list(stds.shape[1:])}: they must be "
                "finite and of the same shape, and std must not be negative"
            )
        stds = torch.where(stds <= _CONSTANT * means.abs(), 1.0, stds)
        names = "".join(f"{groups[position]}\0" for position in order).encode()
        name_bytes = torch.tensor(list(names), dtype=torch.uint8, device="cpu")
        self.register_buffer("mean", means.float())
        self.register_buffer("std", stds.float())
        self.register_buffer("group_numbers", torch.from_numpy(numbers[order]))
        self.register_buffer("group_names", name_bytes)
        self._number_of = _numbers_by_name(self.group_names)

    @classmethod
    def load(cls, path: str | Path, *, cache: Cache | None = None, **options: Any) -> Self:
        """Read the statistics that `featcache stats -o` wrote.

        Args:
            path: The file.
            cache: A cache; statistics of another version or track raise StoreError.
            options: `norm_means`, `norm_vars`, `unknown` and `dtype`, as for the class.

        Raises:
            StoreError: The file cannot be read, or is not such a file.
            ArgumentError: The path is empty.
        """
        stats = Stats.load(path)
        if cache is not None and cache.version.info.fingerprint != stats.fingerprint:
            folder = cache.version.path
            raise StoreError(
                f"{path}: is of {stats.version}, but the cache is {folder.name}: `featcache "
                f"stats {quote(str(folder))} -o FILE` computes its own"
            )
        if cache is not None and stats.track not in ("", cache.track_name):
            raise StoreError(
                f"{path}: is of the track {stats.track!r}, but the cache is {cache.track_name!r}: "
                "`featcache.stats.moments(cache).save(FILE)` computes its own"
            )
        if stats.by is not None:
            options |= {
                "groups": stats.groups,
                "group_mean": stats.group_mean,
                "group_std": np.sqrt(stats.group_variance),
            }
        return cls(stats.mean, stats.std, **options)

    @property
    def groups(self) -> list[str]:
        """The names of the groups."""
        return list(self._number_of)

    def find(self, names: Sequence[str]) -> Tensor:
        """Return the numbers of groups, which can be moved to the device ahead of time
        and passed as `groups`: int64 `[names]`, on the CPU; -1 for an unknown name.

        If the names of all groups are whole numbers, these are the numbers, as in the
        batches of a `FeatureDataset`; otherwise groups are numbered from 0. Raises
        ArgumentError if a name is unknown, and `unknown` is "error"."""
        if isinstance(names, str):
            raise ArgumentError(f"names is one name, {names!r}: give a list, one name for each row")
        unknown = {name for name in names if name not in self._number_of}
        if unknown and self.unknown == "error":
            known = listing(map(repr, self.groups)) or "no groups"
            meant = did_you_mean(min(unknown), self.groups)
            raise ArgumentError(
                f"no statistics for {listing(map(repr, sorted(unknown)))}{meant}: there are some "
                f"for {known}; unknown='global' uses those of all frames instead"
            )
        numbers = [self._number_of.get(name, -1) for name in names]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def forward(
        self, features: Tensor, lengths: Tensor | None = None, groups: Groups | None = None
    ) -> Tensor:
        """Return the normalised features, computed in float32, or in float64 for float64.

        Args:
            features: Floats `[batch, frames, *item_shape]`.
            lengths: The lengths in frames, integers `[batch]`; by default, all frames are
                normalised.
            groups: The group of each row: names, or integers `[batch]` as returned by `find`,
                on the features' device. By default, the statistics of all frames are used.

        Raises:
            ArgumentError: Shapes or dtypes do not fit, or a group is unknown and `unknown` is
                "error". On a GPU, reporting groups would wait: their rows become NaN.
        """
        values, mean, std = self._with_statistics(features, groups)
        if self.norm_means:
            values = values - mean
        if self.norm_vars:
            values = values / std
        return _finish(values, features, lengths, self.dtype)

    def unnormalize(
        self, features: Tensor, lengths: Tensor | None = None, groups: Groups | None = None
    ) -> Tensor:
        """Invert `forward`. Takes the same arguments."""
        values, mean, std = self._with_statistics(features, groups)
        if self.norm_vars:
            values = values * std
        if self.norm_means:
            values = values + mean
        return _finish(values, features, lengths, self.dtype)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"{list(self.mean.shape[1:])}, {counted(len(self._number_of), 'group')}"

    def _with_statistics(
        self, features: Tensor, groups: Groups | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features in float32 or float64, and mean and standard deviation, `[1,
        *item_shape]`; with groups, of each row, `[batch, 1, *item_shape]`."""
        check_floats(features, "batch", "frames", *self.mean.shape[1:])
        values = features.to(torch.promote_types(features.dtype, self.std.dtype))
        if groups is None:
            return values, self.mean[0], self.std[0]
        numbers = groups
        if not isinstance(numbers, Tensor):
            numbers = self.find(numbers)
            if features.device.type == "cuda":
                numbers = numbers.pin_memory()
            numbers = numbers.to(features.device, non_blocking=True)
        if not is_whole(numbers) or numbers.shape != features.shape[:1]:
            raise ArgumentError(
                f"groups is {described(numbers)}: give {len(features)} names or integers, "
                "one per row"
            )
        rows = self._rows_of(numbers)
        mean = self.mean[rows][:, None]
        std = self.std[rows][:, None]
        if self.unknown == "error":
            is_unknown = rows == 0
            if is_unknown.device.type == "cpu" and is_unknown.any():
                names = map(str, sorted(set(numbers[is_unknown].tolist())))
                raise ArgumentError(f"no statistics for groups {listing(names)}")
            is_unknown = expand(is_unknown, mean)
            mean = mean.masked_fill(is_unknown, torch.nan)
            std = std.masked_fill(is_unknown, torch.nan)
        return values, mean, std

    def _rows_of(self, numbers: Tensor) -> Tensor:
        """Find the rows of groups in `mean` and `std`; 0 for unknown groups."""
        known = self.group_numbers
        if not len(known):
            return torch.zeros_like(numbers)
        position = torch.searchsorted(known, numbers).clamp_(max=len(known) - 1)
        return torch.where(known[position] == numbers, position + 1, 0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        for name, buffer in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if buffer is not None and loaded is not None and loaded.shape[1:] == buffer.shape[1:]:
                self._buffers[name] = buffer.new_empty(loaded.shape)
        super()._load_from_state_dict(state_dict, prefix, *more)
        self._number_of = _numbers_by_name(self.group_names)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the buffers to another device, and never to another dtype."""
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
    """Normalise each utterance by the mean and the standard deviation of its own frames, to
    the same bits with any padding and on any device: sums are exact. A dimension that does
    not vary within an utterance is centred but not scaled.

    Args:
        features: Floats `[batch, frames, *item_shape]`.
        lengths: The lengths in frames, integers `[batch]`; by default, all frames count.
        norm_means, norm_vars, dtype: As for `Cmvn`.

    Returns:
        The normalised features, `[batch, frames, *item_shape]`, computed in float64.

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
    """Stack statistics of all frames and of groups in this order, float64 `[1 + groups,
    *item_shape]`."""
    table: Tensor = torch.as_tensor(of_all, dtype=torch.float64, device="cpu").detach()[None]
    if (of_groups is None) != (not len(order)):
        raise ArgumentError("give groups, group_mean and group_std together, or none of them")
    if of_groups is None:
        return table
    groups = torch.as_tensor(of_groups, dtype=torch.float64, device="cpu").detach()
    if groups.shape != (len(order), *table.shape[1:]):
        raise ArgumentError(
            f"statistics of {len(order)} groups are {list(groups.shape)}: there must be "
            f"{list(table.shape[1:])} of each"
        )
    return torch.cat([table, groups[torch.from_numpy(order)]])


def _group_numbers(groups: Sequence[str]) -> NDArray[np.int64]:
    """Return the groups' numbers, int64 `[groups]`: their names if all are whole numbers
    that fit, otherwise 0, 1, 2 …"""
    if all(name.isascii() and name.isdigit() and len(name) < 19 for name in groups):
        numbers = [int(name) for name in groups]
        if [*map(str, numbers)] == [*groups]:
            return np.array(numbers, np.int64)
    return np.arange(len(groups), dtype=np.int64)


def _numbers_by_name(names: Tensor) -> dict[str, int]:
    groups = bytes(names.tolist()).decode().split("\0")[:-1]
    return dict(zip(groups, _group_numbers(groups).tolist(), strict=True))


def _exact_sum(values: Tensor, counts: Tensor) -> Tensor:
    """Sum `values`, float64 `[batch, frames, ...]`, over frames, with the same bits in any
    order and with any padding by zeros. `counts` has the number of frames without padding.

    Values are rounded to multiples of a power of two: 2^-52 of the largest size that the
    sum can have. So float64 holds all partial sums exactly."""
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
    if lengths is not None:
        is_frame = expand(frame_mask(features, lengths), features)
        normalised = torch.where(is_frame, normalised, features)
    return normalised if dtype is None else normalised.to(dtype)
