"""What the tests of units share: the extractor of a file of centroids, a slow reference, features with weights."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from featcache.extractors import Extractor, Params
from featcache.extractors.units import Units, UnitsParams
from featcache.spec import FeatureSpec

CPU = torch.device("cpu")
HOP = 160


class ScaledParams(Params):
    locations = frozenset({"weights"})

    weights: str
    power: int = 1


class Scaled(Extractor[ScaledParams]):
    """An extractor with weights: the mean and the largest sample of every 10 ms, times the number in a file."""

    Params = ScaledParams
    revision = 1
    batching = "single"

    def __init__(self, params, sample_rate, device):
        self._factor = float(Path(params.weights).read_text()) ** params.power
        self.max_seconds = 30.0
        self.spec = FeatureSpec((2,), "float32", sample_rate / HOP, HOP, sample_rate, "moments")

    def num_frames(self, num_samples):
        return num_samples // HOP

    def extract(self, clips):
        frames = [clip.waveform[: len(clip.waveform) // HOP * HOP].view(-1, HOP) for clip in clips]
        return [torch.stack([clip_frames.mean(1), clip_frames.amax(1)], 1) * self._factor for clip_frames in frames]

    @classmethod
    def weights_digest(cls, params):
        return sha256(Path(params.weights).read_bytes()).hexdigest()


def build(path, sample_rate=16000, **features):
    return Units(UnitsParams(weights=str(path), features=features), sample_rate, CPU)


def nearest(features, codebook):
    """Slow and obvious, in float64: `[N, 1]`."""
    centroids = codebook.centroids.double().numpy()
    return np.array([[np.square(frame.astype(np.float64) - centroids).sum(1).argmin()] for frame in features])
