"""What the tests of units share: the extractor of a file of centroids, a slow reference,
features with weights."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from odd_extractors import HOP, Slow
from pausing import SlowParams

from featcache.extractors.units import Codebook, Units, UnitsParams

CPU = torch.device("cpu")


class Scaled(Slow):
    """An extractor with weights: the mean and the largest sample of every 10 ms, times
    the number in a file."""

    class Params(SlowParams):
        locations = frozenset({"weights"})
        weights: str
        power: int = 1

    def __init__(self, params, sample_rate, device):
        super().__init__(params, sample_rate, device)
        self._factor = float(Path(params.weights).read_text()) ** params.power
        self.max_seconds = 30.0

    def features(self, waveform):
        frames = waveform[: len(waveform) // HOP * HOP].view(-1, HOP)
        return torch.stack([frames.mean(1), frames.amax(1)], 1) * self._factor

    @classmethod
    def weights_digest(cls, params):
        return sha256(Path(params.weights).read_bytes()).hexdigest()


def build(path, sample_rate=16000, **features):
    return Units(UnitsParams(weights=str(path), features=features), sample_rate, CPU)


def write_codebook(path, config, centroids):
    """Write units of a config's features, with these centroids, which it returns."""
    codebook = Codebook(
        torch.as_tensor(centroids), config.resolved(), config.fingerprint(), config.dtype, {}
    )
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(codebook.to_bytes())
    return codebook


def nearest(features, codebook):
    """Slow and obvious, in float64: `[N, 1]`."""
    centroids = codebook.centroids.double().numpy()
    return np.array(
        [[np.square(frame.astype(np.float64) - centroids).sum(1).argmin()] for frame in features]
    )
