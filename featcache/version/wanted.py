"""The rows that manifests want of a version. What the version lacks is a subtraction of
sets.

Before a run over a manifest makes its first shard, it keeps a wanted set: of each row the
hashes of its id and of itself, and the lowest generation of its item. Missing is what the
index lacks of it, less the failures that stand. A set replaces that of the same manifest,
and all sets whose rows it has: so a manifest that was moved or has grown leaves nothing
behind. No generation comes again: forgotten rows leave their highest one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from featcache.errors import DamagedError, counted, listing
from featcache.format.documents import AT_MOST_BYTES, Count, Hash, encode_line, parse
from featcache.manifest.strings import Hashes
from featcache.spec import Flags, Ints
from featcache.storage.base import as_bytes, tidying
from featcache.version.index import Index, positions_of
from featcache.version.ledger import (
    Failure,
    by_id,
    by_row,
    failures_by_row,
    failures_of_rows,
    read_failures,
    standing,
)
from featcache.version.version import Version

_FIRST_LINE_BYTES = 4096
"""The most bytes of the first line of most files."""

_ROW_BYTES = 24
_AGAIN = "run the same `featcache extract` again (or `featcache copy`, for an interrupted copy)"


class _Header(msgspec.Struct, frozen=True):
    """The first line of a wanted set's file. Its rows follow."""

    manifest: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    rows: Count
    crc32c: Count
    instead_of: Annotated[list[Hash], msgspec.Meta(max_length=1 << 16)] = []
    forgotten: Count = 0


@dataclass(frozen=True)
class Wanted:
    """The rows that a manifest wants."""

    manifest: str
    """The text that identifies the manifest, also to people."""
    rows: NDArray[np.uint64]
    """uint64 `[3, rows]`: the hash of each row's id, its own, and the lowest generation
    that its item may have."""
    instead_of: Set[str] = frozenset()
    """The names of the sets that it has replaced."""
    forgotten: int = 0
    """The highest generation of forgotten rows. A row that is new, or comes back, gets a
    higher one."""

    @property
    def name(self) -> str:
        """The name of its file, the same for each run over the manifest."""
        return name_of(self.manifest)

    @property
    def names(self) -> Set[str]:
        """Its name, and those of the sets that it has replaced."""
        return self.instead_of | {self.name}

    @property
    def checksum(self) -> int:
        """The CRC-32C of its rows."""
        return int(crc32c(as_bytes(np.ascontiguousarray(self.rows, "<u8"))))

    def __len__(self) -> int:
        return int(self.rows.shape[1])

    def lacks(self, index: Index) -> Flags:
        """Find the rows without an item, bool `[rows]`. An item of a later generation has
        replaced the row."""
        if not len(index):
            return np.ones(len(self), bool)
        id_hash, row_hash, generation = self.rows
        positions = index.find_hashes(id_hash)
        generations = index.generation[positions]
        is_own = (generations == generation) & (index.row_hash[positions] == row_hash)
        lacking: Flags = (positions < 0) | ~(is_own | (generations > generation))
        return lacking

    def find(self, id_hashes: Hashes) -> Ints:
        """Find the numbers of the rows of ids with these hashes, int64 `[n]`; else -1."""
        if np.array_equal(id_hashes, self.rows[0]):
            return np.arange(len(self))
        order = np.argsort(self.rows[0], kind="stable")
        return positions_of(id_hashes, self.rows[0][order], order)

    def contains(self, other: Wanted) -> bool:
        """Tell whether it has all rows of another set, in any generation."""
        if len(other) > len(self):
            return False
        numbers = self.find(other.rows[0])
        return bool(((numbers >= 0) & (self.rows[1][numbers] == other.rows[1])).all())

    def joined(self, other: Wanted, above: Mapping[int, int]) -> Wanted:
        """Join it with its set in another copy: of an id in both, the row of the higher
        generation stays. Rows one generation below their id hash's in `above` are raised to
        it."""
        numbers = self.find(other.rows[0])
        rows, both = self.rows.copy(), np.flatnonzero(numbers >= 0)
        later = both[other.rows[2, both] > rows[2, numbers[both]]]
        rows[:, numbers[later]] = other.rows[:, later]
        rows = np.concatenate([rows, other.rows[:, numbers < 0]], axis=1)
        for row in np.flatnonzero(np.isin(rows[0], np.array([*above], np.uint64))).tolist():
            if int(rows[2, row]) + 1 == above[int(rows[0, row])]:
                rows[2, row] += 1
        instead_of = self.instead_of | other.instead_of
        return Wanted(self.manifest, rows, instead_of, max(self.forgotten, other.forgotten))

    def save(self, version: Version) -> None:
        """Write it, and remove the sets that it has all rows of."""
        others = [
            other
            for other in read_all_wanted(version)
            if other.name == self.name or self.contains(other)
        ]
        instead_of = {*self.instead_of}.union(*(other.names for other in others)) - {self.name}
        forgotten = max([self.forgotten, *(other.forgotten for other in others)])
        joined = replace(self, instead_of=instead_of, forgotten=forgotten)
        version.store.put(f"wanted/{self.name}", joined.encode())
        with tidying(version.path):
            for name in {other.name for other in others} - {self.name}:
                version.store.remove(f"wanted/{name}")

    def encode(self) -> bytes:
        """Return the bytes of its file."""
        header: dict[str, object] = {
            "manifest": self.manifest,
            "rows": len(self),
            "crc32c": self.checksum,
            "instead_of": sorted(self.instead_of),
        }
        if self.forgotten:
            header["forgotten"] = self.forgotten
        return encode_line(header) + as_bytes(np.ascontiguousarray(self.rows, "<u8"))


def name_of(manifest: str) -> str:
    """Return the name of a manifest's wanted set."""
    return str(xxh3_64_hexdigest(manifest.encode(errors="backslashreplace")))


def read_wanted(version: Version, name: str, index: Index | None = None) -> Wanted:
    """Read a wanted set; without its rows, if an `index` is known to lack none of them.
    Raises FileNotFoundError if it does not exist."""
    where = f"{version.path}/wanted/{name}"
    file = version.store.open(f"wanted/{name}", None)
    line = b""
    for at_most in (_FIRST_LINE_BYTES, AT_MOST_BYTES):
        if b"\n" not in line:
            line = bytes(file.read_ranges([0], [min(file.num_bytes, at_most)])[0])
    line, _, _ = line.partition(b"\n")
    header, begin = parse(line, _Header, where), len(line) + 1
    is_complete = index is not None and index.complete.get(name) == header.crc32c
    # before memory is allocated
    if file.num_bytes == begin + header.rows * _ROW_BYTES and name_of(header.manifest) == name:
        wanted = Wanted(
            header.manifest,
            np.empty((3, 0 if is_complete else header.rows), "<u8"),
            {*header.instead_of},
            header.forgotten,
        )
        file.read_into(as_bytes(wanted.rows), begin)
        if is_complete or wanted.checksum == header.crc32c:
            return wanted
    raise DamagedError(f"{where}: damaged: it is not what was written")


def read_all_wanted(
    version: Version, damaged: list[str] | None = None, index: Index | None = None
) -> Iterator[Wanted]:
    """Yield all undamaged wanted sets, as `read_wanted` reads them; damaged ones are named
    in `damaged`."""
    for name in version.store.names("wanted"):
        try:
            with suppress(FileNotFoundError):  # a run has removed it since
                yield read_wanted(version, name, index)
        except DamagedError as error:
            if damaged is not None:
                damaged.append(str(error))


def damaged_wanted(version: Version) -> list[str]:
    """List the names of damaged wanted sets; each is read twice, as a disk may fail once."""
    damaged = {*version.store.names("wanted")}
    for _ in range(2):
        if damaged:  # else 10^7 rows would be read again for nothing
            damaged -= {wanted.name for wanted in read_all_wanted(version)}
    # a run may have removed some since
    return sorted(damaged.intersection(version.store.names("wanted")))


def find_missing(
    wanted: Iterable[Wanted], index: Index, failures: Sequence[Failure]
) -> Iterator[tuple[Wanted, Ints, list[Failure]]]:
    """Yield each wanted set with the numbers of its missing rows, int64 `[n]`, and the
    failures that stand for its rows; also those whose generation an item of another row
    has."""
    of_rows = by_row(failures)
    standing_ones = {*standing(of_rows, index).values()}
    for wanted_set in wanted:
        numbers = np.flatnonzero(wanted_set.lacks(index))
        if not failures:  # else 10^7 rows would be copied for nothing
            yield wanted_set, numbers, []
            continue
        id_hashes, row_hashes, generations = wanted_set.rows[:, numbers]
        failed = {
            place: failure
            for place, failure in failures_of_rows(of_rows, id_hashes, row_hashes).items()
            if failure in standing_ones or failure.generation >= generations[place]
        }
        yield wanted_set, np.delete(numbers, [*failed]), [*failed.values()]


def wanted_failures(version: Version, index: Index) -> dict[str, Failure]:
    """Find the failures that stand, by id, of rows that manifests still want; of all rows,
    if a wanted set is missing or damaged."""
    failures, damaged = failures_by_row(version, index), list[str]()
    if not failures or not version.store.names("wanted"):
        return by_id(failures)
    wanted = {
        failure
        for wanted_set in read_all_wanted(version, damaged)
        for failure in failures_of_rows(failures, *wanted_set.rows[:2]).values()
    }
    if not damaged:
        failures = {key: failure for key, failure in failures.items() if failure in wanted}
    return by_id(failures)


@dataclass(frozen=True)
class Unfinished:
    """A manifest of which a version lacks rows."""

    manifest: str
    utterances: int
    missing: int
    """The utterances neither in the version nor in the failure ledger."""
    failed: int
    """The utterances whose failure stands; some may have an older item."""

    def __str__(self) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return (
            f"{self.missing:,} of the {self.utterances:,} utterances of {self.manifest} are "
            f"missing{failed}: extraction was interrupted, is going on, or shards have been "
            f"removed; {_AGAIN}"
        )


def find_lacking(version: Version, index: Index) -> list[Unfinished | str]:
    """List what a version lacks: gaps of each manifest, and damaged or lost wanted sets and
    ledgers. A version at a tag lacks nothing."""
    if version.tag is not None:
        return []
    damaged, ledger, records = list[str](), list[str](), list[str]()
    wanted = [*read_all_wanted(version, damaged, index)]
    known = {name for item in wanted for name in item.names}
    gaps = find_missing(wanted, index, read_failures(version, ledger))
    unfinished = [
        Unfinished(item.manifest, len(item), len(rows), len(failed))
        for item, rows, failed in gaps
        if len(rows)
    ]
    if ledger and unfinished:  # the damaged failures may be theirs
        count = counted(sum(item.missing for item in unfinished), "utterance")
        unfinished = []
        ledger = [f"{what}: {count} may be missing, or have failed" for what in ledger]
    if not known and not len(index) and not damaged:
        records.append(f"it holds nothing, and nothing says what it is to hold; {_AGAIN}")
    if not damaged:  # the damaged sets may be these
        records += _lost_sets(index, known)
    records += [what.removeprefix(f"{version.path}/") for what in damaged + ledger]
    return [*unfinished, *records]


def _lost_sets(index: Index, known: Set[str]) -> list[str]:
    manifests = [shard.manifest for shard in index.summaries]
    gone = sorted({*manifests} - known)
    if not gone:
        return []
    shards = counted(sum(manifest in gone for manifest in manifests), "shard was", "shards were")
    what = f"wanted: {listing(gone)} is gone, of which {shards} made"
    return [f"{what}: what else the manifest wants is not known; {_AGAIN}"]
