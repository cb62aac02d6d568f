"""The options of a run, and what it has to do for each config's version."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featcache.config import Config
from featcache.errors import ConfigError
from featcache.extract.plan import Todo
from featcache.extract.policy import Choice
from featcache.manifest import Manifest
from featcache.quantize import is_quantized, stored_spec
from featcache.spec import FeatureSpec
from featcache.store.in_flight import Suspects
from featcache.store.index import Index
from featcache.store.version import VersionInfo, library_versions

SHARD_MEGABYTES = 128.0
"""A shard's size, about."""


@dataclass(frozen=True)
class Options:
    """What a run may choose, and values do not depend on.

    Attributes:
        device: `cpu`, `cuda`, `cuda:1`; None is cuda where there is one.
        threads: the budget for everything; None is what `Device` says.
        shard_megabytes: a shard's size, about.
        retry_failed: try failures of earlier runs again, whether or not their files changed.
        check_sources: extract again where a file's size or mtime is not what it was.
        replace: extract again where rows name other files than before, however many do.
        source: a version, or the cache that holds it, to make features from instead of audio; for `units` alone.
        batching: how rows are put together: `single`, `equal_length`, `padded`; None for the loosest that is clean.
        allow_mismatch: take that, though it was neither declared nor found to be clean.
    """

    device: str | None = None
    threads: int | None = None
    shard_megabytes: float = SHARD_MEGABYTES
    retry_failed: bool = False
    check_sources: bool = False
    replace: bool = False
    source: Path | None = None
    batching: str | None = None
    allow_mismatch: bool = False


@dataclass(frozen=True)
class Work:
    """What one config's version lacks.

    Attributes:
        config: the config.
        manifest: what is wanted: the run's, with the config's copies.
        info: of the version.
        path: of the version, which may not exist yet.
        todo: what is missing.
        index: of what is there.
        choice: how its extractor's rows are put together.
        failed_before: how many of the rows that `todo` has as failed have failed for which reason.
        suspects: what may have crashed earlier runs.
    """

    config: Config
    manifest: Manifest
    info: VersionInfo
    path: Path
    todo: Todo
    index: Index
    choice: Choice
    failed_before: dict[str, int] = field(default_factory=dict)
    suspects: Suspects = Suspects()  # noqa: RUF009 (it is frozen)

    @property
    def replaced(self) -> int:
        """Rows whose item in the cache another row or another file made."""
        return int((self.todo.missing & (self.todo.replaces >= 0)).sum())

    @property
    def bytes_per_second(self) -> float:
        """Of features, for each second of audio."""
        return self.info.spec.frame_rate * self.info.spec.bytes_per_frame


def version_info(config: Config, spec: FeatureSpec) -> VersionInfo:
    """What a version of `config` says of itself, whose extractor's features are as `spec` says."""
    stored = stored_spec(spec, config.dtype)
    return VersionInfo(config.name, config.fingerprint(), config.resolved(), stored, library_versions())


def refuse_dtype(config: Config, spec: FeatureSpec) -> None:
    """Refuse to store features as integers, but to quantise them, and codes as what does not hold them all: casts do
    not complain.
    """
    made, stored = np.dtype(spec.dtype), np.dtype(config.dtype)
    what = f"config {config.source or config.name}: store.dtype"
    if made.kind == "f" and stored.kind != "f" and not is_quantized(spec.dtype, config.dtype):
        raise ConfigError(
            f"{what}: {stored} cannot hold the features of {config.extractor}, which are {made}: use float16, float32, "
            "or uint8, which quantises them"
        )
    if made.kind != "f":
        largest = max(spec.codebook_sizes, default=int(np.iinfo(made).max) + 1) - 1
        if stored.kind == "f" or largest > np.iinfo(stored).max:
            raise ConfigError(
                f"{what}: {stored}: codes of {config.extractor} are unsigned integers up to "
                f"{largest}: take {np.min_scalar_type(largest)}"
            )
