"""Reading features in training: opened versions, datasets over them, and their batches. Needs only numpy and torch."""

from featcache.loader.cache import Cache
from featcache.loader.corpus import Corpus
from featcache.loader.crop import Crop
from featcache.loader.data_loader import DataLoader
from featcache.loader.dataset import FeatureDataset
from featcache.loader.opening import open  # noqa: A004
from featcache.loader.sampler import BucketBatchSampler

__all__ = ["BucketBatchSampler", "Cache", "Corpus", "Crop", "DataLoader", "FeatureDataset", "open"]
