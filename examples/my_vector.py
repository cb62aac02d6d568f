"""The level of each utterance as one vector: an extractor of your own, explained in
docs/extractors.md."""

import torch

from featcache.extractors import FeatureSpec, Params, Track
from featcache.extractors.vectors import VectorExtractor
from featcache.spec import Clip


class Level(VectorExtractor[Params]):
    """Level and peak in dB of full scale, and the share of samples at full scale: float32
    `[3]`."""

    Params = Params
    revision = 1

    def __init__(self, params, sample_rate, device):
        track = Track("features", (3,), "float32", "dB, dB, 0 to 1", Clip())
        self.spec = FeatureSpec.of(sample_rate, track)

    def vector(self, clip):
        magnitudes = clip.waveform.double().abs()
        power = magnitudes.square().mean() + 1e-10
        peak = magnitudes.max() + 1e-5
        clipped = (magnitudes >= 32767 / 32768).double().mean()
        return torch.stack([10 * power.log10(), 20 * peak.log10(), clipped]).float()
