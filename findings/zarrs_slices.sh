#!/usr/bin/env bash
# zarrs, as zarr-python's codec pipeline, checks the crc32c of a chunk only if the whole chunk is read.
#
# An uncompressed chunk whose codecs are `bytes, crc32c` ends in a checksum. zarr-python reads the whole chunk for every
# slice, and refuses it after one flipped bit. zarrs reads only the bytes of the slice, cannot check them, and returns
# the changed value without a word. A reader of such slices needs a checksum for each, as in `item_crc32c`.
#
# Seen with zarrs 0.2.3 and zarr 3.4.2 (Python 3.12), and zarr 3.1.6 (Python 3.11):
#   zarr-python whole: refused
#   zarr-python slice: refused
#   zarrs whole: refused
#   zarrs slice: 0 values are wrong before the flip, 1 after it
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check zarrs==0.2.3 numpy==2.4.6 \
    'zarr==3.1.6; python_version < "3.12"' 'zarr==3.4.2; python_version >= "3.12"'
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from pathlib import Path

import numpy as np
import zarr

print(f"zarr {version('zarr')}, zarrs {version('zarrs')}, numpy {np.__version__}")
values = np.arange(8000, dtype=np.float32).reshape(100, 80)
codecs = {"serializer": zarr.codecs.BytesCodec(endian="little"), "compressors": [zarr.codecs.Crc32cCodec()]}
array = zarr.create_array("a", shape=values.shape, chunks=values.shape, dtype="float32", filters=None, **codecs)
array[:] = values


def outcome(rows: int) -> int | str:
    """How many of the first rows' values are wrong, or that they are refused."""
    try:
        return int((zarr.open_array("a", mode="r")[:rows] != values[:rows]).sum())
    except (ValueError, RuntimeError):
        return "refused"


def with_zarrs(rows: int) -> int | str:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return outcome(rows)


before = with_zarrs(10)
chunk = Path("a/c/0/0")
data = bytearray(chunk.read_bytes())
assert len(data) == values.nbytes + 4
data[400] ^= 1  # in row 1
chunk.write_bytes(data)
print("zarr-python whole:", outcome(100))
print("zarr-python slice:", outcome(10))
print("zarrs whole:", with_zarrs(100))
print(f"zarrs slice: {before} values are wrong before the flip, {with_zarrs(10)} after it")
seen = outcome(100), outcome(10), with_zarrs(100), before, with_zarrs(10)
assert seen == ("refused", "refused", "refused", 0, 1), f"the behaviour has changed: {seen}"
PYTHON
