"""Zarr groups: a sealed document in their attributes, a table, and more arrays, each of
one chunk.

Any Zarr library reads them, and none is needed: a chunk is the array's bytes and their
CRC-32C. The document has the size and checksum of every other file, so any flip, cut or
exchange is noticed. A group's name is a hash of its content, which never changes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.errors import DamagedError
from featcache.format.documents import AT_MOST_BYTES, Count, Hex, parse
from featcache.manifest.strings import Strings
from featcache.storage.base import MARK, Store, as_bytes
from featcache.storage.location import Location
from featcache.storage.opening import open_store

NAME_DIGITS = 16
"""The digits of a digest that name a group."""

CHECKSUM_BYTES = 4
"""The bytes of the checksum at the end of each chunk."""

TABLE_PATHS = ("items/c/0/0", "text/c/0")
"""The files of a group's table."""

WRONG_CHECKSUM = "its checksum does not match"
"""The fault of a file that has other bytes than were written."""

_CHUNK_CRC32C = 0x48674BC7
"""The CRC-32C of any bytes followed by their own CRC-32C."""

FilePath = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,80}/(zarr\.json|c(/0){1,17})\Z")]
ColumnName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,90}\Z")]
ColumnDtype = Annotated[str, msgspec.Meta(pattern=r"^(u?int|float)64\Z")]


class Table:
    """The facts about the items of a shard or an index: a matrix of 64-bit numbers, uint64
    `[columns, items + 1]`, and the text of ids and paths, uint8 `[bytes]`. `columns` are
    names and dtypes of 64 bits. `table["row_hash"]` is a column, `[items]`.

    In columns whose names end in `_offset`, an item's part begins at its entry, and ends at
    the next one. In other columns, the entry behind the last item's is 0."""

    def __init__(
        self,
        matrix: NDArray[np.uint64],
        text: NDArray[np.uint8],
        columns: Iterable[tuple[str, str]],
    ) -> None:
        self.matrix = matrix
        self.text = text
        self.columns = [*columns]
        rows = zip(matrix, self.columns, strict=True)
        self._rows: dict[str, NDArray[Any]] = {name: row.view(dtype) for row, (name, dtype) in rows}

    @classmethod
    def of(
        cls, values: Mapping[str, Any], dtypes: Mapping[str, str], text: NDArray[np.uint8]
    ) -> Table:
        """Make a table of these columns, in the order of `dtypes`; offsets are
        `[items + 1]`, others `[items]`."""
        items = max((len(values[name]) - name.endswith("_offset") for name in dtypes), default=0)
        matrix = np.zeros((len(dtypes), items + 1), np.uint64)
        for row, (name, dtype) in zip(matrix, dtypes.items(), strict=True):
            row.view(dtype)[: items + name.endswith("_offset")] = values[name]
        return cls(matrix, text, dtypes.items())

    def __len__(self) -> int:
        return int(self.matrix.shape[1]) - 1

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._rows[name][:-1]

    def offsets(self, of: str) -> NDArray[np.int64]:
        """Return the offsets of `frame`, `id`, `path` or `side_<name>`, int64
        `[items + 1]`."""
        return self._rows[f"{of}_offset"].view(np.int64)

    @property
    def ids(self) -> Strings:
        """The ids, `[items]`."""
        return Strings(self.text, self.offsets("id"))

    @property
    def paths(self) -> Strings:
        """The paths as the manifest had them, `[items]`; an index has none."""
        return Strings(self.text, self.offsets("path"))


def rise(offsets: NDArray[np.int64], first: int, last: int, at_least: int = 0) -> bool:
    """Tell whether offsets go from `first` to `last`, in steps of at least `at_least`."""
    if offsets[0] != first or offsets[-1] != last:
        return False
    return bool((np.diff(offsets) >= at_least).all())


class GroupInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of every group's document. Others are ignored."""

    fingerprint: Hex
    digest: Hex
    """A hash of everything in the group but this document."""
    columns: Annotated[list[tuple[ColumnName, ColumnDtype]], msgspec.Meta(max_length=128)]
    """The columns of the table, and their dtypes."""
    files: Annotated[dict[FilePath, tuple[Count, Count]], msgspec.Meta(max_length=256)]
    """The size and CRC-32C of each other file; for a chunk, the CRC-32C of the array's
    bytes."""
    items: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    text: Count
    """The bytes of text."""


def digest_of(files: Mapping[str, tuple[int, int]], table: Table) -> str:
    """Return the digest that names a group: of all files but the document."""
    digest = hashlib.sha256(msgspec.json.encode(files, order="sorted"))
    for array in (table.matrix, table.text):
        digest.update(as_bytes(np.ascontiguousarray(array)))
    return digest.hexdigest()


def _is_chunk(path: str) -> bool:
    return "/c/" in path


def checksum_of(path: str, data: Any) -> int:
    """Return the CRC-32C of a file, as the group's document records it."""
    if _is_chunk(path):
        return int.from_bytes(data[-CHECKSUM_BYTES:], "little")
    return int(crc32c(data))


@contextmanager
def naming_remedy(version: object) -> Iterator[None]:
    """Have a DamagedError name the version to repair."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(error.what, version) from error


class Group:
    """A group of a version, by its key in the version's store. Opening it reads its
    document, which must have this `kind` and fingerprint, and at least these columns.
    Raises FileNotFoundError if it does not exist."""

    def __init__(
        self, store: Store, key: str, fingerprint: str, kind: Any, columns: Mapping[str, str]
    ) -> None:
        self.store = store
        self.key = key
        self._table: Table | None = None
        with naming_remedy(store.location):
            document = store.read(f"{key}/{MARK}", AT_MOST_BYTES)
            self.info: Any = read_attributes(document, kind, f"{self}/{MARK}")
            """Its document."""
        if self.info.fingerprint != fingerprint:
            raise self._damaged(MARK, f"belongs to another version ({self.info.fingerprint[:12]})")
        if not columns.items() <= dict(self.info.columns).items():
            raise self._damaged(MARK, "lacks columns")

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def folder(self) -> Location:
        """Its location."""
        return self.store.location / self.key

    @property
    def table(self) -> Table:
        """Its table, mapped, and compared with its checksums."""
        # no `cached_property`: Python 3.11's has a lock, which hangs in a forked child
        if self._table is None:
            info = self.info
            matrix = self.map("items", (len(info.columns), info.items + 1), "uint64", check=True)
            text = self.map("text", (info.text,), "uint8", check=True)
            self._table = Table(matrix, text, info.columns)
        return self._table

    def unmap_table(self) -> None:
        """Let go of the table: a process can map so many files (`vm.max_map_count`)."""
        self._table = None

    def map(
        self, name: str, shape: tuple[int, ...], dtype: str, *, check: bool = False
    ) -> NDArray[Any]:
        """Map an array, read-only. Its size and its checksum must be the same as in the
        document; with `check`, all bytes are compared with the checksum."""
        path, num_bytes = self._chunk(name, shape, dtype)
        if not num_bytes:
            return np.frombuffer(b"", dtype).reshape(shape)
        crc = 0

        def passed(block: memoryview) -> None:
            nonlocal crc
            crc = crc32c(block, crc)

        key, num_bytes = f"{self.key}/{path}", num_bytes + CHECKSUM_BYTES
        with self._missing_is_damage(path):
            mapped = self.store.map(key, num_bytes, passed if check else None)
        self._require(path, mapped.size, checksum_of(path, mapped))
        if check and crc != _CHUNK_CRC32C:
            raise self._damaged(path, WRONG_CHECKSUM)
        return mapped[:-CHECKSUM_BYTES].view(np.dtype(dtype).newbyteorder("<")).reshape(shape)

    def _chunk(self, name: str, shape: tuple[int, ...], dtype: str) -> tuple[str, int]:
        return "/".join([name, "c", *"0" * len(shape)]), math.prod(shape) * np.dtype(dtype).itemsize

    def _require(self, path: str, num_bytes: int, checksum: int) -> None:
        if self.info.files.get(path) != (num_bytes, checksum):
            raise self._damaged(path, "it is not the file that the shard was written with")

    @contextmanager
    def _missing_is_damage(self, path: str) -> Iterator[None]:
        try:
            with naming_remedy(self.store.location):
                yield
        except FileNotFoundError as error:
            raise self._damaged(path, "the file is missing") from error

    def _damaged(self, path: str, what: str) -> DamagedError:
        return DamagedError(f"{self}/{path}: damaged: {what}", self.store.location)

    def checked_blocks(self, path: str, copy: Path | None = None) -> Iterator[memoryview]:
        """Yield one of its files, or a copy of it, in blocks, each valid until the next.
        Raises DamagedError, maybe after the last block, if they are not what was written."""
        num_bytes, checksum = self.info.files[path]
        store, key, crc, end = self.store, f"{self.key}/{path}", 0, b""
        if copy is not None:
            store, key = open_store(copy.parent), copy.name
        with self._missing_is_damage(path):
            for block in store.blocks(key, num_bytes):
                crc = crc32c(block, crc)
                end = (end + block[-CHECKSUM_BYTES:])[-CHECKSUM_BYTES:]
                yield block
        is_right = crc == checksum
        if _is_chunk(path):
            is_right = crc == _CHUNK_CRC32C and checksum_of(path, end) == checksum
        if not is_right:
            raise self._damaged(path, WRONG_CHECKSUM)

    def file_fault(self, path: str) -> str:
        """Read one of its files, and return its fault; empty if it has none."""
        try:
            for _ in self.checked_blocks(path):
                pass
        except DamagedError as error:
            return error.what
        return ""


def read_attributes(data: bytes, kind: Any, where: object) -> Any:
    """Parse a group's sealed `zarr.json`, as `kind` declares; see `parse`."""
    return parse(data, _envelope(kind), where).attributes.featcache


@cache
def _envelope(kind: Any) -> Any:
    attributes = msgspec.defstruct("Attributes", [("featcache", kind)])
    return msgspec.defstruct("Group", [("attributes", attributes)])
