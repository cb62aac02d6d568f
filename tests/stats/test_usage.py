"""How the codes of a version are used: counted, and told by the command."""

import math

import numpy as np
import pytest
from make_cache import codes_cache
from manifests import manifest_of

from featcache.errors import StoreError
from featcache.stats import usage


def test_codes_are_counted_all_or_those_of_a_manifest(tmp_path):
    cache = codes_cache(tmp_path / "cache")
    frames = np.concatenate(list(cache.values()))
    for threads in (1, 3):
        found = usage(cache, threads=threads)
        for number, size in enumerate((16, 300)):
            np.testing.assert_array_equal(
                found.counts[number], np.bincount(frames[:, number], minlength=size)
            )
        assert found.frames == len(frames)
    assert found.used == [16, 200]
    shares = np.bincount(frames[:, 0]) / len(frames)
    assert found.entropy[0] == pytest.approx(-sum(p * math.log2(p) for p in shares))
    assert found.perplexity[0] == pytest.approx(2 ** found.entropy[0])
    chosen = cache.ids[:][::3]
    found = usage(cache, manifest_of(tmp_path, [(name, "x") for name in chosen]))
    frames = np.concatenate([cache[name] for name in chosen])
    np.testing.assert_array_equal(found.counts[1], np.bincount(frames[:, 1], minlength=300))


def test_one_code_has_no_entropy_and_equal_ones_have_all(tmp_path):
    even = np.stack([np.full(64, 3), np.arange(64)], 1).astype(np.uint16)
    found = usage(codes_cache(tmp_path, {"a": even}))
    assert found.entropy == [0.0, 6.0]
    assert found.perplexity == [1.0, 64.0]
    assert found.used == [1, 64]


def test_a_code_beyond_its_codebook_is_named(tmp_path):
    cache = codes_cache(tmp_path, {"a": np.full((9, 2), 15, np.uint16)})
    object.__setattr__(cache.version.info.spec, "codebook_sizes", (16, 15))
    with pytest.raises(StoreError, match="holds code 15 of codebook 1, which has 15"):
        usage(cache)


def test_the_command_says_how_codes_are_used(cli, scratch):
    codes_cache(scratch / "cache")
    assert (
        "codebook 1: 200 of 300 codes are used; entropy "
        "7." in cli("stats", scratch / "cache").with_code(0).out
    )
    document = cli("stats", scratch / "cache", "--json").json()
    assert [book["size"] for book in document["codebooks"]] == [16, 300]
    for options in (
        ["-o", scratch / "s.npz"],
        ["--by", "speaker", "--manifest", scratch / "m.csv"],
    ):
        said = cli.refused("stats", scratch / "cache", *options)
        assert "holds codes, which have no mean: --by and -o are for features" in said
