"""Extracts a batch of utterances from the features that another version holds, instead of
from audio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.config import Config
from featcache.errors import AudioError, ConfigError, DamagedError, Reason, listing
from featcache.extraction.features import (
    ClipFeatures,
    Extracted,
    WorkerTimes,
    download,
    errors_of,
    in_halves,
)
from featcache.extraction.padded_rows import PendingRows
from featcache.extraction.version_plan import BuiltConfig
from featcache.format.shard import Frames, Item, Shard, dequantize_array
from featcache.manifest.audio_locations import AudioLocation
from featcache.manifest.copies import copies_of
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest
from featcache.storage.location import Location, ObjectPath, as_location
from featcache.version.indexing import open_index
from featcache.version.join import RowKeys, item_at, join, what_changed
from featcache.version.ledger import Failure, failures_by_row
from featcache.version.selection import select_versions
from featcache.version.version import Version

_UTTERANCES = 64
"""The most utterances whose features are on the device at once."""

_SHARDS_HELD = 8
"""Shards whose columns are held: about as many as workers are at. A shard of 10^5 short
clips takes 4 MB."""


@dataclass(frozen=True)
class StoredUtterance:
    """What a version holds of an utterance."""

    item: Item
    """Everything besides the features: the identity of the audio file, the number of
    samples."""
    features: NDArray[Any]
    """`[frames, *item_shape]`, memory-mapped and read-only; quantised ones as their
    values, float32."""


class SourceVersion:
    """A version from whose features others are made. Its methods may be called from
    several threads. Raises DamagedError if the index has to be built, and a shard's
    metadata is damaged."""

    def __init__(self, version: Version, keep_index: bool = True) -> None:
        self.version = version
        self._index = open_index(version, keep=keep_index)
        self._failures = failures_by_row(version, self._index)
        self._shard = lru_cache(_SHARDS_HELD)(self._open_shard)

    def read(self, utterances: Sequence[Utterance]) -> list[StoredUtterance | AudioError]:
        """Read what the version holds of each utterance, and check it against its checksum.

        The version holds an utterance if an item of its id was made from a row of the
        same path, start, duration and channel, and its file has not changed and failed
        since. Others give an `AudioError` with the reason NOT_IN_SOURCE. Raises
        DamagedError if a shard is damaged."""
        rows = RowKeys.of_utterances(utterances)
        keys = zip(rows.id_hashes.tolist(), rows.hashes.tolist(), strict=True)
        failures = {key: self._failures[key] for key in keys if key in self._failures}
        status = join(rows, self._index, failures)
        stored = self._stored(status.positions[status.present])
        return [
            stored.get(at) or self._missing(utterances[row], at, status.failures.get(row))
            for row, at in enumerate(status.positions.tolist())
        ]

    def seconds(self, manifest: Manifest, known: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of audio of each row, float64 `[rows]`: those known, else the
        version's, else NaN."""
        positions = self._index.find(manifest.ids)
        lasts = self.version.info.spec.axis.seconds(self._index.num_frames[positions])
        of_version = np.where(positions >= 0, lasts, np.nan)
        return np.where(np.isnan(known), of_version, known)

    def extract(
        self,
        root: AudioLocation,
        configs: Sequence[BuiltConfig],
        batch: Sequence[Utterance],
        times: WorkerTimes,
    ) -> Iterator[list[Extracted | PendingRows]]:
        """Make the features of a batch from the version's. Yields, for one part of the
        batch after the other, the results of all configs in their order."""
        for at in range(0, len(batch), _UTTERANCES):
            started = perf_counter()
            utterances = batch[at : at + _UTTERANCES]
            in_source = self.read(utterances)
            stored = [one for one in in_source if isinstance(one, StoredUtterance)]
            times["decode"] += perf_counter() - started
            results: list[Extracted | PendingRows] = []
            for config in configs:
                part = Extracted(config.computed_spec, root, config.config.pool)
                for utterance, error in zip(utterances, in_source, strict=True):
                    if isinstance(error, AudioError):
                        part.fail(utterance, error)
                started = perf_counter()
                made = in_halves(partial(_from_features, config), stored)
                part.seconds = perf_counter() - started
                times["extract"] += part.seconds
                results.append(part.take([one.item for one in stored], made))
            yield results

    def _stored(self, positions: NDArray[np.int64]) -> dict[int, StoredUtterance]:
        """What is stored of the items at some positions of the index, by position; shard
        by shard."""
        index, stored = self._index, dict[int, StoredUtterance]()
        shards = index.shard[positions]
        for shard in np.unique(shards).tolist():
            (opened, frames, parameters), some = self._shard(shard), positions[shards == shard]
            numbers = index.item[some].tolist()
            ranges = frames.read_ranges(
                index.first_frame[some].tolist(), index.num_frames[some].tolist()
            )
            items = opened.items(numbers)
            for position, number, item, features in zip(
                some.tolist(), numbers, items, ranges, strict=True
            ):
                if crc32c(features) != opened.table["item_crc32c"][number]:
                    what = (
                        f"{item.id}: damaged: its features in {self.version.path} are not "
                        "what was written"
                    )
                    raise DamagedError(what, self.version.path)
                if parameters is not None:
                    features = dequantize_array(features, *parameters[number])
                stored[position] = StoredUtterance(replace(item, generation=1), features)
        return stored

    def _missing(self, utterance: Utterance, position: int, failure: Failure | None) -> AudioError:
        where = f"not in {self.version.path.name}"
        if position >= 0:
            item = item_at(self.version, self._index, position)
            changed = what_changed(item, utterance, failure)
            where += f", whose features of this id are of another row or file: {changed}"
        elif failure is not None:
            where += f", where it failed: {failure.reason}: {failure.message}"
        return AudioError(Reason.NOT_IN_SOURCE, where)

    def _open_shard(self, number: int) -> tuple[Shard, Frames, NDArray[np.float32] | None]:
        """A shard, its features, and of quantised ones their scales and offsets: what is
        read for every utterance."""
        shard = self.version.shard(self._index.shards[number])
        return shard, shard.open_features(), shard.quantization if shard.spec.is_quantized else None


def _from_features(
    config: BuiltConfig, stored: Sequence[StoredUtterance]
) -> list[ClipFeatures | AudioError]:
    """What the config makes of the features of each utterance. Raises AudioError if one
    gives none."""
    device = config.device
    features = [one.features for one in stored]
    if config.config.pool is not None:
        return [ClipFeatures(frames, {}) for frames in features]
    with errors_of(config.extractor, (one.item.id for one in stored), device), device.slot():
        frames = torch.from_numpy(np.concatenate(features)).to(device.torch_device)
        items = torch.split(frames, [len(one) for one in features])
        axis = config.extractor.spec.axis
        clips = [axis.as_entries(made) for made in config.extractor.from_items(items)]
        return download(config.extractor, clips, config.computed_spec, device, quantizes=False)


def find_source(
    configs: Sequence[BuiltConfig], source: str | Path | ObjectPath, keep_index: bool
) -> SourceVersion:
    """Open the version that the configs' features are made from: it is the `source`, or
    in that cache. Raises what `open_source` raises; and ConfigError if a config's
    features are made from audio only, or from other copies."""
    fingerprints = set()
    for built in configs:
        if built.source_fingerprint is None:
            raise ConfigError(
                f"--from is only for units and for store.pool: {built.config.extractor} of "
                f"{built.config.name} takes audio"
            )
        fingerprints.add(built.source_fingerprint)
    if len(fingerprints) > 1:
        raise ConfigError(
            "--from: these configs are made of different features: run them one at a time"
        )
    opened = open_source(as_location("source", source), fingerprints.pop(), keep_index)
    for built in configs:
        _refuse_other_copies(built.config, opened.version)
    return opened


def open_source(path: Location, fingerprint: str, keep_index: bool = True) -> SourceVersion:
    """Open the version of that fingerprint, at `path` or in the cache at `path`. Raises
    StoreError if there is no version; ConfigError if there are only others; DamagedError
    if its metadata is damaged."""
    versions = select_versions(path)
    for version in versions:
        if version.info.fingerprint == fingerprint:
            return SourceVersion(version, keep_index)
    there = listing(version.path.name for version in versions)
    raise ConfigError(
        f"--from {path}: the config needs version {fingerprint[:12]}; there is {there}"
    )


def _refuse_other_copies(config: Config, source: Version) -> None:
    """Refuse a config with copies that the source lacks, or that have other noise there."""
    there = copies_of(source.info.config).suffixes
    if lacking := [
        suffix or "the utterances themselves"
        for suffix in config.copies.suffixes
        if suffix not in there
    ]:
        what = f"{config.name} has copies that {source.path.name} lacks: {listing(lacking)}"
        raise ConfigError(
            f"--from: {what}: give both the same augment section, or extract these units from audio"
        )
    noise = config.augment and config.augment.noise
    of_source = (source.info.config.get("augment") or {}).get("noise") or {}
    if noise and (noise.seed, noise.content) != (of_source.get("seed"), of_source.get("content")):
        raise ConfigError(
            f"--from: {config.name} has different noise, or a different seed, from "
            f"{source.path.name}"
        )
