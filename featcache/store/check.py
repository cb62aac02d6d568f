"""Checks that a shard's bytes are as written, and consistent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.spec import QUANTIZATION, FeatureSpec, all_finite
from featcache.store import zarr3
from featcache.store.shard import FEATURES, SIDE_COLUMNS, Column, Shard, columns_of, side_names

_BLOCK_BYTES = 2 << 20

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected
_BYTES = np.arange(256, dtype=np.uint32)


@dataclass(frozen=True)
class Problem:
    """Something wrong in a version."""

    kind: str
    """`metadata`, `structure`, `checksum`, `offsets`, `ids`, `frames`, `non_finite`, `duplicate`, `missing`, `changed`,
    `source`, `recompute`, `unfinished` (a run has not added all that it was to add), `lost` (shards that were there) or
    `record` (of what a run did).
    """
    message: str
    """What is wrong, and where."""
    shard: str | None = None
    """The name of the shard with the problem; None if it is in no shard."""
    id: str | None = None
    """The id of the utterance with the problem; None if it is in no single one."""


def check_shard(
    shard: Shard, spec: FeatureSpec, data: bool = True, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Problem]:
    """Find what is wrong in a shard.

    Args:
        shard, spec: The shard, and the spec of its version.
        data: Whether to read every byte of the features; else only metadata and columns.
        stopped: Called now and then; once it returns True, the rest is not looked at.

    Raises:
        StoreError: The shard may not be read.
    """
    try:
        problems = list(_check_structure(shard, spec))
        if not problems:
            problems = list(check_columns(shard, spec))
        if data and not problems:
            problems = list(_check_features(shard, stopped))
    except PermissionError as error:
        raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except OSError as error:  # a bad sector, a folder in place of a file
        message = f"{error.filename or shard.folder}: damaged: cannot be read: {error.strerror}"
        problems = [Problem("structure", message, shard.name)]
    yield from problems


def _check_structure(shard: Shard, spec: FeatureSpec) -> Iterator[Problem]:
    """Whether the metadata is as it was sealed, every column is whole, and stock Zarr sees the same arrays."""
    try:
        info = shard.info
    except DamagedError as error:
        yield Problem("metadata", error.what, shard.name)
        return
    if info.digest[:12] != shard.name:
        yield Problem("metadata", f"{shard.folder}: holds the shard {info.digest[:12]}", shard.name)
    for name, column in columns_of(spec).items():
        try:
            metadata = (shard.folder / name / "zarr.json").read_bytes()
            if zarr3.hex_crc32c(metadata) != info.metadata.get(name):
                message = f"{shard.folder / name}/zarr.json: damaged: its checksum does not match"
                yield Problem("metadata", message, shard.name)
                continue
            if name == "features":  # their checksum is computed on the way through the items
                array = shard.features
            else:
                array, checksum = zarr3.read_array(shard.folder / name)
                if zarr3.crc32c(array) != checksum:
                    message = f"{shard.folder / name}: damaged: its checksum does not match"
                    yield Problem("checksum", message, shard.name)
                    continue
        except FileNotFoundError as error:
            yield Problem("structure", f"{error.filename}: damaged: the file is missing", shard.name)
            continue
        except DamagedError as error:
            yield Problem("structure", error.what, shard.name)
            continue
        if column.length == FEATURES.length:
            yield from _check_form(shard, column, array, info.frames)
        elif column.length == SIDE_COLUMNS[0].length:
            # Any number of entries will do here: check_columns compares it with their offsets.
            yield from _check_form(shard, column, array, array.shape[0] if array.ndim else 0)


def _check_form(shard: Shard, column: Column, array: NDArray[Any], length: int) -> Iterator[Problem]:
    """Whether an array has the version's dtype and shape, as we read it and as stock Zarr does."""
    stock = zarr.open_array(shard.folder / column.name, mode="r")
    dtype, shape = np.dtype(column.dtype), (length, *column.entry_shape)
    for reader, found in (
        ("it is", (array.dtype.newbyteorder("="), array.shape)),
        ("Zarr reads", (stock.dtype, stock.shape)),
    ):
        if found != (dtype, shape):
            message = f"{shard.folder / column.name}: {reader} {found[0]} {list(found[1])}, not {dtype} {list(shape)}"
            yield Problem("structure", message, shard.name)


def check_columns(shard: Shard, spec: FeatureSpec) -> Iterator[Problem]:
    """Whether offsets rise, ids differ, and items have as many frames as their audio should give.

    A problem with an `id` is that item's alone; any other is the whole shard's.

    Raises:
        DamagedError: A column is not what was written.
    """
    items, columns = shard.info.items, columns_of(spec)
    for column in columns.values():
        if not column.delimits:
            continue
        last = shard.info.frames if column.delimits == "features" else len(shard.column(column.delimits))
        offsets = shard.column(column.name).astype(np.int64)
        is_rising = (np.diff(offsets) >= column.min_entries).all()
        if len(offsets) != items + 1 or offsets[0] != 0 or offsets[-1] != last or not is_rising:
            message = f"{shard.folder / column.name}: do not increase from 0 to {last} in {items} steps"
            yield Problem("offsets", message, shard.name)
            return
    one_for_each = [name for name, column in columns.items() if column.length == "n"]
    if spec.is_quantized:
        one_for_each.append(side_names(QUANTIZATION)[0])
    for name in one_for_each:
        if len(shard.column(name)) != items:
            yield Problem("structure", f"{shard.folder / name}: not one entry for each of {items} items", shard.name)
            return
    ids = shard.ids
    if not ids.are_utf8():
        yield Problem("ids", f"{shard.folder / 'ids'}: not UTF-8", shard.name)
        return
    if len(np.unique(ids.hashes())) < items and len(set(ids)) < items:
        yield Problem("ids", f"{shard.folder / 'ids'}: an id occurs twice", shard.name)
    if spec.is_quantized:
        parameters = shard.column(side_names(QUANTIZATION)[0]).reshape(items, -1)
        for item in np.flatnonzero(~np.isfinite(parameters).all(axis=1)).tolist():
            message = f"{ids[item]}: its scale or offset is NaN or infinite"
            yield Problem("non_finite", message, shard.name, ids[item])
    # An extractor may have a frame more or less at either end. Beyond that, the frames are not of this audio.
    num_frames = np.diff(shard.offsets)
    per_sample = spec.frame_rate / spec.sample_rate
    expected = np.maximum(shard.column("num_samples"), spec.padded_to) * per_sample
    for item in np.flatnonzero(np.abs(num_frames - expected) > spec.frame_length * per_sample + 2).tolist():
        seconds = int(shard.column("num_samples")[item]) / spec.sample_rate
        yield Problem(
            "frames",
            f"{ids[item]}: {num_frames[item]} frames for {seconds:.3f} s of audio",
            shard.name,
            ids[item],
        )


def _check_features(shard: Shard, stopped: Callable[[], bool]) -> Iterator[Problem]:
    """Whether the array's checksum and every item's match, and all values are finite; reads the file once if so."""
    offsets, expected, ids = shard.offsets, shard.column("crc32c"), shard.ids
    array = shard.features
    crc, is_finite = 0, True
    for _, _, block in _blocks(shard.folder, array, offsets):
        if stopped():
            return
        crc = zarr3.crc32c(block, crc)
        is_finite = is_finite and all_finite(block)
    stored = _stored_checksum(shard, array.ndim)
    if is_finite and crc == stored == combined_crc32c(expected, np.diff(offsets) * array[:1].nbytes):
        return
    is_clean = True
    for first, last, block in _blocks(shard.folder, array, offsets):
        if stopped():
            return
        start = int(offsets[first])
        for item in range(first, last):
            features = block[int(offsets[item]) - start : int(offsets[item + 1]) - start]
            if zarr3.crc32c(features) != int(expected[item]):
                message = f"{ids[item]}: damaged: the checksum of its features does not match"
                yield Problem("checksum", message, shard.name, ids[item])
                is_clean = False
            elif not all_finite(features):
                yield Problem("non_finite", f"{ids[item]}: features are NaN or infinite", shard.name, ids[item])
    if is_clean and crc != stored:
        yield Problem(
            "checksum", f"{shard.folder / 'features'}: damaged: the array's checksum does not match", shard.name
        )


def _stored_checksum(shard: Shard, num_dimensions: int) -> int:
    with zarr3.chunk_path(shard.folder / "features", num_dimensions).open("rb") as file:
        file.seek(-zarr3.CHECKSUM_BYTES, os.SEEK_END)
        return int.from_bytes(file.read(), "little")


def _blocks(folder: Path, array: NDArray[Any], offsets: NDArray[np.int64]) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Read an array's chunk file in blocks of whole items that fit a core's cache.

    It uses `readinto` and not the memory map, which takes a page fault for every 4 kB.

    Yields:
        The block's first item, the one after its last, and its frames, which are valid until the next block.
    """
    frame_bytes = array[:1].nbytes
    item, count = 0, len(offsets) - 1
    buffer = np.empty(0, array.dtype)
    with zarr3.chunk_path(folder / "features", array.ndim).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while item < count:
            limit = int(offsets[item]) + max(1, _BLOCK_BYTES // frame_bytes)
            last = max(item + 1, int(np.searchsorted(offsets, limit, "right")) - 1)
            frames = int(offsets[last] - offsets[item])
            size = frames * frame_bytes
            if buffer.nbytes < size:
                buffer = np.empty(size // array.itemsize, array.dtype)
            block = buffer[: size // array.itemsize]
            view, filled = block.view(np.uint8).data, 0
            while filled < size and (got := file.readinto(view[filled:])):
                filled += got
            yield item, last, block.reshape(frames, *array.shape[1:])
            item = last


def combined_crc32c(crcs: NDArray[np.uint32], num_bytes: NDArray[np.int64]) -> int:
    """The CRC-32C of a whole from those of its parts, without reading the bytes again.

    To a CRC's state, another zero byte is a linear map over GF(2). So the CRC of A followed by B is the CRC of A, taken
    through as many zero bytes as B has, exclusive or the CRC of B.

    Source: Mark Adler's `crc32_combine` in zlib's `crc32.c`; the polynomial is that of RFC 3720.
    """
    states = crcs.astype(np.uint32)
    following = num_bytes.sum() - np.cumsum(num_bytes)
    zeros = _one_zero_byte()
    while following.any():
        odd = following % 2 == 1
        states[odd] = _through(zeros, states[odd])
        zeros = _through(zeros, zeros)  # twice as many zero bytes
        following //= 2
    return int(np.bitwise_xor.reduce(states))


def _one_zero_byte() -> NDArray[Any]:
    """The map of one zero byte, uint32 `[4, 256]`: the image of each byte of a state, by the byte's place."""
    crcs: NDArray[Any] = _BYTES
    for _ in range(8):
        crcs = (crcs >> 1) ^ np.where(crcs & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return np.stack([crcs, _BYTES, _BYTES << 8, _BYTES << 16])


def _through(zeros: NDArray[Any], states: NDArray[Any]) -> NDArray[Any]:
    """Take states, uint32 of any shape, through a map."""
    result: NDArray[Any] = zeros[0][states & 255]
    for place in (1, 2, 3):
        result = result ^ zeros[place][(states >> (8 * place)) & 255]
    return result
