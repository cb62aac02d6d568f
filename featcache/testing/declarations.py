"""Checks of what an extractor declares."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from featcache.config import Config, config_from, load_config
from featcache.extractors import FeatureSpec
from featcache.testing.checks import Checks
from featcache.testing.clips import AnyExtractor


class Declarations(Checks):
    """Checks of the class, the spec, the config and the weights."""

    def test_the_spec_is_coherent(self, loaded: Config, extractor: AnyExtractor) -> None:
        """The spec fits itself and the config; building checks its dtypes, sizes and
        numbers."""
        spec, rate = extractor.spec, loaded.audio.sample_rate
        assert isinstance(spec, FeatureSpec), f"spec is a {type(spec).__name__}, no FeatureSpec"
        spec.require_sound()
        assert spec.sample_rate == rate, (
            f"spec.sample_rate: {spec.sample_rate}, but it was built for {rate}"
        )
        assert spec.units, "spec.units: say what a value means"
        for track in spec.tracks:
            shape = track.item_shape
            assert isinstance(shape, tuple), f"item_shape of {track.name}: {shape!r} is no tuple"

    def test_the_class_declares_what_it_must(self, extractor: AnyExtractor) -> None:
        """`revision` and `max_seconds` are valid; building checks `Params` and `batching`."""
        revision, limit = extractor.revision, extractor.max_seconds
        assert isinstance(revision, int), f"revision: {revision!r} is not a whole number"
        assert limit is None or limit > 0, f"max_seconds: {limit!r} refuses every clip"

    def test_codes_fit_their_dtypes(self, loaded: Config, extractor: AnyExtractor) -> None:
        """Codes are whole numbers, in a column for each codebook; other features are
        floats."""
        spec, sizes = extractor.spec, extractor.spec.codebook_sizes
        if not sizes:
            assert spec.values_dtype.kind == "f", (
                f"spec.dtype: {spec.dtype}, but there are no codebook_sizes, which codes have"
            )
            return
        assert spec.item_shape == (len(sizes),), (
            f"spec.item_shape: {spec.item_shape}, but {len(sizes)} codebook_sizes"
        )
        smallest = np.min_scalar_type(max(sizes) - 1).name
        dtypes = {"spec.dtype": spec.dtype, "stored_dtype": extractor.stored_dtype(loaded.params)}
        for source, dtype in dtypes.items():
            fits = np.dtype(dtype).kind in "iu" and np.iinfo(dtype).max >= max(sizes) - 1
            assert fits, (
                f"{source}: {dtype} does not hold the numbers of {max(sizes)} codewords; "
                f"{smallest} does"
            )

    def test_a_config_survives_being_kept(self, loaded: Config) -> None:
        """The resolved config survives JSON, in which a version keeps it."""
        again = config_from(json.loads(json.dumps(loaded.resolved())))
        assert again == loaded, (
            f"params do not survive JSON: {loaded.params!r} becomes {again.params!r}"
        )

    def test_the_fingerprint_is_stable(self, loaded: Config) -> None:
        """The same config names the same version."""
        again = config_from(loaded.resolved())
        fingerprints = [loaded.fingerprint(), loaded.fingerprint(), again.fingerprint()]
        assert len(set(fingerprints)) == 1, (
            f"the fingerprint differs from one time to the next: {fingerprints}; see weights_digest"
        )

    def test_weights_in_another_place_are_the_same_version(
        self, loaded: Config, tmp_path: Path
    ) -> None:
        """The place of weights does not matter."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        assert moved.fingerprint() == loaded.fingerprint(), (
            "the same weights in another folder are another version"
        )

    def test_other_weights_are_another_version(self, loaded: Config, tmp_path: Path) -> None:
        """The content of weights matters."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        suffixes = (".safetensors", ".onnx")
        files = [path for path in (tmp_path / "moved").rglob("*") if path.suffix in suffixes]
        if not files:
            pytest.skip("the weights are neither in safetensors nor in ONNX")
        for file in files:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        assert moved.fingerprint() != loaded.fingerprint(), (
            "weights_digest does not see that the weights have changed"
        )


def _with_weights_in(folder: Path, config: Config) -> Config:
    """Copy the config and its weights, which go to `folder`. Skip the check without
    weights."""
    weights_param = config.resolved()["params"].get("weights")
    if not weights_param or not Path(weights_param).exists():
        pytest.skip("the config names no weights in a folder or file")
    weights = Path(weights_param)
    source = weights if weights.is_dir() else weights.parent
    shutil.copytree(source, folder)
    return load_config(config, {"params.weights": str(folder / weights.relative_to(source))})
