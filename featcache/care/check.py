"""Whether a shard is what was written, byte for byte, and makes sense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from featcache.errors import DamagedError
from featcache.format.documents import AT_MOST_BYTES, decoder_of
from featcache.format.group import CHECKSUM_BYTES
from featcache.format.shard import Shard
from featcache.spec import all_finite
from featcache.version.version import ShardGoneError, Version


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be."""

    kind: str
    """What kind of fault: `metadata`, `structure`, `checksum`, `non_finite`, `frames`, `missing` …"""
    message: str
    shard: str | None = None
    """The damaged shard; None if the fault is in none."""
    id: str | None = None
    """The utterance; None if the fault is not of a single one."""


class StoppedError(Exception):
    """Whoever asked does not want to know any more."""


def examine_shard(
    version: Version, name: str, data: bool, stopped: Callable[[], bool] = lambda: False
) -> tuple[Shard | None, list[Problem]]:
    """A shard, and what is wrong with it. With `data`, every byte of its features is read, else only everything else.

    Raises:
        ShardGoneError: There is no such shard any more.
        StoreError: It cannot be read now.
        StoppedError: `stopped` said so.
    """
    try:
        shard = version.shard(name)
    except DamagedError as error:
        return None, [Problem("metadata", error.what, name)]
    try:
        return shard, [*_problems(shard, data, stopped)]
    except ShardGoneError:
        raise
    except DamagedError as error:
        return shard, [Problem("structure", error.what, name)]


def _problems(shard: Shard, data: bool, stopped: Callable[[], bool]) -> Iterator[Problem]:
    paths = [path for path in shard.info.files if not path.startswith("features/c/")]
    faults = [fault for path in paths if (fault := shard.file_fault(path))]
    if not faults:
        faults = [f"{shard}: damaged: {fault}" for fault in shard.faults()] or [*_metadata_faults(shard)]
    if faults:
        yield from (Problem("checksum" if "checksum" in fault else "structure", fault, shard.name) for fault in faults)
        return
    yield from _item_problems(shard)
    if data:
        yield from _feature_problems(shard, stopped)
    else:
        shard.open_features()  # which compares its size, and the checksum at its end


def _metadata_faults(shard: Shard) -> Iterator[str]:
    """Whether Zarr libraries find the arrays that featcache finds."""
    expected = {"features": ((shard.info.frames, *shard.spec.item_shape), shard.spec.stored_dtype)}
    for side in shard.spec.side:
        last = int(shard.table.offsets(f"side_{side.name}")[-1])
        expected[f"side_{side.name}"] = (last, *side.item_shape), side.dtype
    for name, (shape, dtype) in expected.items():
        path = f"{name}/zarr.json"
        try:
            array = decoder_of(_ArrayMetadata).decode(shard.store.read(f"{shard.key}/{path}", AT_MOST_BYTES))
        except FileNotFoundError:  # since its bytes were read: a repair takes the shard away
            yield f"{shard}/{path}: damaged: the file is missing"
            continue
        except ValueError as error:
            yield f"{shard}/{path}: damaged: {error}"
            continue
        if (array.shape, array.data_type) != (shape, dtype):
            yield f"{shard}/{path}: damaged: it is {array.data_type} {[*array.shape]}, not {dtype} {[*shape]}"


class _ArrayMetadata(msgspec.Struct):
    shape: tuple[int, ...]
    data_type: str


def _item_problems(shard: Shard) -> Iterator[Problem]:
    """Whether each item can be dequantised, and has as many frames as its audio should give."""
    table, spec, ids = shard.table, shard.spec, shard.table.ids
    if spec.is_quantized:
        parameters = shard.quantization.reshape(len(ids), -1)
        for item in np.flatnonzero(~np.isfinite(parameters).all(axis=1)).tolist():
            message = f"{ids[item]}: its scale or offset is NaN or infinite"
            yield Problem("non_finite", message, shard.name, ids[item])
    # An extractor may have a frame more or less at either end. Beyond that, the frames are not of this audio.
    num_frames, num_samples = np.diff(table.offsets("frame")), table["num_samples"]
    per_sample = spec.frame_rate / spec.sample_rate
    expected = np.maximum(num_samples, spec.padded_to) * per_sample
    for item in np.flatnonzero(np.abs(num_frames - expected) > spec.frame_length * per_sample + 2).tolist():
        seconds = int(num_samples[item]) / spec.sample_rate
        message = f"{ids[item]}: {num_frames[item]} frames for {seconds:.3f} s of audio"
        yield Problem("frames", message, shard.name, ids[item])


def _feature_problems(shard: Shard, stopped: Callable[[], bool]) -> Iterator[Problem]:
    """Whether the features are what was written, and finite; read once if so."""
    path = next(path for path in shard.info.files if path.startswith("features/c/"))
    dtype, rest, is_finite = np.dtype(shard.spec.stored_dtype).newbyteorder("<"), b"", True
    left = shard.info.files[path][0] - CHECKSUM_BYTES

    def seen(block: memoryview) -> None:
        nonlocal rest, is_finite, left
        if stopped():
            raise StoppedError
        whole, left = block[:left], max(0, left - len(block))
        if rest or len(whole) % dtype.itemsize:  # of a stream, blocks have any size
            joined = rest + whole
            end = len(joined) // dtype.itemsize * dtype.itemsize
            whole, rest = memoryview(joined)[:end], joined[end:]
        is_finite = is_finite and all_finite(np.frombuffer(whole, dtype))

    fault = shard.file_fault(path, seen)
    if not fault and is_finite:
        return
    ids, num_items = shard.table.ids, len(shard.table)
    sound = {number for number, _ in shard.sound_items(range(num_items))}
    for item in range(num_items):
        if item not in sound:
            what = "the checksum of its features does not match" if fault else "features are NaN or infinite"
            yield Problem("checksum" if fault else "non_finite", f"{ids[item]}: {what}", shard.name, ids[item])
    if fault and ("checksum" not in fault or len(sound) == num_items):  # a disk that cannot be read, for example
        yield Problem("checksum", fault, shard.name)
