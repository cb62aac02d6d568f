"""Zarr v3 arrays and groups as files: the few kinds that format 1 is made of.

Every array is one chunk with the codecs `bytes` (little endian) and `crc32c`: its chunk file is the raw
array followed by four bytes of checksum, so it can be memory-mapped, and stock Zarr refuses it after one
flipped bit. An array without a value has no chunk, and so no such file. Writing it takes a JSON file and a
stream of bytes, which is why it is done here: zarr-python takes 2 ms an array, wants a shard's features
whole in memory, leaves all-zero chunks out by default and does not flush to disk. Tests check what is written here with
zarr-python's reader.

Source: the Zarr core specification v3, and the crc32c codec's (zarr-specs.readthedocs.io).
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.store.mapping import map_file

CHECKSUM_BYTES = 4
UNSEALED = "00000000"
"""What stands for the checksum of a document that `seal` is to seal."""

_PIECE_BYTES = 8 << 20
_NOTHING = np.frombuffer(b"", np.uint8)
SYNC_THREADS = 8
"""That flush the files of a shard side by side, and only wait for the disk."""


def crc32c(data: NDArray[Any], crc: int = 0) -> int:
    """CRC-32C (RFC 3720) of an array's bytes, continued from `crc`; the array is C-contiguous."""
    data = data.view()
    data.flags.writeable = False  # google_crc32c takes read-only buffers only
    return int(google_crc32c.extend(crc, data))


def chunk_path(folder: Path, num_dimensions: int) -> Path:
    """Where the only chunk of the array in `folder` lies."""
    return folder.joinpath("c", *["0"] * num_dimensions)


def array_metadata(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The `zarr.json` of a one-chunk array; a chunk's sizes are at least 1, also where the array's are 0."""
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    return _to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, size) for size in shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0 if dtype.kind in "iu" else 0.0,
            "codecs": [{"name": "bytes", **endian}, {"name": "crc32c"}],
            "attributes": {},
        }
    )


def group_metadata(attributes: dict[str, Any] | None = None) -> bytes:
    """The `zarr.json` of a group, `attributes` under the key `featcache`, sealed by a checksum of its own.

    The seal is `attributes.featcache.checksum`: the CRC-32C, as eight hex digits, of the file's bytes
    with these eight digits set to `0`. JSON has no other defence against a flipped bit.
    """
    if attributes is None:
        return _to_json({"zarr_format": 3, "node_type": "group", "attributes": {}})
    unsealed = {**attributes, "checksum": UNSEALED}
    return seal({"zarr_format": 3, "node_type": "group", "attributes": {"featcache": unsealed}})


def read_group(folder: Path) -> dict[str, Any]:
    """The attributes of a group that `group_metadata` wrote.

    Raises:
        FileNotFoundError: there is no group.
        DamagedError: the file is not what was written.
    """
    path = folder / "zarr.json"
    data = path.read_bytes()
    try:
        attributes: dict[str, Any] = json.loads(data)["attributes"]["featcache"]
        is_sound = is_sealed(data, attributes.pop("checksum"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path}: damaged: not the metadata of a featcache group ({error})") from error
    if not is_sound:
        raise DamagedError(f"{path}: damaged: its checksum does not match")
    return attributes


def seal(document: dict[str, Any]) -> bytes:
    """A document as JSON, the last `"checksum": "00000000"` in it set to the CRC-32C of these bytes."""
    unsealed = _to_json(document)
    head, mark, tail = unsealed.rpartition(_entry(UNSEALED))
    assert mark
    return head + _entry(f"{google_crc32c.value(unsealed):08x}") + tail


def is_sealed(data: bytes, checksum: str) -> bool:
    """Whether `data` is what `seal` gave, by the checksum found in it."""
    head, mark, tail = data.rpartition(_entry(checksum))
    return bool(mark) and f"{google_crc32c.value(head + _entry(UNSEALED) + tail):08x}" == checksum


class ChunkWriter:
    """Streams an array's only chunk to disk, its checksum at the end.

    Raises:
        OSError: from every method, where the disk is full or broken.
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
            # Linux starts to write the piece to the disk, and does not wait: little is left for the flush at the end.
            os.posix_fadvise(self._file.fileno(), self._sent, size - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = size

    def close(self) -> None:
        """Write the checksum and close the file; `discard` closes it without."""
        self._write(memoryview(self._crc.to_bytes(CHECKSUM_BYTES, "little")))
        self._file.close()

    def discard(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _write(self, data: memoryview) -> None:
        while len(data):  # one write may take less than it was given
            data = data[self._file.write(data) :]


def write_array(folder: Path, array: NDArray[Any]) -> bytes:
    """Write an array into `folder`; returns the bytes of its `zarr.json`."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    metadata = array_metadata(little.shape, little.dtype)
    if little.size:
        writer = ChunkWriter(chunk_path(folder, little.ndim))
        writer.append(little)
        writer.close()
    else:
        folder.mkdir(parents=True)
    (folder / "zarr.json").write_bytes(metadata)
    return metadata


def read_array(folder: Path) -> tuple[NDArray[Any], int]:
    """Read an array that `write_array` or a `ChunkWriter` wrote: the array, and the checksum stored with it.

    Raises:
        DamagedError: a file is missing, its size is wrong, or its metadata is not what format 1 writes.
    """
    with _chunk(folder) as (file, shape, dtype):
        data = file.read() if file else bytes(CHECKSUM_BYTES)  # the checksum of nothing is 0
    array = np.frombuffer(data, dtype, count=math.prod(shape)).reshape(shape)
    return array, int.from_bytes(data[-CHECKSUM_BYTES:], "little")


def map_array(folder: Path) -> NDArray[Any]:
    """Memory-map such an array, read-only. The map holds no file descriptor, and lives as long as the array.

    Raises:
        DamagedError: as `read_array`.
    """
    with _chunk(folder) as (file, shape, dtype):
        data = map_file(file.fileno(), math.prod(shape) * dtype.itemsize) if file else _NOTHING
    return data.view(dtype).reshape(shape)


@contextmanager
def _chunk(folder: Path) -> Iterator[tuple[BinaryIO | None, tuple[int, ...], np.dtype[Any]]]:
    """The open chunk file of an array, found to be of the right size, with the array's shape and dtype.

    None in place of the file where the array has no value, and therefore no chunk.
    """
    try:
        metadata = json.loads((folder / "zarr.json").read_bytes())
        shape, dtype = tuple(metadata["shape"]), np.dtype(metadata["data_type"]).newbyteorder("<")
        chunk = chunk_path(folder, len(shape))
        if 0 in shape:
            if chunk.exists():
                raise DamagedError(f"{chunk}: damaged: a chunk of an array without values")
            yield None, shape, dtype
            return
        with chunk.open("rb", buffering=0) as file:
            expected = math.prod(shape) * dtype.itemsize + CHECKSUM_BYTES
            found = os.fstat(file.fileno()).st_size
            if found != expected:
                raise DamagedError(f"{file.name}: damaged: {found} bytes, expected {expected}")
            yield file, shape, dtype
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(f"{error.filename}: damaged: the file is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / 'zarr.json'}: damaged: not an array of format 1 ({error})") from error


def sync_tree(folder: Path) -> None:
    """Flush every file under `folder` to disk, then every folder.

    Side by side: a disk flushes many small files together in little more time than one.
    """
    folders, files = [], []
    for parent, _, names in os.walk(folder):
        folders.append(Path(parent))
        files += [Path(parent, name) for name in names]
    with ThreadPoolExecutor(SYNC_THREADS, "featcache-sync") as pool:
        list(pool.map(sync, files))
        list(pool.map(sync, folders))


def sync(path: Path) -> None:
    """Flush one file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file so that it appears whole or not at all, also after a power cut."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):  # not there, or on a disk that is read-only by now
            beside.unlink()
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode(
        errors="backslashreplace"  # a path may hold bytes that are not UTF-8: as JSON's escapes they come back
    )


def _entry(checksum: str) -> bytes:
    return f'"checksum": "{checksum}"'.encode()
