"""Explains why a config makes another version, and why utterances would be extracted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from featcache.config import Config
from featcache.config.config import Differences, find_differences
from featcache.errors import ManifestError
from featcache.extraction.plan import NOT_THE_NEWEST, VersionPlan, file_change
from featcache.format.shard import Item
from featcache.manifest.segments import Segment
from featcache.manifest.strings import Strings
from featcache.spec import Ints
from featcache.version.join import by_shard, differences, refuse_paths
from featcache.version.ledger import Failure, standing_failures
from featcache.version.version import Version


@dataclass(frozen=True)
class Cause:
    """A reason why some utterances would be extracted."""

    why: str
    """The reason: `new`, `path changed`, `file changed`, `failed before: file_missing` …"""
    rows: Ints
    """The rising numbers of their rows, int64 `[n]`."""
    ids: Strings
    example: str
    """The details for the first of them, if any."""
    again: bool
    """True if the version has features of them, which would be replaced."""


def compare_versions(
    config: Config, fingerprint: str, versions: list[Version]
) -> list[tuple[Version, Differences]]:
    """List how a config differs from the configs of versions, the most similar first."""
    resolved = config.resolved()

    def compare(version: Version) -> Differences:
        info = version.info
        return find_differences(info.config, info.fingerprint, resolved, fingerprint)

    compared = [(version, compare(version)) for version in versions]
    compared.sort(key=lambda pair: (len(pair[1].deciding), pair[0].info.name != config.name))
    return compared


def find_causes(plan: VersionPlan) -> list[Cause]:
    """List why a plan extracts rows, the most frequent cause first."""
    by_cause: dict[tuple[str, bool], list[tuple[Ints, str]]] = {}
    for rows, why, again, example in _reasons(plan):
        by_cause.setdefault((why, again), []).append((rows, example))
    causes = []
    for (why, again), parts in by_cause.items():
        numbers = np.sort(np.concatenate([rows for rows, _ in parts]))
        _, example = min(parts, key=lambda part: int(part[0][0]))
        causes.append(Cause(why, numbers, plan.manifest.ids.take(numbers), example, again))
    return sorted(causes, key=lambda cause: -len(cause.rows))


def refusal(plan: VersionPlan) -> str:
    """Return why `extract` would refuse the manifest without `--replace`; else nothing."""
    if plan.is_new:
        return ""
    try:
        refuse_paths(plan.manifest, plan.rows, Version.open(plan.path), plan.index)
    except ManifestError as error:
        return str(error)
    return ""


def _reasons(plan: VersionPlan) -> Iterator[tuple[Ints, str, bool, str]]:
    """List rows to extract, int64 `[n]`, with `why`, `again` and `example` of a `Cause`."""
    fresh = np.flatnonzero(plan.rows.missing & ~plan.rows.changed)
    if plan.is_new:
        if len(fresh):
            yield fresh, "new", False, ""
        return
    version = Version.open(plan.path)
    failures = standing_failures(version, plan.index)
    has_failed = np.isin(plan.manifest.ids.take(fresh).hashes(), Strings.of(failures).hashes())
    if not has_failed.all():
        yield fresh[~has_failed], "new", False, ""
    for row in fresh[has_failed].tolist():
        failure = failures.get(plan.manifest.ids[row])
        if failure is None:  # another id has the same hash
            yield np.array([row]), "new", False, ""
        else:
            yield np.array([row]), f"failed before: {failure.reason}", False, failure.message
    again = np.flatnonzero(plan.rows.again)
    for inside, shard, numbers in by_shard(version, plan.index, plan.rows.positions[again]):
        for row, item in zip(again[inside].tolist(), shard.items(numbers.tolist()), strict=True):
            yield np.array([row]), *_reason_again(plan, row, item, failures.get(item.id))


def _reason_again(
    plan: VersionPlan, row: int, item: Item, failure: Failure | None
) -> tuple[str, bool, str]:
    utterance = plan.manifest[row]
    changed = differences(item, utterance)
    if changed:
        names = [
            name
            for name in Segment.__struct_fields__
            if getattr(item, name) != getattr(utterance, name)
        ]
        return f"{', '.join(names)} changed", True, changed
    if failure is not None:
        return f"failed before, with another file: {failure.reason}", True, failure.message
    change = file_change(plan, row, item)
    if change == NOT_THE_NEWEST:
        return "not the newest", True, change
    return "file changed", True, change
