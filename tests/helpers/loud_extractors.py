"""Extractors that raise an exception at loud clips, as those of users do. Configs name
them `loud_extractors:Clips`."""

from odd_extractors import HOP, Slow
from pausing import SlowParams
from row_extractors import Moments, MomentsParams

from featcache.extractors.frames import FrameExtractor
from featcache.spec import FeatureSpec

LOUD_SAMPLES = 7777
"""The number of samples of loud clips, for methods that see nothing else."""


class LoudParams(SlowParams):
    at: str = ""
    """The method that raises, if it is not the one that computes."""


def refuse_loud(waveform):
    if waveform.abs().max() > 0.9:
        raise ValueError("too loud")


class Counting:
    """Raises where lengths are counted, if `at` says so."""

    def num_frames(self, num_samples):
        if self._params.at == "num_frames" and num_samples == LOUD_SAMPLES:
            raise ValueError("too loud")
        return num_samples // HOP


class Clips(Counting, Slow):
    Params = LoudParams

    def extract(self, clips):
        for clip in clips:
            refuse_loud(clip.waveform)
        return super().extract(clips)


class Frames(Counting, FrameExtractor[LoudParams]):
    Params = LoudParams
    revision = 1

    def __init__(self, params, sample_rate, device):
        self._params = params
        self.spec = FeatureSpec(
            (1,), "float32", sample_rate / HOP, HOP, sample_rate, "mean of squares"
        )

    def frames(self, clip):
        return clip.waveform[: len(clip.waveform) // HOP * HOP].view(-1, HOP)

    def compute(self, block):
        refuse_loud(block)
        return block.square().mean(1)[:, None]


class Rows(Counting, Moments):
    class Params(LoudParams, MomentsParams):
        pass

    def pieces(self, num_samples):
        if self._params.at == "pieces" and num_samples == LOUD_SAMPLES:
            raise ValueError("too loud")
        return super().pieces(num_samples)

    def encode(self, waveforms, num_samples):
        refuse_loud(waveforms)
        return super().encode(waveforms, num_samples)
