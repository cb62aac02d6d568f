"""What manifests want of a version, and what it lacks: a subtraction of sets.

Before a run over a manifest makes its first shard, it keeps what the manifest wants: of each row the hashes of its id
and of itself, and the lowest generation of its item. What is missing is that, without what the index has, and
without failures that stand. What a run wants takes the place of what earlier ones did over the same manifest, and over
manifests all of whose rows it has: so one that has moved, or has grown, leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from featcache.errors import DamagedError, ManifestError
from featcache.format.documents import AT_MOST_BYTES, Count, Hash, encode_line, parse
from featcache.manifest.segments import SegmentColumns
from featcache.storage.base import as_bytes
from featcache.strings import Strings
from featcache.version.index_table import Index
from featcache.version.ledger import Failure
from featcache.version.version import Version

if TYPE_CHECKING:
    from featcache.manifest import Manifest

__all__ = [
    "Missing",
    "RowKeys",
    "Wanted",
    "find_missing",
    "forget_rows",
    "read_all_wanted",
    "read_wanted",
    "want",
]

_AT_MOST_BYTES = 1 << 37
_ROW_BYTES = 24


class RowKeys(NamedTuple):
    """What is compared of rows: two of equal keys are the same row."""

    id_hash: NDArray[np.uint64]
    """The hashes of the ids, uint64 `[rows]`."""
    row_hash: NDArray[np.uint64]
    """The hashes of the segments, uint64 `[rows]`; see `SegmentColumns.hashes`."""


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
    """uint64 `[3, rows]`: the hash of each row's id, its own, and the lowest generation that its item may have."""
    instead_of: frozenset[str] = frozenset()
    """The names of the sets in whose place it is."""

    @property
    def name(self) -> str:
        """The name under which it is kept, the same for each run over the manifest."""
        return name_of(self.manifest)

    @property
    def names(self) -> frozenset[str]:
        """Its name, and those of the sets in whose place it is."""
        return self.instead_of | {self.name}

    @property
    def keys(self) -> RowKeys:
        """What is compared of its rows."""
        return RowKeys(self.rows[0], self.rows[1])

    def __len__(self) -> int:
        return int(self.rows.shape[1])

    def is_of(self, manifest: Manifest) -> bool:
        """Whether it has as many rows as a manifest has."""
        return len(self) == len(manifest)

    def lacks(self, index: Index) -> NDArray[np.bool_]:
        """Which rows have no item, bool `[rows]`. One of a later generation is as good: it has replaced the row."""
        if not len(index):
            return np.ones(len(self), bool)
        id_hash, row_hash, generation = self.rows
        at = index.find_hashes(id_hash)
        theirs = index.generation[at]
        is_there = (theirs > generation) | ((theirs == generation) & (index.row_hash[at] == row_hash))
        lacking: NDArray[np.bool_] = ~is_there | (at < 0)
        return lacking

    def save(self, version: Version) -> None:
        """Keep it, in the place of sets that it has all rows of."""
        others = [other for other in read_all_wanted(version) if other.name == self.name or _contains(self, other)]
        instead_of = self.instead_of.union(*(other.names for other in others)) - {self.name}
        payload = as_bytes(np.ascontiguousarray(self.rows, "<u8"))
        header = {"manifest": self.manifest, "rows": len(self), "crc32c": crc32c(payload)}
        line = encode_line({**header, "instead_of": sorted(instead_of)})
        version.store.put(f"wanted/{self.name}", line + payload)
        for other in others:
            if other.name != self.name:
                version.store.remove(f"wanted/{other.name}")


def name_of(manifest: str) -> str:
    """The name of a manifest's wanted set."""
    return str(xxh3_64_hexdigest(manifest.encode(errors="surrogateescape")))


def want(
    manifest: str, keys: RowKeys, index: Index, before: Iterable[Wanted], again: Sequence[int] | NDArray[np.int64] = ()
) -> Wanted:
    """What a run over a manifest wants.

    A row that is there in the same form keeps its generation, another one of its id gets the next; so do those that are
    to be extracted `again`, by their numbers, because their audio has changed, for example.

    Args:
        manifest: What tells the manifest from others.
        keys: Its rows.
        index: What there is.
        before: The wanted sets that are kept.
        again: The numbers of rows that are to be extracted although they are there.

    Raises:
        ManifestError: Two ids have the same hash.
    """
    if len(np.unique(keys.id_hash)) < len(keys.id_hash):
        raise ManifestError(f"{manifest}: two ids have the same hash: rename one of them")
    mine = Wanted(manifest, np.stack([*keys, np.zeros_like(keys.id_hash)]))
    highest, is_same = np.zeros(len(mine), np.uint64), np.ones(len(mine), bool)
    of_index = index.find_hashes(keys.id_hash)
    known = [(of_index, index.row_hash, index.generation)] if len(index) else []
    known += [
        (_find(other.rows[0], keys.id_hash), other.rows[1], other.rows[2])
        for other in before
        if len(other) and (other.name == mine.name or _contains(mine, other))
    ]
    for at, row_hashes, generations in known:
        theirs = np.where(at < 0, np.uint64(0), generations[at])
        same = row_hashes[at] == keys.row_hash
        is_same = np.where(theirs > highest, same, is_same & (same | (theirs < highest) | (at < 0)))
        highest = np.maximum(highest, theirs)
    generation = np.where(is_same, np.maximum(highest, np.uint64(1)), highest + np.uint64(1))
    rows = np.asarray(again, np.int64)
    if len(rows) and len(index):
        at = of_index[rows]
        next_ones = np.where(at < 0, np.uint64(1), index.generation[at] + np.uint64(1))
        generation[rows] = np.maximum(generation[rows], next_ones)
    return Wanted(manifest, np.stack([*keys, generation]))


def read_wanted(version: Version, name: str) -> Wanted:
    """A wanted set, by its name.

    Raises:
        FileNotFoundError: There is none.
        DamagedError: It is not what was written.
    """
    where = f"{version.path}/wanted/{name}"
    line, _, payload = version.store.read(f"wanted/{name}", _AT_MOST_BYTES).partition(b"\n")
    if len(line) > AT_MOST_BYTES:
        raise DamagedError(f"{where}: damaged: it has no first line")
    header = parse(line, _Header, where)
    if len(payload) != header.rows * _ROW_BYTES or crc32c(payload) != header.crc32c or name_of(header.manifest) != name:
        raise DamagedError(f"{where}: damaged: it is not what was written")
    rows = np.frombuffer(payload, "<u8").reshape(3, header.rows)
    return Wanted(header.manifest, rows, frozenset(header.instead_of))


def read_all_wanted(version: Version, damaged: list[str] | None = None) -> Iterator[Wanted]:
    """All wanted sets; those that are damaged are passed over, and named in `damaged`."""
    for name in version.store.names("wanted"):
        try:
            yield read_wanted(version, name)
        except FileNotFoundError:  # a run has taken it away since
            continue
        except DamagedError as error:
            if damaged is not None:
                damaged.append(str(error))


@dataclass(frozen=True)
class Missing:
    """What a version lacks of what its manifests want."""

    missing: Mapping[str, NDArray[np.int64]]
    """By manifest, the numbers of its rows that have neither an item nor a failure that stands; none without such."""
    failed: Mapping[str, Failure]
    """The failures that stand, of rows that are wanted, by id."""
    id_hashes: NDArray[np.uint64]
    """The hashes of the ids of missing rows, uint64 `[n]`."""

    def num_failed(self, wanted: Wanted) -> int:
        """How many of the failures are of rows of a wanted set."""
        return int(np.isin(Strings.of(self.failed).hashes(), wanted.rows[0]).sum())


def find_missing(wanted: Iterable[Wanted], index: Index, failures: Sequence[Failure]) -> Missing:
    """What an index lacks of wanted sets, with these failures in the ledger."""
    ids, rows = Strings.of(failure.id for failure in failures).hashes(), SegmentColumns.of(failures).hashes()
    by_key = {
        (id_hash, row_hash, failure.generation): failure
        for id_hash, row_hash, failure in zip(ids.tolist(), rows.tolist(), failures, strict=True)
    }
    missing, failed, hashes = {}, {}, [np.empty(0, np.uint64)]
    for one in wanted:
        numbers = np.flatnonzero(one.lacks(index))
        if by_key and len(numbers):
            may_have_failed = np.isin(one.rows[0, numbers], ids)
            is_failed = np.zeros(len(numbers), bool)
            for place in np.flatnonzero(may_have_failed).tolist():
                failure = by_key.get(tuple(one.rows[:, numbers[place]].tolist()))
                if failure is not None:
                    is_failed[place], failed[failure.id] = True, failure
            numbers = numbers[~is_failed]
        if len(numbers):
            missing[one.manifest] = numbers
            hashes.append(one.rows[0, numbers])
    return Missing(missing, failed, np.concatenate(hashes))


def forget_rows(version: Version, wanted_ids: NDArray[np.uint64]) -> None:
    """Have no manifest want rows whose ids do not have one of these hashes."""
    for one in read_all_wanted(version):
        stays = np.isin(one.rows[0], wanted_ids)
        if not stays.all():
            Wanted(one.manifest, one.rows[:, stays], one.instead_of).save(version)


def _contains(one: Wanted, other: Wanted) -> bool:
    """Whether one has all rows of the other, whatever their generations."""
    if len(other) > len(one):
        return False
    at = _find(one.rows[0], other.rows[0])
    return bool(((at >= 0) & (one.rows[1][at] == other.rows[1])).all())


def _find(hashes: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where each of some hashes is among others, int64 `[n]`; -1 where it is not."""
    if not len(hashes):
        return np.full(len(wanted), -1)
    order = np.argsort(hashes, kind="stable")
    at = np.minimum(np.searchsorted(hashes, wanted, sorter=order), len(hashes) - 1)
    return np.where(hashes[order[at]] == wanted, order[at], -1)
