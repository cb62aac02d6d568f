"""VibeVoice's latents are the means of transformers' model, run on each clip alone."""

import shutil

import codes
import pytest
import torch
from codec_checks import cut
from saved_models import edit_json
from transformers import VibeVoiceAcousticTokenizerFeatureExtractor as Prepare
from transformers import VibeVoiceAcousticTokenizerModel

from featcache.errors import ConfigError
from featcache.extractors.vibevoice import VibeVoice

MODEL, RATE, HOP = "vibevoice", 24000, 3200


def build(folder, **params):
    params = VibeVoice.Params(weights=str(folder), **params)
    return VibeVoice(params, RATE, torch.device("cpu"))


@pytest.fixture(scope="module")
def extractor(folder):
    return build(folder)


@pytest.fixture(scope="module")
def model(folder):
    return VibeVoiceAcousticTokenizerModel.from_pretrained(folder).eval()


@torch.inference_mode()
def alone(model, clip, **options):
    inputs = Prepare(**options)(clip.numpy(), sampling_rate=RATE)["input_values"]
    return model.encode(inputs, sample=False).latents[0]


def test_every_length_around_the_boundaries(extractor, model):
    lengths = [1, 2, HOP - 1, HOP, HOP + 1, 2 * HOP, 7 * HOP + 1, 8 * HOP - 1, 12345, 2 * RATE + 77]
    clips = cut(lengths, RATE)
    for clip, latents in zip(clips, codes.extract(extractor, clips), strict=True):
        assert latents.shape == (-(-len(clip) // HOP), 16)
        codes.assert_close(latents, alone(model, clip))


def test_odd_clips(extractor, model):
    """Among them a click whose peak would pass 1 at that level, so the level is lower."""
    click = torch.zeros(9000)
    click[4000] = 0.3
    clips = [torch.zeros(5000), click, torch.full((700,), -1.0), torch.full((1,), 1e-7)]
    for clip, latents in zip(clips, codes.extract(extractor, clips), strict=True):
        codes.assert_close(latents, alone(model, clip))


def test_loud_and_quiet_clips_have_the_same_latents(extractor):
    (clip,) = cut([20000], RATE)
    quiet, loud = codes.extract(extractor, [clip * 0.01, clip])
    assert (quiet - loud).abs().max() < 1e-2 * loud.abs().max()


@pytest.mark.parametrize("enough", [True, False])
def test_chunks_take_the_level_of_the_clip(folder, extractor, model, enough):
    """The second half of the clip is nearly silent: at their own level, chunks of it would be
    100 times as loud."""
    length = extractor.spec.frame_length
    overlap = -(-length // HOP) * HOP if enough else HOP
    chunked = build(folder, chunk={"seconds": 2 * overlap / RATE + 2, "overlap": overlap / RATE})
    (clip,) = cut([16 * RATE + 5], RATE)
    clip[8 * RATE :] *= 0.01
    assert len(chunked.pieces(len(clip))) >= 3
    assert chunked.chunks_are_exact is enough
    (latents,) = codes.extract(chunked, [clip])
    error = float((latents - alone(model, clip)).abs().max() / latents.abs().max())
    assert (error < codes.ROUNDING) is enough


def test_a_padded_batch_changes_no_bit(extractor):
    clips = cut([7 * HOP + 1, 12, 8 * HOP, 8 * HOP], RATE)
    together = codes.extract(extractor, clips)
    for clip, expected in zip(clips, together, strict=True):
        assert torch.equal(codes.extract(extractor, [clip])[0], expected)


def test_frame_length_is_all_that_a_frame_sees(folder, extractor):
    length, model = extractor.spec.frame_length, VibeVoiceAcousticTokenizerModel
    model = model.from_pretrained(folder).eval().double()
    clip = cut([28 * HOP], RATE)[0].double().requires_grad_()
    latents = model.encode(clip[None, None], sample=False).latents[0]
    (gradient,) = torch.autograd.grad(latents[25].sum(), clip)
    seen = gradient.nonzero().flatten()
    assert (seen.min(), seen.max()) == (26 * HOP - length, 26 * HOP - 1)


def test_settings_of_the_models_folder_count(folder, model, tmp_path):
    for name, settings in {
        "louder": {"target_dB_FS": -20},
        "raw": {"normalize_audio": False},
    }.items():
        shutil.copytree(folder, tmp_path / name)
        edit_json(tmp_path / name / "preprocessor_config.json", **settings)
        (clip,) = cut([12345], RATE)
        (latents,) = codes.extract(build(tmp_path / name), [clip])
        codes.assert_close(latents, alone(model, clip, **settings))
    edit_json(tmp_path / "raw" / "preprocessor_config.json", pad_to_multiple_of=1600)
    with pytest.raises(ConfigError, match="multiples of 1600 samples, and a frame has 3200"):
        build(tmp_path / "raw")
