"""featcache: speech features, extracted once, trusted, and read at memory speed.

    import featcache

    cache = featcache.open("features")
    features, lengths = cache.batch(["utt-1", "utt-2"])

Extraction is a command, `featcache extract manifest.csv`, or a call, `featcache.extract("manifest.csv")`. See
`featcache --help`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcache import augment, cmvn, errors, masks, stats
    from featcache.cmvn import Cmvn
    from featcache.engines.main_job import extract
    from featcache.errors import FeatcacheError, FeatcacheWarning
    from featcache.loader import BucketBatchSampler, Cache, Corpus, Crop, DataLoader, FeatureDataset, open  # noqa: A004
    from featcache.quantize import dequantize

__version__ = "0.1.0"

__all__ = [
    "BucketBatchSampler",
    "Cache",
    "Cmvn",
    "Corpus",
    "Crop",
    "DataLoader",
    "FeatcacheError",
    "FeatcacheWarning",
    "FeatureDataset",
    "adapters",
    "augment",
    "cmvn",
    "dequantize",
    "errors",
    "extract",
    "masks",
    "open",
    "stats",
]

_MODULES = {"adapters", "augment", "cmvn", "errors", "masks", "stats"}

_HOME = {
    "BucketBatchSampler": "loader",
    "Cache": "loader",
    "Cmvn": "cmvn",
    "Corpus": "loader",
    "Crop": "loader",
    "DataLoader": "loader",
    "FeatureDataset": "loader",
    "open": "loader",
    "dequantize": "quantize",
    "extract": "engines.main_job",
    "FeatcacheError": "errors",
    "FeatcacheWarning": "errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the loader imports torch, which takes a second."""
    if name in _MODULES:
        return importlib.import_module(f"featcache.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'featcache' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"featcache.{_HOME[name]}"), name)
    except ImportError as error:
        if name != "extract":
            raise
        from featcache.errors import MissingDependencyError

        raise MissingDependencyError((error.name or "").partition(".")[0], "featcache.extract") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
