"""Extractors of somebody who begins: each has one mistake, and `Sound`, `Framed` and
`Rowed` have none. Configs name them `mistaken_extractors:Numpy`."""

import torch

from featcache.extractors import Extractor, FeatureSpec, Params
from featcache.extractors.frames import FrameExtractor
from featcache.extractors.rows import RowExtractor, Rows
from featcache.spec import Track

HOP = 160


def spec_of(sample_rate, dtype="float32", **more):
    return FeatureSpec((2,), dtype, sample_rate / HOP, HOP, sample_rate, "moments", **more)


class Own(Params):
    pass


class Sound(Extractor[Own]):
    Params = Own
    revision = 1
    batching = "single"

    def __init__(self, params, sample_rate, device):
        self.spec = spec_of(sample_rate)

    def num_frames(self, num_samples):
        return num_samples // HOP

    def extract(self, clips):
        return [torch.ones(self.num_frames(len(clip.waveform)), 2) for clip in clips]


METHODS = {name: Sound.__dict__[name] for name in ("__init__", "num_frames", "extract")}


def without(name):
    """An extractor that lacks an attribute or a method."""
    whole = {"Params": Own, "revision": 1, "batching": "single", **METHODS}
    own = {key: value for key, value in whole.items() if key != name}
    return type(f"Without{name.strip('_')}", (Extractor,), {**own, "__module__": __name__})


Withoutbatching = without("batching")
Withoutrevision = without("revision")
WithoutParams = without("Params")
Withoutextract = without("extract")
Withoutnum_frames = without("num_frames")
Withoutinit = without("__init__")


class Withoutspec(Sound):
    def __init__(self, params, sample_rate, device):
        pass


class DictParams(Sound):
    Params = {"gain": 1.0}  # noqa: RUF012


class OddBatching(Sound):
    batching = "batched"


class DictSpec(Sound):
    def __init__(self, params, sample_rate, device):
        self.spec = {"item_shape": [2]}


class TorchDtype(Sound):
    def __init__(self, params, sample_rate, device):
        self.spec = spec_of(sample_rate, torch.float32)


class InitRaises(Sound):
    def __init__(self, params, sample_rate, device):
        raise ValueError("no such\nmodel")


class InitExits(Sound):
    def __init__(self, params, sample_rate, device):
        raise SystemExit(0)


class InitTakesNothing(Sound):
    def __init__(self):
        pass


class OddStoredDtype(Sound):
    @classmethod
    def stored_dtype(cls, params):
        return torch.float16


class DigestRaises(Sound):
    @classmethod
    def weights_digest(cls, params):
        return open("no-such-weights.pt").read()


class DigestOfBytes(Sound):
    @classmethod
    def weights_digest(cls, params):
        return b"abc"


# What methods return


class Numpy(Sound):
    def extract(self, clips):
        return [features.numpy() for features in super().extract(clips)]


class Nothing(Sound):
    def extract(self, clips):
        super().extract(clips)


class OneTooFew(Sound):
    def extract(self, clips):
        return super().extract(clips)[1:]


class Narrow(Sound):
    def extract(self, clips):
        return [features[:, :1] for features in super().extract(clips)]


class Transposed(Sound):
    def extract(self, clips):
        return [features.T for features in super().extract(clips)]


class FloatFrames(Sound):
    def num_frames(self, num_samples):
        return num_samples / HOP


class Complex(Sound):
    def extract(self, clips):
        return [features * 1j for features in super().extract(clips)]


class NotCodes(Sound):
    """Says that it gives codes, and gives floats."""

    factor = 0.5

    def __init__(self, params, sample_rate, device):
        self.spec = spec_of(sample_rate, "uint8", codebook_sizes=(256, 256))

    @classmethod
    def stored_dtype(cls, params):
        return "uint8"

    def extract(self, clips):
        return [features * self.factor for features in super().extract(clips)]


class LargeCodes(NotCodes):
    factor = 300


class Overflowing(Sound):
    """Features that float16 cannot hold."""

    def extract(self, clips):
        return [features * 1e6 for features in super().extract(clips)]


class OverflowingWhenLoud(Sound):
    """Features that float16 cannot hold where the clip is loud."""

    def extract(self, clips):
        factors = [1e6 if clip.waveform.abs().max() > 0.9 else 1 for clip in clips]
        features = super().extract(clips)
        return [one * factor for one, factor in zip(features, factors, strict=True)]


class NotANumber(Sound):
    def extract(self, clips):
        return [features * torch.nan for features in super().extract(clips)]


class Framed(FrameExtractor[Own]):
    Params = Own
    revision = 1
    __init__ = Sound.__init__
    num_frames = Sound.num_frames

    def frames(self, clip):
        return clip.waveform[: len(clip.waveform) // HOP * HOP].view(-1, HOP)

    def compute(self, block):
        return torch.stack([block.mean(1), block.square().mean(1)], dim=1)


class NarrowFramed(Framed):
    """Would be broadcast to the other column."""

    def compute(self, block):
        return super().compute(block)[:, :1]


class ShortFramed(Framed):
    """Would leave the last frame as memory was."""

    def frames(self, clip):
        return super().frames(clip)[:-1]


class NumpyFramed(Framed):
    def compute(self, block):
        return super().compute(block).numpy()


class Rowed(RowExtractor[Own]):
    Params = Own
    revision = 1
    granularity = HOP
    __init__ = Sound.__init__
    num_frames = Sound.num_frames

    def encode(self, waveforms, num_samples):
        frames = waveforms[:, : waveforms.shape[1] // HOP * HOP].unflatten(1, (-1, HOP))
        return Rows(torch.stack([frames.mean(2), frames.square().mean(2)], dim=2))


class BareRowed(Rowed):
    def encode(self, waveforms, num_samples):
        return super().encode(waveforms, num_samples).features


class NarrowRowed(Rowed):
    def encode(self, waveforms, num_samples):
        return Rows(super().encode(waveforms, num_samples).features[..., :1])


class FewRowed(Rowed):
    def encode(self, waveforms, num_samples):
        return Rows(super().encode(waveforms, num_samples).features[1:])


class SidelessRowed(Rowed):
    def __init__(self, params, sample_rate, device):
        self.spec = spec_of(sample_rate, side=(Track("counts", (), "int64", "frames"),))


class WithoutgranularityRowed(RowExtractor[Own]):
    Params = Own
    revision = 1
    __init__ = Sound.__init__
    num_frames = Sound.num_frames
    encode = Rowed.encode


class FrameRowed(Rowed):
    batching = "frames"
