"""Why a config makes another version than there is, and why a manifest's utterances would be extracted (again)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from featcache.config import Config
from featcache.config.differences import Differences, find_differences
from featcache.errors import ManifestError
from featcache.extraction.audio_files import refuse_other_paths
from featcache.extraction.version_plan import VersionPlan, file_change
from featcache.manifest import Segment
from featcache.store.join import differences
from featcache.store.runs import standing_failures
from featcache.store.version import Version
from featcache.strings import Strings


@dataclass(frozen=True)
class Cause:
    """Why some utterances would be extracted."""

    why: str
    """What is the same of all of them: `new`, `path changed`, `file changed`, `failed before: file_missing` …"""
    ids: Strings
    """The utterances' ids."""
    example: str
    """What exactly it is of the first of them; empty if there is no more to say."""
    again: bool
    """Whether the version has features of them, which would be superseded."""


def compare_versions(config: Config, fingerprint: str, versions: list[Version]) -> list[tuple[Version, Differences]]:
    """How a config of this fingerprint differs from those of versions; its own comes first, then the likest."""
    resolved = config.resolved()
    found = [
        (version, find_differences(version.info.config, version.info.fingerprint, resolved, fingerprint))
        for version in versions
    ]
    return sorted(found, key=lambda one: (len(one[1].deciding), one[0].info.name != config.name))


def find_causes(plan: VersionPlan) -> list[Cause]:
    """Why the rows that a plan is to extract are to be extracted, the most frequent cause first.

    Raises:
        DamagedError: A shard that holds older features is not what was written.
    """
    rows: dict[tuple[bool, str], list[int]] = {}
    examples: dict[tuple[bool, str], str] = {}
    for row, again, why, example in _each(plan):
        rows.setdefault((again, why), []).append(row)
        examples.setdefault((again, why), example)
    causes = [
        Cause(why, plan.manifest.ids.take(np.array(sorted(numbers))), examples[again, why], again)
        for (again, why), numbers in rows.items()
    ]
    return sorted(causes, key=lambda cause: -len(cause.ids))


def refusal(plan: VersionPlan) -> str:
    """Why `extract` would refuse the manifest without `--replace`; empty if it would not."""
    if plan.is_new:
        return ""
    copies = len(plan.built.waveform_maker.copies)
    try:
        refuse_other_paths(plan.manifest, plan.rows, plan.index, Version.open(plan.path), copies)
    except ManifestError as error:
        return str(error)
    return ""


def _each(plan: VersionPlan) -> Iterator[tuple[int, bool, str, str]]:
    """The rows to extract: number, whether again, why, and what exactly it is."""
    missing, replaced = plan.rows.missing, plan.rows.replaces >= 0
    if plan.is_new:
        yield from ((row, False, "new", "") for row in np.flatnonzero(missing).tolist())
        return
    version = Version.open(plan.path)
    failures = standing_failures(version, plan.index)
    for row in np.flatnonzero(missing & ~replaced).tolist():
        failure = failures.get(plan.manifest.ids[row]) if failures else None
        yield row, False, f"failed before: {failure.reason}" if failure else "new", failure.message if failure else ""
    rows = np.flatnonzero(missing & replaced)
    shards = plan.index.shard[plan.rows.replaces[rows]]
    for number in np.unique(shards).tolist():
        inside = rows[shards == number]
        items = version.shard(plan.index.shards[number]).items(plan.index.item[plan.rows.replaces[inside]].tolist())
        for row, item in zip(inside.tolist(), items, strict=True):
            utterance = plan.manifest[row]
            if changed := differences(item, utterance):
                names = [one.name for one in fields(Segment) if getattr(item, one.name) != getattr(utterance, one.name)]
                yield row, True, f"{', '.join(names)} changed", changed
            elif (failure := failures.get(item.id)) is not None:
                yield row, True, f"failed before, with another file: {failure.reason}", failure.message
            else:
                yield row, True, "file changed", file_change(item, plan.manifest)
