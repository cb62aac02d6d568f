"""Extractors for tests: slow, silent, picky, wrong. Configs name them `odd_extractors:Slow`."""

from __future__ import annotations

import threading
import time

import torch

from featcache.errors import AudioError, Reason
from featcache.extractors import Extractor, Params
from featcache.spec import FeatureSpec

HOP = 160


class SlowParams(Params):
    seconds: float = 0.0
    """To sleep, for every clip."""


class Slow(Extractor[SlowParams]):
    """Two moments of every 10 ms, after a sleep: gives a test the time to interfere."""

    Params = SlowParams
    revision = 1
    batching = "single"

    def __init__(self, params, sample_rate, device):
        self._params = params
        self.spec = FeatureSpec((2,), "float32", sample_rate / HOP, HOP, sample_rate, "mean and mean of squares")

    def num_frames(self, num_samples):
        return num_samples // HOP

    def extract(self, clips):
        return [self.one(clip) for clip in clips]

    def one(self, clip):
        time.sleep(self._params.seconds)
        frames = clip.waveform[: len(clip.waveform) // HOP * HOP].reshape(-1, HOP)
        return torch.stack([frames.mean(1), frames.square().mean(1)], dim=1)


class Zeros(Slow):
    """All features are zero."""

    def one(self, clip):
        return torch.zeros(self.num_frames(len(clip.waveform)), 2)


class Picky(Slow):
    """Refuses the clips whose id says so, gives NaN for others, and takes the rest of a batch."""

    def one(self, clip):
        if "refuse" in clip.id:
            raise AudioError(Reason.EXTRACTOR_REFUSED, "it says so")
        features = super().one(clip)
        return features * torch.nan if "nan" in clip.id else features


class Threads(Slow):
    """Every value is the number of threads that torch uses in this thread."""

    seen: set[str] = set()  # noqa: RUF012

    def one(self, clip):
        self.seen.add(threading.current_thread().name)
        return torch.full((self.num_frames(len(clip.waveform)), 2), float(torch.get_num_threads()))


class Wrong(Slow):
    """Returns a frame too few."""

    def one(self, clip):
        return super().one(clip)[:-1]


class Broken(Slow):
    """Raises what nobody expects."""

    def one(self, clip):
        raise RuntimeError("CUDA error: out of cheese")
