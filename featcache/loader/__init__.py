"""Features back into training: an opened version, and a dataset over it. Needs numpy and torch alone."""

from featcache.loader.cache import Cache
from featcache.loader.dataset import FeatureDataset
from featcache.loader.opening import open  # noqa: A004
from featcache.loader.sampler import BucketBatchSampler

__all__ = ["BucketBatchSampler", "Cache", "FeatureDataset", "open"]
