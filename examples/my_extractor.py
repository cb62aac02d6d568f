"""Pitch, voicing and loudness every 10 ms: an extractor of your own, explained in
docs/extractors.md."""

import torch
from pydantic import Field

from featcache.extractors import FeatureSpec, Params
from featcache.extractors.frames import FrameExtractor


class PitchParams(Params):
    min_hz: float = Field(default=60.0, ge=50)
    max_hz: float = Field(default=400.0, le=1000)


class Pitch(FrameExtractor[PitchParams]):
    """By the autocorrelation of 50 ms, normalised for what falls out at the ends: float32
    `[frames, 3]`."""

    Params = PitchParams
    # raise it when values change: what was extracted before is then another version
    revision = 1

    def __init__(self, params, sample_rate, device):
        self.hop, length = sample_rate // 100, sample_rate // 20
        self.lags = torch.arange(
            sample_rate // params.max_hz, sample_rate // params.min_hz, device=device
        ).long()
        self.spec = FeatureSpec(
            (3,), "float32", sample_rate / self.hop, length, sample_rate, "Hz, 0 to 1, dB"
        )

    def num_frames(self, num_samples):
        return max(0, 1 + (num_samples - self.spec.frame_length) // self.hop)

    # [frames, length], which `compute` gets in blocks of a constant number of rows
    def frames(self, clip):
        return clip.waveform.unfold(0, self.spec.frame_length, self.hop)

    def compute(self, block):  # [rows, length] -> [rows, 3]
        power = block.sub_(block.mean(1, keepdim=True)).square().mean(1, keepdim=True) + 1e-10
        products = torch.fft.irfft(torch.fft.rfft(block, 2 * block.shape[1]).abs().square())[
            :, self.lags
        ]
        strength = products / (block.shape[1] - self.lags) / power
        # of its multiples, the shortest period
        best = (strength - 0.01 * self.lags.log2()).argmax(1, keepdim=True)
        voicing = strength.gather(1, best).clamp(0, 1)
        return torch.cat(
            [self.spec.sample_rate / self.lags[best], voicing, 10 * power.log10()], dim=1
        )
