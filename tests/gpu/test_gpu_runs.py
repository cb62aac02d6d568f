"""Whole runs on a GPU: no bit depends on the batch, the order, the threads, or on a restart."""

from __future__ import annotations

import random

import pytest
import small_ssl
from devices import DEVICES

import featcache


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Frames on the device, and rows at two precisions."""
    folder = tmp_path_factory.mktemp("configs")
    weights = small_ssl.save("hubert", folder / "weights")
    for precision in ("fp32", "bf16"):
        text = f"name: {precision}\nextractor: ssl\nparams: {{weights: {weights}, layer: 2, precision: {precision}}}\n"
        (folder / f"{precision}.yaml").write_text(text)
    return ["fbank80", folder / "fp32.yaml", folder / "bf16.yaml"]


@pytest.mark.parametrize("device", DEVICES)
def test_no_bit_depends_on_anything_but_the_clip(corpus, configs, scratch, device):
    def extract(rows, name, **options):
        path = corpus.manifest(rows, f"{name}.csv")
        summary = featcache.extract(path, configs, scratch / name, featcache.Options(device, **options))
        assert summary.failed_by_reason == {}
        caches = [featcache.open(scratch / name, config) for config in ("fbank80", "fp32", "bf16")]
        return [{id_: cache[id_].tobytes() for id_ in cache.ids} for cache in caches]

    shuffled = random.Random(0).sample(corpus.rows, len(corpus.rows))
    expected = extract(corpus.rows, "one", threads=1)
    assert extract(shuffled, "two", threads=4, shard_megabytes=0.05) == expected
    extract(shuffled[:9], "three", threads=2)
    assert extract(corpus.rows, "three", threads=3) == expected
