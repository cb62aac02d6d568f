"""Writing groups, and shards batch by batch.

The names of shards depend on the bytes of their `zarr.json`. These are made here, so that no
release of zarr-python changes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.errors import ExtractorError, listing
from featcache.format.documents import UNSEALED, seal
from featcache.format.group import CHECKSUM_BYTES, NAME_DIGITS, Table, checksum_of, digest_of
from featcache.format.shard import ITEM_COLUMNS, Item, columns_of
from featcache.manifest.segments import SegmentColumns
from featcache.manifest.strings import Strings
from featcache.spec import FeatureSpec, all_finite, as_values
from featcache.storage.base import MARK, Buffer

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
    files: dict[str, Buffer] = {}
    for name, chunk in arrays.items():
        files[f"{name}/{MARK}"] = _array_document(name, chunk.values, no_code)
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
    unsealed = {"featcache": {**attributes, "checksum": UNSEALED}}
    return seal(_zarr_json({"attributes": unsealed, "zarr_format": 3, "node_type": "group"}), where)


def _array_document(name: str, values: NDArray[Any], no_code: int) -> bytes:
    """Return the `zarr.json` of an array with one chunk, byte for byte as zarr-python writes
    it."""
    dimensions = [*_DIMENSIONS.get(name, [f"{name}_entry"])]
    dimensions += [f"{name}_dim_{axis}" for axis in range(len(dimensions), values.ndim)]
    fill_value: object = no_code if name == "features" else 0
    if values.dtype.kind in "fb":
        fill_value = "NaN" if values.dtype.kind == "f" else False
    as_bytes: dict[str, Any] = {"name": "bytes"}
    if values.itemsize > 1:
        as_bytes["configuration"] = {"endian": "little"}
    chunk_shape = [max(1, size) for size in values.shape]
    return _zarr_json(
        {
            "shape": values.shape,
            "data_type": values.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill_value,
            "codecs": [as_bytes, {"name": "crc32c"}],
            "attributes": {},
            "dimension_names": dimensions,
            "zarr_format": 3,
            "node_type": "array",
            "storage_transformers": [],
        }
    )


def _zarr_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()


class _Clip(NamedTuple):
    item: Item
    features: NDArray[Any]
    side: Arrays
    checksum: int


class ShardBuilder:
    """Builds a shard in memory, batch by batch."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._spec = spec
        self._dtype = spec.stored_dtype
        self._clips: list[_Clip] = []

    def __len__(self) -> int:
        return len(self._clips)

    def append(self, item: Item, features: NDArray[Any], side: Arrays = NO_SIDE) -> None:
        """Add an item: events, or at least one frame, `[frames, *item_shape]` of the stored
        dtype, C-contiguous, and its entries of every side array. Both are kept, not copied. Raises
        ExtractorError, and adds nothing, if they are not what the version holds."""
        spec = self._spec
        _refuse_other_arrays("features", "are", features, self._dtype, spec.item_shape)
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
