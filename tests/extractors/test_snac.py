"""SNAC's codes are those of its own package's model, run on each clip alone."""

import json
import re
import sys
from itertools import accumulate

import codes
import pytest
import torch
from codec_checks import CodecChecks, cut
from pydantic import ValidationError

from featcache.care.compare import tied_frames
from featcache.errors import ConfigError, MissingDependencyError, install_hint
from featcache.extractors import Clip
from featcache.extractors.rows import pad_rows
from featcache.extractors.snac import Snac

snac = pytest.importorskip("snac", exc_type=ImportError)


MODEL, RATE, HOP = "snac_24khz", 24000, 2048


def load(folder):
    model = snac.SNAC(**json.loads((folder / "config.json").read_text()))
    model.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    return model.eval()


def every_track(model, clip):
    """The codes of the clip alone, `[n]` for each codebook."""
    with torch.inference_mode():
        return [found[0] for found in model.encode(clip[None, None])]


def by_frame(tracks):
    """The codes of each frame of the first track, `[F, Q]`."""
    return torch.cat([track.view(len(tracks[0]), -1) for track in tracks], 1)


def alone(model, clip):
    latents = model.encoder(model.preprocess(clip[None, None]))[0].T
    tracks = every_track(model, clip)
    return codes.Reference(by_frame(tracks[:1]), latents.reshape(len(tracks[0]), -1))


def batched(model, clips):
    return model.encode(clips[:, None])[0][..., None]


class TestCodes(CodecChecks):
    codec = Snac
    rate, hop, strides, many = RATE, HOP, (2, 8, 64, 512), 50
    load, alone, batched = map(staticmethod, (load, alone, batched))

    def test_latents_are_those_of_the_clip_alone(self, folder):
        """Only its codes are stored."""
        with pytest.raises(ValidationError, match="should be 'codes'"):
            self.build(folder, output="latents")

    def test_one_pass_gives_the_bits_of_several(self, folder, clips):
        takers = [self.build(folder, codebooks=count) for count in (1, 3, 2)]
        batch = pad_rows(clips[-3:], 4, takers[0].padded_length(len(clips[-1])))
        with torch.inference_mode():
            together = takers[0].run_for(takers, *batch)
            apart = [taker.run(*batch) for taker in takers]
        for one, other in zip(together, apart, strict=True):
            assert torch.equal(one.features, other.features)
            assert {*one.side} == {*other.side}
            assert all(torch.equal(track, other.side[name]) for name, track in one.side.items())

    def test_every_track(self, extractor, model, clips):
        tied = total = 0
        with torch.inference_mode():
            found = extractor.extract([Clip("", clip) for clip in clips])
        for tracks, clip in zip(found, clips, strict=True):
            expected = every_track(model, clip)
            assert [*tracks] == ["features", "codes_2", "codes_3"]
            assert [it.shape for it in tracks.values()] == [(len(it), 1) for it in expected]
            differing = by_frame([*tracks.values()]).long() != by_frame(expected)
            tied += int(differing.any(1).sum())
            total += differing.numel()
        assert tied <= 1
        assert total > 500

    def test_latents_give_the_codes_of_all_tracks(self, extractor, model):
        (clip,) = cut([9000], RATE)
        expected = by_frame(every_track(model, clip))
        latents = alone(model, clip).latents
        assert torch.equal(extractor.codes_of(latents[None])[0].long(), expected)
        assert expected.shape[1] == 7
        first = expected[:, :1]
        assert tied_frames(extractor.quantize, latents, first, first).all()

    def test_fewer_codebooks_are_the_first_of_all(self, folder, extractor):
        (clip,) = cut([15003], RATE)
        with torch.inference_mode():
            (every,) = extractor.extract([Clip("", clip)])
            (fewer,) = self.build(folder, codebooks=2).extract([Clip("", clip)])
            only = codes.extract(self.build(folder, codebooks=1), [clip])[0]
        assert [*fewer] == ["features", "codes_2"]
        assert all(torch.equal(track, every[name]) for name, track in fewer.items())
        assert torch.equal(only, every["features"])

    def test_chunks_that_overlap_by_what_a_frame_sees_are_exact(self, folder, extractor):
        enough = 2 * -(-extractor.spec.frame_length // HOP) * HOP / RATE
        chunked = self.build(folder, chunk={"seconds": 4 * enough, "overlap": enough})
        assert chunked.chunks_are_exact
        (clip,) = cut([int(11 * enough * RATE)], RATE)
        assert len(chunked.pieces(len(clip))) >= 3
        with torch.inference_mode():
            (expected,), (found,) = (it.extract([Clip("", clip)]) for it in (extractor, chunked))
        for name, track in expected.items():
            assert (found[name] != track).float().mean() <= codes.RARE, name

    def test_what_the_model_has_not_is_refused(self, folder):
        with pytest.raises(ConfigError, match=r"params\.codebooks: 4, but .* has 3$"):
            self.build(folder, codebooks=4)
        with pytest.raises(ConfigError, match=r"audio\.sample_rate: 8000; .* is for 24000$"):
            self.build(folder, sample_rate=8000)


build = TestCodes.build


def test_the_model_with_attention(saved):
    """Clips are padded to whole windows: 16,384 samples give 4, 8, 16 and 32 codes."""
    folder = saved("snac_44khz")
    model, extractor = load(folder), build(folder, 44100)
    clips = cut([1, 16384, 16385, 40000], 44100)
    padded_length = 4 * 16384
    for (latents, _), clip in zip(
        codes.encode(extractor, clips, padded_length), clips, strict=True
    ):
        with torch.inference_mode():
            codes.assert_close(latents, alone(model, clip).latents)
    with torch.inference_mode():
        tracks = extractor.extract([Clip("", clips[0])])[0]
    assert [len(track) for track in tracks.values()] == [4, 8, 16, 32]
    rates = [extractor.spec.frame_rate, *(track.axis.rate for track in extractor.spec.side)]
    assert rates == [*accumulate([44100 / 4096, 2, 2, 2], lambda a, b: a * b)]
    with pytest.raises(ConfigError, match=r"params\.chunk: .* its own windows"):
        build(folder, 44100, chunk={"seconds": 2.0, "overlap": 0.5})


def test_the_package_may_be_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "snac", None)
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("snac"))):
        build(folder)


def test_weights_of_another_model_are_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {"vq_strides": [8, 4, 2, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes())
    with pytest.raises(ConfigError, match=r"not a SNAC's: .*Missing key"):
        build(tmp_path)
