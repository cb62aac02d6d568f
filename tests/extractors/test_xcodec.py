"""X-Codec's codes are those of transformers' model, run on each clip alone."""

import json
import shutil

import codes
import pytest
import torch
from codec_checks import CodecChecks, cut, xcodec_alone, xcodec_batched
from transformers import DacFeatureExtractor, XcodecConfig, XcodecModel

from featcache.errors import ConfigError
from featcache.extractors.xcodec import Xcodec

MODEL, RATE, HOP = "xcodec", 16000, 320


@pytest.fixture
def other(folder, tmp_path):
    """A copy of it, to change."""
    return shutil.copytree(folder, tmp_path / "other")


def alone(model, clip, bandwidth=None, hop=HOP):
    return xcodec_alone(model, clip, RATE, hop, bandwidth)


def batched(model, clips):
    return xcodec_batched(model, clips, HOP)


class TestCodes(CodecChecks):
    codec, model_class = Xcodec, XcodecModel
    rate, hop, strides = RATE, HOP, (8, 40, 160)
    alone, batched = map(staticmethod, (alone, batched))

    @pytest.mark.parametrize(
        ("params", "bandwidth"),
        [
            *(({"bandwidth": it}, it) for it in (0.5, 2)),
            ({"codebooks": 3}, 1.5),
            ({"bandwidth": 4, "codebooks": 8}, 4),
        ],
    )
    def test_bandwidths(self, folder, model, params, bandwidth):
        extractor = self.build(folder, **params)
        clips = cut([9000, 700], RATE)
        codes.assert_equal(extractor, clips, [alone(model, clip, bandwidth) for clip in clips])
        assert extractor.spec.item_shape == (2 * bandwidth,)

    def test_the_hop_of_the_feature_extractor(self, other, model):
        """It pads clips to whole hops of its own, which may be several hops of the model."""
        DacFeatureExtractor(sampling_rate=RATE, hop_length=2 * HOP).save_pretrained(other)
        extractor = self.build(other)
        clips = cut([1, HOP, HOP + 1, 2 * HOP, 2 * HOP + 1, 9000], RATE)
        codes.assert_equal(extractor, clips, [alone(model, clip, hop=2 * HOP) for clip in clips])
        assert extractor.num_frames(1) == 2
        chunked = self.build(other, chunk={"seconds": 1.0, "overlap": 0.2})
        (clip,) = cut([40_001], RATE)
        for piece in chunked.pieces(len(clip)):
            assert piece.skip + piece.num_frames <= chunked.num_frames(piece.num_samples)
        (found,) = codes.extract(chunked, [clip])
        assert len(found) == chunked.num_frames(len(clip)) == 126


build = TestCodes.build


@pytest.mark.parametrize(
    "semantic",
    [
        {"model_type": "wavlm"},
        {"model_type": "hubert", "feat_extract_norm": "layer", "do_stable_layer_norm": True},
    ],
    ids=lambda semantic: "-".join(map(str, semantic.values())),
)
def test_other_semantic_models(folder, tmp_path, semantic):
    """Their hidden states are averaged as HuBERT's are. Latents are compared, since there
    are no codewords."""
    config = XcodecConfig.from_pretrained(folder).to_dict()
    config["semantic_model_config"] |= {"conv_dim": [32] * 7, **semantic}
    torch.manual_seed(0)
    model = XcodecModel(XcodecConfig.from_dict(config)).eval()
    model.save_pretrained(tmp_path)
    clips = cut([6000, 1, 7 * HOP, 3001], RATE)
    for (latents, _), clip in zip(
        codes.encode(build(tmp_path), clips, 20 * HOP), clips, strict=True
    ):
        codes.assert_close(latents, alone(model, clip).latents)


def test_what_makes_no_frame_of_each_hop_is_refused(folder, other):
    """A feature extractor whose hop is no multiple; a semantic encoder that gives twice
    as many frames."""
    DacFeatureExtractor(sampling_rate=RATE, hop_length=512).save_pretrained(other)
    with pytest.raises(ConfigError, match="padded to multiples of 512"):
        build(other)
    DacFeatureExtractor(sampling_rate=RATE, hop_length=HOP).save_pretrained(other)
    config = json.loads((folder / "config.json").read_text())
    config["semantic_model_config"]["conv_stride"] = [5, 2, 2, 2, 2, 2, 1]
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="of 1 × 320 samples, its encoders make 1 and 2 frames"):
        build(other)
