"""The codes of Higgs Audio v2's tokenizer are those of transformers' model, run on each
clip alone, as its feature extractor prepares it."""

import codes
import pytest
import torch
import torchaudio
from codec_checks import CodecChecks, cut, xcodec_alone, xcodec_batched
from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

from featcache.errors import ConfigError
from featcache.extractors.xcodec import Higgs2

MODEL, RATE, HOP = "higgs2", 24000, 960


def alone(model, clip, bandwidth=None):
    return xcodec_alone(model, clip, RATE, HOP, bandwidth)


def batched(model, clips):
    return xcodec_batched(model, clips, HOP)


class TestCodes(CodecChecks):
    codec, model_class = Higgs2, HiggsAudioV2TokenizerModel
    rate, hop, strides = RATE, HOP, (8, 40, 160, 320)
    rounding = 3e-5
    alone, batched = map(staticmethod, (alone, batched))

    @pytest.fixture(scope="class")
    @classmethod
    def clips(cls):
        """Also where the model's own `encode` would move a clip by half a frame."""
        shifted = (118, 119, 631, 632, 2 * HOP + 119, 2 * HOP + 631, 2 * HOP + 632)
        around = [k * HOP + more for k in (1, 2, 3, 8) for more in (-1, 0, 1)]
        return cut(sorted({1, 2, *shifted, *around, 12345, RATE, 2 * RATE + 77}), RATE)

    @pytest.mark.parametrize("bandwidth", [0.5, 1.5])
    def test_bandwidths(self, folder, model, bandwidth):
        extractor = self.build(folder, bandwidth=bandwidth)
        clips = cut([9000], RATE)
        codes.assert_equal(extractor, clips, [alone(model, clip, bandwidth) for clip in clips])
        assert extractor.spec.item_shape == (4 * bandwidth,)

    def test_the_resampler_is_torchaudios(self, extractor):
        clips = torch.zeros(3, 4 * HOP)
        lengths = torch.tensor([4 * HOP, HOP, 3 * HOP])
        for row, length in zip(clips, lengths, strict=True):
            row[:length] = cut([int(length)], RATE)[0]
        found = extractor.heard(clips, lengths)
        for row, clip, length in zip(found, clips, lengths, strict=True):
            expected = torchaudio.functional.resample(clip[:length], RATE, 16000)
            heard = row[160 : 160 + len(expected)]
            codes.assert_close(heard, expected)
            assert not row[:160].any()
            assert not row[160 + len(expected) :].any()

    def test_torchaudio_is_not_needed(self, folder, monkeypatch):
        monkeypatch.setattr("torchaudio.functional.resample", None)
        (found,) = codes.extract(self.build(folder), cut([3 * HOP], RATE))
        assert found.shape == (3, 8)

    def test_the_defaults_of_the_config_class_are_refused(self, folder, tmp_path):
        """They have a hop of 320 samples, at which the model's own `encode` fails."""
        config = HiggsAudioV2TokenizerConfig.from_pretrained(folder).to_dict()
        config["acoustic_model_config"] |= {"downsampling_ratios": [8, 5, 4, 2]}
        config["acoustic_model_config"] |= {"upsampling_ratios": [8, 5, 4, 2]}
        torch.manual_seed(0)
        other = HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig.from_dict(config))
        other.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="featcache needs one frame of each hop"):
            self.build(tmp_path)
