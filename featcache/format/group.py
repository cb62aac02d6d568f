"""Zarr groups: a sealed document in their attributes, a table, and more arrays, each of one chunk.

zarr-python writes them, at once and from memory; they are read without it, since a chunk is the array's bytes and their
CRC-32C. The document has the size and the checksum of every other file: so what was flipped, cut off or exchanged is
told from what was written. A group's name is the hash of what is in it, and it never changes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.errors import DamagedError
from featcache.format.documents import AT_MOST_BYTES, Count, Hex, parse
from featcache.format.table import Table
from featcache.storage.base import MARK, Opened, Store, as_bytes
from featcache.storage.location import Location

NAME_DIGITS = 16
"""So many digits of a digest name a group."""

CHECKSUM_BYTES = 4
"""Behind the bytes of each chunk."""

_envelopes: dict[Any, Any] = {}

FilePath = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,80}/(zarr\.json|c(/0){1,17})\Z")]
ColumnName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,90}\Z")]
ColumnDtype = Annotated[str, msgspec.Meta(pattern=r"^(u?int|float)64\Z")]


class GroupInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What the document of every group says. What else it says is ignored."""

    fingerprint: Hex
    digest: Hex
    """A hash of everything that is in the group, but this document."""
    columns: Annotated[list[tuple[ColumnName, ColumnDtype]], msgspec.Meta(max_length=128)]
    """The columns of the table, and their dtypes."""
    files: Annotated[dict[FilePath, tuple[Count, Count]], msgspec.Meta(max_length=256)]
    """The size of each other file, and a CRC-32C: of a chunk, of the array's bytes; else of the file's."""
    items: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    text: Count
    """The bytes of text."""


_I = TypeVar("_I", bound=GroupInfo)


def digest_of(files: Mapping[str, tuple[int, int]], table: Table) -> str:
    """What names a group: equal if all of its files are, but the document."""
    digest = hashlib.sha256(msgspec.json.encode(files, order="sorted"))
    for array in (table.matrix, table.text):
        digest.update(as_bytes(np.ascontiguousarray(array)))
    return digest.hexdigest()


def _is_chunk(path: str) -> bool:
    return "/c/" in path


def checksum_of(path: str, data: Any) -> int:
    """The CRC-32C of a file, as the document of its group has it: of a chunk, that which it ends with."""
    return int.from_bytes(data[-CHECKSUM_BYTES:], "little") if _is_chunk(path) else crc32c(data)


class Group(Generic[_I]):
    """A group that is there. Opening it reads its document; everything else is read when it is asked for.

    Args:
        store: The store of the version.
        key: The group's key in it.
        fingerprint: The version's. A group of another version is damage.
        kind: What its document must be.
        columns: The columns that its table must have; it may have more.

    Raises:
        FileNotFoundError: It is not there.
        DamagedError: From everything that reads: it is not what was written.
        StoreError: It cannot be read now.
    """

    def __init__(self, store: Store, key: str, fingerprint: str, kind: type[_I], columns: Mapping[str, str]) -> None:
        self.store = store
        self.key = key
        self._table: Table | None = None
        document = store.read(f"{key}/{MARK}", AT_MOST_BYTES)
        self.info: _I = read_attributes(document, kind, f"{self}/{MARK}", store.location)
        """What its document says."""
        if self.info.fingerprint != fingerprint:
            raise self._damaged(MARK, f"belongs to another version ({self.info.fingerprint[:12]})")
        if not columns.items() <= dict(self.info.columns).items():
            raise self._damaged(MARK, "lacks columns")

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def folder(self) -> Location:
        """Its place."""
        return self.store.location / self.key

    @property
    def table(self) -> Table:
        """Its table, mapped; all bytes of it have been compared with their checksums."""
        # No `cached_property`: Python 3.11's has a lock for all groups, and a child forked while it is held hangs.
        if self._table is None:
            info = self.info
            matrix = self.map("items", (len(info.columns), info.items + 1), "uint64", check=True)
            self._table = Table(matrix, self.map("text", (info.text,), "uint8", check=True), info.columns)
        return self._table

    def unmap_table(self) -> None:
        """Let go of the table: a process can map so many files, and no more (`vm.max_map_count`)."""
        self._table = None

    def map(self, name: str, shape: tuple[int, ...], dtype: str, *, check: bool = False) -> NDArray[Any]:
        """An array of it, mapped and read-only. Its file has the size that follows, and ends in the checksum that the
        document has; with `check`, all of its bytes have been compared with that."""
        path, num_bytes = self._chunk(name, shape, dtype)
        if not num_bytes:
            return np.frombuffer(b"", dtype).reshape(shape)
        passed = _Passed(num_bytes)
        with self._missing_is_damage(path):
            mapped = self.store.map(f"{self.key}/{path}", num_bytes + CHECKSUM_BYTES, passed.take if check else None)
        self._require(path, mapped.size, checksum_of(path, mapped))
        if check and passed.checksum != checksum_of(path, mapped):
            raise self._damaged(path, "its checksum does not match")
        return mapped[:-CHECKSUM_BYTES].view(np.dtype(dtype).newbyteorder("<")).reshape(shape)

    def open(self, name: str, shape: tuple[int, ...], dtype: str) -> Opened:
        """The chunk of an array, to be read piece by piece from where it lies, likewise; it has at least one value."""
        path, num_bytes = self._chunk(name, shape, dtype)
        with self._missing_is_damage(path):
            chunk = self.store.open(f"{self.key}/{path}", num_bytes + CHECKSUM_BYTES)
            (end,) = chunk.read_ranges([num_bytes], [CHECKSUM_BYTES])
        self._require(path, num_bytes + CHECKSUM_BYTES, checksum_of(path, end))
        return chunk

    def _chunk(self, name: str, shape: tuple[int, ...], dtype: str) -> tuple[str, int]:
        return "/".join([name, "c", *"0" * len(shape)]), math.prod(shape) * np.dtype(dtype).itemsize

    def _require(self, path: str, num_bytes: int, checksum: int) -> None:
        if self.info.files.get(path) != (num_bytes, checksum):
            raise self._damaged(path, "it is not the file that the shard was written with")

    @contextmanager
    def _missing_is_damage(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._damaged(path, "the file is missing") from error
        except DamagedError as error:  # the store does not know what mends it
            raise DamagedError(error.what, self.store.location) from error

    def _damaged(self, path: str, what: str) -> DamagedError:
        return DamagedError(f"{self}/{path}: damaged: {what}", self.store.location)

    def checked_blocks(self, path: str, store: Store | None = None, key: str = "") -> Iterator[memoryview]:
        """All bytes of one of its files, or of a copy at another key, in blocks that are valid until the next one.
        Raises DamagedError if they are not what was written, which may be known only after the last one."""
        num_bytes, checksum = self.info.files[path]
        passed = _Passed(num_bytes - CHECKSUM_BYTES * _is_chunk(path))
        with self._missing_is_damage(path):
            for block in (store or self.store).blocks(key or f"{self.key}/{path}", num_bytes):
                passed.take(block)
                yield block
        if passed.checksum != checksum or passed.rest not in (b"", checksum.to_bytes(CHECKSUM_BYTES, "little")):
            raise self._damaged(path, "its checksum does not match")

    def file_fault(self, path: str, seen: Callable[[memoryview], object] = lambda block: None) -> str:
        """Reads every byte of one of its files: what is wrong with it; empty if it is what was written. `seen` is
        called with each block of it, the last of which may end in a chunk's own checksum."""
        try:
            for block in self.checked_blocks(path):
                seen(block)
        except DamagedError as error:
            return error.what
        return ""


class _Passed:
    """Bytes that pass by: the checksum of so many of them, and the rest."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self.checksum = 0
        self.rest = b""

    def take(self, block: memoryview) -> None:
        """Count the next bytes."""
        self.checksum = crc32c(block[: self._left], self.checksum)
        self.rest += block[self._left :]
        self._left = max(0, self._left - len(block))


def read_attributes(data: bytes, kind: type[Any], where: object, version: object) -> Any:
    """What the sealed `zarr.json` of a group says, which must be what `kind` declares. Raises DamagedError if it is not
    what was written."""
    return parse(data, _envelope(kind), str(where), version).attributes.featcache


def _envelope(kind: Any) -> Any:
    """A Struct for groups whose attribute `featcache` is of this kind; made once."""
    if kind not in _envelopes:
        attributes = msgspec.defstruct("Attributes", [("featcache", kind)])
        _envelopes[kind] = msgspec.defstruct("Group", [("attributes", attributes)])
    return _envelopes[kind]
