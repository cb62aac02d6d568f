"""Arrays and groups on disk are Zarr v3, and small files are written whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from processes import open_files
from scratch import scratch_folder
from small_shards import DTYPES

from featcache.errors import DamagedError
from featcache.store import zarr3
from featcache.store.checksums import combined_crc32c, crc32c


def write(folder: Path, array: np.ndarray) -> bytes:
    """Write an array, and return its metadata."""
    metadata = zarr3.array_metadata(array.shape, array.dtype, [f"axis-{axis}" for axis in range(array.ndim)])
    zarr3.write_array(folder, array, metadata)
    return metadata


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4)])
def test_an_array_is_one_chunk_that_stock_zarr_reads(scratch, dtype, shape):
    """Raw little-endian values and four bytes of checksum, byte for byte what zarr-python writes."""
    array = np.random.default_rng(1).integers(0, 200, shape).astype(dtype)
    write(scratch / "ours", array)
    chunk = zarr3.chunk_path(scratch / "ours", len(shape)).read_bytes()
    assert chunk[:-4] == array.tobytes()
    found = zarr.open_array(scratch / "ours", mode="r")
    assert (found.shape, found.dtype, found.chunks) == (array.shape, array.dtype, array.shape)
    assert (found[...] == array).all()
    theirs = zarr.create_array(
        scratch / "theirs",
        data=array,
        chunks=shape,
        compressors=[zarr.codecs.Crc32cCodec()],
        config={"write_empty_chunks": True},
    )
    assert zarr3.chunk_path(scratch / "theirs", len(shape)).read_bytes() == chunk
    assert theirs.metadata.to_dict()["codecs"] == found.metadata.to_dict()["codecs"]


def test_stock_zarr_refuses_a_flipped_bit(scratch):
    """The checksum is Zarr's own: no reader takes damaged features for good ones."""
    write(scratch, np.arange(100, dtype=np.float32))
    path = zarr3.chunk_path(scratch, 1)
    data = bytearray(path.read_bytes())
    data[123] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(scratch, mode="r")[...]


def test_stock_zarr_refuses_a_chunk_that_is_gone_or_does_not_fill_it(scratch):
    """What format 1 reads with `map_array` is never fill values."""
    write(scratch, np.arange(100, dtype=np.float32))
    zarr3.chunk_path(scratch, 1).unlink()
    with pytest.raises(DamagedError, match="missing"):
        zarr3.map_array(scratch)
    with pytest.raises(DamagedError, match="missing"):
        zarr3.read_array(scratch)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 2, 4)])
def test_an_array_without_a_value_has_no_chunk(scratch, shape):
    """As in stock Zarr, for which a chunk is never of size 0; and a chunk that is there all the same is damage."""
    metadata = json.loads(write(scratch / "a", np.empty(shape, np.float32)))
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [1, *shape[1:]]
    assert [path.name for path in (scratch / "a").iterdir()] == ["zarr.json"]
    found = zarr.open_array(scratch / "a", mode="r")
    read, checksum = zarr3.read_array(scratch / "a")
    mapped = zarr3.map_array(scratch / "a")
    for array in (found[...], read, mapped):
        assert (array.shape, array.dtype) == (shape, np.float32)
    assert (checksum, mapped.flags.writeable) == (0, False)
    write(scratch / "b", np.ones((3, *shape[1:]), np.float32))
    (scratch / "a" / "zarr.json").replace(scratch / "b" / "zarr.json")
    for reader in (zarr3.read_array, zarr3.map_array):
        with pytest.raises(DamagedError, match="without values"):
            reader(scratch / "b")


def test_a_map_outlives_its_file(scratch):
    """What training has mapped stays as it was when repair removes a shard."""
    write(scratch, np.arange(100_000, dtype=np.float32))
    mapped = zarr3.map_array(scratch)
    assert open_files(scratch) == []  # a thousand shards are no thousand open files
    zarr3.chunk_path(scratch, 1).unlink()
    assert (mapped == np.arange(100_000)).all()
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "format", "checksum", "é"]), JSON, max_size=4),
    st.integers(0),
    st.integers(0, 7),
)
def test_sealed_metadata_comes_back_or_is_refused(attributes, at, bit):
    """Whatever it holds, even what looks like a seal; and no flipped bit goes unnoticed."""
    attributes = {**attributes, "nested": {"checksum": "00000000"}}
    attributes.pop("checksum", None)
    with scratch_folder() as folder:
        data = bytearray(zarr3.group_metadata(attributes))
        (folder / "zarr.json").write_bytes(data)
        assert zarr3.read_group(folder) == attributes
        assert attributes.items() <= json.loads(data)["attributes"]["featcache"].items()
        data[at % len(data)] ^= 1 << bit
        (folder / "zarr.json").write_bytes(data)
        with pytest.raises(DamagedError):
            zarr3.read_group(folder)


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=30))
def test_the_checksum_of_a_whole_follows_from_those_of_its_parts(parts):
    """As zlib's `crc32_combine`, for all parts at once."""
    crcs = np.array([crc32c(np.frombuffer(part, np.uint8)) for part in parts], np.uint32)
    sizes = np.array([len(part) for part in parts], np.int64)
    assert combined_crc32c(crcs, sizes) == crc32c(np.frombuffer(b"".join(parts), np.uint8))
