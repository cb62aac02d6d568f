"""What a run may choose: its options, as the command line and Python give them, parsed
and checked here alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import extraction_device
from featcache.errors import ArgumentError, ConfigError, listing, require_number
from featcache.storage.location import ObjectPath, as_location

if TYPE_CHECKING:
    from featcache.extraction.jobs import Engine

LOCAL, RAY = "local", "ray"
ALL = "all"
"""The device that stands for every GPU of this machine."""

SHARD_MEGABYTES = 128.0
"""The default size of a shard, approximately."""


@dataclass(frozen=True)
class Options:
    """What a run may choose. What it extracts has the same values, whatever it chooses:
    these are the config's. Raises ArgumentError if one of the options is invalid."""

    device: str | None = None
    """`cpu`, `cuda`, `cuda:1`; with the local engine also `all` or several, as
    `cuda:0,cuda:2`, each of which gets a process. None for cuda if there is one; with
    Ray, for GPUs if the cluster has any."""
    threads: int | None = None
    """The budget for everything; with Ray, of each actor. None for every core, on the CPU
    at most 8."""
    shard_megabytes: float = SHARD_MEGABYTES
    """The size of a shard, approximately."""
    engine: str | Engine = LOCAL
    """`local`; `ray`, for the Ray cluster that this process is in, or that runs on this
    machine, or else one that is started for the run; `ray://host:port`, for a cluster
    elsewhere; or an engine of one's own."""
    retry_failed: bool = False
    """Try utterances that failed in earlier runs again, even if their files are unchanged."""
    check_sources: bool = False
    """Extract utterances again whose file has changed in size or mtime."""
    replace: bool = False
    """Extract utterances again whose path has changed even if they are more than 5 % of
    the version."""
    max_failures: str | int | None = None
    """Stop when more utterances have failed in this run: a number, or a share as `5%`.
    None for no limit."""
    source: str | Path | ObjectPath | None = None
    """A version, or the cache that holds it, whose features are used instead of audio;
    for `units` only."""
    batching: str | None = None
    """How clips share a model's batch: `single`, `equal_length` or `padded`. None for
    what the extractor declares, unless a probe of the device found a difference."""
    allow_mismatch: bool = False
    """Accept that batching even though it may change values."""
    allow_mixed_devices: bool = False
    """Let devices of several models extract, which round differently."""
    partition: str | None = None
    """Extract this partition only, as a job of an array: `3/8`, counted from 0, or
    `auto`, as the job's scheduler says. Of several manifests, or a pattern, it is every
    eighth; of one, rows: such jobs take no lock and build no index."""
    wait: bool = False
    """Wait while somebody else is at work in a version; otherwise, that is an error."""
    dry_run: bool = False
    """Only plan: nothing is extracted or written."""

    def __post_init__(self) -> None:
        if self.device is not None:
            # a device of torch's will do, too
            object.__setattr__(self, "device", str(self.device))
        if not (callable(self.engine) or self.engine == LOCAL or self.is_on_ray):
            raise ArgumentError(
                f"engine {self.engine!r}: there is no such engine; use local, ray or "
                "ray://host:port"
            )
        require_number("shard_megabytes (--shard-size)", self.shard_megabytes, 1e-6, 1e9)
        if self.source is not None:
            as_location("source", self.source)
        _ = self.failure_limit, self.own_partition  # which are checked as they are parsed

    @cached_property
    def failure_limit(self) -> FailureLimit | None:
        """How many utterances of a version may fail; None for any number."""
        return None if self.max_failures is None else FailureLimit.parse(self.max_failures)

    @cached_property
    def own_partition(self) -> Partition | None:
        """The partition to extract; None for all of the manifest."""
        return None if self.partition is None else Partition.parse(self.partition, os.environ)

    @property
    def is_on_ray(self) -> bool:
        """Whether Ray's actors extract."""
        return isinstance(self.engine, str) and (
            self.engine == RAY or self.engine.startswith(f"{RAY}://")
        )

    @cached_property
    def devices(self) -> list[str]:
        """This machine's devices that each have a process to extract. Raises ConfigError
        if one does not exist."""
        names = self.device or ""
        return (
            parse_devices(names) if self.engine == LOCAL and (names == ALL or "," in names) else []
        )

    @property
    def workers(self) -> str:
        """The other processes that are to extract, for the record; empty if this one does."""
        return RAY if self.is_on_ray else ",".join(self.devices)

    @property
    def own_device(self) -> str | None:
        """The device of this process, which plans on the CPU if others extract."""
        return "cpu" if self.workers else self.device


def parse_devices(names: str) -> list[str]:
    """The devices that a name stands for: `all`, every GPU; `cuda:0,cuda:2`; or a single
    one. Raises ConfigError if there is no such device, or no GPU at all."""
    if names == ALL:
        if not (found := [f"cuda:{number}" for number in range(torch.cuda.device_count())]):
            raise ConfigError(
                "device all: torch sees no CUDA device: use cpu, or cpu,cpu for two processes"
            )
        return found
    listed = [name.strip() for name in names.split(",")]
    if "" in listed:
        raise ConfigError(
            f"device {names!r}: a name is missing beside a comma; use cuda:0,cuda:2 or cpu,cpu"
        )
    for name in listed:
        extraction_device(name)
    return listed


# How many utterances may fail

_MIN_TRIED = 100
"""The utterances that must have been tried before a share of them says something, unless
the run ends earlier."""

_LIMIT = re.compile(r"(\d{1,9})|(\d{1,3}(?:\.\d{1,6})?) ?%", re.ASCII)


@dataclass(frozen=True)
class FailureLimit:
    """How many utterances may fail in a run: a number, or a share of those that were
    tried."""

    text: str
    """As the user gave it."""
    count: float
    """The number; infinite if there is only a share."""
    share: float
    """The share, 0 to 1; 1 if there is only a number."""

    @classmethod
    def parse(cls, text: str | int) -> FailureLimit:
        """A number, such as `20`, or a percentage, such as `0.5%`. Raises ArgumentError
        if it is neither."""
        text = str(text)
        if not (found := _LIMIT.fullmatch(text.strip())) or float(found[2] or 0) > 100:
            raise ArgumentError(
                f"--max-failures is {text!r}: give a number of utterances, or a percentage "
                "such as 1%"
            )
        return cls(text.strip(), float(found[1] or math.inf), float(found[2] or 100) / 100)

    def fault(self, failed: int, tried: int, is_end: bool) -> str:
        """That too many have failed; empty if not. A share counts once 100 were tried,
        and at the end of the run."""
        is_telling = is_end or tried >= _MIN_TRIED
        if failed <= self.count and not (is_telling and failed > self.share * tried):
            return ""
        are = "utterance that was tried has" if tried == 1 else "utterances that were tried have"
        return f"{failed:,} of the {tried:,} {are} failed, and --max-failures allows {self.text}"


# Which partition of a manifest a job of an array extracts

MOST_PARTITIONS = 1_000_000
"""The most partitions that a manifest may be extracted in."""

_TEXT = re.compile(r"(\d{1,8})/(\d{1,8})", re.ASCII)
_GIVE = "give the numbers themselves, as --partition I/N, or with GNU parallel --partition {}/8"


@dataclass(frozen=True)
class Partition:
    """A partition of a manifest: of so many, the one of this number, from 0."""

    number: int
    """The number of the partition, from 0."""
    count: int
    chosen_by: str = ""
    """The variables of the environment that say so; empty if the user did."""

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> Partition:
        """A partition from what `--partition` was given: `3/8`, counted from 0, or
        `auto`. Raises ArgumentError if there is no such partition, or the environment
        does not say which it is."""
        if text == "auto":
            return _of_environment(environment)
        if not (found := _TEXT.fullmatch(str(text))):
            raise ArgumentError(
                f"--partition is {text!r}: give its number and how many there are, as 0/8, or auto"
            )
        return _checked(int(found[1]), int(found[2]), f"--partition is {text}")

    def span(self, duration: NDArray[np.float64]) -> tuple[int, int]:
        """The first utterance of the partition, and the one behind its last: its share of
        the seconds if all have durations, else of the utterances.

        Args:
            duration: The seconds of all utterances of the manifest, float64
                `[utterances]`; NaN if not given.
        """
        if np.isnan(duration).any():
            duration = np.ones(len(duration))
        # which no sum of absurd ones exceeds
        ends = np.cumsum(duration / max(1.0, duration.max(initial=0.0)))
        begins = np.concatenate([[0.0], ends])[:-1]
        shares = [
            ends[-1:].sum() * number / self.count for number in (self.number, self.number + 1)
        ]
        first, end = np.searchsorted(begins, shares).tolist()
        return first, len(duration) if self.number + 1 == self.count else end


def _checked(number: int, count: int, where: str, chosen_by: str = "") -> Partition:
    if not 1 <= count <= MOST_PARTITIONS:
        raise ArgumentError(f"{where}: there are 1 to {MOST_PARTITIONS:,} partitions")
    if not 0 <= number < count:
        raise ArgumentError(f"{where}: partitions count from 0: 0/{count} to {count - 1}/{count}")
    return Partition(number, count, chosen_by)


_VARIABLES = (
    (
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_TASK_MIN",
        "SLURM_ARRAY_TASK_MAX",
        "SLURM_ARRAY_TASK_COUNT",
    ),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Those by which each scheduler says a job's number, in an array also the lowest, the
highest and the count. Sources: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"; Kubernetes,
"Indexed Job"; SkyPilot, "Environment Variables"; srun(1)."""


def _of_environment(environment: Mapping[str, str]) -> Partition:
    """The partition that a scheduler gives this job."""
    names = next((names for names in _VARIABLES if environment.keys() >= {*names}), None)
    if names is None:
        raise ArgumentError(f"--partition auto: {_why_unknown(environment)}")
    for name in names:
        if not re.fullmatch(r"\d{1,8}", environment[name], re.ASCII):
            raise ArgumentError(
                f"--partition auto: {name} is {environment[name]!r}, and no whole number"
            )
    number, *bounds, count = (int(environment[name]) for name in names)
    chosen_by = ", ".join(f"{name}={environment[name]}" for name in names)
    where = f"--partition auto: {chosen_by}"
    if bounds:
        if (tasks := environment.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
            what = (
                f"srun starts {tasks} tasks in each job of the array, and all would do the "
                "same partition"
            )
            raise ArgumentError(f"--partition auto: {what}: srun --ntasks=1")
        least, most = bounds
        step, is_uneven = divmod(most - least, count - 1) if count > 1 else (1, 0)
        number, is_between = divmod(number - least, max(1, step))
        if is_uneven or is_between:
            raise ArgumentError(
                f"{where}: these ids are not evenly spaced, as in --array=0-{count - 1}: {_GIVE}"
            )
    return _checked(number, count, where, chosen_by)


def _why_unknown(environment: Mapping[str, str]) -> str:
    """Why the environment does not say which partition it is, and what to do."""
    for number, *others in _VARIABLES:
        if number in environment:
            lacking = next(name for name in others if name not in environment)
            what = (
                f"there is {number}, and no {lacking} in the environment: set the variable "
                f"{lacking}"
            )
            return (
                f"{what}, in Kubernetes in the pod's template to the job's `completions`, "
                f"or {_GIVE}"
            )
    return f"there is no {listing(number for number, *_ in _VARIABLES)} in the environment: {_GIVE}"
