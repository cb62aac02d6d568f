"""Mean and variance of each dimension of a version's features, over all frames and over
groups of utterances; and their file.

Utterances are cut into pieces of 256 frames. For each piece, the sums of x - c and of (x -
c)² are computed in float64, and added without any rounding (`ExactSums`). So the same
utterances give the same bits, in any shards and order, with any number of threads.

The shift c is close to the mean, and preserves the digits of the variance when the mean is
far from zero (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample
variance", The American Statistician 37)."""

from __future__ import annotations

import io
import math
import zipfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, StoreError, refuse_url
from featcache.loader.cache import Cache
from featcache.manifest.utterances import Manifest
from featcache.spec import Ints, as_values, dequantize_array
from featcache.stats.pieces import PIECE_FRAMES, Selection, ShardPieces, pieces_by_shard, select
from featcache.storage.files import write_file
from featcache.storage.location import as_location
from featcache.storage.opening import open_store

FORMAT = "featcache stats 1"

LOWEST = 992
"""The last bit of any value is worth at least 2^-992."""

_AT_MOST_BYTES = 1 << 30
_STILL = 1e-3  # of the median: the largest standard deviation of a still dimension
_BLOCK_VALUES = 1 << 15  # that are summed at once: 256 kB stay in a core's cache
_BLOCK_COLUMNS = _BLOCK_VALUES // PIECE_FRAMES
_SHIFT_UTTERANCES = 16
_PART_BITS = 32

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Stats:
    """Mean and variance of every dimension of a version's features.

    Variances are those of the frames themselves: sum((x - mean)²) / frames."""

    version: str
    """The name of the version's folder."""
    fingerprint: str
    units: str
    frames: int
    utterances: int
    mean: Array
    """Float64 `[*item_shape]`."""
    variance: Array
    """Float64 `[*item_shape]`."""
    by: str | None = None
    """The column of the manifest whose values are the groups, if there are any."""
    groups: list[str] = field(default_factory=list)
    """The names of the groups, sorted."""
    group_frames: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Int64 `[groups]`."""
    group_utterances: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Int64 `[groups]`."""
    group_mean: Array = field(default_factory=lambda: np.empty(0))
    """Float64 `[groups, *item_shape]`."""
    group_variance: Array = field(default_factory=lambda: np.empty(0))
    """Float64 `[groups, *item_shape]`."""
    track: str = ""
    """The name of the track; empty in older files, which do not have it."""

    @property
    def std(self) -> Array:
        """Standard deviations, float64 `[*item_shape]`."""
        return np.sqrt(self.variance)

    @property
    def still(self) -> list[int]:
        """The dimensions that hardly vary, in C order: silent channels, for example, or
        bins above the audio's band."""
        std = self.std.ravel()
        return np.flatnonzero(std <= _STILL * np.median(std)).tolist()

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write an `.npz` of the fields by their names; equal statistics give equal bytes.
        Raises ArgumentError if the file exists, without `overwrite`, or the path is empty or a
        URL; StoreError if it cannot be written."""
        refuse_url("path", path)
        place = as_location("path", path)
        assert isinstance(place, Path)  # it is no URL
        refuse_to_replace(place, overwrite)
        fields: dict[str, Any] = {"format": FORMAT, **vars(self), "by": self.by or ""}
        arrays = {
            name: np.asarray(value)
            for name, value in fields.items()
            if self.by is not None or not name.startswith("group")
        }
        data = io.BytesIO()
        np.savez(data, allow_pickle=False, **arrays)
        write_file(place, data.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Stats:
        """Read the file. Raises StoreError if it does not exist, or holds no statistics;
        ArgumentError if the path is empty."""
        place = as_location("path", path)
        try:
            data = io.BytesIO(open_store(place.parent).read(place.name, _AT_MOST_BYTES))
        except FileNotFoundError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            with zipfile.ZipFile(data) as members:
                # packed data might unpack to any size; `save` packs nothing
                if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
                    raise ValueError("packed")
            with np.load(data, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if str(arrays.pop("format", "")) != FORMAT:
                raise ValueError("of another format")
        except Exception as error:
            raise StoreError(f"{path}: not a file written by `featcache stats`") from error
        try:
            arrays.setdefault("track", np.array(""))
            for name in ("version", "fingerprint", "units", "frames", "utterances", "by", "track"):
                arrays[name] = arrays[name].item()
            groups = list(map(str, arrays.pop("groups", np.empty(0)).tolist()))
            stats = cls(**arrays | {"by": arrays["by"] or None, "groups": groups})
        except (KeyError, TypeError, ValueError) as error:
            what = f"an incomplete file of `featcache stats` ({error})"
            raise StoreError(f"{path}: damaged: {what}") from error
        fault = stats._fault()
        if fault is not None:
            raise StoreError(f"{path}: damaged: {fault}")
        return stats

    def _fault(self) -> str | None:
        """Return the fault of the arrays, if any."""
        groups = (len(self.groups), *self.mean.shape) if self.by is not None else (0,)
        shapes = {"mean": self.mean.shape, "variance": self.mean.shape}
        shapes |= {"group_mean": groups, "group_variance": groups}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.dtype != np.float64 or array.shape != shape or not np.isfinite(array).all():
                shape_text = f"{array.dtype} {list(array.shape)}"
                return f"{name} is {shape_text}, and must be finite float64 {list(shape)}"
        return None


def refuse_to_replace(path: Path, overwrite: bool) -> None:
    """Raise ArgumentError if a file exists, without `overwrite`."""
    if path.exists() and not overwrite:
        raise ArgumentError(f"{path}: already exists: give another name, or --force to replace it")


def moments(
    cache: Cache,
    manifest: str | Path | Manifest | Ints | None = None,
    *,
    by: str | None = None,
    threads: int = 1,
    report: Callable[[int], object] = lambda frames: None,
) -> Stats:
    """Mean and variance of every dimension of a version's features.

    Args:
        cache: A cache of features, not of codes; or a corpus of them.
        manifest: A manifest to whose utterances the statistics are limited, or their
            positions, int64 `[utterances]`; by default all of the cache's count.
        by: A column of the manifest; each of its values gets statistics too.
        threads: The number of threads to read and compute with; it does not change the
            result.
        report: A function that is called with the number of frames done since its last call.

    Raises:
        StoreError: The cache holds codes, no utterances, or NaN or infinity.
        ArgumentError: The cache holds events; or a manifest or `by` is given for a corpus.
        ManifestError: The manifest cannot be read, has faults, or no column `by`.
        MissingItemError: The manifest has utterances that the cache does not have; up to
            ten are listed.
        DamagedError: A shard is damaged.
    """
    spec, path = cache.spec, cache.version.path
    if spec.axis.has_times:
        raise ArgumentError(f"{path}: holds events, and statistics are of frames and vectors")
    if spec.codebook_sizes or spec.values_dtype.kind != "f":
        what = f"holds codes, {spec.dtype}: they have no mean"
        raise StoreError(f"{path}: {what}; featcache.stats.usage counts them")
    chosen = select(cache, manifest, by)
    shift = _shift(chosen)
    sums, squares = (ExactSums(len(chosen.names), len(shift)) for _ in range(2))
    adding = Lock()

    def add(pieces: ShardPieces) -> None:
        piece_sums, piece_squares = _piece_sums(pieces, shift)
        with adding:
            sums.add(pieces.groups, piece_sums)
            squares.add(pieces.groups, piece_squares)

    frames, utterances = chosen.frames_and_utterances()
    if not frames.all():
        group = chosen.names[int(frames.argmin())]
        raise StoreError(f"{path}: no utterance of the group {group!r} has frames")
    chosen.for_each(add, threads, report)
    mean, variance = _finish(sums, squares, frames, shift)
    mean = mean.reshape(-1, *spec.item_shape)
    variance = variance.reshape(-1, *spec.item_shape)
    of_groups: dict[str, Any] = {}
    if by is not None:
        of_groups = {
            "by": by,
            "groups": [*chosen.names],
            "group_frames": frames,
            "group_utterances": utterances,
            "group_mean": mean[1:],
            "group_variance": variance[1:],
        }
    return Stats(
        version=path.name,
        fingerprint=cache.version.info.fingerprint,
        units=spec.units,
        frames=int(frames.sum()),
        utterances=int(utterances.sum()),
        mean=mean[0, ...],  # an array even of one value
        variance=variance[0, ...],
        track=cache.track_name,
        **of_groups,
    )


def _shift(chosen: Selection) -> Array:
    """Return a value close to the mean of every dimension, float64 `[dims]`, in the
    features' dtype: differences of float16 are exact in float64."""
    candidates: list[tuple[int, int, int]] = []  # hash of an id, number of a part, position
    for number, (part, positions, _) in enumerate(chosen):
        index = part.index
        selected = np.zeros(len(index), bool)
        selected[positions] = part.lengths[positions] > 0
        for place in np.flatnonzero(selected[index.by_hash])[:_SHIFT_UTTERANCES].tolist():
            candidates.append((int(index.id_hash[place]), number, int(index.by_hash[place])))
    candidates.sort(key=lambda candidate: candidate[:2])
    spec = chosen.parts[0].spec
    total, frames = np.zeros(math.prod(spec.item_shape)), 0
    for _, number, position in candidates[:_SHIFT_UTTERANCES]:
        part = chosen.parts[number]
        pieces = next(pieces_by_shard(part, np.array([position]), np.zeros(1, np.int64)))
        total += _piece_sums(pieces, np.zeros(len(total)))[0][0]
        frames += int(pieces.counts[0])
    return (total / frames).astype(spec.values_dtype).astype(np.float64)


def _piece_sums(pieces: ShardPieces, shift: Array) -> tuple[Array, Array]:
    """Sum x - shift and (x - shift)² over each piece, float64 `[pieces, dims]`. Raises
    StoreError at NaN or infinity."""
    features, cache = pieces.read(), pieces.cache
    sums, squares = np.empty((2, len(pieces.starts), len(shift)))
    width = min(len(shift), _BLOCK_COLUMNS)
    blocks = _blocks(pieces, _BLOCK_VALUES // width)
    most_rows = max(int(pieces.counts[block].sum()) for block in blocks)
    with np.errstate(invalid="ignore"):
        for first in range(0, len(shift), width):
            columns = slice(first, first + width)
            shifts = np.tile(shift[columns], (most_rows, 1))
            for block in blocks:
                offsets = pieces.starts[block] - pieces.starts[block.start]
                first_row = int(pieces.starts[block.start]) - pieces.first
                rows = slice(first_row, first_row + int(pieces.counts[block].sum()))
                values = _values(features[rows, columns], pieces, block, columns)
                # faster than broadcasting one row, which is a loop for each row
                values -= shifts[: len(values)]
                np.add.reduceat(values, offsets, axis=0, out=sums[block, columns])
                np.square(values, out=values)
                np.add.reduceat(values, offsets, axis=0, out=squares[block, columns])
    finite = np.isfinite(squares).all(axis=1)
    if not finite.all():
        utterance = cache.ids[int(pieces.positions[finite.argmin()])]
        where = f"{utterance}: holds NaN or infinity in {cache.version.path}"
        raise StoreError(f"{where}: `featcache verify` lists all")
    return sums, squares


def _values(stored: NDArray[Any], pieces: ShardPieces, block: slice, columns: slice) -> Array:
    """Return stored frames as a new float64 array."""
    if pieces.cache.spec.is_quantized:
        of_pieces = pieces.cache.scales_and_offsets(pieces.positions[block])
        of_pieces = of_pieces.reshape(len(of_pieces), 2, -1)
        of_frames = np.repeat(of_pieces, pieces.counts[block], axis=0)[..., columns]
        stored = dequantize_array(stored, of_frames[:, 0], of_frames[:, 1])
    return as_values(stored, pieces.cache.spec.dtype).astype(np.float64)


def _blocks(pieces: ShardPieces, max_frames: int) -> list[slice]:
    """Cut the pieces into slices of adjacent pieces, with up to `max_frames` frames each."""
    ends = pieces.starts + pieces.counts
    numbers = (pieces.counts.cumsum() - 1) // max_frames
    cuts = np.flatnonzero((np.diff(numbers) > 0) | (ends[:-1] != pieces.starts[1:])) + 1
    return [slice(first, last) for first, last in pairwise([0, *cuts.tolist(), len(ends)])]


def _finish(sums: ExactSums, squares: ExactSums, frames: Ints, shift: Array) -> tuple[Array, Array]:
    """Compute means and variances of all frames, then of each group, float64 `[1 + groups,
    dims]`, rounded once. With s = sum(x - c) and q = sum((x - c)²) over n frames, mean = c +
    s / n and variance = q / n - (s / n)²; c, s and q are in units of 2^-LOWEST."""
    of_groups = sums.totals(), squares.totals(), frames.astype(object)[:, None]
    s, q, n = (np.concatenate([rows.sum(axis=0, keepdims=True), rows]) for rows in of_groups)
    centres = np.array([in_units(centre) for centre in shift.tolist()], object)
    mean = (centres * n + s) / (n << LOWEST)
    variance = np.maximum((q * n << LOWEST) - s * s, 0) / (n * n << 2 * LOWEST)
    return mean.astype(np.float64), variance.astype(np.float64)


class ExactSums:
    """Sums of floats for each group and column, without rounding: their bits do not
    depend on the order of additions.

    A float64 is cut at fixed powers of two, every 32 bits, into whole numbers; those of
    each power are added as int64 (R. M. Neal's small superaccumulator, 2015, "Fast exact
    summation using small and large superaccumulators", arXiv:1505.05571). Parts are at most
    2^32, so 2^31 of them can be added before one would overflow."""

    def __init__(self, groups: int, columns: int) -> None:
        self._shape = groups, columns
        # part n counts units of 2^(32 n)
        self._parts = defaultdict[int, Ints](lambda: np.zeros(self._shape, np.int64))

    def add(self, groups: Ints, values: Array) -> None:
        """Add float64 `[n, columns]`, zeros or of sizes 2^-900 to 2^900, to each row's
        group, int64 `[n]`, n ≤ 2^21."""
        order = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
        targets, rest = groups[order][starts], values[order]
        number = (int(np.frexp(np.abs(rest).max())[1]) - 1) // _PART_BITS
        while rest.any():
            unit = 2.0 ** (_PART_BITS * number)
            multiples = np.rint(rest * (1 / unit))
            rest -= multiples * unit
            sums = np.add.reduceat(multiples, starts, axis=0)
            self._parts[number][targets] += sums.astype(np.int64)
            number -= 1

    def totals(self) -> NDArray[np.object_]:
        """Return the sums, Python's whole numbers `[groups, columns]`, in units of 2^-LOWEST."""
        total = np.zeros(self._shape, object)
        for number, part in self._parts.items():
            total += part.astype(object) << (_PART_BITS * number + LOWEST)
        return total


def in_units(value: float) -> int:
    """Return a float as a whole number of units of 2^-LOWEST."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * ((1 << LOWEST) // denominator)
