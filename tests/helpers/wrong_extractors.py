"""Extractors that break their contract, each in one way that real ones do; `Right`, and
`Moments`, do not."""

import threading
import time
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import ClassVar

import torch
from odd_extractors import HOP, PaddingSeen, Slow
from pausing import SlowParams
from pydantic import field_validator
from row_extractors import Moments

from featcache.extractors.rows import Piece, Rows


class WeightsParams(SlowParams):
    locations = frozenset({"weights"})
    weights: str = ""
    gain: float = 1.0


class Right(Slow):
    """The mean and the power of every 10 ms."""

    Params = WeightsParams

    said: ClassVar[dict] = {}
    """What is said of the features, in place of what is right."""

    def __init__(self, params, sample_rate, device):
        super().__init__(params, sample_rate, device)
        self.spec = replace(self.spec, **self.said)

    @classmethod
    def weights_digest(cls, params):
        return sha256(Path(params.weights).read_bytes()).hexdigest() if params.weights else None

    def features(self, waveform):
        return super().features(waveform * self._params.gain)


# What it says of itself


class FrameRate(Right):
    """Counts as if it were at 8 kHz."""

    said = {"frame_rate": 8000 / HOP}  # noqa: RUF012


class SampleRate(Right):
    """Is for 24 kHz, whatever it is built for."""

    def __init__(self, params, sample_rate, device):
        super().__init__(params, 24000, device)


class FrameLength(Right):
    """Subtracts the clip's mean, and says that a frame looks at 10 ms."""

    def features(self, waveform):
        return super().features(waveform - waveform.mean())


class SmallDtype(Right):
    """A thousand codewords, and a byte to number them."""

    said = {"item_shape": (1,), "dtype": "uint8", "codebook_sizes": (1000,)}  # noqa: RUF012

    def features(self, waveform):
        return torch.zeros(self.num_frames(len(waveform)), 1, dtype=torch.uint8)


class LargeCode(SmallDtype):
    """Four codewords, numbered from 1."""

    said = SmallDtype.said | {"codebook_sizes": (4,)}

    def features(self, waveform):
        return super().features(waveform) + 4


class Boundary(Right):
    """Forgets that frames may fill a clip."""

    def num_frames(self, num_samples):
        return max(0, num_samples - 1) // HOP


class Flat(Right):
    """Forgets the last dimension."""

    def features(self, waveform):
        return super().features(waveform)[:, 0]


class NeverShort(Right):
    """Gives a frame to nothing."""

    def num_frames(self, num_samples):
        return max(1, super().num_frames(num_samples))


# What its values depend on


class LongestClip(Right):
    """Pads to the longest clip of the call, and normalises over that."""

    def extract(self, clips):
        longest = max(len(clip.waveform) for clip in clips) if clips else 0
        return [self.features(clip.waveform) * longest**-0.5 for clip in clips]


class FirstClip(Right):
    """Takes the first one's mean from all of them."""

    def extract(self, clips):
        return [self.features(clip.waveform - clips[0].waveform.mean()) for clip in clips]


class FullBatch(Right):
    """Computes otherwise where there are many."""

    def extract(self, clips):
        return [features * (1 + 1e-6 * (len(clips) > 16)) for features in super().extract(clips)]


class RunningMean(Right):
    """Normalises by what it has seen so far."""

    calls = 0

    def features(self, waveform):
        self.calls += 1
        return super().features(waveform) / self.calls


class Chance(Right):
    """Dithers, by torch's random numbers."""

    def features(self, waveform):
        return super().features(waveform + 1e-4 * torch.rand(len(waveform)))


class EachItsOwn(Right):
    """A projection that is drawn anew for every instance."""

    instances = count()

    def __init__(self, params, sample_rate, device):
        super().__init__(params, sample_rate, device)
        self.gain = 1 + next(self.instances)

    def features(self, waveform):
        return super().features(waveform) * self.gain


class CallOnSelf(Right):
    """Keeps the clip on `self`, where another thread puts its own: the first of several
    waits for that."""

    has_waited = False

    def extract(self, clips):
        found = []
        for clip in clips:
            self.clip = clip
            is_beside_others = threading.current_thread() is not threading.main_thread()
            for _ in range(10_000 if is_beside_others else 0):
                if self.has_waited or self.clip is not clip:
                    self.has_waited = True
                    break
                time.sleep(0.001)
            found.append(self.features(self.clip.waveform))
        return found


class Strides(Right):
    """Takes it that a waveform's samples lie side by side."""

    def features(self, waveform):
        return super().features(torch.as_strided(waveform, waveform.shape, (1,)))


class InPlace(Right):
    """Scales the waveform that it was given."""

    def features(self, waveform):
        return super().features(waveform.mul_(0.5))


class OneBuffer(Right):
    """Gives away its buffer, and fills it again."""

    buffer = torch.empty(10_000, 2)

    def features(self, waveform):
        features = self.buffer[: self.num_frames(len(waveform))]
        return features.copy_(super().features(waveform))


class Process(Right):
    """Makes itself fast at the others' cost."""

    def __init__(self, params, sample_rate, device):
        super().__init__(params, sample_rate, device)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


# Its values


class Log(Right):
    """Takes the logarithm of what may be 0."""

    def features(self, waveform):
        return super().features(waveform).abs().log()


class Nothing(Right):
    """Takes it that there is something to concatenate."""

    def extract(self, clips):
        counts = [self.num_frames(len(clip.waveform)) for clip in clips]
        return list(torch.cat([self.features(clip.waveform) for clip in clips]).split(counts))


# Its config and its weights


class Growing(Right):
    """Means something else by its own resolved parameters."""

    class Params(WeightsParams):
        @field_validator("gain")
        @classmethod
        def _twice(cls, value):
            return 2 * value


class DigestOfPath(Right):
    """Takes a path for what is there."""

    @classmethod
    def weights_digest(cls, params):
        return sha256(params.weights.encode()).hexdigest()


class DigestOfSize(Right):
    """Does not look into the file."""

    @classmethod
    def weights_digest(cls, params):
        return str(Path(params.weights).stat().st_size)


class DigestOfNow(Right):
    """Hashes what differs from time to time."""

    times = count()

    @classmethod
    def weights_digest(cls, params):
        return str(next(cls.times))


# Rows


class PaddedMean(PaddingSeen):
    """Normalises over a row's padding, too."""


class LostTail(Moments):
    """Drops what does not fill a second."""

    def pieces(self, num_samples):
        starts = range(0, max(1, num_samples - 15999), 16000)
        return [
            Piece(start, min(16000, num_samples), 0, min(100, num_samples // HOP))
            for start in starts
        ]


class NoSide(Moments):
    """Forgets what it promises beside the features."""

    def encode(self, waveforms, num_samples):
        return Rows(super().encode(waveforms, num_samples).features)
