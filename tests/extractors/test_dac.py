"""DAC's codes are those of transformers' model, run on each clip alone."""

import codes
import pytest
import small_models
import torch
from transformers import DacFeatureExtractor, DacModel

from featcache.errors import ConfigError
from featcache.extractors.dac import Dac, DacParams
from featcache.extractors.model import Chunk

CPU = torch.device("cpu")
MODELS = {"dac_16khz": (16000, 320), "dac_24khz": (24000, 320), "dac_44khz": (44100, 512)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: getattr(small_models, name)(tmp_path_factory.mktemp(name)) for name in MODELS}


@pytest.fixture(scope="module")
def folder(folders):
    return folders["dac_16khz"]


@pytest.fixture(scope="module")
def model(folder):
    return DacModel.from_pretrained(folder).eval()


def build(folder, sample_rate=16000, **params):
    return Dac(DacParams(weights=str(folder), **params), sample_rate, CPU)


def alone(model, waveform):
    """`DacModel.encode` of one clip, prepared by `DacFeatureExtractor`."""
    rate, hop = model.config.sampling_rate, model.config.hop_length
    ready = DacFeatureExtractor(sampling_rate=rate, hop_length=hop)
    inputs = ready(waveform.numpy(), sampling_rate=rate, return_tensors="pt")["input_values"]
    with torch.inference_mode():
        return codes.Reference(model.encode(inputs).audio_codes[0].T, model.encoder(inputs)[0].T)


def cut(lengths, rate=16000):
    """Speech-like clips of these lengths, of different loudness."""
    source = small_models.speech_like(max(lengths) / rate + 1, rate, seed=1)
    return [source[n % 97 * 100 :][:n] * 0.5 ** (i % 4) for i, n in enumerate(lengths)]


def around(hop):
    return sorted({1, 2, 7, 100, *(k * hop + d for k in (1, 2, 3, 8, 9, 25) for d in (-1, 0, 1)), 5003, 12345})


def shuffled(count):
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module", params=MODELS)
def clips_around(request, folders):
    """A model's name, clips of lengths around the boundaries, and what the real model gives for each alone."""
    rate, hop = MODELS[request.param]
    model = DacModel.from_pretrained(folders[request.param]).eval()
    clips = cut(around(hop) if request.param == "dac_16khz" else around(hop)[::3], rate)
    clips = [clips[i] for i in shuffled(len(clips))]
    return request.param, clips, [alone(model, clip) for clip in clips]


@pytest.mark.parametrize("policy", codes.POLICIES)
def test_every_length_around_the_boundaries(folders, clips_around, policy):
    name, clips, references = clips_around
    extractor = build(folders[name], MODELS[name][0])
    extractor.chosen_batching = policy
    codes.assert_equal(extractor, clips, references)


@pytest.mark.parametrize("name", MODELS)
def test_frames_are_hops_that_have_begun(folders, name):
    rate, hop = MODELS[name]
    extractor = build(folders[name], rate)
    assert [extractor.num_frames(n) for n in range(4 * hop)] == [-(-n // hop) for n in range(4 * hop)]
    assert extractor.spec.frame_rate == rate / hop
    assert extractor.granularity == hop


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_any_number_of_rows(folder, model, num_rows):
    clips = cut([7001, 12, 6400, 320, 6401][:num_rows])
    for (latents, found), clip in zip(codes.encode(build(folder), clips, 22 * 320), clips, strict=True):
        expected = alone(model, clip)
        codes.assert_close(latents, expected.latents)
        assert torch.equal(found.long(), expected.codes)


def test_no_bit_depends_on_neighbours_position_or_threads(folder):
    codes.assert_same_bits(build(folder), cut([2001, 12, 1600, 1]))


@pytest.mark.parametrize("clip", [torch.zeros(5000), torch.ones(1), torch.full((700,), -1.0), torch.zeros(1)])
def test_odd_clips(folder, model, clip):
    clips = [clip, *cut([5003])]
    codes.assert_equal(build(folder), clips, [alone(model, clip) for clip in clips])


def test_spoken_digits(folder, model):
    """Real speech, in clips so short that padding would show in most of a clip's frames."""
    clips = codes.digits(20, 16000)
    codes.assert_equal(build(folder), clips, [alone(model, clip) for clip in clips])


def test_a_zero_padded_batch_has_other_codes(folder, model):
    """Zero-padded batches, on the same model: if they gave equal codes, the tests above would prove nothing."""
    clips = cut(range(4001, 8000, 307))
    padded = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
    padded = torch.nn.functional.pad(padded, (0, -padded.shape[1] % 320))
    with torch.inference_mode():
        batch = model.encode(padded[:, None]).audio_codes.mT
    differing = 0
    for row, clip in enumerate(clips):
        expected = alone(model, clip).codes
        differing += int((batch[row, : len(expected)] != expected).any(1).sum())
    assert differing >= 3


@pytest.mark.parametrize("name", MODELS)
def test_the_receptive_field_is_what_a_frame_looks_at(folders, name):
    """The samples on which a frame's latents depend, by the derivatives of the model's own encoder."""
    rate, _ = MODELS[name]
    encoder = DacModel.from_pretrained(folders[name]).eval().encoder
    waveform = torch.randn(1, 1, 20000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    latents = encoder(waveform)
    latents[0, :, latents.shape[2] // 2].square().sum().backward()
    seen = waveform.grad[0, 0].nonzero()
    assert int(seen.max() - seen.min()) + 1 == build(folders[name], rate).spec.frame_length


def test_chunks_with_the_receptive_field_as_overlap_are_exact(folder, model):
    extractor = build(folder, chunk=Chunk(seconds=0.8, overlap=5440 / 16000))
    assert extractor.chunks_are_exact
    clips = cut([50001, 12800, 12801, 31999])
    codes.assert_equal(extractor, clips, [alone(model, clip) for clip in clips])


def test_chunks_with_less_are_not(folder, model):
    extractor = build(folder, chunk=Chunk(seconds=0.8, overlap=640 / 16000))
    assert not extractor.chunks_are_exact
    (clip,) = cut([50001])
    assert not torch.equal(codes.extract(extractor, [clip])[0].long(), alone(model, clip).codes)


def test_fewer_codebooks_are_the_first_of_all(folder):
    clips = cut([5003])
    (every,), (three,) = (codes.extract(build(folder, **params), clips) for params in ({}, {"codebooks": 3}))
    assert every.shape[1] == 12
    assert torch.equal(three, every[:, :3])


def test_codes_are_stored_in_the_smallest_type(folder):
    assert Dac.stored_dtype(DacParams(weights=str(folder))) == build(folder).spec.dtype == "uint16"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"codebooks": 13}, r"params\.codebooks: 13, but .* has 12"),
        ({"sample_rate": 44100}, r"audio\.sample_rate: 44100; .* is for 16000"),
    ],
)
def test_what_the_model_has_not(folder, params, message):
    with pytest.raises(ConfigError, match=message):
        build(folder, **params)
