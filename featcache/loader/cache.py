"""An opened version: utterances by id or by position, singly without a copy, or many padded into one tensor."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ArgumentError, MissingItemError, StoreError, listing
from featcache.loader.buffers import Buffers
from featcache.loader.reading import Reader, cut
from featcache.loader.shards import Shards
from featcache.loader.spans import check_codebooks, check_padding, frames_between
from featcache.loader.tiers import Tiers
from featcache.manifest import Manifest
from featcache.quantize import dequantize_array
from featcache.spec import FeatureSpec
from featcache.store.index import open_index
from featcache.store.join import Joined, RowKeys, join, with_other_files
from featcache.store.runs import Failure, latest_failures, outdated_items
from featcache.store.version import Version
from featcache.strings import Strings

__all__ = ["Cache", "Keys"]

Keys = Iterable[str] | Iterable[int] | NDArray[Any] | torch.Tensor
"""Utterances: all by id, or all by position."""


class Cache:
    """The utterances of a version, as they were when it was opened.

    A cache is a sequence of arrays that can also be looked up by id: `cache[3]` and `cache["utt-1"]` are arrays,
    iterating yields the arrays in order, and `"utt-1" in cache` looks for an id. Nothing is read before it is accessed.
    Open the cache again to see shards that a run has added since. A cache pickled into another process has exactly the
    same utterances in the same order.

    Args:
        version: which.
        check: compare every utterance that is read with its checksum.
        shards: names of the shards to use, to see a version as it was; by default all shards.
        tiers: what to keep in memory and on a local disk; nothing by default.

    Attributes:
        version: the opened version: its folder and its metadata.
        index: where each utterance is.
        check: as given.

    Raises:
        DamagedError: the index must be built, and a shard's metadata is damaged.
        ArgumentError: the machine has less memory than `tiers` asks for.
    """

    def __init__(
        self,
        version: Version,
        *,
        check: bool = False,
        shards: Sequence[str] | None = None,
        tiers: Tiers = Tiers(),  # noqa: B008 (it is frozen)
    ) -> None:
        self.version = version
        self.check = check
        self._tiers = tiers
        self.index = open_index(version, shards)
        self._shards = Shards(version, self.index, check=check, tiers=tiers)
        self._reader = Reader(version, self.index, self._shards, tiers.ram)
        self._buffers = Buffers()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.version.path, self.check, self.index.shards, self._tiers)

    def __repr__(self) -> str:
        frames, spec = int(self.lengths.sum()), self.spec
        num_bytes = frames * math.prod(spec.item_shape) * self.version.dtype.itemsize
        shape = ", ".join(map(str, ("frames", *spec.item_shape)))
        return (
            f"Cache({self.version.path.name}: {len(self):,} utterances, {frames / spec.frame_rate / 3600:.2f} h, "
            f"{num_bytes / 1e9:.3g} GB, {spec.dtype}{' in uint8' * spec.is_quantized} [{shape}] "
            f"at {spec.frame_rate:g} Hz)"
        )

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, id: object) -> bool:  # noqa: A002
        return isinstance(id, str) and self.index.find_one(id) >= 0

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return map(self.item, range(len(self)))

    def __getitem__(self, key: str | SupportsIndex) -> NDArray[Any]:
        return self.item(key)

    @property
    def spec(self) -> FeatureSpec:
        """What the features are: shape of a frame, dtype, frame rate, units."""
        return self.version.info.spec

    @property
    def config(self) -> dict[str, Any]:
        """The config that made the version, with every default filled in."""
        return self.version.info.config

    @property
    def ids(self) -> Strings:
        """The utterances' ids, in the cache's order: that of the manifest they were extracted from."""
        return self.index.ids

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of frames of each utterance; int64 `[utterances]`, read-only."""
        lengths = self.index.num_frames.view()
        lengths.flags.writeable = False
        return lengths

    def find(self, ids: Iterable[str]) -> NDArray[np.int64]:
        """The positions of utterances; int64 `[ids]`.

        Raises:
            MissingItemError: ids are missing; names up to ten, and says how many failed in extraction.
        """
        wanted = ids if isinstance(ids, Strings) else _packed(ids)
        positions = self.index.find(wanted)
        missing = np.flatnonzero(positions < 0).tolist()
        if missing:
            raise self.missing_error([wanted[number] for number in missing], len(wanted))
        return positions

    def item(
        self,
        key: str | SupportsIndex,
        *,
        start: float | None = None,
        duration: float | None = None,
        codebooks: int | None = None,
        raw: bool = False,
        check: bool | None = None,
    ) -> NDArray[Any]:
        """The features of one utterance, as `cache[key]`; or a part of them.

        Args:
            key: an id, or a position; negative ones count from the end.
            start: where the part begins, in seconds; at the beginning by default.
            duration: its length in seconds; to the end by default.
            codebooks: read only this many codebooks, from the first on.
            raw: return quantised features as stored, as levels; `quantization` returns their scales and offsets.
            check: whether to compare the utterance with its checksum; by default as the cache was opened.

        Returns:
            `[frames, *item_shape]` of `spec.dtype`, read-only: memory-mapped, nothing is copied. Values of quantised
            features are computed, into a new array.

        Raises:
            MissingItemError: there is no such id; the message says whether and why it failed in extraction.
            IndexError: there is no such position.
            ArgumentError: there is no such part.
            DamagedError: the shard is damaged, or `check` found a wrong checksum.
        """
        position = self._position(key)
        frames = self._reader.whole(position)
        if self.check if check is None else check:
            self._shards.verify(position, frames)
        if start is not None or duration is not None:
            first, count = frames_between(
                self.lengths[position : position + 1], self.spec.frame_rate, start or 0, duration
            )
            frames = frames[int(first[0]) : int(first[0] + count[0])]
        if codebooks is not None:
            return frames[:, : check_codebooks(self.spec, codebooks)]
        if self.spec.is_quantized and not raw:
            return dequantize_array(frames, *self._shards.parameters(position))
        return frames

    def batch(
        self,
        keys: Keys,
        *,
        start: ArrayLike | None = None,
        duration: ArrayLike | None = None,
        codebooks: int | None = None,
        padding_value: float = 0,
        out: torch.Tensor | None = None,
        raw: bool = False,
        check: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The features of several utterances, or of a part of each, padded at their ends to the longest.

        Args:
            keys: ids or positions, in any order; they may repeat. Without keys, the batch is empty.
            start: where the parts begin, in seconds: one number, or one for each key; at the beginning by default.
            duration: the length of the parts, likewise; to the end by default.
            codebooks: read only this many codebooks, from the first on.
            padding_value: the value of frames beyond an utterance's end.
            out: a contiguous tensor in CPU memory, of the batch's dtype and any shape that is large enough, to gather
                into. It is overwritten; the batch is a view of its beginning.
            raw: return quantised features as stored: levels, uint8, padded with 0. `featcache.dequantize` turns them
                into values on any device, with the result of `quantization`.
            check: whether to compare each utterance with its checksum; by default as the cache was opened.

        Returns:
            The features, `[batch, frames, *item_shape]` of `spec.dtype`, or with `raw` of the stored dtype; and the
            number of frames of each utterance, int64 `[batch]`.

        Raises:
            MissingItemError: ids are missing; names up to ten, and says how many failed in extraction.
            IndexError: there is no such position.
            ArgumentError: there are no such parts, or `out` or a key is invalid.
            DamagedError: a shard is damaged, or `check` found a wrong checksum.
        """
        codebooks = check_codebooks(self.spec, codebooks)
        check_padding(self.spec, padding_value)
        if raw and self.spec.is_quantized and padding_value != 0:
            raise ArgumentError(
                f"padding_value is {padding_value}: levels are padded with 0; give padding_value to dequantize"
            )
        positions = self._positions(keys)
        firsts, counts = None, self.lengths[positions]
        if start is not None or duration is not None:
            firsts, counts = frames_between(counts, self.spec.frame_rate, 0 if start is None else start, duration)
        features = self.gather(
            positions, firsts, counts, codebooks=codebooks, padding_value=padding_value, out=out, raw=raw, check=check
        )
        return features, torch.from_numpy(counts)

    def gather(
        self,
        positions: NDArray[np.int64],
        firsts: NDArray[np.int64] | None,
        counts: NDArray[np.int64],
        *,
        codebooks: int | None = None,
        padding_value: float = 0,
        out: torch.Tensor | Buffers | None = None,
        raw: bool = False,
        check: bool | None = None,
    ) -> torch.Tensor:
        """What `batch` is made of: frames of utterances, gathered into a padded tensor.

        Args:
            positions: of the utterances, none of them negative; int64 `[batch]`. There may be none.
            firsts: the first frame of each that is wanted; int64 `[batch]`; the first that it has by default.
            counts: how many frames of each; int64 `[batch]`.
            codebooks: as for `batch`, but not checked; so is `padding_value`.
            out: as for `batch`; or buffers to take the memory from, by default the cache's own.
            raw: as for `batch`; so is `check`.

        Returns:
            `[batch, frames, *item_shape]` of `spec.dtype`, or with `raw` of the stored dtype.

        Raises:
            ArgumentError, DamagedError: as `batch` does.
        """
        spec = self.spec
        as_values = spec.is_quantized and not raw
        dtype = np.dtype(spec.dtype) if as_values else self.version.dtype
        item_shape = spec.item_shape if codebooks is None else (codebooks,)
        padded = self._room((len(positions), int(counts.max(initial=0)), *item_shape), dtype, out)
        is_checked = self.check if check is None else check
        parts = (
            self._checked(positions, firsts, counts) if is_checked else self._reader.parts(positions, firsts, counts)
        )
        if codebooks is not None:
            parts = [frames[:, :codebooks] for frames in parts]
        with self._reader.reading(parts):
            if as_values:
                for row, position, frames in zip(padded.numpy(), positions.tolist(), parts, strict=True):
                    scale, offset = self._shards.parameters(position)
                    dequantize_array(frames, scale, offset, out=row[: len(frames)])
                    row[len(frames) :] = padding_value
            elif parts:
                _pad(parts, padding_value, padded.numpy())
        return padded

    def quantization(self, keys: Keys) -> torch.Tensor:
        """Scale and offset of each utterance and dimension, for `featcache.dequantize`: value = offset + scale * level.

        Args:
            keys: ids or positions, as for `batch`.

        Returns:
            float32 `[batch, 2, *item_shape]`: scale, offset.

        Raises:
            StoreError: the features are not quantised; `spec.is_quantized` says whether they are.
            MissingItemError, IndexError, DamagedError: as `batch` does.
        """
        if not self.spec.is_quantized:
            raise StoreError(f"{self.version.path}: its features are not quantised: `batch` returns their values")
        positions = self._positions(keys)
        parameters = np.empty((len(positions), 2, *self.spec.item_shape), np.float32)
        for row, position in zip(parameters, positions.tolist(), strict=True):
            row[...] = self._shards.parameters(position)
        return torch.from_numpy(parameters)

    def side(self, name: str, key: str | SupportsIndex) -> NDArray[Any]:
        """An utterance's entries of a side array: additional output of the extractor, such as scales.

        Args:
            name: of the side array; `spec.side` lists them.
            key: an id, or a position; negative ones count from the end.

        Returns:
            `[entries, *item_shape]` of the side array's dtype, read-only; may be empty. If the cache was opened with
            `check`, the shard's side array has been compared with its checksum.

        Raises:
            StoreError: there is no such side array; the message lists those that exist.
            MissingItemError: there is no such id.
            IndexError: there is no such position.
            DamagedError: the shard is damaged.
        """
        return self._shards.side(name, self._position(key))

    def _checked(
        self, positions: NDArray[np.int64], firsts: NDArray[np.int64] | None, counts: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        """Frames of utterances, cut from whole ones after these were held against their checksums."""
        wholes = self._reader.parts(positions, None, self.lengths[positions])
        for position, frames in zip(positions.tolist(), wholes, strict=True):
            self._shards.verify(position, frames)
        return cut(wholes, firsts, counts)

    def _position(self, key: str | SupportsIndex) -> int:
        if isinstance(key, str):
            position = self.index.find_one(key)
            if position < 0:
                raise self.missing_error([key], 1)
            return position
        try:
            position = operator.index(key)
        except TypeError:
            raise ArgumentError(f"{key!r}: give an id, or a position; batch takes several") from None
        if not -len(self) <= position < len(self):
            raise self._outside(position)
        return position % len(self)

    def _positions(self, keys: Keys) -> NDArray[np.int64]:
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise ArgumentError(f"keys is {keys!r}: give a list of ids, or of positions")
        if not isinstance(keys, Sized):
            keys = [*keys]
        if not len(keys):
            return np.empty(0, np.int64)
        if isinstance(next(iter(keys)), str):
            return self.find(cast("Iterable[str]", keys))
        positions = np.asarray(keys)
        if positions.dtype.kind not in "iu" or positions.ndim != 1:
            raise ArgumentError(f"keys are {positions.dtype} {list(positions.shape)}: give all ids, or all positions")
        outside = positions[(positions < -len(self)) | (positions >= len(self))]
        if len(outside):
            raise self._outside(int(outside[0]))
        return positions.astype(np.int64) % len(self)

    def _room(self, shape: tuple[int, ...], dtype: np.dtype[Any], out: torch.Tensor | Buffers | None) -> torch.Tensor:
        """A tensor of this shape and any content: the beginning of `out`, or one of its own."""
        if out is None or isinstance(out, Buffers):
            return torch.from_numpy((out or self._buffers).take(shape, dtype))
        wanted = torch.from_numpy(np.empty(0, dtype)).dtype
        if not isinstance(out, torch.Tensor):
            raise ArgumentError(f"out is a {type(out).__name__}: give a tensor")
        if (out.dtype, out.device.type, out.is_contiguous()) != (wanted, "cpu", True):
            raise ArgumentError(f"out is {out.dtype} on {out.device}: it must be {wanted}, contiguous, in CPU memory")
        needed = math.prod(shape)
        if out.numel() < needed:
            raise ArgumentError(f"out has room for {out.numel():,} values: this batch has {needed:,}, {list(shape)}")
        return out.view(-1)[:needed].view(shape)

    def _outside(self, position: int) -> IndexError:
        return IndexError(f"no utterance at {position}: {self.version.path} holds {len(self):,}")

    def join(self, rows: RowKeys, manifest: Manifest) -> Joined:
        """The utterances of a manifest's rows, and which of them are of another row or file than the rows ask for."""
        if not rows.has_path.any():
            return join(self.index, rows, {})
        joined = join(self.index, rows, outdated_items(self.version, self.index))
        return with_other_files(joined, rows, manifest, self.version, self.index)

    @cached_property
    def _failures(self) -> dict[str, Failure]:
        return latest_failures(self.version)

    def missing_error(self, ids: list[str], asked: int) -> MissingItemError:
        """What to raise for ids that are not here, of so many asked for: whether, and why, they failed."""
        failed = [self._failures[name] for name in ids if name in self._failures]
        where = f"{self.version.path}, which holds {len(self):,}"
        if len(ids) == 1 and failed:
            return MissingItemError(
                f"{ids[0]}: failed in extraction: {failed[0].message} ({failed[0].reason}); not in {where}"
            )
        if len(ids) == 1:
            example = f", like {self.ids[0]!r}" if len(self) else ""
            return MissingItemError(f"{ids[0]!r}: no such utterance in {where}{example}")
        reasons = Counter(failure.reason for failure in failed)
        why = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
        return MissingItemError(
            f"{len(ids):,} of {asked:,} utterances are not in {where}: {listing(ids)}"
            + (f"; {len(failed):,} of them failed in extraction ({why})" if failed else "")
        )


def _pad(arrays: list[NDArray[Any]], value: float, out: NDArray[Any]) -> None:
    """Copy arrays `[frames, *item_shape]` into `out` `[batch, frames, *item_shape]`, with a value beyond their ends."""
    padding = np.broadcast_to(np.array(value, out.dtype), out.shape[1:])
    pieces = []
    for array in arrays:
        pieces.append(array)
        if len(array) < len(padding):
            pieces.append(padding[len(array) :])
    np.concatenate(pieces, out=out.reshape(-1, *out.shape[2:]))  # one call: a loop over rows takes longer


def _packed(ids: Iterable[str]) -> Strings:
    if isinstance(ids, str):
        raise ArgumentError(f"ids is one id, {ids!r}: give a list of ids")
    try:
        return Strings.of(ids)
    except (AttributeError, TypeError, UnicodeError):
        raise ArgumentError("ids are not all text: give a list of ids") from None


def _reopen(path: Path, check: bool, shards: list[str], tiers: Tiers) -> Cache:
    return Cache(Version.open(path), check=check, shards=shards, tiers=tiers)
