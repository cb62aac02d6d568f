import numpy as np
import pytest
import real_speech
import soundfile
import torch
import torchaudio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import WhisperFeatureExtractor

import featcache
from featcache.config import load_config
from featcache.errors import ConfigError
from featcache.extractors import Clip
from featcache.extractors.log_mel import LogMel, LogMelParams

CPU = torch.device("cpu")
HIFIGAN = load_config("hifigan-mel80").params

# Hz to mel and back: of HTK, and of Slaney's Auditory Toolbox, whose two pieces meet at 1
# kHz.
SCALES = {
    "htk": (lambda f: 2595 * np.log10(1 + f / 700), lambda m: 700 * (10 ** (m / 2595) - 1)),
    "slaney": (
        lambda f: 3 * f / 200 if f < 1000 else 15 + 27 * np.log(f / 1000) / np.log(6.4),
        lambda m: np.where(m < 15, 200 * m / 3, 1000 * 6.4 ** ((m - 15) / 27)),
    ),
}


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (np.geomspace(1e-4, 0.3, num_samples) * rng.standard_normal(num_samples)).astype(
        np.float32
    )


def extract(waveform: np.ndarray, params: LogMelParams, sample_rate: int) -> np.ndarray:
    return (
        LogMel(params, sample_rate, CPU).extract([Clip("", torch.from_numpy(waveform))])[0].numpy()
    )


def exact(waveform: np.ndarray, params: LogMelParams, sample_rate: int) -> np.ndarray:
    """A slow and obvious reference in float64, without Whisper's scaling: `[frames,
    num_mel_bins]`."""
    added = {"center": params.n_fft, "same": params.n_fft - params.hop_length, "none": 0}[
        params.padding
    ]
    samples = np.pad(waveform.astype(np.float64), added // 2, mode="reflect")
    length = params.win_length or params.n_fft
    window = np.zeros(params.n_fft)
    before = (params.n_fft - length) // 2
    window[before : before + length] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    high = params.high_freq if params.high_freq > 0 else sample_rate / 2 + params.high_freq
    to_mel, to_hertz = SCALES[params.mel_scale]
    corners = to_hertz(np.linspace(to_mel(params.low_freq), to_mel(high), params.num_mel_bins + 2))
    frequencies = np.arange(params.n_fft // 2 + 1) * sample_rate / params.n_fft
    bank = np.array(
        [np.interp(frequencies, corners[m : m + 3], [0, 1, 0]) for m in range(params.num_mel_bins)]
    ).T
    if params.mel_norm == "slaney":
        bank /= (corners[2:] - corners[:-2]) / 2
    rows = []
    for first in range(0, len(samples) - params.n_fft + 1, params.hop_length):
        power = (
            np.abs(np.fft.rfft(samples[first : first + params.n_fft] * window)) ** 2
            + params.power_offset
        )
        energies = np.maximum((power if params.power == 2 else np.sqrt(power)) @ bank, params.floor)
        rows.append(np.log(energies) if params.log == "natural" else np.log10(energies))
    return np.array(rows[:-1] if params.drop_last_frame else rows)


OPTIONS = [
    {},
    {"padding": "same"},
    {"padding": "same", "hop_length": 333},
    {"padding": "none"},
    {"drop_last_frame": False, "log": "natural"},
    {"win_length": 320},
    {"win_length": 301, "n_fft": 512},
    {"n_fft": 401, "hop_length": 100},
    {"hop_length": 500},
    *(
        {"power": power, "power_offset": offset}
        for power, offset in ((1, 0.0), (1, 1e-3), (2, 1e-3))
    ),
    {"num_mel_bins": 128},
    {"mel_scale": "htk", "mel_norm": "none", "num_mel_bins": 40},
    {"mel_norm": "none"},
    {"low_freq": 80.0, "high_freq": 7600.0},
    {"high_freq": -1000.0},
    {"floor": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_is_what_it_says(options):
    params = LogMelParams(**{"log": "log10", **options})
    waveform = noise(8000)
    ours, truth = extract(waveform, params, 16000), exact(waveform, params, 16000)
    assert ours.shape == truth.shape
    # A nearly empty bin's logarithm magnifies the rounding of a float32 Fourier transform.
    assert np.abs(ours - truth).max() < 1e-3
    assert np.sqrt(np.mean((ours - truth) ** 2)) < 1e-5


@pytest.mark.parametrize("num_mel_bins", [80, 128])
@pytest.mark.parametrize(
    ("config", "padding", "lengths"),
    [
        ("whisper-mel80", "do_not_pad", [201, 399, 400, 401, 16000, 16039, 16040, 16159]),
        ("whisper-mel80-30s", "max_length", [1, 200, 399, 16000, 16039, 16121, 479_801, 480_000]),
    ],
)
def test_whisper_is_transformers(num_mel_bins, config, padding, lengths):
    """Every frame of padded clips too: those of the clip, those after it that still see
    it, and those of silence.

    Both round in float32; transformers says that its own is within 1e-5 of OpenAI's."""
    params = load_config(config).params.model_copy(update={"num_mel_bins": num_mel_bins})
    for waveform in map(noise, lengths):
        ours, theirs = extract(waveform, params, 16000), whisper(waveform, num_mel_bins, padding)
        num_frames = 3000 if params.pad_to_seconds else len(waveform) // 160
        assert ours.shape == theirs.shape == (num_frames, num_mel_bins)
        assert np.abs(ours - theirs).max() < 2e-5


def test_whisper_on_real_speech():
    clips = [Clip("", torch.from_numpy(waveform)) for waveform, _ in real_speech.sentences(8)]
    # One batch, of clips of different levels: each is scaled to its own maximum.
    clips = [Clip("", clip.waveform * 10 ** -(i % 4)) for i, clip in enumerate(clips)]
    for clip, ours in zip(clips, LogMel(LogMelParams(), 16000, CPU).extract(clips), strict=True):
        theirs = whisper(clip.waveform.numpy(), 80)
        assert ours.shape == theirs.shape
        assert np.abs(ours.numpy() - theirs).max() < 2e-4
        assert np.sqrt(np.mean((ours.numpy() - theirs) ** 2)) < 2e-6


def whisper(waveform: np.ndarray, num_mel_bins: int, padding: str = "do_not_pad") -> np.ndarray:
    """By default, the clip is not padded to 30 s."""
    function = WhisperFeatureExtractor(feature_size=num_mel_bins)
    outputs = function(
        waveform, sampling_rate=16000, padding=padding, truncation=False, return_tensors="np"
    )
    return outputs["input_features"][0].T


def test_a_batch_of_padded_clips_is_what_whisper_takes(cli, scratch):
    """From files to `input_features`, rounded to float16. A clip of 30 s fits, and a
    longer one fails."""
    lengths = {
        "a": 40,
        "b": 250,
        "c": 16_000,
        "d": 100_123,
        "e": 480_000,
        "silent": 20_000,
        "long": 480_001,
    }
    waveforms = {id_: noise(length, seed) for seed, (id_, length) in enumerate(lengths.items())}
    waveforms["silent"][:] = 0
    waveforms["c"][8000:] = 0
    for id_, waveform in waveforms.items():
        soundfile.write(scratch / f"{id_}.wav", waveform, 16000, subtype="FLOAT")
    (scratch / "train.csv").write_text(
        "id,path\n" + "".join(f"{id_},{id_}.wav\n" for id_ in lengths)
    )
    cli(
        "extract", scratch / "train.csv", "-o", scratch / "features", "-c", "whisper-mel80-30s"
    ).with_code(3)
    failures = cli("info", scratch / "features", "--failures").out
    assert "too_long" in failures
    assert (
        "may last at most 30 s: see audio.max_seconds, params.chunk and "
        "params.pad_to_seconds" in failures
    )
    del waveforms["long"]
    batch, counts = featcache.open(scratch / "features").batch(list(waveforms))
    theirs = WhisperFeatureExtractor()(
        list(waveforms.values()), sampling_rate=16000, return_tensors="np"
    )
    assert counts.tolist() == [3000] * 6
    assert np.abs(np.swapaxes(np.asarray(batch), 1, 2) - theirs["input_features"]).max() < 1e-3
    assert (np.asarray(batch)[-1] == -1.5).all()


def test_frames_of_a_clip_alone_are_not_whispers_input():
    """As the packaged config says: the last frame and up to three after it see the clip's
    end; all others are equal."""
    for num_samples in (16000, 16020, 16100, 16130, 16159):
        waveform = noise(num_samples)
        alone, padded = (
            extract(waveform, LogMelParams(), 16000),
            whisper(waveform, 80, "max_length"),
        )
        inside = np.abs(alone - padded[: len(alone)]).max(axis=1) < 2e-5
        assert inside[:-1].all()
        assert inside[-1] == (num_samples % 160 >= 40)
        silence = padded[-1]
        behind = np.flatnonzero((padded[len(alone) :] != silence).any(axis=1))
        assert 1 <= behind[-1] + 1 <= 3


def test_hifigan_on_real_speech():
    """Features are as close to `exact` as those of HiFi-GAN's own few lines of torch."""
    for waveform, sample_rate in real_speech.sentences(3):
        ours = extract(waveform, HIFIGAN, sample_rate)
        theirs = hifigan(torch.from_numpy(waveform)).numpy()
        truth = exact(waveform, HIFIGAN, sample_rate)
        assert ours.shape == theirs.shape == truth.shape == (len(waveform) // 256, 80)
        assert np.abs(ours - truth).max() <= 2 * np.abs(theirs - truth).max()
        assert np.abs(ours - truth).max() < 1e-3


def hifigan(waveform: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(waveform[None, None], (384, 384), mode="reflect")[0]
    window = torch.hann_window(1024)
    spectrum = torch.stft(
        padded, 1024, hop_length=256, window=window, center=False, return_complex=True
    )
    magnitude = (spectrum.real**2 + spectrum.imag**2 + 1e-9).sqrt()
    bank = torchaudio.functional.melscale_fbanks(
        513, 0.0, 8000.0, 80, 22050, norm="slaney", mel_scale="slaney"
    )
    return (bank.T @ magnitude)[0].clamp(min=1e-5).log().T


@given(
    n_fft=st.integers(8, 600),
    hop_length=st.integers(1, 700),
    num_samples=st.integers(0, 3000),
    padding=st.sampled_from(["center", "same", "none"]),
    drop_last_frame=st.booleans(),
    padded_to=st.none() | st.integers(1, 2000),
)
def test_num_frames(n_fft, hop_length, num_samples, padding, drop_last_frame, padded_to):
    if padding == "same" and hop_length > n_fft:
        return
    options = {"n_fft": n_fft, "hop_length": hop_length, "padding": padding, "num_mel_bins": 1}
    if padded_to:
        options["pad_to_seconds"] = padded_to / 16000
    extractor = LogMel(LogMelParams(**options, drop_last_frame=drop_last_frame), 16000, CPU)
    given = num_samples
    num_samples = max(num_samples, padded_to or 0) if num_samples else 0
    added = {"center": n_fft // 2, "same": (n_fft - hop_length) // 2, "none": 0}[padding]
    num_frames = extractor.num_frames(given)
    if num_samples <= added:
        assert num_frames == 0
    else:
        firsts = [
            t
            for t in range(0, num_samples + 2 * added, hop_length)
            if t + n_fft <= num_samples + 2 * added
        ]
        assert num_frames == max(0, len(firsts) - drop_last_frame)
    if num_frames:
        features = extractor.extract([Clip("", torch.zeros(given))])[0]
        assert features.shape == (num_frames, 1)


def test_silence_is_the_floor():
    silence = np.zeros(16000, np.float32)
    assert np.all(extract(silence, LogMelParams(), 16000) == -1.5)
    assert np.all(extract(silence, LogMelParams(log="log10"), 16000) == -10)
    # HiFi-GAN's offset lifts silence, but not over its floor.
    assert np.all(extract(silence, HIFIGAN, 22050) == np.log(np.float32(1e-5)))


def test_spec():
    spec = LogMel(HIFIGAN, 22050, CPU).spec
    assert (spec.item_shape, spec.dtype, spec.sample_rate) == ((80,), "float32", 22050)
    assert (spec.frame_length, spec.frame_rate) == (1024, 22050 / 256)
    assert spec.units == "log mel magnitude (natural log)"
    assert LogMel(LogMelParams(win_length=320), 16000, CPU).spec.frame_length == 320


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"win_length": 401}, "params.win_length: 401 samples do not fit into n_fft, 400"),
        (
            {"padding": "same", "hop_length": 401},
            "params.padding: same needs n_fft, 400, to be at least hop_length, 401",
        ),
        ({"high_freq": 9000.0}, "params.high_freq: 9000 Hz is above 8000 Hz"),
        (
            {"low_freq": 300.0, "high_freq": 200.0},
            "params.low_freq: 300 Hz is not between 0 and 200 Hz",
        ),
        (
            {"num_mel_bins": 400},
            r"params.num_mel_bins: 400 bins are too many: .* in bin .* and \d+ more",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_parameters_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        LogMel(LogMelParams(**options), 16000, CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("pad_to_seconds", 0),
            ("n_fft", 1),
            ("hop_length", 0),
            ("floor", 0),
            ("power", 3),
            ("log", "ln"),
        ],
        ("mel_norm", None),
    ],
)
def test_parameters_that_are_never_right(name, value):
    with pytest.raises(ValidationError):
        LogMelParams(**{name: value})
