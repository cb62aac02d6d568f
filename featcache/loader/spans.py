"""What is asked for of some utterances: which of them, which span of time, which codebooks.

Frame `i` of a version with `rate` frames a second covers the time from `i / rate` to `(i + 1) / rate`. So a span of
time begins within half a frame of the same point in versions of different rates.
"""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ArgumentError, is_number, listing
from featcache.spec import FeatureSpec


def frames_between(
    lengths: NDArray[np.int64], rate: float, start: ArrayLike, duration: ArrayLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The frames of a span of time in each of some utterances, of `lengths` int64 `[n]` and `rate` frames a second.

    `start` and `duration` are in seconds: one number, or one for each utterance `[n]`; without a duration, to the end.

    Returns:
        The first frame, and the number of frames: the duration's, rounded, but at least one, or as many as there are.
        int64 `[n]`, both.

    Raises:
        ArgumentError: A span is negative, not a number, or begins where its utterance has ended.
    """
    starts = _seconds("start", start, len(lengths))
    late = np.flatnonzero(starts * rate >= lengths)
    if len(late):
        spans = [f"{starts[i]:g} s of {lengths[i] / rate:g} s (number {i})" for i in late.tolist()]
        raise ArgumentError(f"start lies beyond the end of {len(late)} of {len(lengths)} utterances: {listing(spans)}")
    first = np.minimum(np.rint(starts * rate).astype(np.int64), lengths - 1)  # half a frame before the end is the last
    counts = lengths - first
    if duration is not None:
        durations = _seconds("duration", duration, len(lengths))
        wanted = np.maximum(np.rint(durations * rate), durations > 0).astype(np.int64)
        counts = np.minimum(counts, wanted)
    return first, counts


def positions_in(name: str, values: Any, count: int, where: str, wanted: str) -> NDArray[np.int64]:
    """Positions in a sequence of `count`, int64 `[values]`, counted from its beginning; negative values from its end.

    `name`, `where` and `wanted` are for messages: the argument, what has the sequence, and what to give instead.

    Raises:
        ArgumentError: The values are not whole numbers of Python, numpy or torch, or not in a sized sequence.
        IndexError: There is no such position.
    """
    if not isinstance(values, Sized):
        raise ArgumentError(f"{name} is {values!r}: give {wanted}")
    positions = np.asarray(values) if len(values) else np.empty(0, np.int64)
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        raise ArgumentError(f"{name} are {positions.dtype} {list(positions.shape)}: give {wanted}")
    outside = positions[(positions < -count) | (positions >= count)]
    if len(outside):
        raise IndexError(f"no utterance at {outside[0]}: {where} has {count:,}")
    return positions.astype(np.int64) % count if len(positions) else positions.astype(np.int64)


def check_codebooks(spec: FeatureSpec, codebooks: int | None) -> int | None:
    """How many codebooks to read, None for all of them; ArgumentError if there are not so many, or none."""
    if codebooks is None:
        return None
    there = len(spec.codebook_sizes)
    if not there or spec.item_shape != (there,):
        raise ArgumentError(f"codebooks is {codebooks}, but these features are {spec.units}, not codes of codebooks")
    if isinstance(codebooks, SupportsIndex) and 1 <= operator.index(codebooks) <= there:
        return operator.index(codebooks)
    raise ArgumentError(f"codebooks is {codebooks!r}: there are {there}, so it must be 1 to {there}")


def check_padding(spec: FeatureSpec, value: float) -> None:
    """Refuse, by an ArgumentError, a padding value that the features' dtype cannot hold."""
    dtype = np.dtype(spec.dtype)
    if not is_number(value):
        raise ArgumentError(f"padding_value is {value!r}: give a number")
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        if not largest < abs(value) < np.inf:
            return
        remedy = f"whose largest value is {largest:g}"
    else:
        limits = np.iinfo(dtype)
        if limits.min <= value <= limits.max and int(value) == value:
            return
        whole = f"a whole number from {limits.min} to {limits.max}"
        remedy = f"so it must be {whole}; lengths tell where padding begins"
    raise ArgumentError(f"padding_value is {value}: these features are {dtype}, {remedy}")


def _seconds(name: str, value: ArrayLike, count: int) -> NDArray[np.float64]:
    try:
        array: NDArray[Any] = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{name} is {value!r}: it must be seconds, 0 or more") from error
    if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise ArgumentError(
            f"{name} has shape {list(array.shape)}: give one number, or one for each of {count} utterances"
        )
    array = np.broadcast_to(array, count)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise ArgumentError(f"{name} is {array[wrong[0]]:g}: it must be seconds, 0 or more")
    return array
