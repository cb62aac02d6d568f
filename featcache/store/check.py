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
from featcache.store.combine import combined_crc32c
from featcache.store.shard import COLUMNS, Shard
from featcache.store.side import column_names

_BLOCK_BYTES = 2 << 20


@dataclass(frozen=True)
class Problem:
    """Something wrong in a version.

    Attributes:
        kind: `metadata`, `structure`, `checksum`, `offsets`, `ids`, `frames`, `non_finite`,
            `duplicate`, `missing`, `changed`, `source` or `recompute`.
        message: what, where.
        shard: the shard's name, where it is in one.
        id: the utterance's, where it is in one.
    """

    kind: str
    message: str
    shard: str | None = None
    id: str | None = None


def check_shard(
    shard: Shard, spec: FeatureSpec, data: bool = True, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Problem]:
    """Find what is wrong in a shard; with `data`, down to every byte of its features.

    Once `stopped` says so, the rest is not looked at.

    Raises:
        StoreError: it may not be read.
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
    """Metadata as it was sealed; every column whole; and what stock Zarr makes of it."""
    try:
        info = shard.info
    except DamagedError as error:
        yield Problem("metadata", error.what, shard.name)
        return
    if info.digest[:12] != shard.name:
        yield Problem("metadata", f"{shard.folder}: holds the shard {info.digest[:12]}", shard.name)
    sides = {column_names(side.name)[0]: side for side in spec.side}
    names = ("features", *COLUMNS, *(column for side in spec.side for column in column_names(side.name)))
    for name in names:
        try:
            metadata = (shard.folder / name / "zarr.json").read_bytes()
            if f"{zarr3.crc32c(np.frombuffer(metadata, np.uint8)):08x}" != info.metadata.get(name):
                yield Problem(
                    "metadata",
                    f"{shard.folder / name}/zarr.json: damaged: its checksum does not match",
                    shard.name,
                )
                continue
            if name == "features":  # their checksum is found on the way through the items
                array = shard.features
            else:
                array, checksum = zarr3.read_array(shard.folder / name)
                if zarr3.crc32c(array) != checksum:
                    yield Problem(
                        "checksum", f"{shard.folder / name}: damaged: its checksum does not match", shard.name
                    )
                    continue
        except FileNotFoundError as error:
            yield Problem("structure", f"{error.filename}: damaged: the file is missing", shard.name)
            continue
        except DamagedError as error:
            yield Problem("structure", error.what, shard.name)
            continue
        if name == "features":
            yield from _check_form(shard, name, array, spec.stored_dtype, (info.frames, *spec.item_shape))
        elif name in sides:
            shape = *array.shape[:1], *sides[name].item_shape  # how many entries there are, their offsets tell
            yield from _check_form(shard, name, array, sides[name].dtype, shape)


def _check_form(shard: Shard, name: str, array: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> Iterator[Problem]:
    """An array of the version's dtype and shape, to stock Zarr as to us."""
    stock = zarr.open_array(shard.folder / name, mode="r")
    for reader, found in (
        ("it is", (array.dtype.newbyteorder("="), array.shape)),
        ("Zarr reads", (stock.dtype, stock.shape)),
    ):
        if found != (np.dtype(dtype), shape):
            message = f"{shard.folder / name}: {reader} {found[0]} {list(found[1])}, not {dtype} {list(shape)}"
            yield Problem("structure", message, shard.name)


def check_columns(shard: Shard, spec: FeatureSpec) -> Iterator[Problem]:
    """Offsets that rise, ids that differ, and as many frames as the audio should give.

    A problem with an `id` is that item's alone; any other is the whole shard's.

    Raises:
        DamagedError: a column is not what was written.
    """
    items, frames = shard.info.items, shard.info.frames
    ends = {"offsets": (items, frames), "id_offsets": (items, len(shard.column("ids")))}
    ends["path_offsets"] = items, len(shard.column("paths"))
    fewest = dict.fromkeys(ends, 1)
    for side in spec.side:
        entries, name = column_names(side.name)
        ends[name], fewest[name] = (items, len(shard.column(entries))), int(side.name == QUANTIZATION)
    for name, (count, last) in ends.items():
        offsets = shard.column(name).astype(np.int64)
        steps = np.diff(offsets)
        if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != last or (steps < fewest[name]).any():
            yield Problem(
                "offsets", f"{shard.folder / name}: do not increase from 0 to {last} in {count} steps", shard.name
            )
            return
    each = ["crc32c", "num_samples", "segments", "channels", "sources"]
    if spec.is_quantized:
        each.append(column_names(QUANTIZATION)[0])
    for name in each:
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
        parameters = shard.column(column_names(QUANTIZATION)[0]).reshape(items, -1)
        for item in np.flatnonzero(~np.isfinite(parameters).all(axis=1)).tolist():
            message = f"{ids[item]}: its scale or offset is NaN or infinite"
            yield Problem("non_finite", message, shard.name, ids[item])
    # A frame more or less at either end is the extractor's business; beyond that, frames are not this audio's.
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
    """The array's checksum, every item's, and values that are not finite; the file is read once if all is well."""
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
    """Read an array's chunk file in blocks of whole items that fit a core's cache: first and last item, frames.

    By `readinto` and not by the memory map: the map takes a page fault for every 4 kB.
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
