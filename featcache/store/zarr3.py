"""Zarr v3 arrays and groups as files: the few kinds that format 1 is made of.

Every array is one chunk with the codecs `bytes` (little endian) and `crc32c`. So its chunk file is the raw array
followed by four bytes of checksum: it can be memory-mapped, and stock Zarr refuses it after one flipped bit. An array
without any value has no chunk, and so no such file.

Writing such an array takes a JSON file and a stream of bytes. It is done here because zarr-python takes 2 ms for each
array, wants a shard's features whole in memory, leaves all-zero chunks out by default, and does not flush to disk.
Tests check what is written here with zarr-python's reader.

Sources: the Zarr core specification v3, and the crc32c codec's (zarr-specs.readthedocs.io).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError
from featcache.storage.folder import open_file
from featcache.storage.location import Location, ObjectPath, folder_of
from featcache.storage.store import store_of
from featcache.store.checksums import crc32c
from featcache.store.documents import UNSEALED, is_sealed, parse_object, read_bytes, seal, to_json
from featcache.store.fields import anything, fields, listed, one_of, whole
from featcache.store.memory_map import map_file

CHECKSUM_BYTES = 4
RESIDUE = 0x48674BC7
"""CRC-32C of any bytes that are followed by their own CRC-32C, little endian: a chunk's whole file."""

DTYPES = ("float16", "float32", "float64", "uint8", "uint16", "uint32", "uint64", "int32", "int64")
"""What `data_type` may be in format 1."""

_DIMENSIONS = 16
_METADATA = fields({"shape": listed(whole(), _DIMENSIONS), "data_type": one_of(DTYPES)}, others=anything)
_PIECE_BYTES = 8 << 20
_NOTHING = np.frombuffer(b"", np.uint8)

_P = TypeVar("_P", Path, ObjectPath, Location)


def chunk_path(folder: _P, num_dimensions: int) -> _P:
    """The file of the only chunk of the array in `folder`."""
    return folder.joinpath("c", *["0"] * num_dimensions)


def array_metadata(
    shape: tuple[int, ...], dtype: np.dtype[Any], dimension_names: Sequence[str] | None, fill: int = 0
) -> bytes:
    """The `zarr.json` of a one-chunk array. A chunk's sizes are at least 1, even if the array's are 0.

    Where a chunk is missing, stock Zarr reads the fill value: NaN in arrays of floats, `fill` in others. With None for
    the names, it is as the first featcache wrote it: without names, and with a fill value of 0.
    """
    is_first, is_float = dimension_names is None, dtype.kind == "f"
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    # Without a configuration, the separator is the default one, and no flipped bit can change it.
    separator = {"configuration": {"separator": "/"}} if is_first else {}
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, size) for size in shape]}},
        "chunk_key_encoding": {"name": "default", **separator},
        "fill_value": (0.0 if is_first else "NaN") if is_float else fill,
        "codecs": [{"name": "bytes", **endian}, {"name": "crc32c"}],
        "attributes": {},
    }
    return to_json(document if dimension_names is None else {**document, "dimension_names": [*dimension_names]})


def group_metadata(attributes: dict[str, Any] | None = None) -> bytes:
    """The `zarr.json` of a group, with `attributes` under the key `featcache`, sealed by a checksum of its own.

    The seal is `attributes.featcache.checksum`: the CRC-32C, as eight hex digits, of the file's bytes with these eight
    digits set to `0`. JSON itself has no protection against a flipped bit.
    """
    if attributes is None:
        return to_json({"zarr_format": 3, "node_type": "group", "attributes": {}})
    unsealed = {**attributes, "checksum": UNSEALED}
    return seal({"zarr_format": 3, "node_type": "group", "attributes": {"featcache": unsealed}})


def read_group(folder: Location) -> dict[str, Any]:
    """The attributes of a group that `group_metadata` wrote.

    Raises:
        FileNotFoundError: There is no group.
        DamagedError: The file is not what was written.
    """
    return parse_group(read_bytes(folder / "zarr.json"), folder / "zarr.json")[0]


def parse_group(data: bytes, path: Location) -> tuple[dict[str, Any], str]:
    """The attributes of a group, and its seal in hex, from the bytes of its `zarr.json`, which were at `path`.

    Raises:
        DamagedError: They are not what was written.
    """
    document = parse_object(data, path)
    try:
        attributes: dict[str, Any] = document["attributes"]["featcache"]
        checksum = attributes.pop("checksum")
        is_sound = is_sealed(data, checksum)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path}: damaged: not the metadata of a featcache group ({error})") from error
    if not is_sound:
        raise DamagedError(f"{path}: damaged: its checksum does not match")
    return attributes, checksum


def is_plain_group(folder: Location) -> bool:
    """Whether a folder has the metadata of a group without attributes.

    Raises:
        OSError: The metadata cannot be read.
    """
    try:
        return read_bytes(folder / "zarr.json") == group_metadata()
    except (FileNotFoundError, DamagedError):
        return False


@dataclass(frozen=True)
class Form:
    """What an array must be; what is not known of it is None."""

    dtype: str
    """The name of its dtype."""
    entry_shape: tuple[int, ...]
    """The shape of one entry."""
    length: int | None = None
    """The number of entries."""
    at_most: int | None = None
    """The largest number of entries."""

    def fits(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        """Whether an array of that shape and dtype is what it must be."""
        return (
            dtype.name == self.dtype
            and len(shape) == 1 + len(self.entry_shape)
            and shape[1:] == self.entry_shape
            and self.length in (None, shape[0])
            and (self.at_most is None or shape[0] <= self.at_most)
        )

    def __str__(self) -> str:
        length = f"at most {self.at_most}" if self.length is None else str(self.length)
        return f"{self.dtype} [{', '.join([length, *map(str, self.entry_shape)])}]"


class ChunkWriter:
    """Streams an array's only chunk to disk, and its checksum at the end.

    Raises:
        OSError: From every method, if the disk is full or broken.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._crc = 0
        self._sent = 0

    def append(self, data: NDArray[Any]) -> None:
        """Add a C-contiguous little-endian array's bytes."""
        self._crc = crc32c(data, self._crc)
        self._write(data.reshape(-1).view(np.uint8).data)
        if (size := self._file.tell()) - self._sent >= _PIECE_BYTES:
            # Linux starts to write the piece to the disk and does not wait, so little is left for the flush at the end.
            os.posix_fadvise(self._file.fileno(), self._sent, size - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = size

    def close(self) -> None:
        """Write the checksum and close the file."""
        self._write(memoryview(self._crc.to_bytes(CHECKSUM_BYTES, "little")))
        self._file.close()

    def discard(self) -> None:
        """Close the file without a checksum."""
        self._file.close()

    def _write(self, data: memoryview) -> None:
        while len(data):  # one write may take less than it was given
            data = data[self._file.write(data) :]


def write_array(folder: Path, array: NDArray[Any], metadata: bytes) -> None:
    """Write an array into `folder`, with that `zarr.json`."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if little.size:
        writer = ChunkWriter(chunk_path(folder, little.ndim))
        try:
            writer.append(little)
            writer.close()
        finally:
            writer.discard()  # closes the file if the disk is full; else it is closed
    else:
        folder.mkdir(parents=True)
    (folder / "zarr.json").write_bytes(metadata)


def read_array(folder: Location, form: Form | None = None, metadata: bytes | None = None) -> tuple[NDArray[Any], int]:
    """Read an array: its values, and the checksum that is stored with them. They are not compared.

    It must be of that `form`, if there is one; `metadata` are the bytes of its `zarr.json`, if they have been read.

    Raises:
        DamagedError: A file is missing, its size is wrong, its metadata is not what format 1 writes, or the array is
            not what `form` says.
    """
    found = find_array(folder, form, metadata)
    if found.chunk is None:
        data = bytes(CHECKSUM_BYTES)  # the checksum of nothing is 0
    else:
        with _missing_is_damage():
            data = store_of(found.chunk).get(found.chunk, found.check_size)
    if len(data) != found.num_bytes + CHECKSUM_BYTES:
        raise DamagedError(f"{folder}: damaged: {len(data)} bytes could be read")
    array = np.frombuffer(data, found.dtype, count=math.prod(found.shape)).reshape(found.shape)
    return array, int.from_bytes(data[-CHECKSUM_BYTES:], "little")


def map_array(folder: Path) -> NDArray[Any]:
    """Memory-map an array, read-only. The map holds no file descriptor, and lives as long as the array.

    Raises:
        DamagedError: A file is missing, its size is wrong, or its metadata is not what format 1 writes.
    """
    found = find_array(folder)
    if found.chunk is None:
        return _NOTHING.view(found.dtype).reshape(found.shape)
    with _missing_is_damage(), open_file(folder_of(found.chunk)) as file:
        found.check_size(os.fstat(file.fileno()).st_size)
        return map_file(file.fileno(), found.num_bytes).view(found.dtype).reshape(found.shape)


@dataclass(frozen=True)
class FoundArray:
    """What the metadata of an array says."""

    chunk: Location | None
    """Its chunk file, which has not been looked at; None if it has no value, and therefore no chunk."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: np.dtype[Any]
    """Its dtype, little endian."""
    checksum: int = 0
    """The checksum at the end of its chunk file, if that has been looked at."""

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check_size(self, size: int) -> None:
        """Hold the size of its chunk file against its shape and dtype.

        Raises:
            DamagedError: It is another.
        """
        if size != (expected := self.num_bytes + CHECKSUM_BYTES):
            raise DamagedError(f"{self.chunk}: damaged: {size} bytes, expected {expected}")


def find_array(folder: Location, form: Form | None = None, metadata: bytes | None = None) -> FoundArray:
    """Read the metadata of an array; `metadata` are its bytes, if they have been read.

    Raises:
        DamagedError: It is missing, is not what format 1 writes or not what `form` says; or an array without values has
            a chunk.
    """
    path = folder / "zarr.json"
    with _missing_is_damage():
        try:
            array = _METADATA(parse_object(read_bytes(path) if metadata is None else metadata, path))
        except ValueError as error:
            raise DamagedError(f"{path}: damaged: not an array of format 1: {error}") from error
        shape, dtype = tuple(array["shape"]), np.dtype(array["data_type"]).newbyteorder("<")
        if form is not None and not form.fits(shape, dtype):
            raise DamagedError(f"{folder}: damaged: is {dtype.name} {list(shape)}, not {form}")
        chunk = chunk_path(folder, len(shape))
        if 0 in shape and store_of(chunk).exists(chunk):
            raise DamagedError(f"{chunk}: damaged: a chunk of an array without values")
        return FoundArray(None if 0 in shape else chunk, shape, dtype)


def find_whole_array(folder: Location) -> FoundArray:
    """As `find_array`; and its chunk file is there, and has the right size."""
    found = find_array(folder)
    if found.chunk is None:
        return found
    with _missing_is_damage():
        size, end = store_of(found.chunk).size_and_range(found.chunk, found.num_bytes, CHECKSUM_BYTES)
        found.check_size(size)
    return replace(found, checksum=int.from_bytes(end, "little"))


@contextmanager
def _missing_is_damage() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(f"{error.filename}: damaged: the file is missing") from error
