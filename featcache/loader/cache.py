"""An opened version: utterances by id or by position, one without a copy, or many padded into one tensor."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import DamagedError, MissingDependencyError, MissingItemError, StoreError, listing
from featcache.loader.buffers import Buffers
from featcache.spec import FeatureSpec
from featcache.store import zarr3
from featcache.store.index import open_index
from featcache.store.runs import Failure, latest_failures
from featcache.store.shard import Shard
from featcache.store.side import Side
from featcache.store.version import Version, differing_keys, select_version, select_versions
from featcache.strings import Strings

__all__ = ["Cache", "Keys", "open"]

Keys = Sequence[str] | Sequence[int] | NDArray[Any] | torch.Tensor
"""Utterances: all by id, or all by position."""


class ConfigLike(Protocol):
    """What `open` asks of a `featcache.config.Config`, whose module is not there in training."""

    @property
    def name(self) -> str:
        """Of the version."""

    def fingerprint(self) -> str:
        """A hash of everything that decides the values."""

    def resolved(self) -> dict[str, Any]:
        """The config with every default filled in."""


def open(  # noqa: A001
    path: str | Path, name: str | None = None, *, config: str | Path | ConfigLike | None = None, check: bool = False
) -> Cache:
    """Open a version of a cache for reading.

    Args:
        path: the cache, or one version's folder in it.
        name: which version: its name or its folder's; not needed where there is but one.
        config: the version that this config makes, and no other: a YAML file, a packaged config's name, or a
            `Config`. The first two need the extra `extract`.
        check: hold every utterance that is read against its checksum.

    Raises:
        StoreError: there is no such version, or there are several; says which there are, and which config
            keys tell them apart, or from `config`.
        DamagedError: the version's metadata is damaged.
        ConfigError: `config` cannot be read, or has faults.
        MissingDependencyError: `config` is to be read, and the packages for it are not there.
    """
    path = Path(path).absolute()  # the working directory may change while shards are still to be opened
    version = select_version(path, name) if config is None else _version_of(_load(config), path, name)
    return Cache(version, check=check)


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

    Attributes:
        version: where it is, and what it says of itself.
        index: where each utterance is.
        check: as given.

    Raises:
        DamagedError: the index has to be built, and a shard's metadata is damaged.
    """

    def __init__(self, version: Version, *, check: bool = False, shards: Sequence[str] | None = None) -> None:
        self.version = version
        self.check = check
        try:
            self.index = open_index(version, shards)
        except DamagedError as error:
            raise self._damaged(str(error)) from error
        self._buffers = Buffers()
        self._features: dict[int, NDArray[Any]] = {}  # by number of the shard, as they are needed
        self._checksums: dict[int, NDArray[np.uint32]] = {}
        self._sides: dict[tuple[str, int], Side] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.version.path, self.check, self.index.shards)

    def __repr__(self) -> str:
        frames, spec = int(self.lengths.sum()), self.spec
        num_bytes = frames * math.prod(spec.item_shape) * self.version.dtype.itemsize
        shape = ", ".join(map(str, ("frames", *spec.item_shape)))
        return (
            f"Cache({self.version.path.name}: {len(self):,} utterances, {frames / spec.frame_rate / 3600:.2f} h, "
            f"{num_bytes / 1e9:.3g} GB, {spec.dtype} [{shape}] at {spec.frame_rate:g} Hz)"
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

    def item(self, key: str | SupportsIndex, *, check: bool | None = None) -> NDArray[Any]:
        """The features of one utterance: `cache[key]`, with a say on checking.

        Args:
            key: an id, or a position; negative ones count from the end.
            check: whether to hold it against its checksum; by default as the cache was opened.

        Returns:
            `[frames, *item_shape]` of the stored dtype, read-only: memory-mapped, nothing is copied.

        Raises:
            MissingItemError: there is no such id; says whether, and why, it failed in extraction.
            IndexError: there is no such position.
            DamagedError: the shard is damaged, or `check` found other bytes than were written.
        """
        position = self._position(key)
        index = self.index
        frames = self._frames(int(index.shard[position]), int(index.first_frame[position]), int(self.lengths[position]))
        if self.check if check is None else check:
            self._verify(position, frames)
        return frames

    def batch(
        self, keys: Keys, *, padding_value: float = 0, out: torch.Tensor | None = None, check: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The features of several utterances, padded at their ends to the longest.

        Args:
            keys: ids or positions, in any order, repeated or not.
            padding_value: what frames beyond an utterance's end are filled with.
            out: a contiguous tensor in CPU memory, of the stored dtype, to gather into instead of a new one:
                any shape with room enough. What it held is overwritten; the batch is a view of its beginning.
            check: whether to hold each against its checksum; by default as the cache was opened.

        Returns:
            The features, `[batch, frames, *item_shape]` of the stored dtype; and how many frames each
            utterance has, int64 `[batch]`.

        Raises:
            MissingItemError: names up to ten ids that are not there, and says how many failed in extraction.
            IndexError: there is no such position.
            ValueError: there are no keys, or `out` does not do.
            DamagedError: a shard is damaged, or `check` found other bytes than were written.
        """
        positions = self._positions(keys)
        lengths = self.lengths[positions]
        padded = self._room((len(positions), int(lengths.max()), *self.spec.item_shape), out)
        rows = padded.numpy()
        places = self.index.shard[positions], self.index.first_frame[positions], lengths
        for row, shard, first, length in zip(rows, *(place.tolist() for place in places), strict=True):
            row[:length] = self._frames(shard, first, length)
            row[length:] = padding_value
        if self.check if check is None else check:
            for row, position, length in zip(rows, positions.tolist(), lengths.tolist(), strict=True):
                self._verify(position, row[:length])
        return padded, torch.from_numpy(lengths)

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
        position = self._position(key)
        number = int(self.index.shard[position])
        side = self._sides.get((name, number))
        if side is None:
            side = self._sides[name, number] = self._open_side(name, self.version.shard(self.index.shards[number]))
        return side.item(int(self.index.item[position]))

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
            raise ValueError("keys is empty: a batch has at least one utterance")
        if isinstance(keys, str) or isinstance(next(iter(keys)), str):
            return self.find(keys)  # type: ignore[arg-type]
        positions = np.asarray(keys)
        if positions.dtype.kind not in "iu" or positions.ndim != 1:
            raise TypeError(f"keys are all ids or all positions, not {positions.dtype} {list(positions.shape)}")
        outside = positions[(positions < -len(self)) | (positions >= len(self))]
        if len(outside):
            raise self._outside(int(outside[0]))
        return positions.astype(np.int64) % len(self)

    def _room(self, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        """A tensor of this shape and any content: the beginning of `out`, or one of its own."""
        if out is None:
            return torch.from_numpy(self._buffers.take(shape, self.version.dtype))
        dtype = torch.from_numpy(np.empty(0, self.version.dtype)).dtype
        if (out.dtype, out.device.type, out.is_contiguous()) != (dtype, "cpu", True):
            raise ValueError(f"out is {out.dtype} on {out.device}; it must be {dtype}, contiguous, in CPU memory")
        needed = math.prod(shape)
        if out.numel() < needed:
            raise ValueError(f"out has room for {out.numel():,} values; this batch has {needed:,}: {list(shape)}")
        return out.view(-1)[:needed].view(shape)

    def _frames(self, shard: int, first: int, count: int) -> NDArray[Any]:
        """Frames of a shard, by its number in the index."""
        features = self._features.get(shard)
        if features is None:
            features = self._features[shard] = self._open_shard(shard)
        frames = features[first : first + count]
        if len(frames) != count:
            raise self._damaged(
                f"{self.version.path}: damaged: shard {self.index.shards[shard]} ends before frame {first + count}"
            )
        return frames

    def _open_shard(self, number: int) -> NDArray[Any]:
        shard = self.version.shard(self.index.shards[number])
        with self._reading(shard):
            features = shard.features
        if (features.shape[1:], features.dtype) != (self.spec.item_shape, self.version.dtype):
            raise self._damaged(f"{shard.folder}: damaged: features are {features.dtype} {list(features.shape)}")
        return features

    def _open_side(self, name: str, shard: Shard) -> Side:
        spec = {spec.name: spec for spec in self.spec.side}.get(name)
        if spec is None:
            there = listing(spec.name for spec in self.spec.side) or "none"
            raise StoreError(f"{self.version.path}: has no side array {name!r}; it has {there}")
        with self._reading(shard):
            side = shard.side(name, self.check)
        if (side.entries.shape[1:], side.entries.dtype) != (spec.item_shape, np.dtype(spec.dtype)):
            found = f"{side.entries.dtype} {list(side.entries.shape)}"
            raise self._damaged(f"{shard.folder}: damaged: side array {name} is {found}")
        return side

    @contextmanager
    def _reading(self, shard: Shard) -> Iterator[None]:
        """What goes wrong within is said as the loader says it."""
        try:
            yield
        except DamagedError as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            raise StoreError(f"{error.filename or shard.folder}: cannot be read: {error.strerror}") from error

    def _verify(self, position: int, frames: NDArray[Any]) -> None:
        number = int(self.index.shard[position])
        shard = self.version.shard(self.index.shards[number])
        if number not in self._checksums:
            with self._reading(shard):
                self._checksums[number] = shard.column("crc32c")
        if zarr3.crc32c(frames) != self._checksums[number][self.index.item[position]]:
            raise self._damaged(
                f"{self.ids[position]}: damaged: its features in {shard.folder} are not what was written"
            )

    def _outside(self, position: int) -> IndexError:
        return IndexError(f"no utterance at {position}: {self.version.path} holds {len(self):,}")

    def _damaged(self, what: str) -> DamagedError:
        return DamagedError(f"{what}; `featcache repair {self.version.path} --manifest MANIFEST` extracts it again")

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
            f"{len(ids):,} of {asked:,} utterances are not in {where}: {listing(ids)}; "
            f"{len(failed):,} of them failed in extraction" + (f" ({why})" if why else "")
        )


def _packed(ids: Iterable[str]) -> Strings:
    if isinstance(ids, str):
        raise TypeError(f"ids is one id, {ids!r}: give a list of ids")
    try:
        return Strings.of(ids)
    except AttributeError as error:
        raise TypeError(f"ids are strings, all of them ({error})") from None


def _reopen(path: Path, check: bool, shards: list[str]) -> Cache:
    return Cache(Version.open(path), check=check, shards=shards)


def _load(config: str | Path | ConfigLike) -> ConfigLike:
    if not isinstance(config, (str, Path)):
        return config
    try:
        from featcache.config import load_config
    except ImportError as error:
        raise MissingDependencyError(error.name or "pydantic", "reading a config") from error
    return load_config(config)


def _version_of(config: ConfigLike, path: Path, name: str | None) -> Version:
    """The version in `path` (called `name`) that `config` makes."""
    fingerprint = config.fingerprint()
    wanted = f"{config.name}-{fingerprint[:12]}"
    versions = select_versions(path, name)
    fitting = [version for version in versions if version.info.fingerprint == fingerprint]
    namesakes = [version for version in versions if version.info.name == config.name]
    if fitting:  # several differ in nothing but their names
        return next((version for version in fitting if version in namesakes), fitting[0])
    if not namesakes and len(versions) != 1:
        there = listing(version.path.name for version in select_versions(path))
        raise StoreError(f"{path}: holds no version of this config, which would be {wanted}; it holds {there}")
    other = (namesakes or versions)[0]
    keys = listing(differing_keys(other.info.config, config.resolved())) or "their weights or revision"
    raise StoreError(
        f"{other.path}: made by another config than the one given, which would be {wanted}; they differ in {keys}"
    )
