"""WavTokenizer's codes are those of transformers' model, run on each clip alone."""

import codes
import pytest
from codec_checks import CodecChecks, cut
from transformers import WavTokenizerModel

from featcache.errors import ConfigError
from featcache.extractors.wavtokenizer import WavTokenizer

MODEL, RATE = "wavtokenizer_40hz", 24000


def alone(model, clip):
    part = model.encoder_model
    latents = part.encoder(clip[None, None])[0].T
    return codes.Reference(model.encode(clip[None, None]).audio_codes[0].T, latents)


def batched(model, clips):
    return model.encode(clips[:, None]).audio_codes.mT


class TestCodes(CodecChecks):
    codec, model_class = WavTokenizer, WavTokenizerModel
    rate, hop, strides, many = RATE, 600, (4, 20, 100), 100
    alone, batched = map(staticmethod, (alone, batched))

    def test_fewer_codebooks_are_the_first_of_all(self, folder):
        """There is one."""
        (every,) = codes.extract(self.build(folder, codebooks=1), cut([5003], RATE))
        assert every.shape == (9, 1)

    def test_long_clips_are_exact_in_blocks(self, folder, extractor, model):
        blocks = self.build(folder)
        blocks._block = 40
        assert blocks.max_seconds is None
        frames = (40, 80, 81)
        clips = cut([600 * n + more for n in frames for more in (-1, 0, 1)], RATE)
        codes.assert_equal(blocks, clips, self.all_alone(model, clips))
        for (latents, _), clip in zip(codes.encode(blocks, clips, 60000), clips, strict=True):
            codes.assert_close(latents, self.all_alone(model, [clip])[0].latents)

    def test_chunks_are_refused(self, folder):
        with pytest.raises(ConfigError, match=r"params\.chunk: wavtokenizer needs none"):
            self.build(folder, chunk={"seconds": 2.0, "overlap": 0.5})


def test_the_model_at_75_hz(saved):
    folder = saved("wavtokenizer_75hz")
    model, extractor = TestCodes.load(folder), TestCodes.build(folder)
    clips = cut([1, 319, 320, 321, 24000, 9601], RATE)
    codes.assert_equal(extractor, clips, TestCodes.all_alone(model, clips))
    assert [extractor.num_frames(len(clip)) for clip in clips] == [1, 1, 1, 2, 75, 31]
