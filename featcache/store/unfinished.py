"""Whether a version holds everything that its runs were to add, according to their records.

No record says "in progress", which could be wrong after a kill. A run records what it is about to add and how many
items there were before, and at its end the outcome and how many items there are. What a killed run has added is the
difference. A version that has fewer items than a run once found there has lost some.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from featcache.errors import DamagedError
from featcache.store.documents import read_object
from featcache.store.fields import fields, whole
from featcache.store.index import Index
from featcache.store.runs import failures_of, is_running, standing_failures
from featcache.store.version import Version
from featcache.strings import Strings

_LATEST = 64
"""The number of runs that are looked at. Few versions have more, and one made by a thousand jobs is to open as fast."""


@dataclass(frozen=True)
class Unfinished:
    """What a version lacks of what a run was to add, or of what was there once."""

    manifest: str
    """The manifest that the run was given."""
    utterances: int
    """The number of utterances in the manifest; or, if some were lost, of items when the run last saw the version."""
    missing: int
    """The number of utterances that are neither in the version nor in the failure ledger."""
    failed: int
    """The number of utterances in the runs over that manifest whose failure stands; some may have an older item."""
    is_going_on: bool
    """Whether the run is still running, as far as can be seen from here."""
    were_there: bool = False
    """Whether the missing utterances were there once, and their shards have been removed."""

    def __str__(self) -> str:
        if self.were_there:
            return (
                f"{self.missing:,} of the {self.utterances:,} utterances that it held are no longer there: shards "
                "have been removed; run the same `featcache extract` again to restore them"
            )
        failed = f", {self.failed:,} failed" if self.failed else ""
        what = "extraction is running" if self.is_going_on else "extraction was interrupted, or is running elsewhere"
        return (
            f"{self.missing:,} of the {self.utterances:,} utterances of {self.manifest} are missing{failed}: {what}; "
            "run the same `featcache extract` again to add the rest"
        )


def find_unfinished(version: Version, index: Index) -> list[Unfinished]:
    """What is missing of what unfinished runs were to add; or else, of what the fullest run found there.

    Reads a small file for each run, and the failure ledger only if something is missing.
    """
    runs = [run for name in _latest(version) if (run := _Run.of(version, name)) is not None]
    ends: dict[tuple[str, str], str] = {}  # by manifest, when the last run ended that did everything
    for run in runs:
        if run.did_everything:
            ends[run.manifest] = max(run.finished, ends.get(run.manifest, ""))
    found, seen = [], set()
    for number, run in enumerate(runs):
        if run.is_finished or run.manifest in seen or ends.get(run.manifest, "") >= run.started:
            continue
        if not run.asked.get("only"):
            seen.add(run.manifest)  # earlier runs over it were to add what this run was to add
        same = [other for other in runs[: number + 1] if other.manifest == run.manifest]
        others = [other for other in runs[:number] if other.manifest != run.manifest]
        missing = run.asked["new"] - (len(index) - run.asked["held"] - sum(other.extracted for other in others))
        if missing > 0:
            failed, without_item = _failed(same, version, index)
            missing -= without_item
        if missing > 0:
            path, utterances = run.manifest[0], run.asked["utterances"]
            found.append(Unfinished(path, utterances, missing, failed, is_running(version, run.name)))
    return found or _lost(runs, version, index)


def _lost(runs: list[_Run], version: Version, index: Index) -> list[Unfinished]:
    """What is missing of what was there once, in at most one entry."""
    fullest = max(range(len(runs)), key=lambda number: runs[number].items, default=None)
    if fullest is None or runs[fullest].items <= len(index):
        return []
    failed, without_item = _failed(
        runs[:fullest], version, index
    )  # since then: in a repair, for example, when audio was gone
    run = runs[fullest]
    missing = run.items - len(index) - without_item
    return [Unfinished(run.manifest[0], run.items, missing, failed, False, were_there=True)] if missing > 0 else []


def _failed(runs: list[_Run], version: Version, index: Index) -> tuple[int, int]:
    """How many utterances of these runs have a failure that stands, and how many of those have no item."""
    standing = standing_failures(version, index)
    ids = set[str]().union(*(run.failed_ids() for run in runs)) & standing.keys()
    return len(ids), int((index.find(Strings.of(ids)) < 0).sum())


def _latest(version: Version) -> list[str]:
    """The names of the latest runs, the latest first."""
    try:
        return sorted(os.listdir(version.path / "runs"), reverse=True)[:_LATEST]
    except OSError:
        return []  # a copy of a version may have come without it


_COUNTS = fields({"utterances": whole(), "new": whole(), "held": whole()}, others=lambda value: value)
_OUTCOME = fields({}, or_not={"extracted": whole(), "items": whole()}, others=lambda value: value)


@dataclass(frozen=True)
class _Run:
    """A run's record, if it has all that is needed here."""

    version: Version
    name: str
    asked: dict[str, Any]
    started: str
    finished: str
    outcome: dict[str, Any]

    @classmethod
    def of(cls, version: Version, name: str) -> _Run | None:
        try:
            record = read_object(version.path / "runs" / name / "run.json")
            asked, outcome = _COUNTS(record["asked"]), _OUTCOME(record.get("outcome", {}))
            return cls(version, name, asked, str(record["started"]), str(record.get("finished", "")), outcome)
        except (OSError, DamagedError, ValueError, KeyError, TypeError):
            return None

    @property
    def manifest(self) -> tuple[str, str]:
        """The manifest, and the folder that its paths are relative to."""
        return str(self.asked.get("manifest")), str(self.asked.get("root"))

    @property
    def is_finished(self) -> bool:
        return bool(self.finished) and not self.outcome.get("interrupted")

    @property
    def did_everything(self) -> bool:
        """Whether it is finished, and was to extract all of its manifest."""
        return self.is_finished and not self.asked.get("only")

    @property
    def extracted(self) -> int:
        """The number of utterances that it extracted; 0 if it was killed."""
        return int(self.outcome.get("extracted", 0))

    @property
    def items(self) -> int:
        """The number of items in the version when the run last saw it."""
        return int(self.outcome.get("items", self.asked["held"]))

    def failed_ids(self) -> set[str]:
        """The ids of the utterances that it has recorded in the ledger."""
        return {failure.id for failure in failures_of(self.version, self.name)}
