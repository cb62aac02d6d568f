"""Extraction from the features of another version instead of audio: that version's items, for the rows of a
manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.config import Config
from featcache.device import Device
from featcache.errors import AudioError, ConfigError, DamagedError, Reason, listing
from featcache.extract.batch import process
from featcache.extract.decoding import failure_of
from featcache.extract.features import cast
from featcache.extract.memory import AudioMemory
from featcache.extract.rows import Pending
from featcache.extract.target import Extracted, Spent, Target
from featcache.extractors import Extractor, Params
from featcache.extractors.units import Units
from featcache.manifest import Manifest, Utterance
from featcache.manifest.copies import copies_of
from featcache.quantize import dequantize_array
from featcache.spec import QUANTIZATION
from featcache.store import zarr3
from featcache.store.index import open_index
from featcache.store.join import Rows, item_at, join, what_changed
from featcache.store.runs import Failure, standing_failures
from featcache.store.shard import Item
from featcache.store.version import Version, select_versions

Produce = Callable[[Sequence[Utterance], Spent], Iterable[list[Extracted | Pending]]]
"""Makes features of a batch of utterances: for one part of it after the other, what each target gets."""

_UTTERANCES = 64
"""Whose features are on the device at once, at most."""

_SHARDS_HELD = 8
"""Shards whose columns are held: as many as workers are at, about. A shard of 10^5 short clips takes 4 MB."""


@dataclass(frozen=True)
class Given:
    """What a version has of an utterance.

    Attributes:
        item: what it keeps besides the features: the audio file's identity, the number of samples.
        features: `[frames, *item_shape]`, memory-mapped and read-only; quantised ones as their values, float32.
    """

    item: Item
    features: NDArray[Any]


class Source:
    """A version that others are made from. Its methods may be called from several threads.

    Args:
        version: which.

    Raises:
        DamagedError: the index has to be built, and a shard's metadata is damaged.
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self._index = open_index(version)
        self._failures = standing_failures(version, self._index)
        self._shard = lru_cache(_SHARDS_HELD)(self._open_shard)

    def read(self, utterances: Sequence[Utterance]) -> list[Given | AudioError]:
        """What the version has of each utterance; held against its checksum.

        An utterance is there if an item of its id was made from a row of the same path, start, duration and channel,
        and its file has not changed and failed since. For any other there is an `AudioError` with the reason
        NOT_IN_SOURCE.

        Raises:
            DamagedError: a shard is damaged.
        """
        failures = {one.id: self._failures[one.id] for one in utterances if one.id in self._failures}
        joined = join(self._index, Rows.of_utterances(utterances), failures)
        return [
            self._given(utterance, position)
            if position >= 0 and not is_changed
            else self._missing(utterance, position, joined.failures.get(number))
            for number, (utterance, position, is_changed) in enumerate(
                zip(utterances, joined.positions.tolist(), joined.is_changed.tolist(), strict=True)
            )
        ]

    def seconds(self, manifest: Manifest) -> NDArray[np.float64]:
        """Seconds of audio of each row, float64 `[rows]`: the manifest's, else the version's, else NaN."""
        positions = self._index.find(manifest.ids)
        lengths = np.where(
            positions >= 0, self._index.num_frames[positions] / self.version.info.spec.frame_rate, np.nan
        )
        return np.where(np.isnan(manifest.duration), lengths, manifest.duration)

    def _given(self, utterance: Utterance, position: int) -> Given:
        index = self._index
        shard, number = self._shard(int(index.shard[position])), int(index.item[position])
        first = int(index.first_frame[position])
        features = shard.features[first : first + int(index.num_frames[position])]
        if zarr3.crc32c(features) != shard.crc32c[number]:
            raise DamagedError(
                f"{utterance.id}: damaged: its features in {self.version.path} are not what was written",
                self.version.path,
            )
        if shard.parameters is not None:
            features = dequantize_array(features, *shard.parameters[number])
        item = Item.of(utterance, int(shard.num_samples[number]), shard.sources[number].tolist())
        return Given(item, features)

    def _missing(self, utterance: Utterance, position: int, failure: Failure | None) -> AudioError:
        where = f"not in {self.version.path.name}"
        if position >= 0:
            item = item_at(self.version, self._index, position)
            where += f", whose features of this id are of another row or file: {what_changed(item, utterance, failure)}"
        elif (failure := self._failures.get(utterance.id)) is not None:
            where += f", where it failed: {failure.reason}: {failure.message}"
        return AudioError(Reason.NOT_IN_SOURCE, where)

    def _open_shard(self, number: int) -> _Columns:
        shard = self.version.shard(self._index.shards[number])
        is_quantized = self.version.info.spec.is_quantized
        return _Columns(
            features=shard.features,
            crc32c=shard.column("crc32c"),
            num_samples=shard.column("num_samples"),
            sources=shard.column("sources"),
            parameters=shard.side(QUANTIZATION, check=True).entries if is_quantized else None,
        )


@dataclass(frozen=True)
class _Columns:
    """What is needed of a shard, over and over."""

    features: NDArray[Any]
    crc32c: NDArray[np.uint32]
    num_samples: NDArray[np.uint64]
    sources: NDArray[np.int64]
    parameters: NDArray[np.float32] | None


def producer(root: Path, targets: Sequence[Target], device: Device, source: Source | None) -> Produce:
    """What makes features of a batch for every target: from audio, or if there is a source, from its features."""
    if source is not None:
        return partial(derive, root, targets, device, source)
    return partial(process, root, targets, device, AudioMemory())


def derive(
    root: Path,
    targets: Sequence[Target],
    device: Device,
    source: Source,
    batch: Sequence[Utterance],
    spent: Spent,
) -> Iterator[list[Extracted | Pending]]:
    """Make features of a batch from those of the source, for every target; its extractor is `Units`.

    Yields the targets' results, in the targets' order, for one part of the batch after the other.
    """
    for part in np.array_split(np.arange(len(batch)), -(-len(batch) // _UTTERANCES)):
        started = perf_counter()
        utterances = [batch[i] for i in part.tolist()]
        given = source.read(utterances)
        items = [one.item for one in given if isinstance(one, Given)]
        failures = [
            failure_of(row, root, one)
            for row, one in zip(utterances, given, strict=True)
            if isinstance(one, AudioError)
        ]
        features = [one.features for one in given if isinstance(one, Given)]
        spent.decode += perf_counter() - started
        results: list[Extracted | Pending] = []
        for target in targets:
            with spent.extracting(target):
                codes = _codes(target, features, device)
            results.append(Extracted(items, [len(one) for one in features], codes, failures))
        yield results


def _codes(target: Target, features: Sequence[NDArray[Any]], device: Device) -> NDArray[Any]:
    """The codes of some utterances' features, one after the other."""
    extractor = target.extractor
    assert isinstance(extractor, Units)
    if not features:
        return np.empty((0, *extractor.spec.item_shape), target.config.dtype)
    with device.slot():
        frames = torch.from_numpy(np.concatenate(features)).to(device.torch_device)
        codes: NDArray[Any] = device.download(cast(extractor.from_features(frames), target.config.dtype))
    return codes


def source_of(configs: Sequence[Config], extractors: Mapping[str, Extractor[Params]], path: Path) -> Source:
    """The version, at `path` or in the cache at `path`, that the configs' features are made from.

    Args:
        configs: of what is to be made.
        extractors: of each, by its name.
        path: of the version or its cache.

    Raises:
        StoreError: there is no version.
        ConfigError: they are made from audio alone, or from other features or copies than are there.
        DamagedError: its metadata is damaged.
    """
    for config in configs:
        if not isinstance(extractors[config.name], Units):
            raise ConfigError(
                f"--from: {config.name}: {config.extractor} is extracted from audio; --from is only for units"
            )
    sources = {extractor.source_fingerprint for extractor in extractors.values() if isinstance(extractor, Units)}
    if len(sources) > 1:
        raise ConfigError("--from: these configs make units of different features: run them one at a time")
    source = open_source(path, sources.pop())
    for config in configs:
        _refuse_other_copies(config, source.version)
    return source


def open_source(path: Path, fingerprint: str) -> Source:
    """Open the version of that fingerprint, at `path` or in the cache at `path`.

    Raises:
        StoreError: there is no version.
        ConfigError: there are others.
        DamagedError: its metadata is damaged.
    """
    versions = select_versions(path)
    for version in versions:
        if version.info.fingerprint == fingerprint:
            return Source(version)
    there = listing(version.path.name for version in versions)
    raise ConfigError(f"--from {path}: the config needs version {fingerprint[:12]}; there is {there}")


def _refuse_other_copies(config: Config, source: Version) -> None:
    """Refuse to make copies of a version's that it has not, or that have other noise.

    Raises:
        ConfigError: says which.
    """
    there = copies_of(source.info.config).suffixes
    if lacking := [suffix or "the utterances themselves" for suffix in config.copies.suffixes if suffix not in there]:
        raise ConfigError(
            f"--from: {config.name} has copies that {source.path.name} lacks: {listing(lacking)}: give both "
            "the same augment section, or extract these units from audio"
        )
    noise = config.augment and config.augment.noise
    of_source = (source.info.config.get("augment") or {}).get("noise") or {}
    if noise and (noise.seed, noise.content) != (of_source.get("seed"), of_source.get("content")):
        raise ConfigError(f"--from: {config.name} has different noise, or a different seed, from {source.path.name}")
