"""The plan of a run for one version, and the config and extractor that fill it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from featcache.audio.decode import probe, probe_seconds
from featcache.audio.formats import OLD_FFMPEG
from featcache.audio.waveform import WaveformMaker
from featcache.config import Config
from featcache.config.config import find_differences
from featcache.device import Device
from featcache.errors import (
    ArgumentError,
    ConfigError,
    FeatcacheError,
    Reason,
    StoreError,
    counted,
    listing,
)
from featcache.extraction.audio_files import are_unchanged, stat_of
from featcache.extraction.padded_rows import BatchingChoice
from featcache.extraction.pooling import pooled_spec, source_of
from featcache.extractors import Extractor, Params
from featcache.extractors.faults import blamed_on
from featcache.extractors.rows import RowExtractor
from featcache.format.shard import Item
from featcache.manifest.audio_locations import AudioSource, Command
from featcache.manifest.label_files import template_of
from featcache.manifest.utterances import Manifest
from featcache.quantize import is_quantized, stored_spec
from featcache.spec import FeatureSpec
from featcache.storage.location import Location
from featcache.strings import hash_of
from featcache.version.in_flight import Suspects
from featcache.version.index import Index
from featcache.version.join import RowStatus, differences, item_at
from featcache.version.ledger import Failure
from featcache.version.selection import version_names
from featcache.version.version import Version, VersionInfo, library_versions
from featcache.version.wanted import Wanted

_NAMED = 5
"""Utterances that a note names."""


@dataclass(frozen=True, eq=False)
class BuiltConfig:
    """A config and its extractor, which is built when first asked for."""

    config: Config
    device: Device
    renamed: str = ""
    """The name of its version's folder, if that has been renamed."""

    @cached_property
    def extractor(self) -> Extractor[Params]:
        """The extractor on the device. Raises ConfigError if the config does not suit it."""
        self.device.configure_torch()
        extractor = self.config.build(self.device.torch_device)
        with blamed_on(type(extractor)):
            _refuse_dtype(self.config, extractor.spec)
            extractor.check_audio(self.config.audio.model_dump())
        return extractor

    @property
    def takes_rows(self) -> bool:
        """True if the extractor takes rows of padded clips."""
        return isinstance(self.extractor, RowExtractor)

    @cached_property
    def fingerprint(self) -> str:
        """The config's fingerprint, for which the weights are hashed. Raises what
        `extractor` raises."""
        try:
            return self.config.fingerprint()
        except FeatcacheError:
            _ = self.extractor  # its error says more
            raise

    @property
    def sample_rate(self) -> int:
        """The sample rate of the waveforms, in Hz."""
        return self.config.audio.sample_rate

    @cached_property
    def computed_spec(self) -> FeatureSpec:
        """The spec of the features as they are computed and rounded, before any pooling."""
        return stored_spec(self.extractor.spec, self.config.dtype)

    @property
    def spec(self) -> FeatureSpec:
        """The spec of the features as they are stored."""
        return self.info.spec

    @cached_property
    def label_files(self) -> str | None:
        """The template of the label files that are read; None for audio."""
        return template_of(self.config.resolved())

    @cached_property
    def source_fingerprint(self) -> str | None:
        """The fingerprint of the version from whose features these can be made; None for
        audio."""
        if self.config.pool is not None:
            return source_of(self.config.resolved())
        return self.extractor.source_fingerprint

    @cached_property
    def info(self) -> VersionInfo:
        """The attributes of the config's version."""
        return version_info(self.config, self.extractor.spec)

    @property
    def folder_name(self) -> str:
        """The name of its version's folder."""
        return self.renamed or f"{self.config.name}-{self.fingerprint[:12]}"

    @cached_property
    def waveform_maker(self) -> WaveformMaker:
        """The maker of waveforms from decoded audio."""
        return WaveformMaker.of(self.config.audio, self.config.augment)

    @cached_property
    def max_seconds(self) -> float | None:
        """The longest clip that the config and the extractor allow; None for no limit."""
        limits = (self.config.audio.max_seconds, self.extractor.max_seconds)
        return min((limit for limit in limits if limit is not None), default=None)

    def would_fail_again(
        self, failures: Sequence[Failure], files: Sequence[AudioSource]
    ) -> list[bool]:
        """Tell of each failed utterance whether it would fail again with its file."""
        unchanged = are_unchanged(failures, files)
        return [
            is_unchanged and self._would_be_refused(failure, file)
            for failure, file, is_unchanged in zip(failures, files, unchanged, strict=True)
        ]

    def _would_be_refused(self, failure: Failure, file: AudioSource) -> bool:
        """Tell whether an unchanged file is refused again; a limit may have been lifted."""
        audio = self.config.audio
        if failure.reason == Reason.RATE_REFUSED:
            header = None if isinstance(file, Command) else probe(file)
            if header is None:
                return False
            is_other = audio.resample == "forbid" and header.sample_rate != audio.sample_rate
            return is_other or header.sample_rate < audio.min_source_rate
        if failure.reason != Reason.TOO_LONG:
            return True
        # A file is at least as long as a row's duration.
        seconds = math.inf if failure.duration else probe_seconds(file)
        if self.max_seconds is None or seconds is None:
            return False
        max_seconds = self.max_seconds * self.waveform_maker.speed(failure.id)
        return min(failure.duration or math.inf, seconds - (failure.start or 0.0)) > max_seconds


@dataclass(frozen=True, eq=False)
class VersionPlan:
    """The plan of a run for one version."""

    built: BuiltConfig
    manifest: Manifest
    """The rows of the run, with the config's copies."""
    seconds: NDArray[np.float64]
    first_row: int
    """The number of the first of these rows in the whole manifest."""
    wanted: Wanted
    info: VersionInfo
    path: Location
    is_new: bool
    index: Index
    rows: RowStatus
    batching: BatchingChoice | None
    """The choice how rows are put together; None if the extractor is not needed."""
    failed_before: dict[str, int]
    """The number of failed rows that are not tried again, by reason."""
    suspects: Suspects

    @property
    def config(self) -> Config:
        """The config."""
        return self.built.config

    @cached_property
    def num_missing(self) -> int:
        """The number of rows to extract."""
        return int(self.rows.missing.sum())

    @cached_property
    def num_replaced(self) -> int:
        """The number of rows to extract although an item of that id exists."""
        return int(self.rows.again.sum())

    def find(self, utterance: str) -> int | None:
        """Return the number of the row of this id; None if there is none."""
        rows = np.flatnonzero(self.manifest.ids.hashes() == np.uint64(hash_of(utterance))).tolist()
        return next((row for row in rows if self.manifest.ids[row] == utterance), None)

    @cached_property
    def expected_seconds(self) -> float:
        """Seconds of audio to extract."""
        return float(self.seconds[self.rows.missing].sum())

    @property
    def expected_bytes(self) -> float:
        """Bytes of features to write, without side arrays other than scales and offsets."""
        return self.info.spec.expected_bytes(self.expected_seconds, self.num_missing)


def version_info(config: Config, spec: FeatureSpec) -> VersionInfo:
    """Return the attributes of a config's version."""
    spec = stored_spec(spec, config.dtype)
    if config.pool is not None:
        spec = pooled_spec(spec, config.pool)
    return VersionInfo(
        name=config.name,
        fingerprint=config.fingerprint(),
        config=config.resolved(),
        spec=spec,
        made_by=library_versions(),
    )


def _refuse_dtype(config: Config, spec: FeatureSpec) -> None:
    """Refuse a stored dtype that cannot hold the features: casts do not complain."""
    made, stored = np.dtype(spec.dtype), np.dtype(config.dtype)
    where = f"config {config.source or config.name}: store.dtype"
    if spec.axis.has_times and stored != made:
        raise ConfigError(f"{where}: {stored}: times of events are stored as {made}")
    if stored.kind == made.kind == "f" and stored.itemsize > max(4, made.itemsize):
        raise ConfigError(f"{where}: {stored}: features of {config.extractor} are {made}")
    if made.kind == "f" and stored.kind != "f" and not is_quantized(spec.dtype, config.dtype):
        raise ConfigError(
            f"{where}: {stored} cannot hold the features of {config.extractor}, which are {made}: "
            "use float16, float32, or uint8, which quantises them"
        )
    if made.kind != "f":
        largest = max(spec.codebook_sizes, default=int(np.iinfo(made).max) + 1) - 1
        if stored.kind == "f" or largest > np.iinfo(stored).max:
            raise ConfigError(
                f"{where}: {stored}: codes of {config.extractor} are unsigned integers up to "
                f"{largest}: take {np.min_scalar_type(largest)}"
            )


# Notes for the user before the run


def new_version_notes(cache: Location, info: VersionInfo) -> list[str]:
    """Note how a new version differs from those of the same name. Raises ArgumentError if
    a version has this fingerprint under another name."""
    notes: list[str] = []
    names: list[str] = []
    with suppress(StoreError):  # writing reports it
        names = version_names(cache)
    for name in names:
        if name == info.folder_name:  # another run may have made it meanwhile
            continue
        try:
            sibling = Version.open(cache / name)
        except StoreError:  # `verify` reports it
            continue
        is_namesake = sibling.info.name == info.name
        if sibling.info.fingerprint == info.fingerprint:
            if is_namesake:
                remedy = f"but another folder name: rename it back to {info.folder_name}"
            else:
                remedy = f"under another name: call the config {sibling.info.name} to go on with it"
            raise ArgumentError(
                f"{sibling.path} has this config's fingerprint, {remedy}, or move it out of "
                f"{cache} to extract everything again"
            )
        if is_namesake:
            difference = find_differences(
                sibling.info.config, sibling.info.fingerprint, info.config, info.fingerprint
            )
            deciding = ", ".join(difference.deciding)
            notes.append(f"{info.folder_name} is a new version next to {name}: {deciding}")
    return notes


def suspect_notes(plan: VersionPlan) -> list[str]:
    """Note that rows to be extracted may have crashed an earlier run."""
    if not plan.suspects.ids:
        return []
    missing = plan.manifest.ids.take(np.flatnonzero(plan.rows.missing))
    suspects = [id_ for id_ in missing if id_ in plan.suspects.ids]
    if not suspects:
        return []
    return [
        f"{plan.path.name}: an earlier run died with {counted(len(suspects), 'utterance')} in "
        f"flight ({listing(suspects, 3)}): extracted one by one, in a process of their own"
    ]


def replacement_notes(plan: VersionPlan) -> list[str]:
    """Note which rows are extracted again although there are items of them, and why."""
    rows = np.flatnonzero(plan.rows.again).tolist()
    if not rows:
        return []
    version = Version.open(plan.path)
    changes = []
    for row in rows[:_NAMED]:
        item = item_at(version, plan.index, int(plan.rows.positions[row]))
        change = differences(item, plan.manifest[row]) or file_change(item, plan.manifest)
        changes.append(f"{item.id}: {change}")
    examples = "; ".join(changes)
    if len(rows) > _NAMED:
        examples += f" … and {len(rows) - _NAMED:,} more"
    again = counted(len(rows), "utterance is", "utterances are")
    return [f"{plan.info.folder_name}: {again} extracted again: {examples}"]


def file_change(item: Item, manifest: Manifest) -> str:
    """Describe how the file at an item's path has changed since extraction."""
    size, mtime_ns = stat_of(manifest.resolve(item.path))
    changes = []
    if size != item.size:
        changes.append("size")
    if mtime_ns != item.mtime_ns:
        changes.append("mtime")
    if changes:
        return f"its file's {' and '.join(changes)}"
    if item.decoder == OLD_FFMPEG:
        return "how FFmpeg decodes its file"
    return "its file, which has failed meanwhile"
