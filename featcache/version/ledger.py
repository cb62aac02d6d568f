"""The failure ledger: every utterance that could not be extracted, and why.

A failure is of a row, and by the row it is found. It also has a generation: it stands until
there is an item of its id of this generation or a later one. It is in the ledger before
the shard that lacks the utterance is there. A damaged line is passed over: its utterance
counts as missing, and is tried again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from featcache.errors import DamagedError
from featcache.format.documents import encode_line, parse
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.storage.base import in_parallel
from featcache.strings import Strings
from featcache.version.index import Index
from featcache.version.version import Version

_AT_MOST_BYTES = 1 << 30
_MESSAGE = 10_000
"""The longest message that is kept of a failure, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Utterance):
    """An utterance that could not be extracted."""

    reason: str
    """Why: one of `featcache.errors.Reason`."""
    message: Annotated[str, msgspec.Meta(max_length=1 << 20)]
    """What was seen, for a person."""
    size: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """The size of the audio file in bytes when it was tried; None if there was no file."""
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    """When the audio file was last modified, in nanoseconds since 1970; None if there was
    no file."""
    generation: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)] = 1
    """The generation that the item would have had: it stands until there is an item of
    this one, or a later one."""


RowFailures = dict[tuple[int, int], Failure]
"""Failures by the hashes of their ids and of their rows."""


def put_failures(version: Version, name: str, failures: Iterable[Failure]) -> None:
    """Enter failures in the ledger, in a file of its own; nothing if there are none."""
    lines = b"".join(encode_line(_document(failure)) for failure in failures)
    if lines:
        version.store.put(f"failures/{name}", lines)


def _document(failure: Failure) -> dict[str, object]:
    # an extractor's error may hold anything
    cut = " …" if len(failure.message) > _MESSAGE else ""
    return {**failure.document(), "message": f"{failure.message[:_MESSAGE]}{cut}"}


def read_failures(
    version: Version, damaged: list[str] | None = None, run: str = ""
) -> list[Failure]:
    """All failures, or those of a run, in the order of their files' names, which begin
    with the time; whether they stand is another question. What is damaged is passed over,
    and named in `damaged`."""
    names = [name for name in version.store.names("failures") if name.startswith(run)]
    failures, damaged = [], [] if damaged is None else damaged
    for name, data in zip(
        names, in_parallel(lambda name: _read(version, name), names), strict=True
    ):
        where = f"{version.path}/failures/{name}"
        if isinstance(data, DamagedError):
            damaged.append(str(data))
            continue
        for number, line in enumerate(data.splitlines(), 1):
            try:
                failures.append(parse(line, Failure, f"{where}, line {number}"))
            except DamagedError as error:
                damaged.append(str(error))
    return failures


def _read(version: Version, name: str) -> bytes | DamagedError:
    try:
        return version.store.read(f"failures/{name}", _AT_MOST_BYTES)
    except FileNotFoundError:  # taken away since
        return b""
    except DamagedError as error:
        return error


def by_row(failures: Iterable[Failure]) -> RowFailures:
    """Find the last failure of each row: that of the highest generation, and of several the
    last. They are in this order, too."""
    rising = sorted(failures, key=lambda failure: failure.generation)
    ids = Strings.of(failure.id for failure in rising).hashes().tolist()
    rows = SegmentColumns.of(rising).hashes().tolist()
    last: RowFailures = {}
    for key, failure in zip(zip(ids, rows, strict=True), rising, strict=True):
        last.pop(key, None)
        last[key] = failure
    return last


def standing(failures: RowFailures, index: Index) -> RowFailures:
    """Find the failures of whose ids there is no item of their generation or a later one."""
    positions = index.find(Strings.of(failure.id for failure in failures.values())).tolist()
    return {
        key: failure
        for position, (key, failure) in zip(positions, failures.items(), strict=True)
        if position < 0 or index.generation[position] < failure.generation
    }


def failures_by_row(version: Version, index: Index) -> RowFailures:
    """The failures of a version that stand. Of a tag, there are none: what runs have tried
    is no part of it."""
    return {} if version.tag is not None else standing(by_row(read_failures(version)), index)


def standing_failures(version: Version, index: Index) -> dict[str, Failure]:
    """The failures of a version that stand, by id: of several of an id, the last in the
    order of `by_row`."""
    return by_id(failures_by_row(version, index))


def by_id(failures: RowFailures) -> dict[str, Failure]:
    """The last failure of each id."""
    return {failure.id: failure for failure in failures.values()}


def rewrite_failures(
    version: Version, read: Iterable[str], name: str, failures: Sequence[Failure]
) -> None:
    """Put a file of these failures in the place of files of the ledger, which were listed
    before they were `read`: a job of an array may write others meanwhile."""
    put_failures(version, name, failures)
    for other in {*read} - {name}:
        version.store.remove(f"failures/{other}")
