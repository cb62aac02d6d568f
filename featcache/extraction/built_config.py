"""A config and the extractor that it names, for extraction."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from featcache.audio.decode import probe, probe_seconds
from featcache.audio.waveform import WaveformMaker
from featcache.config import Config
from featcache.device import Device
from featcache.errors import ConfigError, FeatcacheError, Reason
from featcache.extraction.audio_files import are_unchanged
from featcache.extractors import Extractor, Params, fingerprint
from featcache.extractors.faults import blamed_on
from featcache.manifest.audio_locations import AudioSource, Command
from featcache.manifest.copies import Copies
from featcache.manifest.label_files import template_of
from featcache.spec import MAIN, Clip, FeatureSpec, Track, numpy_dtype
from featcache.spec.quantize import is_quantized, stored_spec
from featcache.version.ledger import Failure
from featcache.version.records import library_versions
from featcache.version.version import VersionInfo


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

    def model_pass(self) -> object:
        """Return a key that is equal for configs that differ only in what they take from a
        model's pass, and in how they store it."""
        taken = self.config.params.taken
        if not taken or not self.extractor.takes_rows:
            return id(self)
        resolved = self.config.resolved()
        for name in taken:
            resolved["params"].pop(name, None)
        kept = {key: resolved.get(key) for key in ("extractor", "params", "audio", "augment")}
        return json.dumps([kept, self.extractor.chosen_batching], sort_keys=True)

    def require_audio(self, where: object, remedy: str) -> None:
        """Raise ConfigError if the features cannot be made from audio."""
        if self.extractor.needs_source:
            what = "its features are made from those of another version, and not from audio"
            raise ConfigError(f"{where}: {what}: {remedy}")

    @property
    def has_weights(self) -> bool:
        """True if the extractor loads weights."""
        return self.config.extractor_class.weights_digest(self.config.params) is not None

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
        info = version_info(self.config, self.extractor.spec)
        if self.config.pool is not None:
            return info
        with self.device.slot():
            silence = self.extractor.silence()
        if silence is None:
            return info
        return msgspec.structs.replace(info, silence=(*silence.flatten().tolist(),))

    @property
    def folder_name(self) -> str:
        """The name of its version's folder."""
        return self.renamed or f"{self.config.name}-{self.fingerprint[:12]}"

    @cached_property
    def waveform_maker(self) -> WaveformMaker:
        """The maker of waveforms from decoded audio."""
        return WaveformMaker.of(self.config.audio, self.config.augment)

    @property
    def copies(self) -> Copies:
        """The copies that are made of every utterance."""
        return self.waveform_maker.copies

    @cached_property
    def max_seconds(self) -> float:
        """The longest clip that the config and the extractor allow; else infinity."""
        limits = (self.config.audio.max_seconds, self.extractor.max_seconds)
        return min((limit for limit in limits if limit is not None), default=math.inf)

    def would_fail_again(
        self, failures: Sequence[Failure], files: Sequence[AudioSource]
    ) -> list[bool]:
        """Tell of each failed utterance whether it would fail again with its file."""
        return [
            is_unchanged and self._would_be_refused(failure, file)
            for failure, file, is_unchanged in zip(
                failures, files, are_unchanged(failures, files), strict=True
            )
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
        seconds = failure.duration or probe_seconds(file)
        if seconds is None:
            return False
        if not failure.duration:
            seconds -= failure.start or 0.0
        return seconds > self.max_seconds * self.waveform_maker.speed(failure.id)


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
    made, stored = numpy_dtype(spec.dtype), numpy_dtype(config.dtype)
    where = f"config {config.source or config.name}: store.dtype"
    if stored != made and (spec.axis.has_times or stored == np.float64):
        raise ConfigError(f"{where}: {config.dtype}: features of {config.extractor} are {made}")
    if made.kind == "f" and stored.kind != "f" and not is_quantized(spec.dtype, config.dtype):
        raise ConfigError(
            f"{where}: {stored} cannot hold the features of {config.extractor}, which are {made}: "
            "use float16, bfloat16, float32, or uint8, which quantises them"
        )
    if made.kind != "f":
        largest = max(spec.codebook_sizes, default=int(np.iinfo(made).max) + 1) - 1
        if stored.kind == "f" or largest > np.iinfo(stored).max:
            raise ConfigError(
                f"{where}: {config.dtype}: codes of {config.extractor} are unsigned integers up to "
                f"{largest}: take {np.min_scalar_type(largest)}"
            )


def pooled_spec(spec: FeatureSpec, pool: str) -> FeatureSpec:
    """Describe the vectors that `pool` makes of features. Raises ConfigError if they are
    codes, or not along time."""
    if spec.codebook_sizes or not spec.axis.exact_rate:
        raise ConfigError(
            f"store.pool: {pool}, but the features are {spec.main.shape_text()}, {spec.units}: "
            "only frames of floats have a mean"
        )
    first, *rest = spec.item_shape or (1,)
    shape = (first * len(pool.split("+")), *rest)
    return FeatureSpec.of(
        spec.sample_rate, Track(MAIN, shape, "float32", f"{pool} over time: {spec.units}", Clip())
    )


def source_of(config: Mapping[str, Any]) -> str:
    """Return the fingerprint of the version whose frames a resolved config pools."""
    return fingerprint({**config, "store": {"dtype": config["store"]["dtype"]}})
