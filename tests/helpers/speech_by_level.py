"""An extractor of speech probabilities, of the form of vad-silero, that needs no model."""

from featcache.extractors import FeatureSpec, Params
from featcache.extractors.frames import FrameExtractor


class SpeechParams(Params):
    hop: int = 512


class SpeechByLevel(FrameExtractor[SpeechParams]):
    """1 where a frame has a sample above 0.01, else 0."""

    Params = SpeechParams
    revision = 1

    def __init__(self, params, sample_rate, device):
        self.hop = params.hop
        rate = sample_rate / self.hop
        self.spec = FeatureSpec((1,), "float32", rate, self.hop, sample_rate, "speech")

    def num_frames(self, num_samples):
        return num_samples // self.hop

    def frames(self, clip):
        return clip.waveform.unfold(0, self.hop, self.hop)

    def compute(self, block):
        return (block.abs().amax(dim=1, keepdim=True) > 0.01).float()
