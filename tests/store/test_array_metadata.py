"""What other software reads of a shard's arrays, also if a chunk is gone or a bit of their metadata has flipped."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import xarray
import zarr
from damage import flip
from small_shards import INFO, SIDED, SPEC, item, problems, write

from featcache.errors import DamagedError
from featcache.store import zarr3
from featcache.store.checksums import hex_crc32c
from featcache.store.columns import columns_of
from featcache.store.version import Version

CODES = replace(SPEC, dtype="uint16", codebook_sizes=(1024, 500))
FULL = replace(SPEC, dtype="uint8", codebook_sizes=(256, 256))
LEVELS = replace(SPEC, side=(replace(SIDED.spec.side[0], name="quantization", item_shape=(2, 2)),))
ABSENT = {"float32": np.nan, "float64": np.nan}
"""What stock Zarr reads in place of values that are not there; of all other dtypes 0."""


def shard_of(scratch, spec, **given):
    version = Version.create(scratch / f"cache-{spec.stored_dtype}", replace(INFO, spec=spec))
    return write(version, [item("a"), item("b", 4), item("c", 5)], **given)


@pytest.mark.parametrize("spec", [SPEC, CODES, FULL], ids=["floats", "codes", "full"])
def test_a_missing_chunk_is_never_a_silence_or_a_code(scratch, spec):
    """Of floats NaN, of codes a number that no codebook has if the dtype has one; of counts and bytes 0."""
    shard = shard_of(scratch, spec)
    for name, column in columns_of(spec, shard.info.metadata).items():
        zarr3.chunk_path(shard.folder / name, 1 + len(column.entry_shape)).unlink()
        found = zarr.open_array(shard.folder / name, mode="r")[...]
        assert found.size
        absent = 65535 if name == "features" and spec is CODES else ABSENT.get(column.dtype, 0)
        np.testing.assert_array_equal(found, np.full_like(found, absent))
        with pytest.raises(DamagedError, match="missing"):
            shard.features if name == "features" else shard.column(name)


def side_of(counts):
    entries = np.arange(sum(counts), dtype=np.float32)
    return {"scales": (entries, counts), "marks": (np.zeros((0, 2), np.uint16), [0, 0, 0])}


@pytest.mark.parametrize("consolidated", [False, None])
@pytest.mark.filterwarnings("ignore:Failed to open Zarr store with consolidated metadata")
def test_xarray_opens_a_shard_as_one_dataset(scratch, consolidated):
    """With all its arrays, also a side array without entries; dimensions of one name have one length."""
    shard = shard_of(scratch, SIDED.spec, side=side_of([2, 0, 7]))
    with (
        xarray.open_zarr(shard.folder, chunks=None, consolidated=consolidated) as opened,
        xarray.open_dataset(shard.folder, engine="zarr", consolidated=consolidated) as other,
    ):
        columns = columns_of(SIDED.spec, shard.info.metadata)
        assert {*opened.data_vars} == {*other.data_vars} == {*columns}
        assert not opened.coords
        for name in columns:
            array = shard.features if name == "features" else shard.column(name)
            assert opened[name].dtype == array.dtype
            np.testing.assert_array_equal(opened[name].values, array)
        assert {name: opened.sizes[name] for name in ("item", "item_edge", "frame")} == {
            "item": 3,
            "item_edge": 4,
            "frame": 12,
        }
        assert opened.attrs["featcache"]["items"] == 3


def test_quantised_features_open_too(scratch):
    shard = shard_of(scratch, LEVELS, side={"quantization": (np.ones((3, 2, 2), np.float32), [1, 1, 1])})
    with xarray.open_zarr(shard.folder, chunks=None, consolidated=False) as opened:
        assert opened["side_quantization"].shape == (3, 2, 2)


def test_stock_zarr_refuses_flipped_metadata_or_reads_the_same_unless_the_shape_has_flipped(scratch):
    """Every bit. Of another shape, it reads NaN where there is no value; never other values, and never zeros."""
    shard = shard_of(scratch, SPEC)
    path = shard.folder / "features" / "zarr.json"
    data = path.read_bytes()
    shape = json.loads(data)["shape"]
    values = shard.features[...]
    others = 0
    for at in range(len(data)):
        for bit in range(8):
            flip(path, at, bit)
            try:
                found = zarr.open_array(path.parent, mode="r")[...]
            except Exception:  # noqa: BLE001 - refused, with whatever error
                pass
            else:
                assert found.dtype == values.dtype
                if [*found.shape] != shape:
                    others += 1
                    assert sum(a != b for a, b in zip(found.shape, shape, strict=True)) == 1
                cut = tuple(slice(min(sizes)) for sizes in zip(found.shape, shape, strict=True))
                np.testing.assert_array_equal(found[cut], values[cut])
                there = np.zeros(found.shape, bool)
                there[cut] = True
                assert np.isnan(found[~there]).all()
            flip(path, at, bit)
    assert 0 < others < 20
    assert path.read_bytes() == data


@pytest.mark.parametrize(("data_type", "found"), [("float32", []), ("uint32", ["structure"])])
def test_sealed_metadata_in_a_form_that_nobody_knows_is_sound_if_it_says_the_same(scratch, data_type, found):
    """Of whatever later code has written, as far as it matters to stock Zarr."""
    version = Version.create(scratch, INFO)
    shard = write(version, [item("a"), item("b", 4)])
    path = shard.folder / "features" / "zarr.json"
    document = json.loads(path.read_bytes()) | {"data_type": data_type, "fill_value": 1, "attributes": {"later": True}}
    path.write_text(json.dumps(document))
    metadata = shard.info.metadata | {"features": hex_crc32c(path.read_bytes())}
    (shard.folder / "zarr.json").write_bytes(zarr3.group_metadata(asdict(replace(shard.info, metadata=metadata))))
    assert problems(version, version.shard(shard.name)) == found
