"""X-Codec2's and NeuCodec's codes are those of transformers' models, run on each clip
alone, as their feature extractors prepare it."""

import codes
import pytest
import torch
from codec_checks import CodecChecks, cut
from transformers import (
    NeuCodecFeatureExtractor,
    NeuCodecModel,
    Xcodec2FeatureExtractor,
    Xcodec2Model,
)

from featcache.extractors.xcodec2 import NeuCodec, Xcodec2

RATE, HOP = 16000, 320
PREPARE = {Xcodec2Model: Xcodec2FeatureExtractor(), NeuCodecModel: NeuCodecFeatureExtractor()}


def prepared(model, clips):
    prepare = PREPARE[type(model)]
    return prepare([*map(torch.Tensor.numpy, clips)], sampling_rate=RATE, return_tensors="pt")


def alone(model, clip):
    latents = []
    handle = model.quantizer.project_in.register_forward_hook(lambda *it: latents.append(it[2][0]))
    found = model.encode(**prepared(model, [clip])).audio_codes[0].T
    handle.remove()
    return codes.Reference(found.long(), latents[0])


def batched(model, clips):
    return model.encode(**prepared(model, clips)).audio_codes.mT


class Checks(CodecChecks):
    rate, hop, strides, many = RATE, HOP, (2, 4, 16, 64), 200
    shortest = 1

    rounding = 3e-5
    """In clips of two frames of a mel bin, its spread is small, and division by it makes
    rounding larger: 1.2e-5 was seen."""

    alone, batched = map(staticmethod, (alone, batched))

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, saved):
        return saved(cls.codec.__name__.lower())

    @pytest.fixture(scope="class")
    @classmethod
    def clips(cls):
        around = {k * HOP + more for k in (1, 2, 3, 8) for more in (-1, 0, 1)}
        lengths = sorted({1, *around, 5003, 12345, RATE - 1, RATE, 2 * RATE + 77})
        return cut([n for n in lengths if n >= cls.shortest], RATE)

    def test_any_number_of_rows(self, extractor, model):
        clips = cut([7 * HOP + 1, 6 * HOP, 3 * HOP - 1, 9 * HOP], RATE)
        for row, clip in zip(codes.encode(extractor, clips, 9 * HOP), clips, strict=True):
            codes.assert_close(row[0], self.all_alone(model, [clip])[0].latents)

    def test_odd_clips(self, extractor, model):
        """Also of silence, whose energies are nothing but rounding."""
        faint = 1e-6 * torch.randn(3000, generator=torch.Generator().manual_seed(0))
        odd = [torch.zeros(5000), torch.full((700,), -1.0), faint]
        codes.assert_equal(extractor, odd, self.all_alone(model, odd))

    def test_fewer_codebooks_are_the_first_of_all(self, folder):
        """There is one."""
        (found,) = codes.extract(self.build(folder, codebooks=1), cut([5003], RATE))
        assert found.shape[1] == 1

    def test_codes_are_stored_in_the_smallest_type(self, folder, extractor):
        stored = extractor.stored_dtype(extractor.Params(weights=str(folder)))
        assert stored == extractor.spec.dtype == "uint16"
        assert extractor.spec.codebook_sizes == (65536,)

    def test_torchaudio_is_not_needed(self, folder, monkeypatch):
        monkeypatch.setattr("torchaudio.compliance.kaldi.fbank", None)
        (found,) = codes.extract(self.build(folder), cut([3 * HOP], RATE))
        assert len(found) == self.build(folder).num_frames(3 * HOP)


class TestXcodec2(Checks):
    codec, model_class = Xcodec2, Xcodec2Model

    def test_frames_of_every_length(self, extractor):
        counts = [extractor.num_frames(n) for n in (0, 1, 319, 320, 321, 15999, 16000)]
        assert counts == [0, 1, 1, 2, 2, 50, 51]


class TestNeuCodec(Checks):
    codec, model_class = NeuCodec, NeuCodecModel
    shortest = HOP

    def test_frames_of_every_length(self, extractor):
        counts = [extractor.num_frames(n) for n in (0, 1, 319, 320, 321, 15999, 16000)]
        assert counts == [0, 0, 0, 1, 1, 49, 50]

    # X-Codec2's are of the same code
    test_no_bit_depends_on_neighbours_position_or_threads = None
    test_spoken_digits = test_odd_clips = test_any_number_of_rows = None
    test_one_pass_gives_the_bits_of_several = test_latents_are_those_of_the_clip_alone = None
