"""What must hold of a codec's extractor against the real model, run on each clip alone;
codecs' tests inherit it."""

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

import codes
import pytest
import small_models
import torch

from featcache.errors import ConfigError
from featcache.extractors.codec import CodecExtractor, code_dtype
from featcache.extractors.rows import pad_rows

MANY = 300
"""Distinct codes that must occur where codes are compared: of too few, all could be equal
by accident."""


def cut(lengths, rate, seed=1):
    """Speech-like clips of these lengths, of different loudness."""
    source = small_models.speech_like(max(lengths) / rate + 1, rate, seed)
    return [source[n % 97 * 100 :][:n] * 0.5 ** (i % 4) for i, n in enumerate(lengths)]


def xcodec_alone(model, clip, rate, hop, bandwidth=None):
    """The `encode` of an X-Codec, or of a model like it, of one clip, as its feature extractor
    prepares it."""
    from transformers import DacFeatureExtractor

    prepare = DacFeatureExtractor(sampling_rate=rate, hop_length=hop)
    inputs = prepare(clip.numpy(), sampling_rate=rate, return_tensors="pt")["input_values"]
    latents = []
    handle = model.fc.register_forward_hook(lambda _, __, output: latents.append(output[0]))
    with torch.inference_mode():
        found = model.encode(inputs, bandwidth=bandwidth).audio_codes[0].T
    handle.remove()
    return codes.Reference(found, latents[0])


def xcodec_batched(model, clips, hop):
    """The codes of clips that are padded with zeros, to whole hops, in one batch."""
    whole_hops = torch.nn.functional.pad(clips, (0, -clips.shape[1] % hop))
    return model.encode(whole_hops[:, None]).audio_codes.mT


class CodecChecks(ABC):
    """The subclass's module has a fixture `folder`, with a small model in it; the
    subclass says the rest."""

    codec: type[CodecExtractor]
    model_class: type
    rate: int
    hop: int
    """The samples from one frame to the next."""
    many: int = MANY
    """Less for models of one codebook and few frames."""
    rounding: float = codes.ROUNDING
    """Of latents, as there; more for models in which it adds up."""
    strides: tuple[int, ...]
    """Products of the encoder's strides: a clip's length matters in each of its layers."""

    @classmethod
    def build(cls, folder, sample_rate=None, **params):
        params = cls.codec.Params(weights=str(folder), **params)
        return cls.codec(params, sample_rate or cls.rate, torch.device("cpu"))

    @classmethod
    def load(cls, folder):
        return cls.model_class.from_pretrained(folder).eval()

    @staticmethod
    @abstractmethod
    def alone(model, clip) -> codes.Reference:
        """What the real model gives for a clip `[n]`: its `encode`, run on it alone."""

    @staticmethod
    @abstractmethod
    def batched(model, clips):
        """What its `encode` gives for a batch `[R, n]`: `[R, F, Q]`."""

    @pytest.fixture(autouse=True)
    def _rounding(self, monkeypatch):
        monkeypatch.setattr(codes, "ROUNDING", self.rounding)

    @pytest.fixture(scope="class")
    @classmethod
    def extractor(cls, folder):
        return cls.build(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder):
        return cls.load(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def clips(cls):
        """Clips of every length around the boundaries."""
        around = {
            n + more
            for n in (*cls.strides, *(k * cls.hop for k in (1, 2, 3, 7, 8, 9)))
            for more in (-1, 0, 1)
        }
        return cut(
            sorted({*range(1, 9), *around, 5003, 12345, cls.rate, 2 * cls.rate + 77}), cls.rate
        )

    @pytest.fixture(scope="class")
    @classmethod
    def references(cls, model, clips):
        return cls.all_alone(model, clips)

    @classmethod
    @torch.inference_mode()
    def all_alone(cls, model, clips):
        return [cls.alone(model, clip) for clip in clips]

    @pytest.mark.parametrize("policy", codes.POLICIES)
    def test_every_length_around_the_boundaries(self, folder, clips, references, policy):
        extractor = self.build(folder)
        extractor.chosen_batching = policy
        for seed in (0, 1) if policy == "padded" else (0,):
            order = torch.randperm(
                len(clips), generator=torch.Generator().manual_seed(seed)
            ).tolist()
            codes.assert_equal(extractor, [clips[i] for i in order], [references[i] for i in order])
        assert (
            len(torch.cat([reference.codes.flatten() for reference in references]).unique())
            > self.many
        )

    def test_latents_are_equal_to_rounding(self, extractor, clips, references):
        for clip, reference in zip(clips, references, strict=True):
            ((latents, _),) = codes.encode(extractor, [clip], extractor.padded_length(len(clip)))
            codes.assert_close(latents, reference.latents)

    @pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
    def test_any_number_of_rows(self, extractor, model, num_rows):
        clips = cut(
            [7 * self.hop + 1, 12, 6 * self.hop, 3 * self.hop - 1, 9 * self.hop][:num_rows],
            self.rate,
        )
        for more in (0, 1, self.hop - 1):  # padded lengths need not be whole hops
            for row, clip in zip(
                codes.encode(extractor, clips, 9 * self.hop + more), clips, strict=True
            ):
                expected = self.all_alone(model, [clip])[0]
                codes.assert_close(row[0], expected.latents)
                # a tie, which rounding decides
                assert (row[1].long() != expected.codes).any(1).sum() <= 1

    def test_frames_of_every_length(self, extractor):
        counts = [extractor.num_frames(n) for n in range(4 * self.hop)]
        assert counts == [-(-n // self.hop) for n in range(4 * self.hop)]

    def test_no_bit_depends_on_neighbours_position_or_threads(self, extractor):
        """Of threads in `encode`; torch's own are one, as in a run."""
        clips = cut([7 * self.hop + 1, 12, 8 * self.hop, 8 * self.hop, 1], self.rate)
        expected = codes.encode(extractor, clips, 8 * self.hop)
        rng = torch.Generator().manual_seed(0)
        strangers = [
            torch.randn(n, generator=rng)
            for n in (8 * self.hop, 1, 2 * self.hop + 1, 5 * self.hop, 77)
        ]
        all_rows = [*clips, *strangers]
        batches = [
            torch.randperm(len(all_rows), generator=rng)[: len(clips)].tolist() for _ in range(13)
        ]
        with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = pool.map(
                lambda rows: codes.encode(extractor, [all_rows[i] for i in rows], 8 * self.hop),
                batches,
            )
            for rows, batch in zip(batches, found, strict=True):
                for i, ours in zip(rows, batch, strict=True):
                    assert i >= len(clips) or all(map(torch.equal, ours, expected[i]))

    def test_odd_clips(self, extractor, model):
        faint = 1e-6 * torch.randn(3000, generator=torch.Generator().manual_seed(0))
        odd = [torch.zeros(5000), torch.ones(1), torch.full((700,), -1.0), torch.zeros(1), faint]
        codes.assert_equal(extractor, odd, self.all_alone(model, odd))

    def test_spoken_digits(self, extractor, model):
        """Short clips, in which zero padding does most harm."""
        clips = codes.digits(40, self.rate)
        references = self.all_alone(model, clips)
        codes.assert_equal(extractor, clips, references)
        assert (
            len(torch.cat([reference.codes.flatten() for reference in references]).unique())
            > self.many
        )

    def test_a_zero_padded_batch_has_other_codes(self, model):
        """What others do, on this very model: without it, equality above would prove
        nothing."""
        clips = cut(range(4001, 8000, 307), self.rate)
        with torch.inference_mode():
            found = self.batched(model, torch.nn.utils.rnn.pad_sequence(clips, batch_first=True))
        expected = [reference.codes for reference in self.all_alone(model, clips)]
        last = [found[row, : len(codes)][-3:] != codes[-3:] for row, codes in enumerate(expected)]
        assert sum(int(frames.any(1).sum()) for frames in last) >= 3

    def test_latents_are_those_of_the_clip_alone(self, folder, clips, references):
        """Whatever shares their batch; and no bit depends on the number of codebooks."""
        extractor = self.build(folder, output="latents")
        assert (extractor.spec.dtype, extractor.spec.codebook_sizes) == ("float32", ())
        found = codes.extract(extractor, clips)
        for latents, reference in zip(found, references, strict=True):
            assert latents.shape[1:] == extractor.spec.item_shape
            codes.assert_close(latents, reference.latents)
        fewer = self.codec.Params(weights=str(folder), output="latents", codebooks=3)
        assert fewer == extractor.params
        assert extractor.stored_dtype(fewer) == "float32"

    def test_one_pass_gives_the_bits_of_several(self, folder, clips):
        takers = [
            self.build(folder),
            self.build(folder, output="latents"),
            self.build(folder, codebooks=1),
        ]
        batch = pad_rows(clips[-3:], 4, takers[0].padded_length(len(clips[-1])))
        with torch.inference_mode():
            together = takers[1].run_for(takers, *batch)
            apart = [taker.run(*batch) for taker in takers]
        for one, other in zip(together, apart, strict=True):
            assert torch.equal(one.features, other.features)
            assert {*one.side} == {*other.side}

    def test_fewer_codebooks_are_the_first_of_all(self, folder):
        clips = cut([5003], self.rate)
        (every,) = codes.extract(self.build(folder, codebooks=None), clips)
        assert every.shape[1] > 3
        for count in (1, 3):
            fewer = self.build(folder, codebooks=count)
            assert torch.equal(codes.extract(fewer, clips)[0], every[:, :count])
            assert len(fewer.spec.codebook_sizes) == count

    def test_codes_are_stored_in_the_smallest_type(self, folder, extractor):
        assert (
            extractor.stored_dtype(extractor.Params(weights=str(folder)))
            == extractor.spec.dtype
            == "uint16"
        )
        sizes = {
            2: "uint8",
            256: "uint8",
            257: "uint16",
            1024: "uint16",
            65536: "uint16",
            65537: "uint32",
        }
        assert {size: code_dtype(size) for size in sizes} == sizes

    def test_what_the_model_has_not_is_refused(self, folder):
        most = len(self.build(folder, codebooks=None).spec.codebook_sizes)
        with pytest.raises(
            ConfigError, match=rf"params\.codebooks: {most + 1}, but .* has {most}$"
        ):
            self.build(folder, codebooks=most + 1)
        with pytest.raises(ConfigError, match=rf"audio\.sample_rate: 8000; .* is for {self.rate}$"):
            self.build(folder, sample_rate=8000)
