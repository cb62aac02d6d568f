"""What the tests of units share: the extractor of a file of centroids, and a slow reference."""

import numpy as np
import torch

from featcache.extractors.units import Units, UnitsParams

CPU = torch.device("cpu")


def build(path, sample_rate=16000, **features):
    return Units(UnitsParams(weights=str(path), features=features), sample_rate, CPU)


def nearest(features, codebook):
    """Slow and obvious, in float64: `[N, 1]`."""
    centroids = codebook.centroids.double().numpy()
    return np.array([[np.square(frame.astype(np.float64) - centroids).sum(1).argmin()] for frame in features])
