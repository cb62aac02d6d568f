"""Normalisation by the statistics of a version: of all frames, or of groups of utterances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcache.cmvn.batches import CONSTANT, check, finish
from featcache.errors import ArgumentError, StoreError, listing
from featcache.stats import Stats


class OfVersion(Protocol):
    """What `Cmvn.load` asks of a `featcache.Cache`."""

    @property
    def version(self) -> Any:
        """The version, with its `path` and its `info.fingerprint`."""


class Cmvn(nn.Module):
    """Subtracts the mean of every dimension and divides by its standard deviation.

    The statistics are float32 buffers. They are in `state_dict`, with the names of the groups, so a trained model does
    not need their file: a `Cmvn(torch.zeros(80), torch.ones(80))` accepts any such state. They stay float32 when the
    model is cast to half precision. A dimension that does not vary is centred but not scaled.

    Args:
        mean: `[*item_shape]`, of all frames.
        std: standard deviations, `[*item_shape]`.
        groups: names of groups with their own statistics; unique.
        group_mean: `[groups, *item_shape]`.
        group_std: `[groups, *item_shape]`.
        norm_means: whether to subtract means; Kaldi's name.
        norm_vars: whether to divide by standard deviations; Kaldi's name.
        unknown: for rows of unknown groups: "error" raises an error, "global" uses the statistics of all frames.
        dtype: of the result; by default float32, or float64 for float64 features.

    Raises:
        ArgumentError: shapes or names do not fit together, or the statistics are not finite.
    """

    mean: Tensor  # [1 + groups, *item_shape]; row 0 is of all frames
    std: Tensor  # likewise
    group_numbers: Tensor  # int64 [groups], ascending
    group_names: Tensor  # uint8: UTF-8, a zero byte after each name
    _number_of: dict[str, int]  # by name; on a GPU, reading group_numbers would wait

    def __init__(
        self,
        mean: Any,
        std: Any,
        *,
        groups: Sequence[str] = (),
        group_mean: Any = None,
        group_std: Any = None,
        norm_means: bool = True,
        norm_vars: bool = True,
        unknown: Literal["error", "global"] = "error",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if unknown not in ("error", "global"):
            raise ArgumentError(f"unknown is {unknown!r}: it must be 'error' or 'global'")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"dtype is {dtype!r}: give a float dtype, such as torch.float16")
        if len(set(groups)) < len(groups):
            raise ArgumentError("groups: two groups have the same name")
        self.norm_means, self.norm_vars, self.unknown, self.dtype = norm_means, norm_vars, unknown, dtype
        numbers = _numbers(groups)
        order = np.argsort(numbers, kind="stable")
        means, stds = (_table(*given, order) for given in ((mean, group_mean), (std, group_std)))
        if means.shape != stds.shape or not (means.isfinite().all() and stds.isfinite().all() and (stds >= 0).all()):
            raise ArgumentError(
                f"mean is {list(means.shape[1:])} and std {list(stds.shape[1:])}: they must be finite and of the same "
                "shape, and std must not be negative"
            )
        names = "".join(f"{groups[at]}\0" for at in order).encode()
        self.register_buffer("mean", means.float())
        self.register_buffer("std", torch.where(stds <= CONSTANT * means.abs(), 1.0, stds).float())
        self.register_buffer("group_numbers", torch.from_numpy(numbers[order]))
        self.register_buffer("group_names", torch.tensor(list(names), dtype=torch.uint8, device="cpu"))
        self._number_of = _by_name(self.group_names)

    @classmethod
    def load(cls, path: str | Path, *, cache: OfVersion | None = None, **options: Any) -> Self:
        """The statistics that `featcache stats -o` wrote.

        Args:
            path: the file.
            cache: refuse statistics of any other version than this cache's.
            options: `norm_means`, `norm_vars`, `unknown`, `dtype`.

        Raises:
            StoreError: the file cannot be read, is not such a file, or is of another version.
        """
        stats = Stats.load(path)
        if cache is not None and cache.version.info.fingerprint != stats.fingerprint:
            raise StoreError(
                f"{path}: statistics of {stats.version}, but the cache is {cache.version.path.name}: "
                f"`featcache stats {quote(str(cache.version.path))} -o FILE` computes its own"
            )
        if stats.by is None:
            return cls(stats.mean, stats.std, **options)
        group_std = np.sqrt(stats.group_variance)
        return cls(
            stats.mean, stats.std, groups=stats.groups, group_mean=stats.group_mean, group_std=group_std, **options
        )

    @property
    def groups(self) -> list[str]:
        """The names of the groups with their own statistics."""
        return list(self._number_of)

    def find(self, names: Sequence[str]) -> Tensor:
        """The numbers of groups, which can be moved to the device ahead of time and passed as `groups`.

        Returns:
            int64 `[names]`, on the CPU. If the names of all groups are whole numbers, these are the numbers, as in the
            batches of a `FeatureDataset`; otherwise groups are numbered from 0. An unknown name is -1.

        Raises:
            ArgumentError: a name is unknown, and `unknown` is "error"; lists up to ten.
        """
        if isinstance(names, str):
            raise ArgumentError(f"names is one name, {names!r}: give a list, one name for each row")
        if self.unknown == "error" and (strange := sorted({name for name in names if name not in self._number_of})):
            raise ArgumentError(
                f"no statistics for {listing(map(repr, strange))}: there are some for "
                f"{listing(map(repr, self.groups)) or 'no groups'}; unknown='global' uses those of all frames instead"
            )
        return torch.tensor([self._number_of.get(name, -1) for name in names], dtype=torch.int64, device="cpu")

    def forward(
        self, features: Tensor, lengths: Tensor | None = None, groups: Sequence[str] | Tensor | None = None
    ) -> Tensor:
        """Normalise a batch. Computed in float32, or in float64 for float64 features.

        Args:
            features: floats `[batch, frames, *item_shape]`.
            lengths: integers `[batch]`, in frames; frames beyond are not changed. Without it, all frames are
                normalised.
            groups: the group of each row: names, or integers `[batch]` as returned by `find`, on the features' device.
                Without it, the statistics of all frames are used. On a GPU, unknown numbers cannot be reported without
                waiting: if `unknown` is "error", rows of unknown groups become NaN.

        Returns:
            `[batch, frames, *item_shape]`.

        Raises:
            ArgumentError: shapes or dtypes do not fit, or a group is unknown and `unknown` is "error".
        """
        mean, std = self._statistics(features, groups)
        normalised = features - mean if self.norm_means else features.to(torch.promote_types(features.dtype, std.dtype))
        return finish(normalised / std if self.norm_vars else normalised, features, lengths, self.dtype)

    def unnormalize(
        self, features: Tensor, lengths: Tensor | None = None, groups: Sequence[str] | Tensor | None = None
    ) -> Tensor:
        """The inverse of `forward`, with the same arguments."""
        mean, std = self._statistics(features, groups)
        restored = features * std if self.norm_vars else features.to(torch.promote_types(features.dtype, std.dtype))
        return finish(restored + mean if self.norm_means else restored, features, lengths, self.dtype)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{list(self.mean.shape[1:])}, {len(self._number_of)} groups"

    def _statistics(self, features: Tensor, groups: Sequence[str] | Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, `[*item_shape]`, or of each row, `[batch, 1, *item_shape]`."""
        check(features, tuple(self.mean.shape[1:]))
        if groups is None:
            return self.mean[0], self.std[0]
        numbers = groups
        if not isinstance(numbers, Tensor):
            numbers = self.find(numbers)
            if features.device.type == "cuda":
                numbers = numbers.pin_memory()
            numbers = numbers.to(features.device, non_blocking=True)
        if numbers.shape != features.shape[:1] or numbers.dtype.is_floating_point or numbers.dtype == torch.bool:
            raise ArgumentError(
                f"groups is {numbers.dtype} {list(numbers.shape)}: give a name or an integer for each of "
                f"{len(features)} rows"
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
                raise ArgumentError(
                    f"no statistics for groups {listing(map(str, sorted(set(numbers[strange].tolist()))))}"
                )
            strange = strange.view(-1, *[1] * (mean.ndim - 1))
            mean, std = mean.masked_fill(strange, torch.nan), std.masked_fill(strange, torch.nan)
        return mean, std

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Takes whatever groups the state has: their number need not be the one it was made with."""
        for name, buffer in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if buffer is not None and loaded is not None and loaded.shape[1:] == buffer.shape[1:]:
                self._buffers[name] = buffer.new_empty(loaded.shape)
        super()._load_from_state_dict(state_dict, prefix, *more)
        self._number_of = _by_name(self.group_names)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves to another device, and never to another dtype: half precision would move the means."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self


def _table(of_all: Any, of_groups: Any, order: Any) -> Tensor:
    """Statistics of all and of the groups in this order, float64 `[1 + groups, *item_shape]`."""
    table: Tensor = torch.as_tensor(of_all, dtype=torch.float64, device="cpu").detach()[None]
    if (of_groups is None) != (not len(order)):
        raise ArgumentError("give groups, group_mean and group_std together, or none of them")
    if of_groups is None:
        return table
    groups = torch.as_tensor(of_groups, dtype=torch.float64, device="cpu").detach()
    if groups.shape != (len(order), *table.shape[1:]):
        raise ArgumentError(
            f"statistics of {len(order)} groups are {list(groups.shape)}: there must be {list(table.shape[1:])} of each"
        )
    return torch.cat([table, groups[torch.from_numpy(order)]])


def _numbers(groups: Sequence[str]) -> NDArray[np.int64]:
    """The groups' numbers, int64 `[groups]`: their names, where all are whole numbers; else counted from 0."""
    are_numbers = all(name.isascii() and name.isdigit() and str(int(name)) == name for name in groups)
    are_numbers = are_numbers and all(len(name) < 19 for name in groups)  # which int64 holds
    return np.array([int(name) for name in groups] if are_numbers else range(len(groups)), np.int64)


def _by_name(names: Tensor) -> dict[str, int]:
    """The number of each group, of names as `group_names` has them: in the order of their numbers."""
    groups = bytes(names.tolist()).decode().split("\0")[:-1]
    return dict(zip(groups, _numbers(groups).tolist(), strict=True))
