"""Extracts a batch of utterances from the features of another version, instead of from
audio."""

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
from msgspec import structs
from numpy.typing import NDArray

from featcache.errors import (
    AudioError,
    ConfigError,
    DamagedError,
    ManifestError,
    Reason,
    counted,
    listing,
)
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import (
    ClipFeatures,
    Extracted,
    Result,
    WorkerTimes,
    download,
    errors_of,
    in_halves,
)
from featcache.extraction.padded_rows import Part
from featcache.extractors.faults import require_tensor
from featcache.format.shard import Frames, Item, Shard
from featcache.manifest.audio_locations import AudioLocation
from featcache.manifest.copies import copies_of, noise_of
from featcache.manifest.label_files import is_imported
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest
from featcache.spec import as_values, dequantize_array
from featcache.storage.location import Location, ObjectPath, as_location
from featcache.version.index import Index
from featcache.version.indexing import open_index
from featcache.version.join import RowKeys, RowStatus, item_at, join, sources_of, what_changed
from featcache.version.ledger import Failure, failures_by_row
from featcache.version.selection import select_versions
from featcache.version.version import Version
from featcache.version.wanted import Wanted, read_all_wanted

_UTTERANCES = 64
"""The most utterances whose features are on the device at once."""

_SHARDS_HELD = 8
"""Shards whose columns are held. A shard of 10^5 short clips takes 4 MB."""


@dataclass(frozen=True)
class StoredUtterance:
    """An utterance as a version stores it."""

    item: Item
    features: NDArray[Any]
    """`[frames, *item_shape]`, read-only; quantised ones as float32."""


class SourceVersion:
    """A version from whose features others are made. Safe to use from several threads."""

    def __init__(self, version: Version, keep_index: bool = True) -> None:
        self.version = version
        self._index = open_index(version, keep=keep_index)
        self._failures = failures_by_row(version, self._index)
        self._shard = lru_cache(_SHARDS_HELD)(self._open_shard)

    def read(self, utterances: Sequence[Utterance]) -> list[StoredUtterance | AudioError]:
        """Read stored utterances, and check them against their checksums. Returns an
        `AudioError` for each utterance whose row or file is not the item's. Raises
        DamagedError if a shard is damaged."""
        rows = RowKeys.of_utterances(utterances)
        keys = zip(rows.id_hashes.tolist(), rows.hashes.tolist(), strict=True)
        failures = {key: self._failures[key] for key in keys if key in self._failures}
        status = join(rows, self._index, failures)
        stored = self._stored(status.positions[status.present])
        return [
            stored.get(position)
            or self._missing(utterances[row], position, status.failures.get(row))
            for row, position in enumerate(status.positions.tolist())
        ]

    def seconds(self, manifest: Manifest, known: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each row's seconds, float64 `[rows]`: those known, else the version's,
        else NaN."""
        positions = self._index.find(manifest.ids)
        lasts = self.version.info.spec.axis.seconds(self._index.num_frames[positions])
        of_version = np.where(positions >= 0, lasts, np.nan)
        return np.where(np.isnan(known), of_version, known)

    def refuse_another_manifest(self, manifest: Manifest, wanted: Wanted, first_row: int) -> None:
        """Raise ManifestError if the version was made from another manifest: it has none of
        the wanted rows, and none of them has failed there. `manifest` has some of them, from
        number `first_row` on."""
        index = self._index
        id_hash, row_hash, _ = wanted.rows
        positions = index.find_hashes(id_hash)
        namesakes = np.flatnonzero(positions >= 0)
        if (index.row_hash[positions[namesakes]] == row_hash[namesakes]).any():
            return
        keys = zip(id_hash.tolist(), row_hash.tolist(), strict=True)
        if not self._failures.keys().isdisjoint(keys):
            return
        positions = positions[first_row : first_row + len(manifest)]
        row = int(positions.argmax())  # of an item with that id, if there is any
        utterance = manifest[row]
        why = self._missing(utterance, int(positions[row]), None)
        sources = {saved.manifest for saved in read_all_wanted(self.version)}
        made_from = listing(sorted(sources), 3) or "another manifest"
        remedy = "or extract this one there first"
        if is_imported(self.version.info.config):
            remedy = "with --format features"
        what = f"--from has none of its {counted(len(wanted), 'utterance')}"
        raise ManifestError(
            f"{manifest.source}: {what}: {utterance.id} is {why}; that was made from {made_from}: "
            f"give that manifest, {remedy}"
        )

    def with_changed_items(
        self, keys: RowKeys, status: RowStatus, version: Version, index: Index
    ) -> RowStatus:
        """Mark rows as missing whose features here were made from another file than those
        in `version`, or decoded otherwise."""
        here = join(keys, self._index, self._failures)
        rows = np.flatnonzero(status.present & here.present)
        made_from = sources_of(version, index, status.positions[rows])
        present = status.present.copy()
        present[rows] = (
            made_from == sources_of(self.version, self._index, here.positions[rows])
        ).all(axis=1)
        return replace(status, present=present)

    def extract(
        self,
        root: AudioLocation,
        configs: Sequence[BuiltConfig],
        batch: Sequence[Utterance],
        times: WorkerTimes,
    ) -> Iterator[Part]:
        """Make the features of a batch from the version's. Yields the results of all
        configs, for one part of the batch after the other."""
        for start in range(0, len(batch), _UTTERANCES):
            started = perf_counter()
            utterances = batch[start : start + _UTTERANCES]
            in_source = self.read(utterances)
            stored = [result for result in in_source if isinstance(result, StoredUtterance)]
            items = [utterance.item for utterance in stored]
            times["decode"] += perf_counter() - started
            results: Part = []
            for config in configs:
                part = Extracted.of(config, root)
                for utterance, error in zip(utterances, in_source, strict=True):
                    if isinstance(error, AudioError):
                        part.fail(utterance, error)
                started = perf_counter()
                features = in_halves(partial(_from_features, config), stored)
                part.seconds = perf_counter() - started
                results.append(part.take(items, features))
            yield results

    def _stored(self, positions: NDArray[np.int64]) -> dict[int, StoredUtterance]:
        index = self._index
        stored: dict[int, StoredUtterance] = {}
        shards = index.shard[positions]
        for shard in np.unique(shards).tolist():
            opened, frames, parameters = self._shard(shard)
            in_shard = positions[shards == shard]
            numbers = index.item[in_shard].tolist()
            ranges = frames.read_ranges(
                index.first_frame[in_shard].tolist(), index.num_frames[in_shard].tolist()
            )
            rows = zip(in_shard.tolist(), numbers, opened.items(numbers), ranges, strict=True)
            for position, number, item, features in rows:
                if crc32c(features) != opened.table["item_crc32c"][number]:
                    path = self.version.path
                    raise DamagedError(
                        f"{item.id}: damaged: its features in {path} are not what was written", path
                    )
                if parameters is not None:
                    features = dequantize_array(features, *parameters[number])
                features = as_values(features, opened.spec.dtype)
                stored[position] = StoredUtterance(structs.replace(item, generation=1), features)
        return stored

    def _missing(self, utterance: Utterance, position: int, failure: Failure | None) -> AudioError:
        message = f"not in {self.version.path.name}"
        if position >= 0:
            item = item_at(self.version, self._index, position)
            changed = what_changed(item, utterance, failure)
            message += f", whose features of this id are of another row or file: {changed}"
        elif failure is not None:
            message += f", where it failed: {failure.reason}: {failure.message}"
        return AudioError(Reason.NOT_IN_SOURCE, message)

    def _open_shard(self, number: int) -> tuple[Shard, Frames, NDArray[np.float32] | None]:
        shard = self.version.shard(self._index.shards[number])
        return shard, shard.open_features(), shard.quantization if shard.spec.is_quantized else None


def _from_features(config: BuiltConfig, stored: Sequence[StoredUtterance]) -> list[Result]:
    device = config.device
    features = [utterance.features for utterance in stored]
    if config.config.pool is not None:
        return [ClipFeatures(frames, {}) for frames in features]
    extractor = config.extractor
    with errors_of(config, (clip.item.id for clip in stored)), device.slot():
        joined = torch.from_numpy(np.concatenate(features)).to(device.torch_device)
        made = extractor.from_features(joined)
        shape = (len(joined), *extractor.spec.item_shape)
        require_tensor(extractor, "from_features", made, shape)
        clips = torch.split(made, [len(frames) for frames in features])
        return download(config, clips, quantizes=False)


def find_source(
    configs: Sequence[BuiltConfig], source: str | Path | ObjectPath, keep_index: bool
) -> SourceVersion:
    """Open the version that the configs' features are made from: the `source`, or a version
    in that cache. Raises ConfigError if a config needs audio, or other copies."""
    for built in configs:
        if built.source_fingerprint is None:
            reads = "takes audio" if built.label_files is None else "reads other files"
            raise ConfigError(
                f"--from is only for units and for store.pool: {built.config.extractor} of "
                f"{built.config.name} {reads}"
            )
        if built.source_fingerprint != configs[0].source_fingerprint:
            raise ConfigError(
                "--from: these configs are made of different features: run them one at a time"
            )
        fingerprint = built.source_fingerprint
    opened = open_source(as_location("source", source), fingerprint, keep_index)
    for built in configs:
        _refuse_other_copies(built, opened.version)
    return opened


def open_source(path: Location, fingerprint: str, keep_index: bool = True) -> SourceVersion:
    """Open the version of that fingerprint, at `path` or in the cache at `path`. Raises
    StoreError if there is no version; ConfigError if there are only others."""
    versions = select_versions(path)
    for version in versions:
        if version.info.fingerprint == fingerprint:
            return SourceVersion(version, keep_index)
    names = listing(version.path.name for version in versions)
    raise ConfigError(
        f"--from {path}: no version has the features of this config, with the same params, audio, "
        f"augment and store.dtype (fingerprint {fingerprint[:12]}); it holds {names}"
    )


def _refuse_other_copies(built: BuiltConfig, source: Version) -> None:
    name, source_name = f"--from: {built.config.name}", source.path.name
    source_suffixes = copies_of(source.info.config).suffixes
    lacking = [
        suffix or "the utterances themselves"
        for suffix in built.copies.suffixes
        if suffix not in source_suffixes
    ]
    if lacking:
        raise ConfigError(
            f"{name} has copies that {source_name} lacks: {listing(lacking)}: give both the same "
            "augment section, or extract these units from audio"
        )
    augment = built.config.augment
    noise = augment and augment.noise
    if noise and (noise.seed, noise.content) != noise_of(source.info.config):
        raise ConfigError(f"{name} has different noise, or a different seed, from {source_name}")
