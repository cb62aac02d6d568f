"""The files of a shard, checked while they are read, for copies of shards and uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from featcache.errors import DamagedError
from featcache.spec import FeatureSpec
from featcache.storage.location import Location, ObjectPath
from featcache.storage.objects import in_parallel
from featcache.storage.store import store_of
from featcache.store import zarr3
from featcache.store.checksums import hex_crc32c
from featcache.store.chunk_file import checked_blocks, reading_error
from featcache.store.columns import columns_of
from featcache.store.documents import read_bytes
from featcache.store.shard import Shard

Blocks = Callable[[], Iterator[memoryview]]
"""Reads the blocks of a file, held against its checksum."""


class ShardFiles:
    """The files of a shard of a version with this spec.

    Raises:
        DamagedError: From every method, or from reading a file to its end: it is not what was written.
        StoreError: It cannot be read.
    """

    def __init__(self, shard: Shard, spec: FeatureSpec) -> None:
        self.shard = shard
        self._columns = columns_of(spec, shard.info.metadata)

    def small(self) -> Iterator[Location]:
        """All but the features' chunk."""
        yield self.shard.folder / "features" / "zarr.json"
        yield from self.shard.files(column for name, column in self._columns.items() if name != "features")

    def arrays(self) -> Iterator[tuple[str, Blocks]]:
        """The path of each file of an array in the shard's folder, and what reads it."""
        folder = self.shard.folder
        for name in self._columns:
            found = self.shard.find(name)
            if found.chunk is not None:
                path = str(found.chunk).removeprefix(f"{folder}/")
                yield path, partial(checked_blocks, found.chunk, found.num_bytes + zarr3.CHECKSUM_BYTES)
            metadata = _read_document(folder / name / "zarr.json")
            if hex_crc32c(metadata) != self.shard.info.metadata.get(name):
                raise DamagedError(f"{folder / name / 'zarr.json'}: damaged: its checksum does not match")
            yield f"{name}/zarr.json", _one_block(metadata)

    def document(self) -> bytes:
        """The shard's own `zarr.json`, which is the last file of a copy, once all others have been read."""
        folder = self.shard.folder
        document = _read_document(folder / "zarr.json")
        if self.shard.info != Shard(folder, self.shard.fingerprint).info:
            raise DamagedError(f"{folder}: is being exchanged: copy it again")
        return document

    def upload_arrays(self, to: ObjectPath) -> dict[str, int]:
        """Write the arrays below a place in an object store, and not the `zarr.json`; returns each file's size."""

        def put(file: tuple[str, Blocks]) -> tuple[str, int]:
            name, blocks = file
            return name, store_of(to).put_blocks(to / name, blocks)

        # What has been read ahead of a shard in an object store, only this thread has.
        files = list(self.arrays())
        return dict(map(put, files) if isinstance(self.shard.folder, ObjectPath) else in_parallel(put, files))


def _read_document(location: Location) -> bytes:
    try:
        return read_bytes(location)
    except OSError as error:
        raise reading_error(error, location) from error


def _one_block(data: bytes) -> Blocks:
    return lambda: iter([memoryview(data)])
