"""Which partition of a manifest a job of an array is to extract: `--partition 3/8`, or as the job's scheduler says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError

MOST_PARTITIONS = 1_000_000
"""The most partitions that a manifest may be extracted in."""

_TEXT = re.compile(r"(\d{1,8})/(\d{1,8})", re.ASCII)
_ARRAY_SIZE = "give --partition I/N with the numbers themselves"


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
        """A partition from what `--partition` was given: `3/8`, counted from 0, or `auto`. Raises ArgumentError if
        there is no such partition, or the environment does not say which it is."""
        if text == "auto":
            return _of_environment(environment)
        found = _TEXT.fullmatch(str(text))
        if found is None:
            raise ArgumentError(
                f"--partition is {text!r}: give its number and how many there are, such as 0/8, or auto"
            )
        return _checked(int(found[1]), int(found[2]), f"--partition is {text}")

    def span(self, duration: NDArray[np.float64]) -> tuple[int, int]:
        """The first utterance of the partition, and the one behind its last: its share of the seconds if all have
        durations, else of the utterances.

        Args:
            duration: The seconds of all utterances of the manifest, float64 `[utterances]`; NaN if not given.
        """
        if np.isnan(duration).any():
            duration = np.ones(len(duration))
        ends = np.cumsum(duration / max(1.0, duration.max(initial=0.0)))  # which no sum of absurd ones exceeds
        begins = np.concatenate([[0.0], ends])[:-1]
        shares = [ends[-1:].sum() * number / self.count for number in (self.number, self.number + 1)]
        first, end = np.searchsorted(begins, shares).tolist()
        return first, len(duration) if self.number + 1 == self.count else end


def _checked(number: int, count: int, where: str, chosen_by: str = "") -> Partition:
    if not 1 <= count <= MOST_PARTITIONS:
        raise ArgumentError(f"{where}: there are 1 to {MOST_PARTITIONS:,} partitions")
    if not 0 <= number < count:
        raise ArgumentError(f"{where}: partitions count from 0: 0/{count} to {count - 1}/{count}")
    return Partition(number, count, chosen_by)


def _of_environment(environment: Mapping[str, str]) -> Partition:
    """The partition that a scheduler gives this job.

    Sources: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"; srun(1); Kubernetes, "Indexed Job"; SkyPilot, "Environment
    Variables"; parallel(1), "ENVIRONMENT VARIABLES"."""
    if "SLURM_ARRAY_TASK_ID" in environment:
        return _of_slurm_array(environment)
    if "JOB_COMPLETION_INDEX" in environment and "JOB_COMPLETIONS" not in environment:
        raise ArgumentError(
            "--partition auto: Kubernetes tells a pod its JOB_COMPLETION_INDEX, but not how many there are: set the "
            "variable JOB_COMPLETIONS in the pod's template to the job's `completions`"
        )
    for number, count in (
        ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
        ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ):
        if number in environment and count in environment:
            values = _whole_numbers(environment, number, count)
            chosen_by = f"{number}={values[0]}, {count}={values[1]}"
            return _checked(values[0], values[1], f"--partition auto: {chosen_by}", chosen_by)
    if "PARALLEL_SEQ" in environment:
        raise ArgumentError(
            "--partition auto: GNU parallel does not tell a job how many there are: "
            "seq 0 7 | parallel featcache extract … --partition {}/8"
        )
    raise ArgumentError(
        "--partition auto: there is no SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX or SKYPILOT_NODE_RANK in the "
        f"environment: {_ARRAY_SIZE}"
    )


def _of_slurm_array(environment: Mapping[str, str]) -> Partition:
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")]
    if lacking := [name for name in names if name not in environment]:
        raise ArgumentError(f"--partition auto: there is no {lacking[0]} in the environment: {_ARRAY_SIZE}")
    id_, least, most, count = _whole_numbers(environment, *names)
    chosen_by = f"SLURM_ARRAY_TASK_ID={id_} of {count} from {least} to {most}"
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise ArgumentError(
            f"--partition auto: srun starts {environment['SLURM_STEP_NUM_TASKS']} tasks in each job of the array, and "
            "all would do the same partition: srun --ntasks=1"
        )
    step, is_uneven = divmod(most - least, count - 1) if count > 1 else (1, 0)
    number, is_between = divmod(id_ - least, max(1, step))
    if is_uneven or is_between:
        raise ArgumentError(
            f"--partition auto: {chosen_by}: these ids are not evenly spaced, as in --array=0-{count - 1}: "
            f"{_ARRAY_SIZE}"
        )
    return _checked(number, count, f"--partition auto: {chosen_by}", chosen_by)


def _whole_numbers(environment: Mapping[str, str], *names: str) -> list[int]:
    for name in names:
        if not re.fullmatch(r"\d{1,8}", environment[name], re.ASCII):
            raise ArgumentError(f"--partition auto: {name} is {environment[name]!r}, and no whole number")
    return [int(environment[name]) for name in names]
