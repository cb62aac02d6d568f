"""The partition of a manifest that one job of an array extracts: `--partition`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, listing

MOST_PARTITIONS = 1_000_000
"""The most partitions that a manifest may be extracted in."""

_TEXT = re.compile(r"(\d{1,8})/(\d{1,8})", re.ASCII)
_GIVE = "give the numbers themselves, as --partition I/N, or with GNU parallel --partition {}/8"

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
"""The variables in which each scheduler gives a job's number and the count of jobs. Slurm's
arrays also give the lowest and the highest number. Sources: sbatch(1), "OUTPUT ENVIRONMENT
VARIABLES"; Kubernetes, "Indexed Job"; SkyPilot, "Environment Variables"; srun(1)."""


@dataclass(frozen=True)
class Partition:
    """A partition of a manifest."""

    number: int
    """The number of the partition, from 0."""
    count: int
    chosen_by: str = ""
    """The variables of the environment that chose it; empty if the user did."""

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> Partition:
        """Parse the value of `--partition`: `3/8`, counted from 0, or `auto`. Raises
        ArgumentError if there is no such partition, or the environment does not name it."""
        if text == "auto":
            return _of_environment(environment)
        match = _TEXT.fullmatch(str(text))
        if match is None:
            raise ArgumentError(
                f"--partition is {text!r}: give its number and how many there are, as 0/8, or auto"
            )
        return _checked(int(match[1]), int(match[2]), f"--partition is {text}")

    def span(self, duration: NDArray[np.float64]) -> tuple[int, int]:
        """Return the first utterance of the partition, and the one after its last. The
        partition has its share of the seconds if all have durations, else of the utterances.
        `duration` has the seconds of all utterances, float64 `[utterances]`, or NaN."""
        if np.isnan(duration).any():
            duration = np.ones(len(duration))
        # Relative durations have a finite sum, even if some are absurd.
        ends = np.cumsum(duration / max(1.0, duration.max(initial=0.0)))
        begins = np.concatenate([[0.0], ends])[:-1]
        total = ends[-1:].sum()
        bounds = [total * number / self.count for number in (self.number, self.number + 1)]
        first, end = np.searchsorted(begins, bounds).tolist()
        if self.number + 1 == self.count:
            end = len(duration)
        return first, end


def _checked(number: int, count: int, where: str, chosen_by: str = "") -> Partition:
    if not 1 <= count <= MOST_PARTITIONS:
        raise ArgumentError(f"{where}: there are 1 to {MOST_PARTITIONS:,} partitions")
    if not 0 <= number < count:
        raise ArgumentError(f"{where}: partitions count from 0: 0/{count} to {count - 1}/{count}")
    return Partition(number, count, chosen_by)


def _of_environment(environment: Mapping[str, str]) -> Partition:
    auto = "--partition auto:"
    names = next((names for names in _VARIABLES if environment.keys() >= {*names}), None)
    if names is None:
        raise ArgumentError(f"{auto} {_why_unknown(environment)}")
    for name in names:
        if not re.fullmatch(r"\d{1,8}", environment[name], re.ASCII):
            raise ArgumentError(f"{auto} {name} is {environment[name]!r}, and no whole number")
    number, *bounds, count = (int(environment[name]) for name in names)
    chosen_by = ", ".join(f"{name}={environment[name]}" for name in names)
    if bounds:
        tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1":
            raise ArgumentError(
                f"{auto} srun starts {tasks} tasks in each job of the array, and all would do the "
                "same partition: srun --ntasks=1"
            )
        lowest, highest = bounds
        number = _number_in_array(number, lowest, highest, count, f"{auto} {chosen_by}")
    return _checked(number, count, f"{auto} {chosen_by}", chosen_by)


def _number_in_array(number: int, lowest: int, highest: int, count: int, where: str) -> int:
    """Return the number, from 0, of a job of an array with evenly spaced ids."""
    step, rest = 1, 0
    if count > 1:
        step, rest = divmod(highest - lowest, count - 1)
    position, offset = divmod(number - lowest, max(1, step))
    if rest or offset:
        raise ArgumentError(
            f"{where}: these ids are not evenly spaced, as in --array=0-{count - 1}: {_GIVE}"
        )
    return position


def _why_unknown(environment: Mapping[str, str]) -> str:
    for number, *others in _VARIABLES:
        if number in environment:
            lacking = next(name for name in others if name not in environment)
            return (
                f"there is {number}, and no {lacking} in the environment: set the variable "
                f"{lacking}, in Kubernetes in the pod's template to the job's `completions`, "
                f"or {_GIVE}"
            )
    return f"there is no {listing(number for number, *_ in _VARIABLES)} in the environment: {_GIVE}"
