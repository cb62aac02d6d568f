"""Writing: groups, which zarr-python makes in memory, and shards, which are put together
batch by batch."""

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
from featcache.format.shard import ITEM_COLUMNS, Item, columns_of
from featcache.manifest.segments import SegmentColumns
from featcache.spec import FeatureSpec
from featcache.storage.base import MARK, Buffer
from featcache.strings import Strings

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

GroupFiles: TypeAlias = tuple[str, dict[str, Buffer]]
"""The name of a group, or its digest; and its files, by their paths in it."""

NO_SIDE: Arrays = MappingProxyType({})

_DIMENSIONS = {"items": ["column", "item"], "text": ["byte"], "features": ["frame"]}
"""The names of arrays' first dimensions, for xarray: those of one name have one length,
and no array has that name."""


def group_files(
    document: Mapping[str, Any], table: Table, arrays: Arrays, no_code: int, where: object
) -> GroupFiles:
    """The files of a group, by their paths in it, and its digest.

    Args:
        document: What its document says besides `GroupInfo`, and the `fingerprint`.
        arrays: What it holds besides its table, by name.
        no_code: What Zarr libraries read where the chunk of integer `features` is missing.
        where: Names the version in messages.

    Raises StoreError if the document is too large."""
    stored = _zarr_group({**arrays, "items": table.matrix, "text": table.text}, no_code, {})
    files = {path: data for path, data in stored.items() if path != MARK}
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
    """The `zarr.json` of a group with these attributes, sealed."""
    stored = _zarr_group({}, 0, {"featcache": {**attributes, "checksum": UNSEALED}})
    return seal(bytes(stored[MARK]), where)


def _zarr_group(arrays: Arrays, no_code: int, attributes: dict[str, Any]) -> dict[str, Any]:
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
        no_value = no_code if name == "features" else 0
        group.create_array(
            name,
            data=values,
            chunks=tuple(max(1, size) for size in values.shape),
            compressors=Crc32cCodec(),
            fill_value=np.nan if values.dtype.kind == "f" else no_value,
            dimension_names=dimensions
            + [f"{name}_dim_{axis}" for axis in range(len(dimensions), values.ndim)],
            config={"write_empty_chunks": True},
        )
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
            features: Its frames, at least one, or its events: `[frames, *item_shape]` of
                the stored dtype, C-contiguous; kept, not copied.
            side: Its entries of every side array of the version; likewise.

        Raises ExtractorError if it is not what the version holds. Nothing has been added
        then."""
        _refuse_other_arrays(
            "features", "are", features, self._spec.stored_dtype, self._spec.item_shape
        )
        names = {spec.name for spec in self._spec.side}
        if side.keys() != names:
            given, own = (listing(sorted(names)) or "none" for names in (side, names))
            raise ExtractorError(f"side arrays are {given}; this version's are {own}")
        for spec in self._spec.side:
            _refuse_other_arrays(
                f"side array {spec.name}", "is", side[spec.name], spec.dtype, spec.item_shape
            )
        self._clips.append(_Clip(item, features, side, crc32c(features)))

    def files(
        self, *, fingerprint: str, row: int, manifest: str, made_by: dict[str, Any], where: object
    ) -> GroupFiles:
        """The name and the files of the shard, to be published as `shards/<name>`. What
        was added is let go of.

        Args:
            row, manifest, made_by: See `ShardInfo`.
            where: Names the version in messages.
        """
        table = self._table()
        features = np.concatenate([clip.features for clip in self._clips])
        num_frames = len(features)
        if not num_frames:  # events may be none, and no array is empty
            features = np.zeros((1, *features.shape[1:]), features.dtype)
        arrays = {"features": features}
        for side in self._spec.side:
            arrays[f"side_{side.name}"] = np.concatenate(
                [clip.side[side.name] for clip in self._clips]
            )
        self._clips.clear()
        seconds = round(int(table["num_samples"].sum()) / self._spec.sample_rate, 6)
        contents = {"fingerprint": fingerprint, "frames": num_frames, "seconds": seconds}
        document = {**contents, "row": row, "manifest": manifest, "made_by": made_by}
        digest, files = group_files(document, table, arrays, _no_code(self._spec), where)
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
            "item_crc32c": [clip.checksum for clip in self._clips],
            **{
                column: [getattr(item, name) for item in items]
                for name, column in ITEM_COLUMNS.items()
            },
            **{"start": rows.start, "duration": rows.duration, "channel": rows.channel},
        }
        for side in self._spec.side:
            columns[f"side_{side.name}_offset"] = np.cumsum(
                [0, *(len(clip.side[side.name]) for clip in self._clips)]
            )
        return Table.of(
            columns, columns_of(self._spec), np.concatenate([ids.blob, rows.paths.blob])
        )


def _refuse_other_arrays(
    what: str, is_: str, array: NDArray[Any], dtype: str, item_shape: Sequence[int]
) -> None:
    """Refuse an array that the version does not hold; messages begin with `what` it `is_`."""
    given, own = [*array.shape], [len(array) if array.ndim else 1, *item_shape]
    if (array.dtype, given) != (np.dtype(dtype), own):
        raise ExtractorError(
            f"{what} {is_} {array.dtype} {given}; this version's {is_} {dtype} {own}"
        )


def _no_code(spec: FeatureSpec) -> int:
    """The largest value of the dtype of codes if it is none, else 0: what cannot be taken
    for data."""
    dtype = np.dtype(spec.stored_dtype)
    if (
        dtype.kind == "f"
        or not spec.codebook_sizes
        or max(spec.codebook_sizes) > np.iinfo(dtype).max
    ):
        return 0
    return int(np.iinfo(dtype).max)
