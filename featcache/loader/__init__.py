"""Features back into training: an opened version, and a dataset over it. Needs numpy and torch alone."""

from featcache.loader.cache import Cache, open  # noqa: A004
from featcache.loader.dataset import FeatureDataset

__all__ = ["Cache", "FeatureDataset", "open"]
