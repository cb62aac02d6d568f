"""The options of a run, as the command line and Python give them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from featcache.device import extraction_device
from featcache.errors import ArgumentError, ConfigError, did_you_mean, require_number
from featcache.extraction.jobs import Engine, FailureLimit
from featcache.extraction.partition import Partition
from featcache.storage.location import ObjectPath, as_location

LOCAL, RAY = "local", "ray"
ALL = "all"
"""The device that stands for every GPU of this machine."""

SHARD_MEGABYTES = 128.0
"""The default size of a shard, approximately."""


@dataclass(frozen=True)
class Options:
    """The choices of a run, which change no value. Raises ArgumentError if one is
    invalid."""

    device: str | None = None
    """`cpu`, `cuda`, `cuda:1`; with the local engine also `all` or several, as
    `cuda:0,cuda:2`, each of which gets a process. None for cuda if there is one; with Ray,
    for GPUs if the cluster has any."""
    threads: int | None = None
    """The budget of threads; with Ray, of each actor. None for every core, on the CPU at
    most 8."""
    shard_megabytes: float = SHARD_MEGABYTES
    """The size of a shard, approximately."""
    engine: str | Engine = LOCAL
    """`local`; `ray`, for the Ray cluster that this process is in, or that runs on this
    machine, or else one that is started for the run; `ray://host:port`, for another
    cluster; or an engine of one's own."""
    retry_failed: bool = False
    """Try utterances again that failed in earlier runs, even if their files are
    unchanged."""
    check_sources: bool = False
    """Extract utterances again if their file has changed in size or mtime; with a `source`,
    if that was made from another file."""
    replace: bool = False
    """Extract utterances again if their path has changed, even if they are more than 5 % of
    the version."""
    max_failures: str | int | None = None
    """Stop when more utterances have failed: a number, or a share as `5%`. None for no
    limit."""
    source: str | Path | ObjectPath | None = None
    """A version, or its cache, whose features are used instead of audio; for `units` and
    `store.pool` only."""
    batching: str | None = None
    """How clips share a model's batch: `single`, `equal_length` or `padded`. None for what
    the extractor declares, unless a probe of the device found a difference."""
    allow_mismatch: bool = False
    """Accept that batching even though it may change values."""
    allow_mixed_devices: bool = False
    """Let devices of several models extract, which round differently."""
    partition: str | None = None
    """Extract this partition only, as a job of an array: `3/8`, counted from 0, or `auto`,
    as the job's scheduler says. Of several manifests, it is every eighth; of one, rows:
    such jobs take no lock and build no index."""
    wait: bool = False
    """Wait while somebody else is at work in a version, instead of raising an error."""
    dry_run: bool = False
    """Only plan: extract and write nothing."""

    def __post_init__(self) -> None:
        if self.device is not None:  # it may be a torch.device
            object.__setattr__(self, "device", str(self.device))
        if not (callable(self.engine) or self.engine == LOCAL or self.is_on_ray):
            meant = did_you_mean(str(self.engine), (LOCAL, "ray"))
            message = f"there is no such engine{meant}; use local, ray or ray://host:port"
            raise ArgumentError(f"engine {self.engine!r}: {message}")
        require_number("shard_megabytes (--shard-size)", self.shard_megabytes, 1e-6, 1e9)
        if self.source is not None:
            as_location("source", self.source)
        _ = self.failure_limit  # parsing checks it
        _ = self.own_partition

    @cached_property
    def failure_limit(self) -> FailureLimit | None:
        """The utterances that may fail; None for any number."""
        return None if self.max_failures is None else FailureLimit.parse(self.max_failures)

    @cached_property
    def own_partition(self) -> Partition | None:
        """The partition to extract; None for all of the manifest."""
        return None if self.partition is None else Partition.parse(self.partition, os.environ)

    @property
    def is_on_ray(self) -> bool:
        """True if Ray's actors extract."""
        if not isinstance(self.engine, str):
            return False
        return self.engine == RAY or self.engine.startswith(f"{RAY}://")

    @cached_property
    def devices(self) -> list[str]:
        """The devices of this machine that each get a process. Raises ConfigError if one
        does not exist."""
        names = self.device or ""
        if self.engine == LOCAL and (names == ALL or "," in names):
            return parse_devices(names)
        return []

    @property
    def workers(self) -> str:
        """The other processes that extract, for the record; empty if this one does."""
        return RAY if self.is_on_ray else ",".join(self.devices)

    @property
    def own_device(self) -> str | None:
        """The device of this process, which plans on the CPU if others extract."""
        return "cpu" if self.workers else self.device


def parse_devices(names: str) -> list[str]:
    """List the devices that a name stands for: `all`, every GPU; `cuda:0,cuda:2`; or a
    single one. Raises ConfigError if there is no such device, or no GPU at all."""
    if names == ALL:
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        if not devices:
            raise ConfigError(
                "device all: torch sees no CUDA device: use cpu, or cpu,cpu for two processes"
            )
        return devices
    devices = [name.strip() for name in names.split(",")]
    if "" in devices:
        raise ConfigError(f"device {names!r}: a name is missing; use cuda:0,cuda:2 or cpu,cpu")
    for device in devices:
        extraction_device(device)
    return devices
