"""`ssl` gives what transformers gives for a clip alone, whatever other clips are in the
batch."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import real_speech
import small_ssl
import soxr
import torch
import transformers
from devices import DEVICES
from hidden_states import assert_blind_behind_the_end, difference, extract, noise

from featcache.config import config_from
from featcache.errors import ConfigError
from featcache.extractors import wav2vec2
from featcache.extractors.ssl import SSL

CPU = torch.device("cpu")
MODELS = [*small_ssl.WAVEFORM_MODELS, *small_ssl.OTHER_MODELS]

TOLERANCE = {"w2v-bert": 2e-4, "w2v-bert-rotary": 2e-4, "w2v-bert-relative": 2e-4}
"""Parts of the largest value: 1e-5 for all others. Both sides round in float32; theirs
also the mean and variance by which w2v-BERT's mel energies are scaled."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return cache(lambda name: small_ssl.save(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def theirs(folder):
    """Runs a model by hand on a waveform: hidden states `[frames, layers, D]`, and output
    `[frames, D]`."""
    return cache(lambda name: Reference(folder(name)))


class Reference:
    """A model and its feature extractor, as transformers loads them."""

    def __init__(self, folder: Path) -> None:
        model = transformers.AutoModel.from_pretrained(folder).eval()
        self.model = model.encoder if model.config.model_type == "whisper" else model
        self.extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)

    @torch.inference_mode()
    def __call__(
        self, waveform: np.ndarray, dtype: torch.dtype = torch.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        inputs = self.extractor(waveform, sampling_rate=16000, return_tensors="pt")
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            outputs = self.model(**inputs, output_hidden_states=True)
        hidden = torch.stack([state.float() for state in outputs.hidden_states], dim=2)[0].numpy()
        if isinstance(self.extractor, transformers.WhisperFeatureExtractor):
            kept = slice(-(-len(waveform) // 320))
        elif isinstance(self.extractor, transformers.ParakeetFeatureExtractor):
            kept = outputs.attention_mask[0].bool().numpy()
        else:
            kept = (
                inputs["attention_mask"][0].bool().numpy()
                if "attention_mask" in inputs
                else slice(None)
            )
        return hidden[kept], outputs.last_hidden_state[0].float().numpy()[kept]


def build(folder: Path, **params) -> SSL:
    extractor = SSL(SSL.Params(weights=str(folder), **params), 16000, CPU)
    extractor.chosen_batching = "padded"
    return extractor


# Values


@pytest.mark.parametrize("name", MODELS)
def test_every_hidden_state_is_transformers(name, folder, theirs):
    everything = build(folder(name), layers=list(range(small_ssl.LAYERS + 1)))
    output = build(folder(name))
    # around where frames begin; the two longest share a padded length, and so does each
    # pair of short ones
    lengths = (400, 559, 560, 719, 720, 879, 880, 9001, 9280)
    waveforms = [noise(n) for n in lengths if everything.num_frames(n)]
    waveforms = [waveforms[i] for i in np.random.default_rng(0).permutation(len(waveforms))]
    found = zip(waveforms, extract(everything, waveforms), extract(output, waveforms), strict=True)
    for waveform, ours, ours_last in found:
        hidden, last = theirs(name)(waveform.numpy())
        assert len(ours) == everything.num_frames(len(waveform))
        for layer in range(small_ssl.LAYERS + 1):
            assert difference(ours[:, layer], hidden[:, layer]) < TOLERANCE.get(name, 1e-5)
        assert difference(ours_last, last) < TOLERANCE.get(name, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_num_frames_is_that_of_the_reference(name, folder, theirs):
    extractor = build(folder(name), layer=0)
    assert extractor.num_frames(0) == 0
    shortest = next(n for n in range(1000) if extractor.num_frames(n))
    others = {"parakeet": 320, "whisper": 1}
    assert shortest == others.get(name, 560 if name.startswith("w2v") else 400)
    for n in (*range(shortest, shortest + 2), *range(718, 722), *range(878, 882), 9599, 9600, 9601):
        assert extractor.num_frames(n) == len(theirs(name)(noise(n).numpy())[0])


@pytest.mark.parametrize("name", ["hubert", "wavlm-large", "w2v-bert", "whisper"])
def test_real_speech(name, folder, theirs):
    """The audio is from 8 kHz, so the upper bands are empty."""
    digits = [
        soxr.resample(waveform, rate, 16000)[:32000] for waveform, rate in real_speech.digits(6)
    ]
    for waveform, ours in zip(
        digits, extract(build(folder(name)), list(map(torch.from_numpy, digits))), strict=True
    ):
        assert difference(ours, theirs(name)(waveform)[1]) < TOLERANCE.get(name, 1e-5)


def mel_energies(
    waveform: np.ndarray, extractor: transformers.SeamlessM4TFeatureExtractor
) -> torch.Tensor:
    """The formula of w2v-BERT's front end, float32 `[frames, 160]`: the log energies have
    float32's places, all else is computed in float64."""
    mels = []
    for first in range(0, len(waveform) - 399, 160):
        frame = waveform[first : first + 400].astype(np.float64) * 32768
        frame -= frame.mean()
        frame = (
            np.concatenate([frame[:1] * (1 - 0.97), frame[1:] - 0.97 * frame[:-1]])
            * extractor.window
        )
        energies = np.abs(np.fft.rfft(frame, 512)) ** 2 @ extractor.mel_filters
        mels.append(np.log(np.maximum(energies, 2.0**-23)).astype(np.float32).astype(np.float64))
    scaled = (mels - np.mean(mels, 0)) / np.sqrt(np.var(mels, 0, ddof=1) + 1e-7)
    return torch.from_numpy(scaled[: len(scaled) // 2 * 2].reshape(-1, 160)).float()


def telephone(gain: float) -> np.ndarray:
    """A digit from 8 kHz, in 16 bits, that much quieter."""
    waveform, rate = real_speech.digits(6)[1]
    return soxr.resample(
        (np.round(waveform * gain * 32768) / 32768).astype(np.float32), rate, 16000
    )


def vowel(seconds: float) -> np.ndarray:
    """A voice of nearly 100 Hz: every 10 ms is nearly as the next."""
    times = np.arange(round(16000 * seconds)) / 16000
    return (
        sum(np.sin(2 * np.pi * 100.01 * k * times) / k for k in range(1, 70)).astype(np.float32) / 4
    )


@pytest.mark.parametrize(("make", "of"), [(telephone, 0.01), (telephone, 0.001), (vowel, 0.04)])
def test_where_a_mel_bin_hardly_changes_it_is_the_reference_that_rounds(make, of, folder, theirs):
    """The reference takes a bin's mean in float32. An error in its last place, 1e-6, is
    divided by the root of the bin's variance plus 1e-7. Where a band is empty, or two
    frames are all that there is, that makes 3e-3 of it."""
    waveform, reference, encoder = make(of), theirs("w2v-bert"), build(folder("w2v-bert"))._encoder
    exact = mel_energies(waveform, reference.extractor)
    given = reference.extractor(waveform, sampling_rate=16000, return_tensors="pt")[
        "input_features"
    ][0, : len(exact)]
    ours = encoder.mel_energies(torch.from_numpy(waveform)[None], torch.tensor([len(waveform)]))[0]
    assert float((ours - exact).abs().max()) < 1e-6
    assert float((given - exact).abs().max()) > 1e-3
    with torch.inference_mode():
        states = reference.model(torch.stack([exact, ours, given])).last_hidden_state
    rms = states[0].square().mean().sqrt()
    of_ours, of_theirs = (states[1:] - states[0]).abs().amax((1, 2)) / rms
    assert of_ours < 1e-5 < 1e-3 < of_theirs


@pytest.mark.parametrize("name", MODELS)
def test_what_is_behind_the_end_changes_no_bit(name, folder):
    assert_blind_behind_the_end(
        build(folder(name), layers=[0, small_ssl.LAYERS]), [9280, 880, 9001, 4000]
    )


@pytest.mark.parametrize("groups", [1, 4, 24])
def test_the_group_norm_on_a_gpu_is_that_of_the_row_alone(groups):
    """GPUs have their own function for it, which runs on any device."""
    norm = torch.nn.GroupNorm(groups, 24)
    small_ssl.draw(norm)
    steps = 0.1 * torch.randn(3, 24, 500, generator=torch.Generator().manual_seed(0)) + 0.5
    num_steps = torch.tensor([500, 7, 123])
    with torch.inference_mode():
        on_cpu = wav2vec2.group_norm(norm, steps.clone(), num_steps)
        on_device = wav2vec2.group_norm_on_device(norm, steps.clone(), num_steps)
        for row, n in enumerate(num_steps.tolist()):
            alone = norm(steps[row : row + 1, :, :n])[0]
            assert torch.equal(on_cpu[row, :, :n], alone)
            assert (on_device[row, :, :n] - alone).abs().max() < 2e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("groups", "width", "rows", "frames"), [(16, 128, 5, 49), (4, 19, 3, 8), (1, 4, 2, 1)]
)
def test_the_wide_convolution_on_a_gpu_is_that_of_the_row_alone(
    groups, width, rows, frames, device
):
    generator = torch.Generator().manual_seed(0)
    conv = torch.nn.Conv1d(48, 96, width, padding=width // 2, groups=groups).to(device)
    x = torch.randn(rows, frames, 48, generator=generator).to(device).mT
    with torch.inference_mode():
        expected = conv.double()(x.double())
        wide = wav2vec2.WideConvolution(conv.float())
        found = wide(x)
        moved = wide(x.roll(1, 0)).roll(-1, 0)
    assert found.shape == expected.shape
    assert (found - expected).norm() < 1e-6 * expected.norm()
    assert torch.equal(found, moved)


@pytest.mark.parametrize("frames", [1, 2, 7, 15, 16, 17, 21, 31, 33])
def test_gates_are_the_same_wherever_a_row_is(frames, folder):
    """If WavLM's frames do not fill whole vectors, torch computes the last frames of the
    last row in another way."""
    gates = build(folder("wavlm"))._encoder.layers[0].attention._gates
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        row = torch.randn(1, frames, small_ssl.SIZE, generator=generator)
        with torch.inference_mode():
            found = gates(row.expand(9, -1, -1).contiguous())
        assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
@pytest.mark.parametrize("name", ["hubert", "hubert-large", "wavlm", "w2v-bert", "whisper"])
def test_lower_precision_is_as_near_as_theirs(name, precision, dtype, folder, theirs):
    """It is close to float32. How close depends on the processor: one with its own bf16
    is ten times as far off."""
    waveform = noise(9000).numpy()
    ours = extract(build(folder(name), precision=precision), [noise(9000), noise(16000)])
    assert ours[0].dtype == np.float32
    exact, lower = theirs(name)(waveform)[1], theirs(name)(waveform, dtype)[1]
    assert 1e-5 < difference(ours[0], exact) < 2 * difference(lower, exact) < 2


def test_normalisation_is_what_the_folder_says(tmp_path, folder):
    """A model that begins with a group norm undoes it anyway, so it is left out."""
    as_it_is = small_ssl.save("hubert-large", tmp_path / "hubert", do_normalize=False)
    waveform = noise(9000)
    normalized = (waveform - waveform.mean()) / (waveform.var(correction=0) + 1e-7).sqrt()
    expected = extract(build(folder("hubert-large")), [waveform])[0]
    found = extract(build(as_it_is), [waveform, normalized])
    assert difference(found[0], expected) > 1e-2
    assert difference(found[1], expected) < 1e-5
    (as_it_is / "preprocessor_config.json").unlink()
    assert np.array_equal(extract(build(as_it_is), [waveform])[0], found[0])
    assert "normalised" in build(folder("hubert")).spec.units
    assert "normalised" not in build(as_it_is).spec.units


# Layers


@pytest.mark.parametrize("name", ["hubert-large", "wavlm", "w2v-bert", "whisper"])
def test_one_layer_several_and_their_sum(name, folder):
    waveforms = [noise(9001), noise(4000)]
    everything = extract(build(folder(name), layers=[0, 1, 2, 3]), waveforms)[0]
    single = build(folder(name), layer=2)
    assert single.spec.item_shape == (small_ssl.SIZE,)
    assert np.array_equal(extract(single, waveforms)[0], everything[:, 2])
    some = build(folder(name), layers=[3, 1])
    assert some.spec.item_shape == (2, small_ssl.SIZE)
    assert np.array_equal(extract(some, waveforms)[0], everything[:, [3, 1]])
    weighted = build(folder(name), layers=[3, 1], weights_per_layer=[0.25, -2.0])
    assert weighted.spec.item_shape == (small_ssl.SIZE,)
    assert (
        difference(extract(weighted, waveforms)[0], 0.25 * everything[:, 3] - 2 * everything[:, 1])
        < 1e-6
    )
    no_layers, output = build(folder(name), weights_per_layer=[]), build(folder(name))
    assert no_layers.spec == output.spec
    assert np.array_equal(extract(no_layers, waveforms)[0], extract(output, waveforms)[0])


@pytest.mark.parametrize("name", ["hubert", "wavlm-large", "w2v-bert", "whisper"])
def test_layers_above_the_highest_are_not_there(name, folder):
    assert len(build(folder(name), layers=[1, 0])._encoder.layers) == 1
    assert len(build(folder(name), layer=0)._encoder.layers) == 0
    assert len(build(folder(name))._encoder.layers) == small_ssl.LAYERS


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"layer": 4}, "params.layer: 4; the model has layers 0 to 3"),
        ({"layers": [0, 7]}, "params.layers: 7; the model has layers 0 to 3"),
        ({"layer": -1}, "params.layer: should be greater than or equal to 0"),
        ({"layer": 1, "layers": [2]}, "params.layers: give layer or layers, not both"),
        ({"layers": []}, "params.layers: give one or more different numbers, none below 0"),
        ({"layers": [1, 1]}, "one or more different numbers"),
        ({"weights_per_layer": [1.0]}, "params.weights_per_layer: 1 given for 0 layers"),
        ({"layers": [1, 2], "weights_per_layer": [1.0]}, "give one for each layer"),
        (
            {"chunk": {"seconds": 4, "overlap": 0}},
            "params.chunk.overlap: 0; the model needs 0.02 s",
        ),
    ],
    ids=str,
)
def test_params_that_do_not_hold_together(params, message, folder):
    named = {"weights": str(folder("hubert")), **params}
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        config_from({"name": "a", "extractor": "ssl", "params": named}).build(CPU)
    assert "\n" not in str(raised.value)


def test_a_model_that_is_not_known_and_one_of_another_rate(tmp_path, folder):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    known = "data2vec-audio, hubert, parakeet_encoder"
    with pytest.raises(ConfigError, match=f"model_type 'bert'; ssl knows {known}"):
        build(tmp_path)
    with pytest.raises(ConfigError, match=r"audio.sample_rate: 8000; .* is for 16000"):
        SSL(SSL.Params(weights=str(folder("hubert"))), 8000, CPU)


def test_the_encoder_of_a_parakeet_with_a_head(folder, tmp_path):
    """Published models are for CTC or transducers; the encoder is a part of them."""
    path = small_ssl.save("parakeet-ctc", tmp_path)
    model = transformers.ParakeetForCTC.from_pretrained(path).eval().encoder
    prepare = transformers.ParakeetFeatureExtractor()
    waveforms = [noise(n) for n in (320, 1279, 1280, 1281, 16000, 32000)]
    for waveform, found in zip(waveforms, extract(build(path), waveforms), strict=True):
        inputs = prepare(waveform.numpy(), sampling_rate=16000, return_tensors="pt")
        with torch.inference_mode():
            expected = model(**inputs)
        inside = expected.attention_mask[0].bool()
        assert difference(found, expected.last_hidden_state[0][inside].numpy()) < 1e-5
        assert len(found) == -(-(len(waveform) // 160) // 8)


# Long clips


def test_whisper_takes_so_much_and_no_more(folder):
    assert build(folder("whisper")).max_seconds == 2.0
    with pytest.raises(
        ConfigError, match=r"params.chunk.seconds: 3; the model takes 2 s at a time"
    ):
        build(folder("whisper"), chunk={"seconds": 3, "overlap": 0})
    chunked = build(folder("whisper"), chunk={"seconds": 2, "overlap": 0})
    assert chunked.max_seconds is None
    waveform = noise(70001)
    parts = extract(build(folder("whisper")), list(waveform.split(32000)))
    assert np.array_equal(extract(chunked, [waveform])[0], np.concatenate(parts))


@pytest.mark.parametrize("name", ["hubert", "w2v-bert"])
def test_chunks_are_the_models_own_frames(name, folder):
    """Each frame is what the model gives for its chunk alone; no frame is missing,
    however short the last chunk is."""
    chunked = build(folder(name), chunk={"seconds": 0.4, "overlap": 0.08})
    whole = build(folder(name))
    for n in (6401, 11520, 11521, 12000, 16641):
        waveform = noise(n)
        found = extract(chunked, [waveform])[0]
        assert len(found) == whole.num_frames(n)
        second = extract(whole, [waveform[5120:11520]])[0]
        assert difference(found[18:20], second[2:4]) < 1e-5
