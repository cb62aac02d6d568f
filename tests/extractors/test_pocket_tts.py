"""Pocket TTS's latents are those of transformers' model, run on each clip alone."""

import codes
import pytest
import torch
from codec_checks import cut
from saved_models import edit_json
from transformers import PocketTTSAudioTokenizerModel

from featcache.errors import ConfigError
from featcache.extractors.mimi import PocketTTS

MODEL, RATE, HOP = "pocket_tts", 24000, 1920


def build(folder, **params):
    params = PocketTTS.Params(weights=str(folder), **params)
    return PocketTTS(params, RATE, torch.device("cpu"))


@pytest.fixture(scope="module")
def extractor(folder):
    return build(folder)


@pytest.fixture(scope="module")
def model(folder):
    return PocketTTSAudioTokenizerModel.from_pretrained(folder).eval()


@torch.inference_mode()
def alone(model, clip):
    """The model's `encode` of one clip in whole frames, as its documentation has it."""
    whole = torch.nn.functional.pad(clip, (0, -len(clip) % HOP))
    return model.encode(whole[None, None]).latents[0]


def test_every_length_around_the_boundaries(extractor, model):
    lengths = [1, 2, 119, 120, 121, HOP - 1, HOP, HOP + 1, 2 * HOP + 1, 8 * HOP, 9 * HOP - 1]
    clips = cut([*lengths, 12345, 48000], RATE)
    for clip, latents in zip(clips, codes.extract(extractor, clips), strict=True):
        assert latents.shape == (-(-len(clip) // HOP), 32)
        codes.assert_close(latents, alone(model, clip))


def test_the_last_frame_of_a_clip_that_is_not_padded_is_another(model):
    """Without it, equality above would not show that clips are padded to whole frames."""
    (clip,) = cut([5 * HOP + 77], RATE)
    with torch.inference_mode():
        bare = model.encode(clip[None, None]).latents[0]
    expected = alone(model, clip)
    codes.assert_close(bare[:-1], expected[:-1])
    assert (bare[-1] - expected[-1]).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("enough", [True, False])
def test_chunks_that_overlap_by_what_a_frame_sees_are_exact(folder, extractor, model, enough):
    overlap = -(-extractor.spec.frame_length // HOP) * HOP if enough else 2 * HOP
    chunked = build(folder, chunk={"seconds": 1.5, "overlap": overlap / RATE})
    (clip,) = cut([int(5.3 * RATE)], RATE)
    assert len(chunked.pieces(len(clip))) >= 4
    assert chunked.chunks_are_exact is enough
    (latents,) = codes.extract(chunked, [clip])
    error = float((latents - alone(model, clip)).abs().max() / latents.abs().max())
    assert (error < codes.ROUNDING) is enough


def test_frame_length_covers_all_that_a_frame_sees(folder, extractor):
    length = extractor.spec.frame_length
    model = PocketTTSAudioTokenizerModel.from_pretrained(folder).eval().double()
    clip = cut([30 * HOP], RATE)[0].double().requires_grad_()
    latents = model.encode(clip[None, None]).latents[0]
    (gradient,) = torch.autograd.grad(latents[25].sum(), clip)
    seen = gradient.nonzero().flatten()
    assert (seen.min(), seen.max()) == (26 * HOP - length, 26 * HOP - 1)


def test_a_model_without_an_encoder_is_refused(folder, tmp_path):
    edited = tmp_path / "decoder"
    edited.mkdir()
    model = PocketTTSAudioTokenizerModel.from_pretrained(folder)
    model.config.encoder_config = None
    model.encoder = None
    model.save_pretrained(edited)
    edit_json(edited / "config.json", encoder_config=None)
    with pytest.raises(ConfigError, match="holds a decoder only"):
        build(edited)
