"""The failure ledger: every utterance that could not be extracted, and why. Each run has its part of it, in its folder.

The latest record of an utterance counts.

A failure stands as long as nothing has made up for it: its utterance is in no shard; or there is an item of it, but
still the older one, of another row or another file, that the failed extraction was to replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from featcache.errors import DamagedError
from featcache.manifest import Utterance
from featcache.storage.objects import read_ahead
from featcache.storage.store import store_of
from featcache.store import documents
from featcache.store import fields as checks
from featcache.store.fields import any_text, number, optional, text, whole
from featcache.store.index import Index, Place
from featcache.store.records import Record
from featcache.store.run_records import read_run, record_files
from featcache.store.tags import TaggedVersion
from featcache.store.version import Version
from featcache.strings import Strings


@dataclass(frozen=True, slots=True)
class ReplacedItem:
    """The item that a failed extraction was to replace; it stays. Repair may move it to another shard."""

    run: str
    """The name of the run that extracted it; empty if its shard does not say."""
    row_hash: str
    """The hash of the row that it was extracted from, as 16 hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Utterance):
    """An utterance that could not be extracted."""

    reason: str
    """Why: one of `featcache.errors.Reason`."""
    message: str
    """What was seen, for a person."""
    size: int | None = None
    """The size of the audio file in bytes when it was tried; None if there was no file."""
    mtime_ns: int | None = None
    """When the audio file was last modified, in nanoseconds since 1970; None if there was no file."""
    replaces: ReplacedItem | None = None
    """The item of this id that stays in the version nevertheless; None if there was none."""


_MESSAGE = 10_000
"""The longest message that is kept of a failure, in characters."""

WITHDRAWN = "withdrawn"
"""The reason of a record that takes back the earlier ones of its utterance, which is no longer wanted."""

_SECONDS = optional(number(0))
_FAILURE = checks.fields(
    {"id": text(), "path": text(), "reason": text(), "message": any_text(1 << 20)},
    or_not={
        "start": _SECONDS,
        "duration": _SECONDS,
        "channel": optional(whole(0, 2**31 - 1)),
        "size": optional(whole()),
        "mtime_ns": optional(whole(-(2**63), 2**63 - 1)),
        "replaces": optional(checks.fields({"run": text(), "row_hash": text()})),
    },
)


def failures_of(version: Version, run: str) -> Iterator[Failure]:
    """What a run, by its name, has recorded in the ledger, in order; there may be nothing.

    What is damaged is passed over: its utterance counts as missing, and will be tried again.
    """
    record = read_run(version, run)
    for line in () if record is None else record.failures.records:
        with suppress(ValueError):
            yield _failure_of(line)


def latest_failures(version: Version) -> dict[str, Failure]:
    """The latest record of every utterance that ever failed, by id; some may have been extracted since."""
    runs = runs_with_failures(version)
    with read_ahead(record_files(version, runs)):
        latest = {failure.id: failure for run in runs for failure in failures_of(version, run)}
    return {id_: failure for id_, failure in latest.items() if failure.reason != WITHDRAWN}


def standing_failures(version: Version, index: Index) -> dict[str, Failure]:
    """The failures that stand, by id: of utterances that have no item, or still the one that was to be replaced. Of a
    tag, there are none: what runs have tried is no part of it.
    """
    failures = {} if isinstance(version, TaggedVersion) else latest_failures(version)

    @cache
    def run_of(shard: str) -> str | None:
        try:
            return version.shard(shard).run
        except DamagedError:  # until it is repaired, nothing tells whether the failure still stands
            return None

    def is_at(position: int, replaced: ReplacedItem | None) -> bool:
        place = index.place(position)
        if replaced is None or replaced.row_hash != _hex(place.row_hash):
            return False
        return run_of(place.shard) in (replaced.run, None)

    positions = index.find(Strings.of(failures)).tolist()
    return {
        failure.id: failure
        for failure, position in zip(failures.values(), positions, strict=True)
        if position < 0 or is_at(position, failure.replaces)
    }


def outdated_items(version: Version, index: Index) -> dict[str, Failure]:
    """The failures that stand of utterances that have an item, by id: the item is older than what was asked for last.

    If no failure has left an item in place, this reads the ledger's bytes and nothing else.
    """
    runs = runs_with_failures(version)
    ledgers = (version.path / "runs" / run / "failures.jsonl" for run in runs)
    with read_ahead(record_files(version, runs)):
        if not any(b'"replaces"' in line for ledger in ledgers for line in documents.read_lines(ledger)):
            return {}
    standing = standing_failures(version, index)
    there = index.find(Strings.of(standing)) >= 0
    return {failure.id: failure for failure, is_there in zip(standing.values(), there, strict=True) if is_there}


def runs_with_failures(version: Version) -> list[str]:
    """The names of the runs that have recorded failures, the earliest first."""
    runs = version.path / "runs"
    if isinstance(runs, Path):
        return sorted(path.parent.name for path in runs.glob("*/failures.jsonl"))
    return sorted(name.partition("/")[0] for name, _ in store_of(runs).walk(runs) if name.endswith("/failures.jsonl"))


def ledger_lines(version: Version, failures: Iterable[Failure], replaces: Mapping[str, Place]) -> list[Record]:
    """The lines of a ledger for some failures; `replaces` has the items that were to be replaced, by id.

    Raises:
        DamagedError: The shard of such an item is not what was written.
    """
    run_of = cache(lambda shard: version.shard(shard).run)
    lines = []
    for failure in failures:
        if (place := replaces.get(failure.id)) is not None:
            failure = replace(failure, replaces=ReplacedItem(run_of(place.shard), _hex(place.row_hash)))
        lines.append(_record(failure))
    return lines


def _record(failure: Failure) -> Record:
    """A line of the ledger, without `replaces` if it is None, as in ledgers that were written before that key."""
    record = failure.document()
    if len(failure.message) > _MESSAGE:  # an extractor's error may hold anything
        record["message"] = f"{failure.message[:_MESSAGE]} …"
    if failure.replaces is None:
        del record["replaces"]
    return record


def _failure_of(record: Record) -> Failure:
    """The failure that a line of the ledger records; ValueError if it records none. Unknown keys are newer ones."""
    known = _FAILURE({field.name: record[field.name] for field in fields(Failure) if field.name in record})
    replaced = known.get("replaces")
    return Failure(**{**known, "replaces": None if replaced is None else ReplacedItem(**replaced)})


def _hex(row_hash: int) -> str:
    return f"{row_hash:016x}"
