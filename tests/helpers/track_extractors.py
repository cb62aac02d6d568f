"""Extractors for tests that give several tracks, or one vector for each clip. Configs name them
`track_extractors:ThreeRates`."""

import torch

from featcache.extractors import Extractor, FeatureSpec, Params, Track
from featcache.extractors.vectors import VectorExtractor
from featcache.spec import LABELS, Clip, Events, Frames

HOPS = {"features": 2048, "codes_1": 1024, "codes_2": 512}


class ThreeRates(Extractor[Params]):
    """Codes at three rates, as SNAC's: the rounded level of every 2,048, 1,024 and 512 samples.
    A clip is padded with zeros to whole hops of the slowest."""

    Params = Params
    revision = 1
    batching = "single"

    def __init__(self, params, sample_rate, device):
        tracks = [
            Track(name, (1,), "int64", "level", Frames(sample_rate / hop, hop), (4096,))
            for name, hop in HOPS.items()
        ]
        self.spec = FeatureSpec.of(sample_rate, *tracks)

    def num_frames(self, num_samples):
        return -(-num_samples // HOPS["features"])

    def extract(self, clips):
        return [self._codes(clip.waveform) for clip in clips]

    def _codes(self, waveform):
        padded = torch.nn.functional.pad(waveform, (0, -len(waveform) % HOPS["features"]))
        return {
            name: (padded.unflatten(0, (-1, hop)).abs().mean(1, keepdim=True) * 4095).long()
            for name, hop in HOPS.items()
        }

    @classmethod
    def stored_dtype(cls, params):
        return "uint16"


class Peak(VectorExtractor[Params]):
    """The largest magnitude of a clip, one number; clips of less than 0.1 s are too short."""

    Params = Params
    revision = 1

    def __init__(self, params, sample_rate, device):
        self.spec = FeatureSpec.of(sample_rate, Track("features", (), "float32", "peak", Clip()))

    def num_frames(self, num_samples):
        return int(num_samples >= self.spec.sample_rate // 10)

    def vector(self, clip):
        return clip.waveform.abs().max()


class Loud(Extractor[Params]):
    """Events: the stretches of a clip whose samples are above 0.25, with their peaks as labels."""

    Params = Params
    revision = 1
    batching = "single"

    def __init__(self, params, sample_rate, device):
        events = Track("features", (2,), "float64", "start and end", Events())
        self.spec = FeatureSpec.of(sample_rate, events, Track(LABELS, (), "uint8", "peaks"))

    def num_frames(self, num_samples):
        return min(num_samples, 1)

    def extract(self, clips):
        return [self._events(clip.waveform) for clip in clips]

    def _events(self, waveform):
        is_loud = torch.nn.functional.pad((waveform.abs() > 0.25).int(), (1, 1)).diff()
        starts, ends = (torch.nonzero(is_loud == step)[:, 0] for step in (1, -1))
        peaks = [
            f"{waveform[start:end].abs().max():.2f}\0".encode()
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
        labels = torch.tensor([*b"".join(peaks)], dtype=torch.uint8)
        times = torch.stack([starts, ends], 1).double() / self.spec.sample_rate
        return {"features": times, LABELS: labels}

    @classmethod
    def stored_dtype(cls, params):
        return "float64"


class WrongTracks(ThreeRates):
    """Returns a track that its spec does not have."""

    def _codes(self, waveform):
        codes = super()._codes(waveform)
        codes["codes_3"] = codes.pop("codes_2")
        return codes
