"""The spans of frames that are read, and checks of the arguments about them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, MissingDependencyError, is_number
from featcache.spec import FeatureSpec, Ints

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Spans:
    """Some frames of some utterances of a version."""

    positions: Ints
    """The positions of the utterances."""
    firsts: Ints
    """The first frame of each."""
    counts: Ints
    """The number of frames of each."""


def positions_in(name: str, values: Any, count: int, where: str, wanted: str) -> Ints:
    """Count positions in a sequence of `count` from its beginning, int64 `[values]`;
    negative values count from its end.

    `name`, `where` and `wanted` are for messages: the argument, the sequence, and what to
    give instead. Raises IndexError if there is no such position; ArgumentError if the
    values are not whole numbers of Python, numpy or torch in a sized sequence."""
    try:
        positions = np.asarray(values) if len(values) else np.empty(0, np.int64)
    except (TypeError, ValueError):  # a number, or lists of several lengths
        raise ArgumentError(f"{name} is {values!r}: give {wanted}") from None
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        raise ArgumentError(f"{name} are {positions.dtype} {list(positions.shape)}: give {wanted}")
    outside = positions[(positions < -count) | (positions >= count)]
    if len(outside):
        raise IndexError(f"no utterance at {outside[0]}: {where} has {count:,}")
    return positions.astype(np.int64) % max(1, count)


def check_codebooks(spec: FeatureSpec, codebooks: int | None) -> int | None:
    """Return the number of codebooks to read, None for all. Raises ArgumentError if there
    are fewer, or none."""
    if codebooks is None:
        return None
    most = len(spec.codebook_sizes)
    if not most or spec.item_shape != (most,):
        raise ArgumentError(
            f"codebooks is {codebooks}, but these features are {spec.units}, not codes of codebooks"
        )
    if isinstance(codebooks, SupportsIndex) and 1 <= operator.index(codebooks) <= most:
        return operator.index(codebooks)
    raise ArgumentError(f"codebooks is {codebooks!r}: there are {most}, so it must be 1 to {most}")


def check_padding(spec: FeatureSpec, value: float) -> None:
    """Raise ArgumentError for a padding value that the features' dtype cannot hold."""
    dtype = np.dtype(spec.dtype)
    if not is_number(value):
        raise ArgumentError(f"padding_value is {value!r}: give a number")
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        if largest < abs(value) < np.inf:
            raise ArgumentError(
                f"padding_value is {value}: these features are {dtype}, which ends at {largest:g}"
            )
        return
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max or int(value) != value:
        raise ArgumentError(
            f"padding_value is {value}: these features are {dtype}, so it must be a whole "
            f"number from {limits.min} to {limits.max}; lengths tell where padding begins"
        )


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor in an array's memory. Raises MissingDependencyError without torch."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "a batch of tensors", "torch") from error
    return torch.from_numpy(array)
