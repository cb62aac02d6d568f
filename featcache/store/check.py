"""Checks that a shard's bytes are as written, and consistent."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError
from featcache.manifest import SegmentColumns
from featcache.spec import QUANTIZATION, FeatureSpec, all_finite
from featcache.storage.stream import open_stream
from featcache.store import zarr3
from featcache.store.checksums import combined_crc32c, crc32c, hex_crc32c
from featcache.store.chunk_file import reading_error
from featcache.store.columns import FEATURES, SIDE_COLUMNS, Column, columns_of, side_names
from featcache.store.documents import read_bytes
from featcache.store.shard import Shard, are_rising
from featcache.store.shard_items import ShardItems
from featcache.strings import Strings

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Problem:
    """Something wrong in a version."""

    kind: str
    """`metadata`, `structure`, `checksum`, `offsets`, `ids`, `frames`, `non_finite`, `duplicate`, `missing`, `changed`,
    `source`, `recompute`, `unfinished` (a run has not added all that it was to add), `lost` (shards that were there),
    `record` (of what a run did) or `tag`.
    """
    message: str
    """What is wrong, and where."""
    shard: str | None = None
    """The name of the shard with the problem; None if it is in no shard."""
    id: str | None = None
    """The id of the utterance with the problem; None if it is in no single one."""


def check_shard(shard: Shard, spec: FeatureSpec, data: bool = True) -> list[Problem]:
    """Find what is wrong in a shard; see `examine_shard`."""
    return examine_shard(shard, spec, data)[0]


def examine_shard(
    shard: Shard, spec: FeatureSpec, data: bool = True, stopped: Callable[[], bool] = lambda: False
) -> tuple[list[Problem], ShardItems | None]:
    """Find what is wrong in a shard; if it is nothing, its items for an index, so that nobody reads its columns again.

    Without `data`, only metadata and columns are read, and not the features. Once `stopped`, which is called now and
    then, returns True, the rest is not looked at.

    Raises:
        StoreError: The shard may not be read.
    """
    arrays: dict[str, NDArray[Any]] = {}
    items: ShardItems | None = None
    try:
        problems = list(_check_structure(shard, spec, arrays))
        if not problems:
            problems, items = check_columns(shard, spec, arrays)
        if data and not problems:
            problems = list(_check_features(shard, arrays, stopped))
    except DamagedError as error:  # sealed, and odd all the same
        problems = [Problem("structure", error.what, shard.name)]
    except OSError as error:  # a bad sector, a folder in place of a file
        fault = reading_error(error, shard.folder)
        if not isinstance(fault, DamagedError):
            raise fault from error
        problems = [Problem("structure", fault.what, shard.name)]
    return problems, None if problems else items


def _check_structure(shard: Shard, spec: FeatureSpec, arrays: dict[str, NDArray[Any]]) -> Iterator[Problem]:
    """Whether the metadata is as it was sealed, every column is whole, and stock Zarr sees the same arrays.

    What is read goes into `arrays`, by name; of the features, an array that only has their dtype and shape.
    """
    try:
        info = shard.info
    except DamagedError as error:
        yield Problem("metadata", error.what, shard.name)
        return
    if info.digest[:12] != shard.name:
        yield Problem("metadata", f"{shard.folder}: holds the shard {info.digest[:12]}", shard.name)
    for name, column in columns_of(spec, info.metadata).items():
        try:
            metadata = read_bytes(shard.folder / name / "zarr.json")
            if hex_crc32c(metadata) != info.metadata.get(name):
                message = f"{shard.folder / name}/zarr.json: damaged: its checksum does not match"
                yield Problem("metadata", message, shard.name)
                continue
            if name == "features":  # their checksum is computed on the way through the items
                found = shard.find("features")
                array = np.broadcast_to(np.zeros((), found.dtype), found.shape)  # of that form; nothing is read
            else:
                array, checksum = zarr3.read_array(shard.folder / name, shard.form(name), metadata)
                if crc32c(array) != checksum:
                    message = f"{shard.folder / name}: damaged: its checksum does not match"
                    yield Problem("checksum", message, shard.name)
                    continue
        except FileNotFoundError as error:
            yield Problem("structure", f"{error.filename}: damaged: the file is missing", shard.name)
            continue
        except DamagedError as error:
            yield Problem("structure", error.what, shard.name)
            continue
        arrays[name] = array
        if column.length == FEATURES.length:
            yield from _check_form(shard, column, array, info.frames)
        elif column.length == SIDE_COLUMNS[0].length:
            # Any number of entries will do here: check_columns compares it with their offsets.
            yield from _check_form(shard, column, array, array.shape[0] if array.ndim else 0)


def _check_form(shard: Shard, column: Column, array: NDArray[Any], length: int) -> Iterator[Problem]:
    """Whether an array has the version's dtype and shape, and stock Zarr finds the same: it does, by metadata that is
    byte for byte what featcache writes, or differs from that in nothing that matters to it.
    """
    if column.is_metadata(shard.info.metadata.get(column.name), length):
        return
    place, found = shard.folder / column.name, (array.dtype.newbyteorder("="), array.shape)
    dtype, shape = np.dtype(column.dtype), (length, *column.entry_shape)
    if found != (dtype, shape):
        message = f"{place}: it is {found[0]} {list(found[1])}, not {dtype} {list(shape)}"
        yield Problem("structure", message, shard.name)
    elif not column.is_like(read_bytes(place / "zarr.json"), length):
        yield Problem("structure", f"{place}/zarr.json: is not the metadata of an array of format 1", shard.name)


def check_columns(
    shard: Shard, spec: FeatureSpec, arrays: Mapping[str, NDArray[Any]]
) -> tuple[list[Problem], ShardItems | None]:
    """Whether offsets rise, ids differ, and items have as many frames as their audio should give.

    `arrays` are the shard's, by name; the features need not be among them. A problem with an `id` is that item's alone;
    any other is the whole shard's, and then there are no items.
    """
    problem = _check_lengths(shard, spec, arrays)
    if problem is not None:
        return [problem], None
    ids = Strings(arrays["ids"], arrays["id_offsets"].astype(np.int64))
    paths = Strings(arrays["paths"], arrays["path_offsets"].astype(np.int64))
    for name, strings in (("ids", ids), ("paths", paths)):
        if not strings.are_utf8():
            return [Problem("ids", f"{shard.folder / name}: damaged: not UTF-8", shard.name)], None
    channels = arrays["channels"] if "channels" in arrays else shard.column("channels")
    rows = SegmentColumns.of_arrays(paths, arrays["segments"], channels)
    items = ShardItems.of(shard, ids, rows, arrays["offsets"].astype(np.int64))
    hashes = np.sort(items.id_hash)
    if (hashes[1:] == hashes[:-1]).any() and len(set(ids)) < len(ids):
        return [Problem("ids", f"{shard.folder / 'ids'}: an id occurs twice", shard.name)], None
    return list(_check_items(items, spec, arrays)), items


def _check_lengths(shard: Shard, spec: FeatureSpec, arrays: Mapping[str, NDArray[Any]]) -> Problem | None:
    """Whether offsets rise to the end of what they delimit, and the other columns have an entry for each item."""
    items, columns = shard.info.items, columns_of(spec, shard.info.metadata)
    for column in columns.values():
        if not column.delimits:
            continue
        last = shard.info.frames if column.delimits == "features" else len(arrays[column.delimits])
        if not are_rising(arrays[column.name], last, column.min_entries):
            message = f"{shard.folder / column.name}: do not increase from 0 to {last} in {items} steps"
            return Problem("offsets", message, shard.name)
    one_for_each = [name for name, column in columns.items() if column.length == "n"]
    if spec.is_quantized:
        one_for_each.append(side_names(QUANTIZATION)[0])
    for name in one_for_each:
        if len(arrays[name]) != items:
            return Problem("structure", f"{shard.folder / name}: not one entry for each of {items} items", shard.name)
    return None


def _check_items(items: ShardItems, spec: FeatureSpec, arrays: Mapping[str, NDArray[Any]]) -> Iterator[Problem]:
    """Whether each item can be dequantised, and has as many frames as its audio should give."""
    ids, shard = items.ids, items.shard.name
    if spec.is_quantized:
        parameters = arrays[side_names(QUANTIZATION)[0]].reshape(len(ids), -1)
        for item in np.flatnonzero(~np.isfinite(parameters).all(axis=1)).tolist():
            message = f"{ids[item]}: its scale or offset is NaN or infinite"
            yield Problem("non_finite", message, shard, ids[item])
    # An extractor may have a frame more or less at either end. Beyond that, the frames are not of this audio.
    num_frames, num_samples = np.diff(items.offsets), arrays["num_samples"]
    per_sample = spec.frame_rate / spec.sample_rate
    expected = np.maximum(num_samples, spec.padded_to) * per_sample
    for item in np.flatnonzero(np.abs(num_frames - expected) > spec.frame_length * per_sample + 2).tolist():
        seconds = int(num_samples[item]) / spec.sample_rate
        yield Problem(
            "frames", f"{ids[item]}: {num_frames[item]} frames for {seconds:.3f} s of audio", shard, ids[item]
        )


def _check_features(shard: Shard, arrays: Mapping[str, NDArray[Any]], stopped: Callable[[], bool]) -> Iterator[Problem]:
    """Whether the array's checksum and every item's match, and all values are finite; reads the file once if so."""
    features, expected = arrays["features"], arrays["crc32c"]
    offsets = arrays["offsets"].astype(np.int64) * features[:1].nbytes
    num_bytes = offsets[1:] - offsets[:-1]
    crc, is_finite = 0, True
    with open_stream(zarr3.chunk_path(shard.folder / "features", features.ndim)) as file:
        if isinstance(file, FileIO):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for piece in _pieces(file, features):
            if stopped():
                return
            crc = crc32c(piece, crc)
            is_finite = is_finite and all_finite(piece)
        stored = int.from_bytes(file.read(zarr3.CHECKSUM_BYTES), "little")
        if is_finite and crc == stored == combined_crc32c(expected, num_bytes):
            return
        is_clean = True
        file.seek(0)
        ids = Strings(arrays["ids"], arrays["id_offsets"].astype(np.int64))
        for item, size in enumerate(num_bytes.tolist()):
            if stopped():
                return
            data = np.empty(size, np.uint8)
            _fill(file, data.data)
            if crc32c(data) != int(expected[item]):
                message = f"{ids[item]}: damaged: the checksum of its features does not match"
                yield Problem("checksum", message, shard.name, ids[item])
                is_clean = False
            elif not all_finite(data.view(features.dtype)):
                yield Problem("non_finite", f"{ids[item]}: features are NaN or infinite", shard.name, ids[item])
    if is_clean and crc != stored:
        message = f"{shard.folder / 'features'}: damaged: the array's checksum does not match"
        yield Problem("checksum", message, shard.name)


def _pieces(file: Any, array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Read an array's values from its chunk file, in pieces that fit a core's cache and are valid until the next one.

    The kernel's copy into memory that begins at a page takes half the time of a copy into numpy's, which begins 16
    bytes later. A memory map would take a page fault for every 4 kB.
    """
    page_aligned = mmap.mmap(-1, _PIECE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values, view, left = np.frombuffer(page_aligned, array.dtype), memoryview(page_aligned), array.nbytes
    while left:
        size = min(left, _PIECE_BYTES)
        _fill(file, view[:size])
        yield values[: size // array.itemsize]
        left -= size


def _fill(file: Any, view: memoryview) -> None:
    """Read until a piece of memory is full; one call may read less. If the file ends before, the rest stays."""
    while view and (got := file.readinto(view)):
        view = view[got:]
