"""Checks of what an extractor declares, in its spec, its class and its config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from featcache.config import Config, config_from
from featcache.extraction.batching import BATCHINGS
from featcache.extractors import Extractor, FeatureSpec, Params
from featcache.testing.base import Checks, with_params


class DeclaredChecks(Checks):
    """Checks of what an extractor says about itself, and of its config."""

    def test_the_spec_is_coherent(self, loaded: Config, extractor: Extractor[Params]) -> None:
        """Shapes, rates and dtypes make sense."""
        spec, rate = extractor.spec, loaded.audio.sample_rate
        assert isinstance(spec, FeatureSpec), f"spec is {spec!r}, and not a featcache.extractors.FeatureSpec"
        assert _is_shape(spec.item_shape), f"spec.item_shape: {spec.item_shape!r} is not a tuple of sizes"
        assert spec.frame_rate > 0, f"spec.frame_rate: {spec.frame_rate!r} frames per second"
        assert spec.frame_length >= 0, f"spec.frame_length: {spec.frame_length!r} samples; 0 is for not finite"
        assert spec.sample_rate == rate, f"spec.sample_rate: {spec.sample_rate}, but it was built for {rate}"
        assert spec.units, "spec.units: say what a value means"
        assert _is_dtype(spec.dtype), f"spec.dtype: {spec.dtype!r} is not the name of a dtype of numpy and torch"
        names = [side.name for side in spec.side]
        assert len(set(names)) == len(names), f"spec.side: names are given twice: {names}"
        for side in spec.side:
            assert _is_shape(side.item_shape), f"spec.side, {side.name}: {side.item_shape!r} is not a tuple of sizes"
            assert _is_dtype(side.dtype), f"spec.side, {side.name}: {side.dtype!r} is not a dtype of numpy and torch"

    def test_the_class_declares_what_it_must(self, extractor: Extractor[Params]) -> None:
        """`Params`, `revision`, `batching` and `max_seconds` are valid."""
        assert issubclass(extractor.Params, Params), "Params does not inherit featcache.extractors.Params"
        assert isinstance(extractor.revision, int), f"revision: {extractor.revision!r} is not a whole number"
        known = ["frames", *BATCHINGS]
        assert extractor.batching in known, f"batching: {extractor.batching!r} is none of {', '.join(known)}"
        limit = extractor.max_seconds
        assert limit is None or limit > 0, f"max_seconds: {limit!r} refuses every clip"

    def test_codes_fit_their_dtypes(self, loaded: Config, extractor: Extractor[Params]) -> None:
        """Codes are whole numbers, in one column for each codebook; features without codebooks are floats."""
        spec, sizes = extractor.spec, extractor.spec.codebook_sizes
        if not sizes:
            kind = np.dtype(spec.dtype).kind
            assert kind == "f", f"spec.dtype: {spec.dtype}, but there are no codebook_sizes, which codes have"
            return
        assert min(sizes) > 0, f"spec.codebook_sizes: {sizes}"
        assert spec.item_shape == (len(sizes),), f"spec.item_shape: {spec.item_shape}, but {len(sizes)} codebook_sizes"
        smallest = np.min_scalar_type(max(sizes) - 1).name
        for source, dtype in (("spec.dtype", spec.dtype), ("stored_dtype", extractor.stored_dtype(loaded.params))):
            fits = np.dtype(dtype).kind in "iu" and np.iinfo(dtype).max >= max(sizes) - 1
            assert fits, f"{source}: {dtype} does not hold the numbers of {max(sizes)} codewords; {smallest} does"

    def test_a_config_survives_being_kept(self, loaded: Config) -> None:
        """The resolved config survives JSON, in which a version keeps it to be recomputed and repaired."""
        again = config_from(json.loads(json.dumps(loaded.resolved())))
        assert again == loaded, f"params do not survive JSON: {loaded.params!r} becomes {again.params!r}"

    def test_the_fingerprint_is_stable(self, loaded: Config) -> None:
        """If the same config is loaded again, it names the same version."""
        found = [loaded.fingerprint(), loaded.fingerprint(), config_from(loaded.resolved()).fingerprint()]
        assert len(set(found)) == 1, f"the fingerprint differs from one time to the next: {found}; see weights_digest"

    def test_weights_in_another_place_are_the_same_version(self, loaded: Config, tmp_path: Path) -> None:
        """The fingerprint includes the content of weights, not their place."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        assert moved.fingerprint() == loaded.fingerprint(), "the same weights in another folder are another version"

    def test_other_weights_are_another_version(self, loaded: Config, tmp_path: Path) -> None:
        """The fingerprint notices other weights of the same name in the same place."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        files = sorted((tmp_path / "moved").rglob("*.safetensors"))
        if not files:
            pytest.skip("the weights are not in safetensors")
        for file in files:
            _change_last_byte(file)
        assert moved.fingerprint() != loaded.fingerprint(), "weights_digest does not see that the weights have changed"


def _with_weights_in(folder: Path, config: Config) -> Config:
    """The config with a copy of its weights in `folder`. The check is skipped if the weights are not on disk."""
    named = config.resolved()["params"].get("weights")
    if not named or not (weights := Path(named)).exists():
        pytest.skip("the config names no weights in a folder or file")
    shutil.copytree(weights if weights.is_dir() else weights.parent, folder)
    return with_params(config, weights=str(folder if weights.is_dir() else folder / weights.name))


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)


def _is_dtype(name: object) -> bool:
    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype) and hasattr(np, name)


def _change_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
