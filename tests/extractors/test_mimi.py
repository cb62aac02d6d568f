"""Mimi's codes are those of transformers' model, run on each clip alone."""

import shutil

import codes
import pytest
import small_models
import torch
from codec_checks import CodecChecks, cut
from saved_models import edit_json
from transformers import MimiModel

from featcache.extractors.mimi import Mimi

MODEL, RATE, HOP, STEP = "mimi", 24000, 1920, 960


def with_window(folder, to, window):
    """The same model with a transformer that sees so many steps."""
    shutil.copytree(folder, to)
    edit_json(to / "config.json", sliding_window=window)
    return to


def alone(model, clip, codebooks=8):
    found = model.encode(clip[None, None], num_quantizers=codebooks).audio_codes
    return codes.Reference(found[0].T, model.encoder(clip[None, None]).latents[0].T)


def batched(model, clips):
    return model.encode(clips[:, None], num_quantizers=8).audio_codes.mT


class TestCodes(CodecChecks):
    codec, model_class = Mimi, MimiModel
    rate, hop, strides = RATE, HOP, (4, 20, 120, 960)
    alone, batched = map(staticmethod, (alone, batched))

    def test_clips_longer_than_the_window(self, extractor, model):
        """The transformer sees 10 s, and the shapes of its mask are others for longer
        clips."""
        clips = cut([int(9.9 * RATE), 23 * RATE + 5, 10 * RATE + 1, 4000], RATE)
        codes.assert_equal(extractor, clips, self.all_alone(model, clips))
        for (latents, _), clip in zip(
            codes.encode(extractor, clips, 24 * RATE), clips, strict=True
        ):
            codes.assert_close(latents, self.all_alone(model, [clip])[0].latents)

    @pytest.mark.parametrize(("codebooks", "count"), [(1, 1), (2, 2), (32, 32), (None, 32)])
    def test_codebooks(self, folder, model, codebooks, count):
        """The reference's own latents are quantised: the small model's last codebooks are
        finer than rounding."""
        extractor = self.build(folder, codebooks=codebooks)
        (clip,) = cut([20000], RATE)
        with torch.inference_mode():
            reference = self.alone(model, clip, count)
            assert torch.equal(extractor.quantize(reference.latents[None])[0], reference.codes)
        (found,) = codes.extract(extractor, [clip])
        assert torch.equal(found[:, :8].long(), reference.codes[:, :8])
        assert extractor.spec.codebook_sizes == (2048,) * count


build, load = TestCodes.build, TestCodes.load


def test_the_spec_of_the_published_model(folder):
    """The small model has 2 layers instead of 8, and is otherwise the same."""
    spec = build(folder).spec
    assert (spec.item_shape, spec.frame_rate, spec.dtype) == ((8,), 12.5, "uint16")
    convolutions = 4280 + 3 * STEP
    assert spec.frame_length == convolutions + 2 * 249 * STEP


def test_frame_length_is_all_that_a_frame_sees(folder, tmp_path):
    """It is exact: the reference has a gradient for its first and last sample, and for
    none outside."""
    short = with_window(folder, tmp_path / "short", 3)
    length = build(short).spec.frame_length
    model = load(short).double()
    clip = small_models.speech_like(1.6, RATE).double().requires_grad_()
    latents = model.encoder(clip[None, None]).latents[0]
    for frame in (10, 15):
        (gradient,) = torch.autograd.grad(latents[:, frame].sum(), clip, retain_graph=True)
        seen = gradient.nonzero().flatten()
        assert (seen.min(), seen.max()) == ((frame + 1) * HOP - length, (frame + 1) * HOP - 1)


def test_chunks_that_overlap_by_what_a_frame_sees_are_exact(folder, tmp_path):
    short = with_window(folder, tmp_path / "short", 5)
    plain = build(short)
    enough = -(-plain.spec.frame_length // HOP) * HOP
    clip = small_models.speech_like(5.3, RATE)
    (expected,) = codes.extract(plain, [clip])
    for overlap, is_exact in ((enough, True), (HOP, False)):
        chunked = build(short, chunk={"seconds": 2.0, "overlap": overlap / RATE})
        (found,) = codes.extract(chunked, [clip])
        differing = float((found != expected).float().mean())
        assert len(chunked.pieces(len(clip))) >= 3
        assert chunked.chunks_are_exact is is_exact
        assert (differing <= codes.RARE) is is_exact
