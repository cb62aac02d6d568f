"""What is written of a version: groups, which zarr-python makes in memory, and shards, put together batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.errors import ExtractorError, MissingDependencyError, listing
from featcache.format.documents import UNSEALED, seal
from featcache.format.group import NAME_DIGITS, Table, checksum_of, digest_of
from featcache.format.shard import Item, columns_of
from featcache.manifest.segments import SegmentColumns
from featcache.spec import FeatureSpec
from featcache.storage.base import MARK, Buffer
from featcache.strings import Strings

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

NO_SIDE: Arrays = MappingProxyType({})

_DIMENSIONS = {"items": ["column", "item"], "text": ["byte"], "features": ["frame"]}
"""The names of arrays' first dimensions, for xarray: those of one name have one length, and no array has that name."""


def group_files(
    document: Mapping[str, Any], table: Table, arrays: Arrays, fills: Mapping[str, int], where: object
) -> tuple[str, dict[str, Buffer]]:
    """The files of a group, by their paths in it, and its digest.

    Args:
        document: What its document says besides `GroupInfo`, and the `fingerprint`.
        arrays: What it holds besides its table, by name.
        fills: What Zarr libraries read where a chunk is missing, of arrays for which it is neither NaN nor 0.
        where: Names the version in messages.

    Raises:
        StoreError: The document is too large.
    """
    stored = _zarr_group({**arrays, "items": table.matrix, "text": table.text}, fills, {})
    files = {path: data for path, data in stored.items() if path != MARK}
    sizes = {path: (len(data), checksum_of(path, data)) for path, data in sorted(files.items())}
    digest = digest_of(sizes, table)
    own = {"columns": table.columns, "items": len(table), "text": table.text.size, "digest": digest, "files": sizes}
    return digest, {**files, MARK: seal_group({**document, **own}, where)}


def seal_group(attributes: Mapping[str, Any], where: object) -> bytes:
    """The `zarr.json` of a group with these attributes, sealed."""
    stored = _zarr_group({}, {}, {"featcache": {**attributes, "checksum": UNSEALED}})
    return seal(bytes(stored[MARK]), where)


def _zarr_group(arrays: Arrays, fills: Mapping[str, int], attributes: dict[str, Any]) -> dict[str, Any]:
    """The files of a Zarr group, by their paths, as zarr-python writes them."""
    try:
        import zarr
        from zarr.codecs import Crc32cCodec
        from zarr.storage import MemoryStore
    except ImportError as error:
        raise MissingDependencyError("zarr", "writing a cache") from error

    stored: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(stored), attributes=attributes)
    for name, array in arrays.items():
        values = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        dimensions = _DIMENSIONS.get(name, [f"{name}_entry"])
        created = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=tuple(max(1, size) for size in values.shape),
            compressors=Crc32cCodec(),
            fill_value=np.nan if values.dtype.kind == "f" else fills.get(name, 0),
            dimension_names=dimensions + [f"{name}_dim_{axis}" for axis in range(len(dimensions), values.ndim)],
            config={"write_empty_chunks": True},
        )
        if values.size:
            created[...] = values
    return {path: memoryview(data.as_numpy_array()).cast("B") for path, data in stored.items()}


class _Clip(NamedTuple):
    item: Item
    features: NDArray[Any]
    side: Arrays
    checksum: int


class ShardBuilder:
    """Puts a shard together in memory, batch by batch."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._spec = spec
        self._clips: list[_Clip] = []

    def __len__(self) -> int:
        return len(self._clips)

    def append(self, item: Item, features: NDArray[Any], side: Arrays = NO_SIDE) -> None:
        """Add an item.

        Args:
            features: Its frames, at least one: `[frames, *item_shape]` of the stored dtype, C-contiguous; kept, not
                copied.
            side: Its entries of every side array of the version; likewise.

        Raises:
            ExtractorError: It is not what the version holds. Nothing has been added.
        """
        _refuse_other_arrays("features", "are", features, self._spec.stored_dtype, self._spec.item_shape)
        names = {spec.name for spec in self._spec.side}
        if side.keys() != names:
            given, own = (listing(sorted(names)) or "none" for names in (side, names))
            raise ExtractorError(f"side arrays are {given}; this version's are {own}")
        for spec in self._spec.side:
            _refuse_other_arrays(f"side array {spec.name}", "is", side[spec.name], spec.dtype, spec.item_shape)
        self._clips.append(_Clip(item, features, side, crc32c(features)))

    def files(
        self, *, fingerprint: str, row: int, manifest: str, made_by: Mapping[str, Any], where: object
    ) -> tuple[str, dict[str, Buffer]]:
        """The name and the files of the shard, to be published as `shards/<name>`. What was added is let go of.

        Args:
            row, manifest, made_by: See `ShardInfo`.
            where: Names the version in messages.
        """
        table = self._table()
        arrays = {"features": np.concatenate([clip.features for clip in self._clips])}
        for side in self._spec.side:
            arrays[f"side_{side.name}"] = np.concatenate([clip.side[side.name] for clip in self._clips])
        self._clips.clear()
        document = {
            "fingerprint": fingerprint,
            "frames": len(arrays["features"]),
            "seconds": round(int(table["num_samples"].sum()) / self._spec.sample_rate, 6),
            "row": row,
            "manifest": manifest,
            "made_by": dict(made_by),
        }
        digest, files = group_files(document, table, arrays, {"features": _no_code(self._spec)}, where)
        return digest[:NAME_DIGITS], files

    def _table(self) -> Table:
        items = [clip.item for clip in self._clips]
        rows = SegmentColumns.of(items)
        ids = Strings.of(item.id for item in items)
        columns = {
            "frame_offset": np.cumsum([0, *(len(clip.features) for clip in self._clips)]),
            "id_offset": ids.offsets,
            "path_offset": rows.paths.offsets + len(ids.blob),
            "id_hash": ids.hashes(),
            "row_hash": rows.hashes(),
            "generation": [item.generation for item in items],
            "item_crc32c": [clip.checksum for clip in self._clips],
            "num_samples": [item.num_samples for item in items],
            "sample_rate": [item.sample_rate for item in items],
            "source_size": [item.size for item in items],
            "source_mtime_ns": [item.mtime_ns for item in items],
            "source_hash": [item.content_hash for item in items],
            "decoder": [item.by_ffmpeg for item in items],
            "start": rows.start,
            "duration": rows.duration,
            "channel": rows.channel,
        }
        for side in self._spec.side:
            columns[f"side_{side.name}_offset"] = np.cumsum([0, *(len(clip.side[side.name]) for clip in self._clips)])
        return Table.of(columns, columns_of(self._spec), np.concatenate([ids.blob, rows.paths.blob]))


def _refuse_other_arrays(what: str, is_: str, array: NDArray[Any], dtype: str, item_shape: Sequence[int]) -> None:
    """Refuse an array that the version does not hold; messages begin with `what` it `is_`."""
    given, own = [*array.shape], [len(array) if array.ndim else 1, *item_shape]
    if (array.dtype, given) != (np.dtype(dtype), own):
        raise ExtractorError(f"{what} {is_} {array.dtype} {given}; this version's {is_} {dtype} {own}")


def _no_code(spec: FeatureSpec) -> int:
    """The largest value of the dtype of codes if it is none, else 0: what cannot be taken for data."""
    dtype = np.dtype(spec.stored_dtype)
    if dtype.kind == "f" or not spec.codebook_sizes or max(spec.codebook_sizes) > np.iinfo(dtype).max:
        return 0
    return int(np.iinfo(dtype).max)
