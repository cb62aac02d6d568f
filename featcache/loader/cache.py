"""An opened version: utterances by id or by position, one without a copy, or many padded into one tensor."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ArgumentError, DamagedError, MissingItemError, StoreError, listing
from featcache.loader.buffers import Buffers
from featcache.loader.reading import Reader
from featcache.loader.shards import Shards, damaged
from featcache.loader.spans import check_codebooks, check_padding, frames_between
from featcache.loader.tiers import Tiers
from featcache.quantize import dequantize_array
from featcache.spec import FeatureSpec
from featcache.store.index import open_index
from featcache.store.runs import Failure, latest_failures
from featcache.store.version import Version
from featcache.strings import Strings

__all__ = ["Cache", "Keys"]

Keys = Sequence[str] | Sequence[int] | NDArray[Any] | torch.Tensor
"""Utterances: all by id, or all by position."""


class Cache:
    """The utterances of a version, as they were when it was opened.

    It is a sequence of arrays, whose items can also be named: `cache[3]` and `cache["utt-1"]` are arrays,
    iterating yields the arrays in order, and `"utt-1" in cache` asks for an id. Nothing is read before it is
    asked for; shards that a run adds later are seen by opening again. Copies that are pickled into other
    processes see exactly the same utterances in the same order.

    Args:
        version: which.
        check: hold every utterance that is read against its checksum.
        shards: names of the shards that count, to see a version as it was; by default all that are there.
        tiers: what to keep in memory, and on a disk of this machine; nothing by default.

    Attributes:
        version: where it is, and what it says of itself.
        index: where each utterance is.
        check: as given.

    Raises:
        DamagedError: the index has to be built, and a shard's metadata is damaged.
        ArgumentError: the machine has not the memory that `tiers` asks for.
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
        try:
            self.index = open_index(version, shards)
        except DamagedError as error:
            raise damaged(str(error), version) from error
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
        """The config that made the version, every default filled in."""
        return self.version.info.config

    @property
    def ids(self) -> Strings:
        """The utterances' ids, in the cache's order: that of the manifest they were extracted from."""
        return self.index.ids

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """How many frames each utterance has; int64 `[utterances]`, read-only."""
        lengths = self.index.num_frames.view()
        lengths.flags.writeable = False
        return lengths

    def find(self, ids: Iterable[str]) -> NDArray[np.int64]:
        """The positions of utterances; int64 `[ids]`.

        Raises:
            MissingItemError: names up to ten that are not there, and says how many failed in extraction.
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
        """The features of one utterance: `cache[key]`, or a part of it, with a say on checking.

        Args:
            key: an id, or a position; negative ones count from the end.
            start: of the part that is wanted, in seconds; the beginning by default.
            duration: of that part, in seconds; to the end by default.
            codebooks: only the first so many of them.
            raw: give quantised features as they are stored, as levels; `quantization` has what makes values of them.
            check: whether to hold it against its checksum; by default as the cache was opened.

        Returns:
            `[frames, *item_shape]` of `spec.dtype`, read-only: memory-mapped, nothing is copied. The values of
            quantised features are computed, an array of your own.

        Raises:
            MissingItemError: there is no such id; says whether, and why, it failed in extraction.
            IndexError: there is no such position.
            ArgumentError: there is no such part.
            DamagedError: the shard is damaged, or `check` found other bytes than were written.
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
            keys: ids or positions, in any order, repeated or not; of none, the batch is empty.
            start: where the wanted parts begin, in seconds: one number, or one for each key; the beginning by default.
            duration: how long they are, likewise; to the end by default.
            codebooks: only the first so many of them.
            padding_value: what frames beyond an utterance's end are filled with.
            out: a contiguous tensor in CPU memory, of the batch's dtype, to gather into instead of a new one:
                any shape with room enough. What it held is overwritten; the batch is a view of its beginning.
            raw: give quantised features as they are stored, as levels, uint8, padded with 0. `featcache.dequantize`
                makes values of them, on any device, and of what `quantization` gives.
            check: whether to hold each against its checksum; by default as the cache was opened.

        Returns:
            The features, `[batch, frames, *item_shape]` of `spec.dtype`, or with `raw` of the stored dtype; and how
            many frames each utterance has, int64 `[batch]`.

        Raises:
            MissingItemError: names up to ten ids that are not there, and says how many failed in extraction.
            IndexError: there is no such position.
            ArgumentError: there are no such parts.
            ValueError: `out` does not do.
            DamagedError: a shard is damaged, or `check` found other bytes than were written.
        """
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
        out: torch.Tensor | None = None,
        raw: bool = False,
        check: bool | None = None,
    ) -> torch.Tensor:
        """What `batch` is made of: frames of utterances, gathered into a padded tensor.

        Args:
            positions: of the utterances, none of them negative; int64 `[batch]`. There may be none.
            firsts: the first frame of each that is wanted; int64 `[batch]`; the first that it has by default.
            counts: how many frames of each; int64 `[batch]`.
            codebooks: as for `batch`; so are `padding_value`, `out`, `raw` and `check`.

        Returns:
            `[batch, frames, *item_shape]` of `spec.dtype`, or with `raw` of the stored dtype.

        Raises:
            ArgumentError, ValueError, DamagedError: as `batch` does.
        """
        codebooks = check_codebooks(self.spec, codebooks)
        check_padding(self.spec, padding_value)
        item_shape = self.spec.item_shape if codebooks is None else (codebooks,)
        if raw and self.spec.is_quantized and padding_value != 0:
            raise ArgumentError(f"padding_value is {padding_value}: levels are padded with 0; dequantize has the value")
        as_values = self.spec.is_quantized and not raw
        dtype = np.dtype(self.spec.dtype) if as_values else self.version.dtype
        padded = self._room((len(positions), int(counts.max(initial=0)), *item_shape), dtype, out)
        rows = padded.numpy()
        with self._reader.parts(positions, firsts, counts) as parts:
            for row, position, frames in zip(rows, positions.tolist(), parts, strict=True):
                if as_values:
                    scale, offset = self._shards.parameters(position)
                    dequantize_array(frames, scale, offset, out=row[: len(frames)])
                else:
                    row[: len(frames)] = frames if codebooks is None else frames[:, :codebooks]
                row[len(frames) :] = padding_value
        if self.check if check is None else check:
            for position in positions.tolist():
                self._shards.verify(position, self._reader.whole(position))
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
            raise StoreError(f"{self.version.path}: its features are not quantised: `batch` has their values")
        positions = self._positions(keys)
        parameters = np.empty((len(positions), 2, *self.spec.item_shape), np.float32)
        for row, position in zip(parameters, positions.tolist(), strict=True):
            row[...] = self._shards.parameters(position)
        return torch.from_numpy(parameters)

    def side(self, name: str, key: str | SupportsIndex) -> NDArray[Any]:
        """What the extractor gave beside the features of one utterance: its entries of a side array.

        Args:
            name: of the side array; `spec.side` has them.
            key: an id, or a position; negative ones count from the end.

        Returns:
            `[entries, *item_shape]` of the side array's dtype, read-only; there may be none. In a cache that was
            opened with `check`, a shard's side array has been held against its checksum.

        Raises:
            StoreError: there is no such side array; names those that there are.
            MissingItemError: there is no such id.
            IndexError: there is no such position.
            DamagedError: the shard is damaged.
        """
        return self._shards.side(name, self._position(key))

    def _position(self, key: str | SupportsIndex) -> int:
        if isinstance(key, str):
            position = self.index.find_one(key)
            if position < 0:
                raise self.missing_error([key], 1)
            return position
        position = operator.index(key)
        if not -len(self) <= position < len(self):
            raise self._outside(position)
        return position % len(self)

    def _positions(self, keys: Keys) -> NDArray[np.int64]:
        if not len(keys):
            return np.empty(0, np.int64)
        if isinstance(keys, str) or isinstance(next(iter(keys)), str):
            return self.find(keys)  # type: ignore[arg-type]
        positions = np.asarray(keys)
        if positions.dtype.kind not in "iu" or positions.ndim != 1:
            raise TypeError(f"keys are all ids or all positions, not {positions.dtype} {list(positions.shape)}")
        outside = positions[(positions < -len(self)) | (positions >= len(self))]
        if len(outside):
            raise self._outside(int(outside[0]))
        return positions.astype(np.int64) % len(self)

    def _room(self, shape: tuple[int, ...], dtype: np.dtype[Any], out: torch.Tensor | None) -> torch.Tensor:
        """A tensor of this shape and any content: the beginning of `out`, or one of its own."""
        if out is None:
            return torch.from_numpy(self._buffers.take(shape, dtype))
        wanted = torch.from_numpy(np.empty(0, dtype)).dtype
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out is a {type(out).__name__}: give a tensor")
        if (out.dtype, out.device.type, out.is_contiguous()) != (wanted, "cpu", True):
            raise ValueError(f"out is {out.dtype} on {out.device}; it must be {wanted}, contiguous, in CPU memory")
        needed = math.prod(shape)
        if out.numel() < needed:
            raise ValueError(f"out has room for {out.numel():,} values; this batch has {needed:,}: {list(shape)}")
        return out.view(-1)[:needed].view(shape)

    def _outside(self, position: int) -> IndexError:
        return IndexError(f"no utterance at {position}: {self.version.path} holds {len(self):,}")

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


def _packed(ids: Iterable[str]) -> Strings:
    if isinstance(ids, str):
        raise TypeError(f"ids is one id, {ids!r}: give a list of ids")
    try:
        return Strings.of(ids)
    except AttributeError as error:
        raise TypeError(f"ids are strings, all of them ({error})") from None


def _reopen(path: Path, check: bool, shards: list[str], tiers: Tiers) -> Cache:
    return Cache(Version.open(path), check=check, shards=shards, tiers=tiers)
