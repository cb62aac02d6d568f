"""What manifests want of a version, and what it lacks: a subtraction of sets.

Before a run over a manifest makes its first shard, it keeps what the manifest wants: of
each row the hashes of its id and of itself, and the lowest generation of its item. What
is missing is that, without what the index has, and without failures that stand. What a
run wants takes the place of what earlier ones did over the same manifest, and over
manifests all of whose rows it has: so one that has moved, or has grown, leaves nothing
behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from featcache.errors import DamagedError, counted, listing
from featcache.format.documents import AT_MOST_BYTES, Count, Hash, encode_line, parse
from featcache.manifest.segments import SegmentColumns
from featcache.storage.base import as_bytes
from featcache.strings import Strings
from featcache.version.index import Index
from featcache.version.ledger import Failure, read_failures
from featcache.version.version import Version

_FIRST_LINE_BYTES = 4096
"""As many bytes have the first line of most files."""

_ROW_BYTES = 24
_AGAIN = "run the same `featcache extract` again (or of a copy, the same `featcache copy`)"


class _Header(msgspec.Struct, frozen=True):
    """The first line of the file of a wanted set. Its rows follow."""

    manifest: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    rows: Count
    crc32c: Count
    instead_of: Annotated[list[Hash], msgspec.Meta(max_length=1 << 16)] = []


@dataclass(frozen=True)
class Wanted:
    """What a manifest wants."""

    manifest: str
    """The manifest: what tells it from others, and is shown to people."""
    rows: NDArray[np.uint64]
    """uint64 `[3, rows]`: the hash of each row's id, its own, and the lowest generation
    that its item may have."""
    instead_of: Set[str] = frozenset()
    """The names of the sets in whose place it is."""

    @property
    def name(self) -> str:
        """The name under which it is kept, the same for each run over the manifest."""
        return name_of(self.manifest)

    @property
    def names(self) -> Set[str]:
        """Its name, and those of the sets in whose place it is."""
        return self.instead_of | {self.name}

    @property
    def checksum(self) -> int:
        """The CRC-32C of its rows."""
        return int(crc32c(as_bytes(np.ascontiguousarray(self.rows, "<u8"))))

    def __len__(self) -> int:
        return int(self.rows.shape[1])

    def lacks(self, index: Index) -> NDArray[np.bool_]:
        """Which rows have no item, bool `[rows]`. One of a later generation is as good:
        it has replaced the row."""
        if not len(index):
            return np.ones(len(self), bool)
        id_hash, row_hash, generation = self.rows
        at = index.find_hashes(id_hash)
        theirs = index.generation[at]
        is_there = (theirs > generation) | (
            (theirs == generation) & (index.row_hash[at] == row_hash)
        )
        lacking: NDArray[np.bool_] = ~is_there | (at < 0)
        return lacking

    def find(self, id_hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The numbers of the rows of ids with these hashes, int64 `[n]`; -1 where there
        is none."""
        if not len(self):
            return np.full(len(id_hashes), -1)
        if np.array_equal(id_hashes, self.rows[0]):
            return np.arange(len(self))
        order = np.argsort(self.rows[0], kind="stable")
        at = np.minimum(np.searchsorted(self.rows[0], id_hashes, sorter=order), len(self) - 1)
        return np.where(self.rows[0][order[at]] == id_hashes, order[at], -1)

    def contains(self, other: Wanted) -> bool:
        """Whether it has all rows of another, whatever their generations."""
        if len(other) > len(self):
            return False
        at = self.find(other.rows[0])
        return bool(((at >= 0) & (self.rows[1][at] == other.rows[1])).all())

    def save(self, version: Version) -> None:
        """Keep it, in the place of sets that it has all rows of."""
        others = [
            other
            for other in read_all_wanted(version)
            if other.name == self.name or self.contains(other)
        ]
        instead_of = {*self.instead_of}.union(*(other.names for other in others)) - {self.name}
        header = {"manifest": self.manifest, "rows": len(self), "crc32c": self.checksum}
        line = encode_line({**header, "instead_of": sorted(instead_of)})
        version.store.put(
            f"wanted/{self.name}", line + as_bytes(np.ascontiguousarray(self.rows, "<u8"))
        )
        for name in {other.name for other in others} - {self.name}:
            version.store.remove(f"wanted/{name}")


def name_of(manifest: str) -> str:
    """The name of a manifest's wanted set."""
    return str(xxh3_64_hexdigest(manifest.encode(errors="backslashreplace")))


def read_wanted(version: Version, name: str, index: Index | None = None) -> Wanted:
    """A wanted set, by its name; none of its rows, if an `index` is known to lack nothing
    of it. Raises FileNotFoundError if there is none; DamagedError if it is not what was
    written."""
    where = f"{version.path}/wanted/{name}"
    file = version.store.open(f"wanted/{name}", None)
    line = b""
    for at_most in (_FIRST_LINE_BYTES, AT_MOST_BYTES):
        if b"\n" not in line:
            line = bytes(file.read_ranges([0], [min(file.num_bytes, at_most)])[0])
    line, _, _ = line.partition(b"\n")
    header, begin = parse(line, _Header, where), len(line) + 1
    is_complete = index is not None and index.complete.get(name) == header.crc32c
    # Memory is asked for by what there is.
    if file.num_bytes == begin + header.rows * _ROW_BYTES and name_of(header.manifest) == name:
        wanted = Wanted(
            header.manifest,
            np.empty((3, 0 if is_complete else header.rows), "<u8"),
            {*header.instead_of},
        )
        file.read_into(as_bytes(wanted.rows), begin)
        if is_complete or wanted.checksum == header.crc32c:
            return wanted
    raise DamagedError(f"{where}: damaged: it is not what was written")


def read_all_wanted(
    version: Version, damaged: list[str] | None = None, index: Index | None = None
) -> Iterator[Wanted]:
    """All sound wanted sets, as `read_wanted` reads them; damaged ones are passed over,
    and named in `damaged`."""
    for name in version.store.names("wanted"):
        try:
            with suppress(FileNotFoundError):  # a run has taken it away since
                yield read_wanted(version, name, index)
        except DamagedError as error:
            if damaged is not None:
                damaged.append(str(error))


def damaged_wanted(version: Version) -> list[str]:
    """The names of the wanted sets that are damaged, also at a second look: a disk may
    refuse once."""
    damaged = {*version.store.names("wanted")}
    for _ in range(2):
        if damaged:  # else 10^7 rows would be read once more for nothing
            damaged -= {wanted.name for wanted in read_all_wanted(version)}
    # a run may have taken some away since
    return sorted(damaged.intersection(version.store.names("wanted")))


def find_missing(
    wanted: Iterable[Wanted], index: Index, failures: Sequence[Failure]
) -> Iterator[tuple[Wanted, NDArray[np.int64], list[Failure]]]:
    """What an index lacks of each wanted set, with these failures in the ledger: the
    numbers of the rows that have neither an item nor a failure that stands, int64 `[n]`;
    and those failures of its rows that stand."""
    ids, rows = (
        Strings.of(failure.id for failure in failures).hashes(),
        SegmentColumns.of(failures).hashes(),
    )
    keys = zip(
        ids.tolist(), rows.tolist(), (failure.generation for failure in failures), strict=True
    )
    by_key = dict(zip(keys, failures, strict=True))
    for one in wanted:
        numbers, standing = np.flatnonzero(one.lacks(index)), list[Failure]()
        if failures:  # else 10^7 rows would be looked up for nothing
            is_missing = ~np.isin(one.rows[0, numbers], ids)
            for place in np.flatnonzero(~is_missing).tolist():
                failure = by_key.get(tuple(one.rows[:, numbers[place]].tolist()))
                is_missing[place] = failure is None
                standing += [] if failure is None else [failure]
            numbers = numbers[is_missing]
        yield one, numbers, standing


@dataclass(frozen=True)
class Unfinished:
    """What a version lacks of what a manifest wants."""

    manifest: str
    utterances: int
    missing: int
    """The number of them that are neither in the version nor in the failure ledger."""
    failed: int
    """The number of them whose failure stands; some may have an older item."""

    def __str__(self) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        missing = (
            f"{self.missing:,} of the {self.utterances:,} utterances of {self.manifest} are "
            f"missing{failed}"
        )
        return (
            f"{missing}: extraction was interrupted, is going on, or shards have been "
            f"removed; {_AGAIN}"
        )


def find_lacking(version: Version, index: Index) -> list[Unfinished | str]:
    """Why a version, of which these items count, may not be whole: what it lacks of
    manifests, and in words, which records of what was wanted or has failed are damaged.
    Nothing of a tag: what was wanted since is no part of it."""
    if version.tag is not None:
        return []
    damaged, ledger, records = list[str](), list[str](), list[str]()
    wanted = [*read_all_wanted(version, damaged, index)]
    known = {name for one in wanted for name in one.names}
    gaps = find_missing(wanted, index, read_failures(version, ledger))
    findings = [
        Unfinished(one.manifest, len(one), len(rows), len(failed))
        for one, rows, failed in gaps
        if len(rows)
    ]
    if ledger and findings:  # it may have said that they have failed
        count = counted(sum(one.missing for one in findings), "utterance")
        findings, ledger = (
            [],
            [f"{what}: {count} may be missing, or have failed" for what in ledger],
        )
    if not known and not len(index) and not damaged:
        records.append(f"it holds nothing, and nothing says what it is to hold; {_AGAIN}")
    gone = sorted({shard.manifest for shard in index.summaries} - known)
    if gone and not damaged:  # what is damaged may be them
        shards = counted(
            sum(shard.manifest in gone for shard in index.summaries), "shard was", "shards were"
        )
        what = f"wanted: {listing(gone)} is gone, of which {shards} made"
        records.append(f"{what}: what else the manifest wants is not known; {_AGAIN}")
    records += [what.removeprefix(f"{version.path}/") for what in damaged + ledger]
    return [*findings, *records]


def forget_rows(version: Version, wanted_ids: NDArray[np.uint64]) -> None:
    """Have no manifest want rows whose ids do not have one of these hashes. Raises
    DamagedError if one cannot be read: what it wants would be missing."""
    # saving removes some
    for one in [read_wanted(version, name) for name in version.store.names("wanted")]:
        stays = np.isin(one.rows[0], wanted_ids)
        if not stays.all():
            Wanted(one.manifest, one.rows[:, stays], one.instead_of).save(version)
