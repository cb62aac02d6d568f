"""The arrays of an index, as `.npy` files with checksums: written and read in folders and object stores."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.storage.folder import open_file
from featcache.storage.location import Location, folder_of
from featcache.storage.store import store_of
from featcache.storage.stream import open_stream
from featcache.store.checksums import crc32c, hex_crc32c
from featcache.store.memory_map import map_file

_BLOCK_BYTES = 1 << 20
_PUT_ENTRIES = 1 << 20
"""Entries of an array that are sent together."""


def write_array(location: Location, array: NDArray[Any]) -> str:
    """Write an array's `.npy` file; returns the CRC-32C of what was to be written, as eight hex digits."""
    header = _header(array)
    if isinstance(location, Path):
        with location.open("wb") as file:
            file.write(header)
            array.tofile(file)
    else:

        def blocks() -> Iterator[memoryview]:
            yield memoryview(header)
            yield from (array[at : at + _PUT_ENTRIES].view(np.uint8).data for at in range(0, len(array), _PUT_ENTRIES))

        store_of(location).put_blocks(location, blocks)
    return f"{crc32c(array, crc32c(np.frombuffer(header, np.uint8))):08x}"


def _header(array: NDArray[Any]) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    return header.getvalue()


def read_arrays(folder: Location, checksums: Mapping[str, str]) -> dict[str, NDArray[Any]] | None:
    """The arrays of an index, by name: memory-mapped if they are in a folder; None if one is not what was written.

    Args:
        folder: Where their files are.
        checksums: What `write_array` returned, by their names.
    """
    paths = {name: folder / f"{name}.npy" for name in checksums}
    if isinstance(folder, Path):
        if any(_checksum(path) != checksums[name] for name, path in paths.items()):
            return None
        return {name: _map(folder_of(path)) for name, path in paths.items()}
    with ThreadPoolExecutor(len(paths)) as pool:
        files = dict(zip(paths, pool.map(_fetch, paths.values()), strict=True))
    if any(hex_crc32c(data) != checksums[name] for name, data in files.items()):
        return None
    return {name: _loaded(io.BytesIO(data), data) for name, data in files.items()}


def _map(path: Path) -> NDArray[Any]:
    with open_file(path) as file:
        return _loaded(file, map_file(file.fileno(), os.fstat(file.fileno()).st_size))


def _fetch(location: Location) -> bytes:
    return store_of(location).get(location, lambda size: None)  # as large as it is; nothing in it says how large


def _loaded(file: Any, data: Any) -> NDArray[Any]:
    """The array of an `.npy` file, whose bytes these are: a view of them."""
    if np.lib.format.read_magic(file) != (1, 0):  # the header of other versions may be as long as 4 GB
        raise ValueError("not as `_write` writes it")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject or is_fortran or len(shape) != 1:
        raise ValueError("not as `_write` writes it")
    return np.frombuffer(data, dtype, shape[0], file.tell())


def _checksum(path: Location) -> str:
    """CRC-32C of a whole file. It is read and not mapped, so that 10^7 items do not stay in a process's memory."""
    crc, block = 0, np.empty(_BLOCK_BYTES, np.uint8)
    with open_stream(path) as file:
        while got := file.readinto(block.data):
            crc = crc32c(block[:got], crc)
    return f"{crc:08x}"
