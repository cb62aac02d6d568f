"""DAC's codes are those of transformers' model, run on each clip alone."""

import codes
import pytest
import torch
from codec_checks import CodecChecks, cut
from transformers import DacFeatureExtractor, DacModel

from featcache.extractors.dac import Dac
from featcache.extractors.model import Chunk

MODEL = "dac_16khz"
MODELS = {"dac_16khz": (16000, 320), "dac_24khz": (24000, 320), "dac_44khz": (44100, 512)}


@torch.inference_mode()
def alone(model, waveform):
    """`DacModel.encode` of one clip, prepared by `DacFeatureExtractor`."""
    rate, hop = model.config.sampling_rate, model.config.hop_length
    ready = DacFeatureExtractor(sampling_rate=rate, hop_length=hop)
    inputs = ready(waveform.numpy(), sampling_rate=rate, return_tensors="pt")["input_values"]
    return codes.Reference(model.encode(inputs).audio_codes[0].T, model.encoder(inputs)[0].T)


def batched(model, clips):
    whole_hops = torch.nn.functional.pad(clips, (0, -clips.shape[1] % 320))
    return model.encode(whole_hops[:, None]).audio_codes.mT


class TestCodes(CodecChecks):
    codec, model_class = Dac, DacModel
    rate, hop, strides = 16000, 320, (2, 8, 40, 320)
    alone, batched = map(staticmethod, (alone, batched))


build, load = TestCodes.build, TestCodes.load


@pytest.mark.parametrize("name", ["dac_24khz", "dac_44khz"])
def test_models_of_other_rates(saved, name):
    rate, hop = MODELS[name]
    extractor, model = build(saved(name), rate), load(saved(name))
    clips = cut(
        [12345, *(k * hop + more for k in (3, 1, 25, 8) for more in (-1, 0, 1)), 1, 7], rate
    )
    codes.assert_equal(extractor, clips, [alone(model, clip) for clip in clips])
    assert (extractor.spec.frame_rate, extractor.granularity) == (rate / hop, hop)


@pytest.mark.parametrize("name", MODELS)
def test_the_receptive_field_is_what_a_frame_looks_at(saved, name):
    """The samples on which a frame's latents depend, by the derivatives of the model's
    own encoder."""
    rate, _ = MODELS[name]
    encoder = load(saved(name)).encoder
    waveform = torch.randn(1, 1, 20000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    latents = encoder(waveform)
    latents[0, :, latents.shape[2] // 2].square().sum().backward()
    seen = waveform.grad[0, 0].nonzero()
    assert int(seen.max() - seen.min()) + 1 == build(saved(name), rate).spec.frame_length


def test_chunks_are_exact_with_the_receptive_field_as_overlap_and_not_with_less(folder):
    clips, model = cut([50001, 12800, 12801, 31999], 16000), load(folder)
    extractor = build(folder, chunk=Chunk(seconds=0.8, overlap=5440 / 16000))
    assert extractor.chunks_are_exact
    codes.assert_equal(extractor, clips, [alone(model, clip) for clip in clips])
    extractor = build(folder, chunk=Chunk(seconds=0.8, overlap=640 / 16000))
    assert not extractor.chunks_are_exact
    assert not torch.equal(
        codes.extract(extractor, clips[:1])[0].long(), alone(model, clips[0]).codes
    )
