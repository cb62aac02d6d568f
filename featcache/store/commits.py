"""Commits of shards, by a rename in a folder and by a conditional request in an object store.

In an object store nothing is renamed. A shard is made on this machine first, at the version's desk. Then each attempt
is written to a place of its own, `shards/<name>`, whose name follows from the items and from a random number; all but
its `zarr.json`, without which it is not there. Then the attempt is entered in `commits/<what>`, where `what` follows
from the items alone, by a request that fails if there is such an entry. Whoever succeeds writes the `zarr.json`; others
remove what they have written. So no reader needs to know of `commits/`, and no shard is seen that is not to stay.

An entry holds the shard's `zarr.json`, so that if its writer has died before it wrote that, whoever makes the same
shard completes it; and the columns that an index needs. A run records, once the shard is there, where it is entered: so
building an index reads one small file of each shard. An entry whose shard is gone, because repair has taken it away or
somebody has lost it, is void: then the next attempt is entered in `commits/<what>.1`, and so on. No entry is ever
changed or removed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.manifest import SegmentColumns
from featcache.storage.location import ObjectPath
from featcache.storage.objects import Objects, read_ahead
from featcache.storage.store import store_of
from featcache.store import zarr3
from featcache.store.checksums import hex_crc32c
from featcache.store.documents import DOCUMENT_BYTES, UNSEALED, is_sealed, parse_object, seal
from featcache.store.fields import fields, mapped, text, whole
from featcache.store.files import remove_from_version
from featcache.store.records import read_lines
from featcache.store.shard import Shard, are_rising
from featcache.store.shard_files import ShardFiles
from featcache.store.shard_writer import ShardWriter
from featcache.store.version import Version
from featcache.strings import Strings

_DAY_SECONDS = 86400.0
_COMPLETED_SECONDS = _DAY_SECONDS / 2
"""How old the files of a shard may be that is still to be completed: long before they may be removed."""
_TRUSTED_SECONDS = 3600.0
"""How long after a writer began it may rely on it that its files are there, without looking."""

_COLUMNS = {"ids": np.uint8, "id_offsets": np.uint64, "row_hash": np.uint64, "offsets": np.uint64}
_EVENT = fields(
    {"shard": text("[0-9a-f]{12}")}, or_not={"entry": text(r"[0-9a-f]{12}(\.\d+)?")}, others=lambda value: value
)
"""A line of a run about a shard, as far as it leads to its entry."""

_ENTRY = fields(
    {
        "shard": text("[0-9a-f]{12}"),
        "zarr_json": text(at_most=DOCUMENT_BYTES),
        "files": mapped(text(), whole()),
        "columns": mapped(text(), whole()),
        "crc32c": text("[0-9a-f]{8}"),
    }
)

_store = Objects()


class Committed(NamedTuple):
    """A shard that is there."""

    name: str
    """Its name."""
    entry: str | None = None
    """The name of its entry in `commits/`; None if it was committed in a folder."""


@dataclass(frozen=True)
class Entry:
    """What is entered in `commits/` of a shard."""

    shard: str
    """The shard's name."""
    zarr_json: str
    """Its own `zarr.json`."""
    files: Mapping[str, int]
    """The sizes of its other files, by their paths in it."""
    columns: Mapping[str, NDArray[Any]]
    """Its `ids`, `id_offsets` and `offsets`, and the hashes of its rows, `row_hash`."""

    def data(self) -> bytes:
        """As it is written: a line of JSON, sealed, and the columns one after the other."""
        payload = b"".join(self.columns[name].astype(dtype).tobytes() for name, dtype in _COLUMNS.items())
        document = {
            "shard": self.shard,
            "zarr_json": self.zarr_json,
            "files": dict(self.files),
            "columns": {name: len(self.columns[name]) for name in _COLUMNS},
            "crc32c": hex_crc32c(payload),
            "checksum": UNSEALED,
        }
        return seal(document, indent=None) + b"\n" + payload

    @classmethod
    def read(cls, place: ObjectPath) -> Entry:
        """What has been entered.

        Raises:
            FileNotFoundError: There is nothing.
            DamagedError: It is not what was written.
        """
        data = _store.get(place, lambda size: None)  # no larger than it is; nothing in it says how large
        line, _, payload = data.partition(b"\n")
        document = parse_object(line, place)
        try:
            if not is_sealed(line, document.pop("checksum")):
                raise ValueError("its checksum does not match")
            known = _ENTRY(document)
            lengths = [known["columns"][name] for name in _COLUMNS]
            ends = np.cumsum(
                [length * np.dtype(dtype).itemsize for length, dtype in zip(lengths, _COLUMNS.values(), strict=True)]
            )
            if int(ends[-1]) != len(payload) or hex_crc32c(payload) != known["crc32c"]:
                raise ValueError("its checksum does not match")
            columns, begin = {}, 0
            for (name, dtype), end in zip(_COLUMNS.items(), ends.tolist(), strict=True):
                columns[name] = np.frombuffer(payload[begin:end], np.dtype(dtype).newbyteorder("<"))
                begin = end
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{place}: damaged: not the entry of a shard: {error}") from error
        return cls(known["shard"], known["zarr_json"], known["files"], columns)


def commit_shard(
    writer: ShardWriter,
    version: Version,
    *,
    sample_rate: int,
    row: int,
    supersedes: Mapping[str, list[int]],
    made_by: Mapping[str, Any],
) -> Committed:
    """Make a shard of a version visible, as `ShardWriter.commit` says; wherever the version is.

    Returns:
        The shard, or the one of another attempt that was there already.

    Raises:
        StoreError: It cannot be written.
        OSError: The disk of this machine is full or broken.
    """
    described: dict[str, Any] = {
        "sample_rate": sample_rate,
        "row": row,
        "supersedes": supersedes,
        "made_by": made_by,
    }
    if isinstance(version.path, Path):
        return Committed(writer.commit(version.folder / "shards", **described))
    place = version.work_folder("upload")
    place.mkdir()
    try:
        name = writer.commit(place, **described, attempt=secrets.token_hex(8))
        return _upload(ShardFiles(Shard(place / name, version.info.fingerprint), version.info.spec), version)
    finally:
        remove_from_version(version.desk, "work", place.name)


def _upload(files: ShardFiles, version: Version) -> Committed:
    shard = files.shard
    what, path = _what(shard), version.path
    assert what is not None
    assert isinstance(path, ObjectPath)
    if (other := _standing(path, what)) is not None:
        return other
    place, begun = path / "shards" / shard.name, time.time()
    sizes = files.upload_arrays(place)
    rows = SegmentColumns.of_arrays(shard.paths, shard.column("segments"), shard.column("channels"))
    columns = {name: shard.column(name) for name in ("ids", "id_offsets", "offsets")}
    document = files.document()
    entry = Entry(shard.name, document.decode(), sizes, {**columns, "row_hash": rows.hashes()})
    for entered in _entries(path, what):
        is_ours = _store.put_if_absent(entered, entry.data())
        if is_ours and time.time() - begun < _TRUSTED_SECONDS:
            _store.put(place / "zarr.json", document)
            return Committed(shard.name, entered.name)
        if (name := _shard_of(path, entered)) is not None:
            if not is_ours:
                with suppress(StoreError):  # it stays, and is not seen
                    _store.delete_folder(place)
            return Committed(name, entered.name)
        if is_ours:  # this machine has slept for a day, for example, and another one has swept
            raise StoreError(f"{place}: what was written of this shard is too old, or gone: run the same command again")
    raise AssertionError


def _standing(version: ObjectPath, what: str) -> Committed | None:
    """The shard that was committed of some items, and is there; None if there is none."""
    with suppress(FileNotFoundError):
        for entered in _entries(version, what):
            if (name := _shard_of(version, entered)) is not None:
                return Committed(name, entered.name)
    return None


def _shard_of(version: ObjectPath, entered: ObjectPath) -> str | None:
    """The name of the shard that is entered somewhere, which is completed if that has not been done; None if the shard
    is gone.
    """
    try:
        entry = Entry.read(entered)
    except DamagedError:
        return None
    place = version / "shards" / entry.shard
    files = dict(_store.walk(place))  # all at once: its writer may be about to write the last one
    if "zarr.json" in files:
        return entry.shard
    if files != entry.files:
        return None
    written = _store.last_change(place)
    if written is None or _store.now(version / "work") - written > _COMPLETED_SECONDS:
        return None
    _store.put(place / "zarr.json", entry.zarr_json.encode())
    return entry.shard


def _entries(version: ObjectPath, what: str) -> Iterator[ObjectPath]:
    """Where shards of some items are entered, one after the other."""
    for number in count():
        yield version / "commits" / (f"{what}.{number}" if number else what)


def _what(shard: Shard) -> str | None:
    """The name under which the attempts to make this shard are entered; None if it was not made in an object store."""
    attempt = shard.info.made_by.get("attempt")
    return None if attempt is None else str(attempt).partition(".")[0]


@dataclass(frozen=True)
class CommittedColumns:
    """The columns of a shard that an index needs, from its entry."""

    ids: Strings
    """The items' ids, `[items]`."""
    row_hash: NDArray[np.uint64]
    """The hash of the row that each item was extracted from, uint64 `[items]`."""
    offsets: NDArray[np.int64]
    """Where each item's frames begin, and the last one's end, int64 `[items + 1]`."""


def recorded_entries(version: Version) -> dict[str, str]:
    """The names of the entries of shards in an object store, by the shards' names: of those that a run has recorded
    when they were there, and that nobody has recorded to take away.
    """
    runs = version.path / "runs"
    try:
        ledgers = [runs / name / "shards.jsonl" for name in store_of(runs).names(runs)]
    except FileNotFoundError:
        return {}
    entries: dict[str, str] = {}
    with read_ahead(ledgers):
        records = [record for ledger in ledgers for record in read_lines(ledger, sealed=True).records]
    for record in records:
        with suppress(ValueError):  # sealed, and odd all the same
            event = _EVENT(record)
            entry = "" if "until" in event else event.get("entry", "")
            entries[event["shard"]] = entry and entries.get(event["shard"], entry)
    return {shard: entry for shard, entry in entries.items() if entry}


def committed_columns(shard: Shard, entry: str = "") -> CommittedColumns | None:
    """The columns of a shard from its entry; None if it has none, or something is wrong with it: then the shard's own
    tell, or what is wrong. With the name of the entry, the shard is there, and its `zarr.json` is not read, either.
    """
    if not isinstance(shard.folder, ObjectPath):
        return None
    version = shard.folder.parent.parent
    with suppress(FileNotFoundError, DamagedError):
        if entry:
            found = Entry.read(version / "commits" / entry)
            if found.shard == shard.name:
                shard.take_metadata(found.zarr_json.encode())
                return _checked(found.columns, shard)
    if (what := _what(shard)) is None:
        return None
    with suppress(FileNotFoundError, DamagedError):
        for entered in _entries(version, what):
            found = Entry.read(entered)
            if found.shard == shard.name:
                return _checked(found.columns, shard)
    return None


def _checked(columns: Mapping[str, NDArray[Any]], shard: Shard) -> CommittedColumns | None:
    items, frames = shard.info.items, shard.info.frames
    if [len(columns[name]) for name in ("id_offsets", "row_hash", "offsets")] != [items + 1, items, items + 1]:
        return None
    if not are_rising(columns["id_offsets"], len(columns["ids"]), 0) or not are_rising(columns["offsets"], frames, 1):
        return None
    ids = Strings(columns["ids"], columns["id_offsets"].astype(np.int64))
    if not ids.are_utf8():
        return None
    return CommittedColumns(ids, columns["row_hash"].astype(np.uint64), columns["offsets"].astype(np.int64))


def sweep_attempts(version: Version, known: Iterable[str]) -> None:
    """Remove what killed processes have left of shards in an object store: what is not there as a whole, and to which
    nothing has been added for a day; `known` are shards that are there as a whole. Likewise what they wrote to try the
    store. In a folder, nothing.
    """
    if not isinstance(version.path, ObjectPath):
        return
    for place in (version.path.parent, version.path / "work"):
        _store.sweep_probes(place, _DAY_SECONDS)
    version.take_for_whole(known)
    if not (lacking := {*version.listed_shards()} - {*version.shard_names()}):
        return
    now = _store.now(version.path / "work")
    for name in sorted(lacking):
        place = version.path / "shards" / name
        written = _store.last_change(place)
        if written is not None and now - written > _DAY_SECONDS and not _store.exists(place / "zarr.json"):
            _store.delete_folder(place)


def remove_shard_of_objects(version: Version, name: str) -> None:
    """Remove a shard in an object store: first its features, so that nobody completes it again, and its `zarr.json`."""
    place, dimensions = version.path / "shards" / name, 1 + len(version.info.spec.item_shape)
    _store.delete(zarr3.chunk_path(place / "features", dimensions))
    _store.delete(place / "zarr.json")
    _store.delete_folder(place)


def remove_version_of_objects(version: Version) -> None:
    """Remove a version in an object store: each shard as above, then the rest, and its own `zarr.json` last."""
    for name in version.listed_shards():
        remove_shard_of_objects(version, name)
    for folder in ("commits", "index", "probes", "runs", "tags", "shards"):
        _store.delete_folder(version.path / folder)
    _store.delete_folder(version.path)


def was_written_lately(version: Version) -> bool:
    """Whether anything of a version in an object store was written within a day, by the store's clock."""
    written = _store.last_change(version.path)
    return written is not None and _store.now(version.path / "work") - written < _DAY_SECONDS
