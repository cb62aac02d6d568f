"""Why a config makes another version than there is, and why a manifest's utterances would
be extracted (again)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from featcache.config import Config
from featcache.config.config import Differences, find_differences
from featcache.errors import ManifestError
from featcache.extraction.version_plan import VersionPlan, file_change
from featcache.manifest.segments import Segment
from featcache.strings import Strings
from featcache.version.join import by_shard, differences, refuse_paths
from featcache.version.ledger import standing_failures
from featcache.version.version import Version


@dataclass(frozen=True)
class Cause:
    """Why some utterances would be extracted."""

    why: str
    """What is the same of all of them: `new`, `path changed`, `file changed`, `failed
    before: file_missing` …"""
    rows: NDArray[np.int64]
    """The numbers of their rows, rising, int64 `[n]`."""
    ids: Strings
    example: str
    """What exactly it is of the first of them; empty if there is no more to say."""
    again: bool
    """Whether the version has features of them, which would not count any more."""


def compare_versions(
    config: Config, fingerprint: str, versions: list[Version]
) -> list[tuple[Version, Differences]]:
    """How a config of this fingerprint differs from those of versions; its own comes
    first, then the likest."""
    ours = config.resolved(), fingerprint
    found = [
        (version, find_differences(version.info.config, version.info.fingerprint, *ours))
        for version in versions
    ]
    return sorted(found, key=lambda one: (len(one[1].deciding), one[0].info.name != config.name))


def find_causes(plan: VersionPlan) -> list[Cause]:
    """Why the rows that a plan is to extract are to be extracted, the most frequent cause
    first. Raises DamagedError if a shard that holds older features is not what was
    written."""
    found: dict[tuple[str, bool], list[tuple[NDArray[np.int64], str]]] = {}
    for rows, why, again, example in _reasons(plan):
        found.setdefault((why, again), []).append((rows, example))
    causes = []
    for (why, again), parts in found.items():
        numbers = np.sort(np.concatenate([rows for rows, _ in parts]))
        _, example = min(parts, key=lambda part: int(part[0][0]))
        causes.append(Cause(why, numbers, plan.manifest.ids.take(numbers), example, again))
    return sorted(causes, key=lambda cause: -len(cause.rows))


def refusal(plan: VersionPlan) -> str:
    """Why `extract` would refuse the manifest without `--replace`; empty if it would not."""
    if plan.is_new:
        return ""
    try:
        refuse_paths(plan.manifest, plan.rows, Version.open(plan.path), plan.index)
    except ManifestError as error:
        return str(error)
    return ""


def _reasons(plan: VersionPlan) -> Iterator[tuple[NDArray[np.int64], str, bool, str]]:
    """Rows to extract, int64 `[n]`: with why, whether again, and what exactly it is of
    the first of them."""
    fresh, again = (
        np.flatnonzero(plan.rows.missing & ~plan.rows.changed),
        np.flatnonzero(plan.rows.again),
    )
    version = None if plan.is_new else Version.open(plan.path)
    failures = {} if version is None else standing_failures(version, plan.index)
    failed = np.isin(plan.manifest.ids.take(fresh).hashes(), Strings.of(failures).hashes())
    if not failed.all():
        yield fresh[~failed], "new", False, ""
    for row in fresh[failed][:, None]:
        # None if only the hashes of two ids are equal
        failure = failures.get(plan.manifest.ids[int(row[0])])
        yield (
            row,
            f"failed before: {failure.reason}" if failure else "new",
            False,
            failure.message if failure else "",
        )
    if version is None:
        return
    for inside, shard, numbers in by_shard(version, plan.index, plan.rows.positions[again]):
        for row, item in zip(again[inside][:, None], shard.items(numbers.tolist()), strict=True):
            utterance = plan.manifest[int(row[0])]
            if changed := differences(item, utterance):
                names = [
                    one.name
                    for one in fields(Segment)
                    if getattr(item, one.name) != getattr(utterance, one.name)
                ]
                yield row, f"{', '.join(names)} changed", True, changed
            elif (failure_of_row := failures.get(item.id)) is not None:
                yield (
                    row,
                    f"failed before, with another file: {failure_of_row.reason}",
                    True,
                    failure_of_row.message,
                )
            else:
                yield row, "file changed", True, file_change(item, plan.manifest)
