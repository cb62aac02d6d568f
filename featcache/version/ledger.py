"""The failure ledger: every utterance that could not be extracted, and why.

A failure belongs to a row, and stands until its id has an item of its generation or a later
one. Damaged lines are skipped: their utterances count as missing, and are tried again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from featcache.errors import DamagedError
from featcache.format.documents import Int64, Positive, encode_line, parse
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.manifest.strings import Hashes, Strings
from featcache.storage.base import in_parallel
from featcache.version.index import Index
from featcache.version.version import Version

_AT_MOST_BYTES = 1 << 30
_MESSAGE = 10_000
"""The longest message of a failure that is kept, in characters."""


class Failure(Utterance, frozen=True, kw_only=True):
    """An utterance that could not be extracted."""

    reason: str
    """One of `featcache.errors.Reason`."""
    message: Annotated[str, msgspec.Meta(max_length=1 << 20)]
    """The cause, for a person."""
    size: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """The size of the audio file in bytes; None without a file."""
    mtime_ns: Int64 | None = None
    """When the audio file was last modified, in nanoseconds since 1970; None without a
    file."""
    generation: Positive = 1
    """The generation that the item would have had."""


RowFailures = dict[tuple[int, int], Failure]
"""Failures by the hashes of their ids and of their rows."""


def put_failures(version: Version, name: str, failures: Iterable[Failure]) -> None:
    """Enter failures in the ledger, as a new file; nothing if there are none."""
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
    """Read all failures, or those of a run, whether they stand or not, the earliest files
    first. Damaged ones are skipped, and named in `damaged`."""
    names = [name for name in version.store.names("failures") if name.startswith(run)]
    failures, damaged = [], [] if damaged is None else damaged
    files = in_parallel(lambda name: _read(version, name), names)
    for name, data in zip(names, files, strict=True):
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
    """Find the failure of each row with the highest generation; of several, the last.
    Returns them by rising generation."""
    rising = sorted(failures, key=lambda failure: failure.generation)
    ids = Strings.of(failure.id for failure in rising).hashes().tolist()
    rows = SegmentColumns.of(rising).hashes().tolist()
    last: RowFailures = {}
    for key, failure in zip(zip(ids, rows, strict=True), rising, strict=True):
        last.pop(key, None)
        last[key] = failure
    return last


def standing(failures: RowFailures, index: Index) -> RowFailures:
    """Find the failures whose ids have no item of their generation or a later one."""
    positions = index.find(Strings.of(failure.id for failure in failures.values())).tolist()
    return {
        key: failure
        for position, (key, failure) in zip(positions, failures.items(), strict=True)
        if position < 0 or index.generation[position] < failure.generation
    }


def failures_of_rows(
    failures: RowFailures, id_hashes: Hashes, row_hashes: Hashes
) -> dict[int, Failure]:
    """Find the failures of rows with these hashes, by the rows' rising numbers."""
    failed_ids = np.array([id_hash for id_hash, _ in failures], np.uint64)
    rows = np.flatnonzero(np.isin(id_hashes, failed_ids))
    keys = zip(id_hashes[rows].tolist(), row_hashes[rows].tolist(), strict=True)
    found = zip(rows.tolist(), map(failures.get, keys), strict=True)
    return {row: failure for row, failure in found if failure is not None}


def failures_by_row(version: Version, index: Index) -> RowFailures:
    """Find the failures that stand; none at a tag, which has no ledger."""
    return {} if version.tag is not None else standing(by_row(read_failures(version)), index)


def standing_failures(version: Version, index: Index) -> dict[str, Failure]:
    """Find the failures of a version that stand; see `by_id`."""
    return by_id(failures_by_row(version, index))


def by_id(failures: RowFailures) -> dict[str, Failure]:
    """Find the last failure of each id."""
    return {failure.id: failure for failure in failures.values()}


def rewrite_failures(
    version: Version, read: Iterable[str], name: str, failures: Sequence[Failure]
) -> None:
    """Replace files of the ledger, listed before they were `read`, by one of these
    failures: a job of an array may write others meanwhile."""
    put_failures(version, name, failures)
    for other in {*read} - {name}:
        version.store.remove(f"failures/{other}")
