"""An extractor of speech probabilities, of the form of vad-silero, that needs no model."""

from featcache.extractors import FeatureSpec, Params
from featcache.extractors.frames import FrameExtractor


class SpeechByLevel(FrameExtractor[Params]):
    """1 where a frame has a sample above 0.01, else 0."""

    Params = Params
    revision = 1

    def __init__(self, params, sample_rate, device):
        self.spec = FeatureSpec((1,), "float32", sample_rate / 512, 512, sample_rate, "speech")

    def num_frames(self, num_samples):
        return num_samples // 512

    def frames(self, clip):
        return clip.waveform.unfold(0, 512, 512)

    def compute(self, block):
        return (block.abs().amax(dim=1, keepdim=True) > 0.01).float()
