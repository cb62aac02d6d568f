"""featcache: speech features, extracted once, trusted, and read at memory speed.

    import featcache

    cache = featcache.open("features")
    features, lengths = cache.batch(["utt-1", "utt-2"])

Extract by `featcache extract manifest.csv` (see `featcache --help`) or by
`featcache.extract("manifest.csv")`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcache import augment as augment
    from featcache import cmvn as cmvn
    from featcache import errors as errors
    from featcache import masks as masks
    from featcache import stats as stats
    from featcache.cmvn import Cmvn as Cmvn
    from featcache.engines.main_job import Observer as Observer
    from featcache.engines.main_job import extract as extract
    from featcache.errors import FeatcacheError as FeatcacheError
    from featcache.errors import FeatcacheWarning as FeatcacheWarning
    from featcache.extraction.live import extractor as extractor
    from featcache.extraction.options import Options as Options
    from featcache.loader.cache import Cache as Cache
    from featcache.loader.corpus import Corpus as Corpus
    from featcache.loader.data_loader import DataLoader as DataLoader
    from featcache.loader.dataset import FeatureDataset as FeatureDataset
    from featcache.loader.mixture import Mixture as Mixture
    from featcache.loader.opening import open as open  # noqa: A004
    from featcache.loader.packed_loader import PackedLoader as PackedLoader
    from featcache.loader.sampler import BucketBatchSampler as BucketBatchSampler
    from featcache.loader.windows import Crop as Crop
    from featcache.spec.quantize import dequantize as dequantize

__version__ = "0.2.0"

_HOME = {
    "BucketBatchSampler": "loader.sampler",
    "Cache": "loader.cache",
    "Cmvn": "cmvn",
    "Corpus": "loader.corpus",
    "Crop": "loader.windows",
    "DataLoader": "loader.data_loader",
    "FeatcacheError": "errors",
    "FeatcacheWarning": "errors",
    "FeatureDataset": "loader.dataset",
    "Mixture": "loader.mixture",
    "Observer": "engines.main_job",
    "Options": "extraction.options",
    "PackedLoader": "loader.packed_loader",
    "dequantize": "spec.quantize",
    "extract": "engines.main_job",
    "extractor": "extraction.live",
    "open": "loader.opening",
}
"""The module of each public name that is no module itself."""

__all__ = sorted({*_HOME, "adapters", "augment", "cmvn", "errors", "masks", "stats"})

_EXTRACTION = {"Observer", "Options", "extract", "extractor"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: reading arrays needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'featcache' has no attribute {name!r}")
    try:
        value = importlib.import_module(f"featcache.{_HOME.get(name, name)}")
    except ModuleNotFoundError as error:
        from featcache.errors import MissingDependencyError

        package = (error.name or "").partition(".")[0]
        extra = "torch"
        if name in _EXTRACTION:
            extra = "extract"
        elif package != "torch":
            raise
        raise MissingDependencyError(package, f"featcache.{name}", extra) from error
    if name in _HOME:
        value = globals()[name] = getattr(value, name)
    return value


def __dir__() -> list[str]:
    return __all__ + [name for name in globals() if name.startswith("__")]
