"""What of an array's metadata matters to stock Zarr, and so to `verify`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from featcache.store import zarr3
from featcache.store.columns import COLUMNS

(OFFSETS,) = (column for column in COLUMNS if column.name == "offsets")


def changed(**keys) -> bytes:
    return json.dumps(json.loads(OFFSETS.metadata(9)) | keys).encode()


@pytest.mark.parametrize(
    "metadata",
    [
        OFFSETS.metadata(9),
        zarr3.array_metadata((9,), np.dtype("uint64"), None),
        changed(),
        changed(fill_value=7, attributes={"mine": 1}, dimension_names=["i"]),
    ],
)
def test_what_does_not_matter_may_be_another(metadata):
    assert OFFSETS.is_like(metadata, 9)
    assert not OFFSETS.is_like(metadata, 8)


@pytest.mark.parametrize(
    "keys",
    [
        {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]},
        {"chunk_key_encoding": {"name": "v2"}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3]}}},
        {"data_type": "int64"},
        {"storage_transformers": [{"name": "any"}]},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_what_matters_may_not(keys):
    assert not OFFSETS.is_like(changed(**keys), 9)
