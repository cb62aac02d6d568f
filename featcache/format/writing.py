"""Writing groups, whose documents zarr-python makes, and shards, batch by batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.errors import ExtractorError, MissingDependencyError, listing
from featcache.format.documents import UNSEALED, seal
from featcache.format.group import CHECKSUM_BYTES, NAME_DIGITS, Table, checksum_of, digest_of
from featcache.format.shard import ITEM_COLUMNS, Item, columns_of
from featcache.manifest.segments import SegmentColumns
from featcache.spec import FeatureSpec, all_finite, as_values
from featcache.storage.base import MARK, Buffer
from featcache.strings import Strings

Arrays = Mapping[str, NDArray[Any]]

GroupFiles = tuple[str, dict[str, Buffer]]
"""The name or digest of a group, and its files, by their paths in it."""

NO_SIDE: Arrays = MappingProxyType({})

_DIMENSIONS = {"items": ["column", "item"], "text": ["byte"], "features": ["frame"]}
"""The names of arrays' first dimensions, for xarray. Dimensions of one name have one
length, and no array has that name."""


class Chunk:
    """An array, and the file of its only chunk: the little-endian values, and their CRC-32C.

    Args:
        parts: Arrays of one dtype and item shape. They are joined along their first
            dimension, and copied once.
    """

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        dtype = parts[0].dtype.newbyteorder("<")
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        num_bytes = math.prod(shape) * dtype.itemsize
        file = np.empty(num_bytes + CHECKSUM_BYTES, np.uint8)
        values = file[:num_bytes]
        self.values: NDArray[Any] = values.view(dtype).reshape(shape)
        np.concatenate(parts, out=self.values)
        checksum = crc32c(values).to_bytes(CHECKSUM_BYTES, "little")
        file[num_bytes:] = np.frombuffer(checksum, np.uint8)
        self.file = file.data


def group_files(
    document: Mapping[str, Any],
    table: Table,
    arrays: Mapping[str, Chunk],
    no_code: int,
    where: object,
) -> GroupFiles:
    """Return the digest and the files of a group, from the keys of its document that follow
    neither from its table nor from its arrays. Zarr libraries read `no_code` where the
    chunk of integer `features` is missing. `where` names the version in messages. Raises
    StoreError if the document is too large."""
    arrays = {**arrays, "items": Chunk([table.matrix]), "text": Chunk([table.text])}
    files = _zarr_documents({name: chunk.values for name, chunk in arrays.items()}, no_code, {})
    del files[MARK]
    for name, chunk in arrays.items():
        if chunk.values.size:
            files["/".join([name, "c", *"0" * chunk.values.ndim])] = chunk.file
    sizes = {path: (len(data), checksum_of(path, data)) for path, data in sorted(files.items())}
    digest = digest_of(sizes, table)
    own = {
        "columns": table.columns,
        "items": len(table),
        "text": table.text.size,
        "digest": digest,
        "files": sizes,
    }
    return digest, {**files, MARK: seal_group({**document, **own}, where)}


def seal_group(attributes: Mapping[str, Any], where: object) -> bytes:
    """Return the sealed `zarr.json` of a group with these attributes."""
    documents = _zarr_documents({}, 0, {"featcache": {**attributes, "checksum": UNSEALED}})
    return seal(bytes(documents[MARK]), where)


def _zarr_documents(arrays: Arrays, no_code: int, attributes: dict[str, Any]) -> dict[str, Buffer]:
    """Return each `zarr.json` of a group, as zarr-python makes it, by its path."""
    try:
        from zarr.storage import MemoryStore
    except ImportError as error:
        raise MissingDependencyError("zarr", "writing a cache") from error

    stored: dict[str, Any] = {}

    def write() -> None:
        # zarr's other functions give each array to a thread, and slow down the threads that
        # extract
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(_write_group(MemoryStore(stored), arrays, no_code, attributes))
        finally:
            loop.close()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        write()
    else:  # a notebook's: a thread runs one loop at a time
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write).result()
    return {path: memoryview(data.as_numpy_array()).cast("B") for path, data in stored.items()}


async def _write_group(
    store: Any, arrays: Arrays, no_code: int, attributes: dict[str, Any]
) -> None:
    from zarr.api.asynchronous import create_array, create_group
    from zarr.codecs import Crc32cCodec

    await create_group(store=store, attributes=attributes)
    for name, values in arrays.items():
        dimensions = [*_DIMENSIONS.get(name, [f"{name}_entry"])]
        dimensions += [f"{name}_dim_{axis}" for axis in range(len(dimensions), values.ndim)]
        no_value = no_code if name == "features" else 0
        await create_array(
            store,
            name=name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=tuple(max(1, size) for size in values.shape),
            compressors=Crc32cCodec(),
            fill_value=np.nan if values.dtype.kind == "f" else no_value,
            dimension_names=dimensions,
        )


class _Clip(NamedTuple):
    item: Item
    features: NDArray[Any]
    side: Arrays
    checksum: int


class ShardBuilder:
    """Builds a shard in memory, batch by batch."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._spec = spec
        self._clips: list[_Clip] = []

    def __len__(self) -> int:
        return len(self._clips)

    def append(self, item: Item, features: NDArray[Any], side: Arrays = NO_SIDE) -> None:
        """Add an item: events, or at least one frame, `[frames, *item_shape]` of the stored
        dtype, C-contiguous, and its entries of every side array. Both are kept, not copied. Raises
        ExtractorError, and adds nothing, if they are not what the version holds."""
        spec = self._spec
        _refuse_other_arrays("features", "are", features, spec.stored_dtype, spec.item_shape)
        names = {one.name for one in spec.side}
        if side.keys() != names:
            given, own = (listing(sorted(names)) or "none" for names in (side, names))
            raise ExtractorError(f"side arrays are {given}; this version's are {own}")
        for one in spec.side:
            what = f"side array {one.name}"
            _refuse_other_arrays(what, "is", side[one.name], one.dtype, one.item_shape)
        self._clips.append(_Clip(item, features, side, crc32c(features)))

    def files(
        self, *, fingerprint: str, row: int, manifest: str, made_by: dict[str, Any], where: object
    ) -> GroupFiles:
        """Return the name and the files of the shard, to be published as `shards/<name>`,
        and forget its items. See `ShardInfo`; `where` names the version in messages."""
        table = self._table()
        parts = [clip.features for clip in self._clips]
        num_frames = sum(map(len, parts))
        if not num_frames:  # events may be none, and no array is empty
            parts.append(np.zeros((1, *parts[0].shape[1:]), parts[0].dtype))
        arrays = {"features": Chunk(parts)}
        for name in (side.name for side in self._spec.side):
            arrays[f"side_{name}"] = Chunk([clip.side[name] for clip in self._clips])
        self._clips.clear()
        document = {
            "fingerprint": fingerprint,
            "frames": num_frames,
            "seconds": round(int(table["num_samples"].sum()) / self._spec.sample_rate, 6),
            "row": row,
            "manifest": manifest,
            "made_by": made_by,
            "finite": all_finite(as_values(arrays["features"].values, self._spec.dtype)),
        }
        digest, files = group_files(document, table, arrays, _no_code(self._spec), where)
        return digest[:NAME_DIGITS], files

    def _table(self) -> Table:
        items = [clip.item for clip in self._clips]
        rows = SegmentColumns.of(items)
        ids = Strings.of(item.id for item in items)
        columns = {
            "frame_offset": _offsets(clip.features for clip in self._clips),
            "id_offset": ids.offsets,
            "path_offset": rows.paths.offsets + len(ids.blob),
            "id_hash": ids.hashes(),
            "row_hash": rows.hashes(),
            "item_crc32c": [clip.checksum for clip in self._clips],
            "start": rows.start,
            "duration": rows.duration,
            "channel": rows.channel,
        }
        for name, column in ITEM_COLUMNS.items():
            columns[column] = [getattr(item, name) for item in items]
        for name in (side.name for side in self._spec.side):
            columns[f"side_{name}_offset"] = _offsets(clip.side[name] for clip in self._clips)
        text = np.concatenate([ids.blob, rows.paths.blob])
        return Table.of(columns, columns_of(self._spec), text)


def _offsets(arrays: Iterable[NDArray[Any]]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, arrays)])


def _refuse_other_arrays(
    what: str, is_: str, array: NDArray[Any], dtype: str, item_shape: Sequence[int]
) -> None:
    given, own = [*array.shape], [len(array) if array.ndim else 1, *item_shape]
    if (array.dtype, given) != (np.dtype(dtype), own):
        found = f"{what} {is_} {array.dtype} {given}"
        raise ExtractorError(f"{found}; this version's {is_} {dtype} {own}")


def _no_code(spec: FeatureSpec) -> int:
    """Return the largest value of the dtype of codes if it is no code, else 0."""
    dtype = np.dtype(spec.stored_dtype)
    if dtype.kind == "f" or not spec.codebook_sizes:
        return 0
    largest = int(np.iinfo(dtype).max)
    return 0 if max(spec.codebook_sizes) > largest else largest
