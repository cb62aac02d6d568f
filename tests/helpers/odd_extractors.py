"""Extractors for tests: slow, silent, picky, wrong. Configs name them
`odd_extractors:Slow`."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from pausing import SlowParams
from row_extractors import HOP, Moments

from featcache import weights
from featcache.errors import AudioError, Reason
from featcache.extractors import Extractor
from featcache.extractors.codec import CodecExtractor, CodecParams
from featcache.extractors.encodec import Encodec
from featcache.spec import FeatureSpec


class Slow(Extractor[SlowParams]):
    """Two moments of every 10 ms, after a pause."""

    Params = SlowParams
    revision = 1
    batching = "single"

    def __init__(self, params, sample_rate, device):
        self._params = params
        self.spec = FeatureSpec(
            (2,), "float32", sample_rate / HOP, HOP, sample_rate, "mean and mean of squares"
        )

    def num_frames(self, num_samples):
        return num_samples // HOP

    def extract(self, clips):
        return [self.extract_clip(clip) for clip in clips]

    def extract_clip(self, clip):
        self._params.pause()
        return self.features(clip.waveform)

    def features(self, waveform):
        # a copy: sums depend on how their addresses are aligned
        frames = waveform[: len(waveform) // HOP * HOP].clone().reshape(-1, HOP)
        return torch.stack([frames.mean(1), frames.square().mean(1)], dim=1)


class Picky(Slow):
    """Refuses the clips whose id says so, gives NaN for others, and takes the rest of a
    batch."""

    def extract_clip(self, clip):
        if "refuse" in clip.id:
            raise AudioError(Reason.EXTRACTOR_REFUSED, "it says so")
        features = super().extract_clip(clip)
        return features * torch.nan if "nan" in clip.id else features


class Threads(Slow):
    """Every value is the number of threads that torch uses in this thread."""

    def extract_clip(self, clip):
        return torch.full((self.num_frames(len(clip.waveform)), 2), float(torch.get_num_threads()))


class Wrong(Slow):
    """Returns a frame too few."""

    def extract_clip(self, clip):
        return super().extract_clip(clip)[:-1]


class Broken(Slow):
    """Raises what nobody expects."""

    def extract_clip(self, clip):
        raise RuntimeError("CUDA error: out of cheese")


class NothingSeen(Moments):
    """Rows are padded to whole 80 ms."""

    granularity = 8 * HOP


class PaddingSeen(NothingSeen):
    """Less the mean of all the padded row: what is padded is another clip."""

    def encode(self, waveforms, num_samples):
        return super().encode(waveforms - waveforms.mean(1, keepdim=True), num_samples)


class NeighboursSeen(NothingSeen):
    """Less the mean of the first 10 ms of all rows of the batch."""

    def encode(self, waveforms, num_samples):
        return super().encode(waveforms - waveforms[:, :HOP].mean(), num_samples)


class EqualLengths(NothingSeen):
    """Declares less than it could stand."""

    batching = "equal_length"


class HalvesParams(CodecParams):
    weights: str = ""
    leaks: int = 0
    """Frames at the end of a row that what is behind it changes."""


class Halves(CodecExtractor[HalvesParams]):
    """Whether the mean of 10 ms is above 0.25: a tie where it is just that, decided by
    the shape of the batch.

    A batch of several rows rounds up, by a millionth."""

    Params = HalvesParams
    revision = 1

    def __init__(self, params, sample_rate, device):
        super().__init__(params, sample_rate, device)
        self.granularity = 8 * HOP
        self.spec = FeatureSpec((1,), "uint8", sample_rate / HOP, HOP, sample_rate, "code", (2,))

    @classmethod
    def weights_digest(cls, params):
        return None

    @classmethod
    def stored_dtype(cls, params):
        return "uint8"

    def num_frames(self, num_samples):
        return num_samples // HOP

    def latents(self, waveforms, num_samples):
        frames = waveforms[:, : waveforms.shape[1] // HOP * HOP].unflatten(1, (-1, HOP)).mean(2)
        at = torch.arange(frames.shape[1]) - (num_samples // HOP)[:, None]
        is_padded = (num_samples < waveforms.shape[1])[:, None]
        leaked = is_padded & (-self.params.leaks <= at) & (at < 0)
        rounded = frames * (1 + 1e-6 * (len(waveforms) > 1))
        return torch.where(leaked, -frames, rounded)[..., None]

    def quantize(self, latents):
        return (latents > 0.25).long()


class NaiveEncodec(Encodec):
    """EnCodec as people batch it: rows padded with zeros, through the model as it is."""

    def __init__(self, params, sample_rate, device):
        super().__init__(params, sample_rate, device)
        from transformers import EncodecModel

        self._encoder = weights.load(
            EncodecModel, weights.locate(params.weights, params.revision), device
        ).encoder

    def latents(self, waveforms, num_samples):
        return self._encoder(waveforms[:, None]).mT


class OrderSeen(Slow):
    """Of each clip of a call, its number there is added."""

    batching = "frames"

    def extract(self, clips):
        return [self.extract_clip(clip) + number for number, clip in enumerate(clips)]


class Moving(Slow):
    """Changes the current folder, also when it is built, as some models' own code does."""

    def __init__(self, *args):
        super().__init__(*args)
        os.chdir("/")

    def extract_clip(self, clip):
        if "away" in clip.id:
            os.chdir("/")
        return super().extract_clip(clip)


class Mute(Exception):
    """Cannot be printed."""

    def __str__(self):
        raise LookupError("no text")


class Crashing(Slow):
    """Ends its process at the clips whose id says how: by a signal, or with that exit
    code; or raises what few extractors raise."""

    def extract_clip(self, clip):
        how = clip.id.partition("!")[2]
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
        elif how == "segfault":
            ctypes.string_at(0)
        elif how == "exit":
            sys.exit(0)
        elif how == "interrupt":
            raise KeyboardInterrupt
        elif how == "cancelled":
            raise asyncio.CancelledError
        elif how == "mute":
            raise Mute
        elif how == "reason":
            raise AudioError("loud", "too loud")
        elif how == "orphan":
            if os.fork() == 0:
                gate = Path(self._params.gate)
                while gate.exists():
                    time.sleep(0.01)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "memory":
            torch.empty(1 << 60, dtype=torch.uint8)
        elif how == "numpy":
            np.empty(1 << 60, np.uint8)
        elif how:
            os._exit(int(how))
        return super().extract_clip(clip)


def end_at_once(connection):
    """In the place of what another process is to serve."""
    os._exit(5)
