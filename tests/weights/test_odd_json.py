"""The JSON beside a model's weights, and the file of a codebook: odd ones are refused in one line."""

import json
import os
import struct

import pytest
from saved_models import fault, located

from featcache import weights
from featcache.extractors.units import read_codebook

DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text(DEEP), "cannot be read: maximum recursion depth"),
        (lambda path: path.write_text("9" * 10_000), "cannot be read: Exceeds the limit"),
        (lambda path: path.write_text("[1]"), "expected a mapping"),
        (lambda path: os.mkfifo(path), "cannot be read: not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read: not a file"),
        (lambda path: path.touch() or os.truncate(path, 7 << 40), "cannot be read: more than 33,554,432 bytes"),
    ],
    ids=["deep", "long number", "list", "pipe", "device", "sparse"],
)
def test_odd_json_of_a_model_is_refused(tmp_path, make, words):
    (tmp_path / "config.json").write_text("{}")
    make(tmp_path / "preprocessor_config.json")
    assert words in fault(weights.read_json, located(tmp_path), "preprocessor_config.json")


def codebook(path, config: str, shape: list[int], num_bytes: int) -> None:
    metadata = {"format": "featcache units 1", "config": config, "fingerprint": "0", "dtype": "float32"}
    centroids = {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": metadata, "centroids": centroids}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: codebook(path, DEEP, [2, 2], 16), "incomplete file"),
        (lambda path: codebook(path, "{}", [0, 2], 0), "centroids are finite float32"),
        (lambda path: codebook(path, "{}", [10**12, 2], 16), "incomplete file"),
        (lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"), "incomplete file"),
        (lambda path: os.mkfifo(path), "not a file"),
    ],
    ids=["deep", "empty", "terabytes", "long header", "pipe"],
)
def test_an_odd_codebook_is_refused(tmp_path, make, words):
    make(tmp_path / "units.safetensors")
    assert words in fault(read_codebook, tmp_path / "units.safetensors")
