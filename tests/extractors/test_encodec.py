"""EnCodec's codes are those of transformers' model, run on each clip alone."""

import codes
import pytest
import torch
from codec_checks import CodecChecks, cut
from pydantic import ValidationError
from transformers import EncodecConfig, EncodecModel
from transformers.models.encodec.modeling_encodec import EncodecEncoder

from featcache.errors import ConfigError
from featcache.extractors import Clip, ragged
from featcache.extractors.encodec import Encodec
from featcache.extractors.model import Chunk

MODEL, STEREO, HOP = "encodec_24khz", "encodec_48khz", 320
CHUNK, STRIDE = 48000, 47520


@pytest.fixture(scope="module")
def stereo_model(saved):
    return load(saved(STEREO))


def with_scales(model, waveform, bandwidth=24.0):
    """`EncodecModel.encode` of one clip, with the frames of its chunks one after another."""
    latents = []
    handle = model.encoder.register_forward_hook(
        lambda module, inputs, output: latents.append(output[0].T)
    )
    with torch.inference_mode():
        stereo = waveform.expand(1, model.config.audio_channels, -1)
        found = model.encode(stereo, bandwidth=bandwidth)
    handle.remove()
    chunks = [
        chunk[0].T[: len(latent)] for chunk, latent in zip(found.audio_codes, latents, strict=True)
    ]
    return codes.Reference(torch.cat(chunks), torch.cat(latents)), found.audio_scales


def alone(model, waveform, bandwidth=24.0):
    return with_scales(model, waveform, bandwidth)[0]


def batched(model, clips):
    return model.encode(clips[:, None], bandwidth=24.0).audio_codes[0].mT


class TestCodes(CodecChecks):
    codec, model_class = Encodec, EncodecModel
    rate, hop, strides = 24000, HOP, (2, 8, 40, 320)
    alone, batched = map(staticmethod, (alone, batched))

    @pytest.mark.parametrize(("bandwidth", "count"), [(1.5, 2), (6.0, 8), (24.0, 32)])
    def test_bandwidths(self, folder, model, bandwidth, count):
        (clip,) = cut([5003], 24000)
        for params in (
            {"bandwidth": bandwidth},
            {"codebooks": count},
            {"bandwidth": bandwidth, "codebooks": count},
        ):
            extractor = build(folder, **params)
            assert extractor.spec.codebook_sizes == (1024,) * count
            assert codes.assert_equal(extractor, [clip], [alone(model, clip, bandwidth)]) == 0


build, load = TestCodes.build, TestCodes.load

STEREO_BOUNDARIES = [
    1,
    2,
    319,
    320,
    321,
    5003,
    47519,
    47520,
    47521,
    47680,
    47999,
    48000,
    48001,
    95040,
    95201,
    100003,
]


@pytest.mark.parametrize("policy", codes.POLICIES)
def test_chunks_of_the_48_khz_model(saved, stereo_model, policy):
    extractor = build(saved(STEREO), 48000)
    extractor.chosen_batching = policy
    clips = cut(STEREO_BOUNDARIES, 48000)
    references, scales = zip(*(with_scales(stereo_model, clip) for clip in clips), strict=True)
    order = torch.randperm(len(clips), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        found = extractor.extract_rows([Clip(str(i), clips[i]) for i in order])
    features = [rows.features for rows in found]
    codes.assert_equal(
        extractor, [clips[i] for i in order], [references[i] for i in order], features
    )
    for i, rows in zip(order, found, strict=True):
        assert rows.side["scales"].dtype == torch.float32
        torch.testing.assert_close(rows.side["scales"], torch.cat(scales[i])[:, 0])


def test_lengths_that_the_48_khz_model_cannot_stack(saved, stereo_model):
    """The second of three chunks has 149 frames: the reference fails, and here each chunk
    has its own codes."""
    (clip,) = cut([2 * STRIDE + 100], 48000)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        alone(stereo_model, clip)
    (found,) = codes.extract(build(saved(STEREO), 48000), [clip])
    with torch.inference_mode():
        chunks = [
            clip[start : start + CHUNK].expand(1, 2, -1) for start in range(0, len(clip), STRIDE)
        ]
        expected = [stereo_model._encode_frame(chunk, 24.0)[0][0].T for chunk in chunks]
    assert [len(codes) for codes in expected] == [150, 149, 1]
    assert torch.equal(found.long(), torch.cat(expected))


def test_the_48_khz_model_has_chunks_of_its_own(saved, folder, monkeypatch):
    """Only one of them is in memory at once, so clips may have any length. How long they
    are is not asked of the model's config again, which takes longer than the rest."""
    extractor = build(saved(STEREO), 48000)
    with monkeypatch.context() as patch:
        patch.delattr(EncodecConfig, "chunk_length")
        assert extractor.num_frames(5 * STRIDE) == 749
        assert extractor.padded_length(CHUNK - 1) == CHUNK
    assert extractor.spec.frame_rate == pytest.approx(150 / 0.99)
    assert [side.name for side in extractor.spec.side] == ["scales"]
    assert (extractor.max_seconds, build(folder).max_seconds) == (None, 120)
    with pytest.raises(ConfigError, match=r"params\.chunk: .* has its own chunks, of 1 s"):
        build(saved(STEREO), 48000, chunk=Chunk(seconds=2, overlap=0.1))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"bandwidth": 5.0}, ConfigError, r"params\.bandwidth: 5; .* has 1\.5, 3, 6, 12, 24 kbps"),
        (
            {"bandwidth": 6.0, "codebooks": 4},
            ConfigError,
            r"params\.codebooks: 4, but a bandwidth of 6 kbps means 8",
        ),
        ({"bandwidth": 0}, ValidationError, "bandwidth"),
        ({"codebooks": 0}, ValidationError, "codebooks"),
    ],
)
def test_a_bandwidth_that_the_model_has_not_is_refused(folder, params, error, message):
    with pytest.raises(error, match=message):
        build(folder, **params)


@pytest.mark.parametrize("pad_mode", ["reflect", "constant", "replicate"])
@pytest.mark.parametrize("causal", [True, False])
def test_encoders_of_other_configs(pad_mode, causal):
    sizes = {
        "num_filters": 4,
        "hidden_size": 8,
        "upsampling_ratios": [5, 3],
        "num_residual_layers": 2,
    }
    norm_type = "weight_norm" if causal else "time_group_norm"
    options = {"use_causal_conv": causal, "use_conv_shortcut": causal, "norm_type": norm_type}
    config = EncodecConfig(**sizes, **options, pad_mode=pad_mode)
    torch.manual_seed(0)
    encoder = EncodecEncoder(config).eval().requires_grad_(False)
    lengths = torch.tensor([1, 2, 14, 15, 16, 31, 47])
    rows = torch.randn(len(lengths), 1, 47)
    x, ends = ragged.run(ragged.seanet_layers(encoder.layers), rows, lengths)
    for row, n in enumerate(lengths.tolist()):
        expected = encoder(rows[row : row + 1, :, :n])[0]
        assert expected.shape[1] == ends[row]
        codes.assert_close(x[row, :, : ends[row]], expected)
