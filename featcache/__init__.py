"""featcache: speech features, extracted once, trusted, and read at memory speed.

    import featcache

    cache = featcache.open("features")
    features, lengths = cache.batch(["utt-1", "utt-2"])

Extraction is a command, `featcache extract manifest.csv`, or a call, `featcache.extract("manifest.csv")`. See
`featcache --help`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcache import augment, cmvn, errors, masks, stats
    from featcache.cmvn import Cmvn
    from featcache.engines.main_job import Observer, extract
    from featcache.errors import FeatcacheError, FeatcacheWarning
    from featcache.extraction.live import extractor
    from featcache.extraction.options import Options
    from featcache.loader.cache import Cache
    from featcache.loader.corpus import Corpus
    from featcache.loader.data_loader import DataLoader
    from featcache.loader.dataset import FeatureDataset
    from featcache.loader.opening import open  # noqa: A004
    from featcache.loader.sampler import BucketBatchSampler
    from featcache.loader.spans import Crop
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
    "Observer",
    "Options",
    "adapters",
    "augment",
    "cmvn",
    "dequantize",
    "errors",
    "extract",
    "extractor",
    "masks",
    "open",
    "stats",
]

_HOME = {
    "BucketBatchSampler": "loader.sampler",
    "Cache": "loader.cache",
    "Cmvn": "cmvn",
    "Corpus": "loader.corpus",
    "Crop": "loader.spans",
    "DataLoader": "loader.data_loader",
    "FeatureDataset": "loader.dataset",
    "Observer": "engines.main_job",
    "Options": "extraction.options",
    "open": "loader.opening",
    "dequantize": "quantize",
    "extract": "engines.main_job",
    "extractor": "extraction.live",
    "FeatcacheError": "errors",
    "FeatcacheWarning": "errors",
}
"""Where a public name is found; the others of `__all__` are modules."""

_EXTRACTION = {"Observer", "Options", "extract", "extractor"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes a second, and reading arrays does without it."""
    if name not in __all__:
        raise AttributeError(f"module 'featcache' has no attribute {name!r}")
    try:
        value = importlib.import_module(f"featcache.{_HOME.get(name, name)}")
    except ImportError as error:
        from featcache.errors import MissingDependencyError

        package, extra = (error.name or "").partition(".")[0], "extract" if name in _EXTRACTION else "torch"
        if extra == "torch" and package != "torch":
            raise
        raise MissingDependencyError(package, f"featcache.{name}", extra) from error
    if name in _HOME:
        value = globals()[name] = getattr(value, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
