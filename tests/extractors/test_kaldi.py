import warnings

import kaldi_native_fbank as knf
import numpy as np
import pytest
import real_speech
import soxr
import torch
import torchaudio
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from featcache.config import load_config
from featcache.errors import ConfigError
from featcache.extractors import Clip, find
from featcache.extractors.kaldi import Fbank, FbankParams, KaldiParams, Mfcc, MfccParams

CPU = torch.device("cpu")
EPSILON = float(np.finfo(np.float32).eps)

FBANK_OPTIONS = [
    {},
    {"num_mel_bins": 23},
    {"num_mel_bins": 40, "low_freq": 0.0},
    {"low_freq": 60.0, "high_freq": 7600.0},
    {"high_freq": -400.0, "snip_edges": False},
    {"frame_length": 20.0, "frame_shift": 12.5},
    {"frame_length": 32.0, "frame_shift": 8.0},
    *(
        {"frame_length": 10.0, "frame_shift": 25.0, "num_mel_bins": 23, "snip_edges": snip}
        for snip in (True, False)
    ),
    *({"window_type": name} for name in ("hanning", "hamming", "rectangular", "blackman")),
    {"window_type": "blackman", "blackman_coeff": 0.3},
    *({"preemphasis_coefficient": value} for value in (0.0, 1.0)),
    {"remove_dc_offset": False, "window_type": "rectangular"},
    {"round_to_power_of_two": False},
    {"use_energy": True},
    *(
        {"use_energy": True, **more}
        for more in ({"raw_energy": False}, {"htk_compat": True}, {"energy_floor": 1e9})
    ),
    *(
        {"use_log_fbank": log, "use_power": power}
        for log, power in ((True, False), (False, True), (False, False))
    ),
    *({"waveform_scale": value} for value in (1.0, 1000.0)),
    {"waveform_scale": 1.0, "use_energy": True, "energy_floor": 1.0},
]

MFCC_OPTIONS = [  # and {}, at every rate
    {"use_energy": False},
    *({"htk_compat": True, "use_energy": use_energy} for use_energy in (True, False)),
    {"raw_energy": False},
    {"energy_floor": 1e9},
    *({"cepstral_lifter": value} for value in (0.0, 10.0)),
    *({"num_ceps": count} for count in (1, 23)),
    {"num_ceps": 40, "num_mel_bins": 40, "high_freq": -400.0, "use_energy": False},
    {"snip_edges": False, "window_type": "hamming"},
    {"waveform_scale": 1.0},
]


# Kaldi's fbank and MFCC three more times: in float64, slow and obvious; by torchaudio; by
# kaldi-native-fbank. The last two have defaults of their own, so everything is said to
# them.


def by_featcache(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """What is tested: `[frames, values]` of a waveform in [-1, 1]; the others give the
    same."""
    extractor = find(_name(params))(params, sample_rate, torch.device("cpu"))
    return extractor.extract([Clip("an id", torch.from_numpy(waveform))])[0].numpy()


def exact(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """In float64, one frame after the other, as the Kaldi sources read."""
    samples = waveform.astype(np.float64) * params.waveform_scale
    length = int(sample_rate * 0.001 * params.frame_length)
    shift = int(sample_rate * 0.001 * params.frame_shift)
    fft_length = length
    if params.round_to_power_of_two:
        fft_length = 1
        while fft_length < length:
            fft_length *= 2
    window = _window(params, length)
    bank = _mel_bank(params, fft_length, sample_rate)
    if params.snip_edges:
        firsts = [
            first for first in range(0, len(samples), shift) if first + length <= len(samples)
        ]
    else:
        firsts = [
            shift * t + shift // 2 - length // 2
            for t in range((len(samples) + shift // 2) // shift)
        ]
    if not firsts:
        return np.empty((0, 0))
    reflected = np.pad(samples, length, mode="symmetric")
    rows = []
    for first in firsts:
        frame = reflected[length + first :][:length]
        if params.remove_dc_offset:
            frame = frame - frame.mean()
        energy = np.sum(frame**2)
        previous = np.append(frame[0], frame[:-1])
        frame = (frame - params.preemphasis_coefficient * previous) * window
        if not params.raw_energy:
            energy = np.sum(frame**2)
        log_energy = np.log(max(energy, EPSILON, params.energy_floor))
        power = np.abs(np.fft.rfft(frame, fft_length)) ** 2
        rows.append(_values(params, bank, power, log_energy))
    return np.array(rows)


def by_torchaudio(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    function = getattr(torchaudio.compliance.kaldi, _name(params))
    samples = torch.from_numpy(waveform)[None] * params.waveform_scale
    options = params.model_dump(exclude={"waveform_scale"})
    return function(samples, sample_frequency=sample_rate, **options).numpy()


def by_native(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """kaldi-native-fbank: Kaldi's own code, without Kaldi."""
    is_fbank = isinstance(params, FbankParams)
    options = knf.FbankOptions() if is_fbank else knf.MfccOptions()
    frame, mel = options.frame_opts, options.mel_opts
    frame.samp_freq = sample_rate
    frame.frame_length_ms = params.frame_length
    frame.frame_shift_ms = params.frame_shift
    frame.preemph_coeff = params.preemphasis_coefficient
    mel.num_bins = params.num_mel_bins
    for part, same_names in [
        (
            frame,
            "dither remove_dc_offset window_type blackman_coeff snip_edges round_to_power_of_two",
        ),
        (mel, "low_freq high_freq"),
        (options, "use_energy raw_energy energy_floor htk_compat"),
        (options, "use_log_fbank use_power" if is_fbank else "num_ceps cepstral_lifter"),
    ]:
        for name in same_names.split():
            setattr(part, name, getattr(params, name))
    online = knf.OnlineFbank(options) if is_fbank else knf.OnlineMfcc(options)
    online.accept_waveform(sample_rate, (waveform * params.waveform_scale).tolist())
    online.input_finished()
    return np.array([online.get_frame(t) for t in range(online.num_frames_ready)])


def max_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def rms_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)))


def assert_as_close_as_they_are(waveform, sample_rate, params, max_factor=4, rms_factor=2):
    """Hold featcache to all three.

    The logarithm of a nearly empty bin magnifies the rounding of the Fourier transform
    before it, by how much depends on the audio: torchaudio and kaldi-native-fbank differ
    by 1e-5 here and by 1e-2 there. What they differ by on the same audio is the measure:
    featcache may be `max_factor` times that from either, and `rms_factor` times as far
    from the exact values as the worse of them. A wrong formula is off by orders of
    magnitude more. (An error's maximum over few frames is a matter of luck: over 250
    random cases it was up to 6 times theirs, their root mean square up to 2.1 times.)"""
    ours = by_featcache(waveform, sample_rate, params)
    theirs = by_torchaudio(waveform, sample_rate, params), by_native(waveform, sample_rate, params)
    truth = exact(waveform, sample_rate, params)
    assert ours.shape == truth.shape == theirs[0].shape == theirs[1].shape
    scale = max(1, np.abs(truth).max()) * EPSILON
    apart = max_error(*theirs) + 4 * scale
    assert max(max_error(ours, reference) for reference in theirs) <= max_factor * apart
    off = max(rms_error(reference, truth) for reference in theirs) + scale
    assert rms_error(ours, truth) <= rms_factor * off


def _name(params: KaldiParams) -> str:
    return "fbank" if isinstance(params, FbankParams) else "mfcc"


def _values(params, bank, power, log_energy):
    if isinstance(params, MfccParams):
        cepstra = _cosine_transform(params) @ np.log(np.maximum(bank @ power, EPSILON))
        if params.use_energy:
            cepstra[0] = log_energy
        elif params.htk_compat:
            cepstra[0] *= np.sqrt(2)
        return np.append(cepstra[1:], cepstra[0]) if params.htk_compat else cepstra
    energies = bank @ (power if params.use_power else np.sqrt(power))
    if params.use_log_fbank:
        energies = np.log(np.maximum(energies, EPSILON))
    if not params.use_energy:
        return energies
    return np.append(energies, log_energy) if params.htk_compat else np.append(log_energy, energies)


def _window(params, length):
    phase = 2 * np.pi * np.arange(length) / (length - 1)
    hann = 0.5 - 0.5 * np.cos(phase)
    a = params.blackman_coeff
    return {
        "povey": hann**0.85,
        "hanning": hann,
        "hamming": 0.54 - 0.46 * np.cos(phase),
        "rectangular": np.ones(length),
        "blackman": a - 0.5 * np.cos(phase) + (0.5 - a) * np.cos(2 * phase),
    }[params.window_type]


def _mel_bank(params, fft_length, sample_rate):
    def mel(hertz):
        return 1127 * np.log(1 + hertz / 700)

    high = params.high_freq if params.high_freq > 0 else sample_rate / 2 + params.high_freq
    step = (mel(high) - mel(params.low_freq)) / (params.num_mel_bins + 1)
    positions = mel(np.arange(fft_length // 2 + 1) * sample_rate / fft_length)
    peaks = [mel(params.low_freq) + (m + 1) * step for m in range(params.num_mel_bins)]
    return np.array([np.maximum(0, 1 - np.abs(positions - peak) / step) for peak in peaks])


def _cosine_transform(params):
    rows = []
    for k in range(params.num_ceps):
        row = np.cos(np.pi / params.num_mel_bins * k * (np.arange(params.num_mel_bins) + 0.5))
        row *= np.sqrt((1 if k == 0 else 2) / params.num_mel_bins)
        if params.cepstral_lifter:
            row *= 1 + params.cepstral_lifter / 2 * np.sin(np.pi * k / params.cepstral_lifter)
        rows.append(row)
    return np.array(rows)


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    """Noise that swells and has an offset, rounded to 16 bits."""
    rng = np.random.default_rng(seed)
    swelling = np.geomspace(1e-3, 0.3, num_samples) * rng.standard_normal(num_samples) + 0.02
    return (np.round(swelling.clip(-1, 1) * 32767) / 32768).astype(np.float32)


AT_EVERY_RATE = [
    (FbankParams, {"num_mel_bins": 40}),
    (FbankParams, {"num_mel_bins": 40, "snip_edges": False}),
]
AT_EVERY_RATE += [(MfccParams, {})]


@pytest.mark.parametrize(
    ("sample_rate", "params_class", "options"),
    [
        *((16000, FbankParams, options) for options in FBANK_OPTIONS),
        *((16000, MfccParams, options) for options in MFCC_OPTIONS),
        *(
            (sample_rate, *one)
            for sample_rate in (8000, 16000, 22050, 24000, 44100)
            for one in AT_EVERY_RATE
        ),
    ],
    ids=str,
)
def test_every_option_and_every_rate_is_kaldis(sample_rate, params_class, options):
    assert_as_close_as_they_are(noise(sample_rate), sample_rate, params_class(**options))


SHARED = {
    "low_freq": st.floats(0, 300),
    "high_freq": st.sampled_from([0.0, -400.0, 3800.0]),
    # Kaldi's milliseconds are float32: a length that is 1e-8 short of so many samples has
    # that many there.
    "frame_length": st.integers(15_000, 50_000).map(lambda microseconds: microseconds / 1000),
    "frame_shift": st.integers(4_000, 60_000).map(lambda microseconds: microseconds / 1000),
    "snip_edges": st.booleans(),
    "window_type": st.sampled_from(["povey", "hanning", "hamming", "rectangular", "blackman"]),
    "preemphasis_coefficient": st.floats(0, 1),
    "remove_dc_offset": st.booleans(),
    "use_energy": st.booleans(),
    "raw_energy": st.booleans(),
    "energy_floor": st.sampled_from([0.0, 1.0]),
    "htk_compat": st.booleans(),
    "waveform_scale": st.sampled_from([32768.0, 1.0]),
}
BINS = st.integers(4, 40)  # torchaudio refuses 3, which Kaldi allows
FBANK = st.builds(FbankParams, num_mel_bins=BINS, use_power=st.booleans(), **SHARED)
CEPSTRA = {"num_ceps": st.integers(1, 40), "cepstral_lifter": st.sampled_from([0.0, 22.0, 7.5])}
MFCC = st.builds(MfccParams, num_mel_bins=BINS, **CEPSTRA, **SHARED).filter(
    lambda p: p.num_ceps <= p.num_mel_bins
)


@pytest.mark.parametrize("params", [FBANK, MFCC], ids=["fbank", "mfcc"])
@settings(max_examples=150, derandomize=True)
@given(
    st.data(),
    st.sampled_from([8000, 16000, 22050, 24000, 44100]),
    st.floats(0.06, 0.3),
    st.integers(0, 2**32 - 1),
)
def test_any_options_are_kaldis(params, data, sample_rate, seconds, seed):
    waveform = noise(int(sample_rate * seconds), seed)
    assert_as_close_as_they_are(
        waveform, sample_rate, data.draw(params), max_factor=10, rms_factor=4
    )


@pytest.mark.parametrize(("num_mel_bins", "rms_factor"), [(23, 1.1), (80, 1.1), (None, 1.5)])
def test_real_speech_is_as_near_to_the_formula_as_others(num_mel_bins, rms_factor):
    """Without bins, those are cepstra, whose transform adds a rounding of its own."""
    for clips in real_speech.sentences(5), real_speech.digits(40):
        sample_rate = clips[0][1]
        params = MfccParams(use_energy=False)
        if num_mel_bins:
            params = FbankParams(
                num_mel_bins=min(num_mel_bins, sample_rate // 200), snip_edges=False
            )
        ours, truth, *others = (
            np.concatenate([function(waveform, sample_rate, params) for waveform, _ in clips])
            for function in (by_featcache, exact, by_torchaudio, by_native)
        )
        for other in others:
            assert max_error(ours, other) <= 2 * max_error(*others)
            assert rms_error(ours, truth) <= rms_factor * rms_error(other, truth)


@pytest.mark.parametrize("sample_rate", [8000, 16000, 22050, 44100])
@pytest.mark.parametrize("snip_edges", [True, False])
def test_frames_at_every_boundary(sample_rate, snip_edges):
    params = FbankParams(num_mel_bins=20, snip_edges=snip_edges)
    extractor = Fbank(params, sample_rate, CPU)
    length, shift = extractor.spec.frame_length, sample_rate // 100
    boundaries = [
        shift // 2,
        shift,
        shift + shift // 2,
        length // 2,
        length,
        length + shift,
        length + 2 * shift,
    ]
    waveform = noise(length + 3 * shift)
    for num_samples in sorted({at + off for at in boundaries for off in (-1, 0, 1)}):
        clip = waveform[:num_samples]
        there = by_native(clip, sample_rate, params)
        assert extractor.num_frames(num_samples) == len(there)
        if len(there):
            ours = extractor.extract([Clip("", torch.from_numpy(clip))])[0].numpy()
            assert ours.shape == there.shape
            # Clips shorter than a frame are reflected several times: torchaudio cannot do
            # that.
            assert max_error(ours, exact(clip, sample_rate, params)) < 2e-3
            assert max_error(ours, there) < 2e-3


def test_silence_is_the_floor():
    extractor = Fbank(FbankParams(use_energy=True), 16000, CPU)
    (features,) = extractor.extract([Clip("", torch.zeros(1000))])
    assert torch.equal(features, torch.full((4, 81), float(np.log(np.float32(EPSILON)))))


def test_dither_is_the_ids():
    """Dither is Gaussian, as strong as the parameter says, new in every frame, and
    another of another id; the same in every extraction, by `TestFbankDithered`."""
    extractor = Fbank(FbankParams(dither=2.0, waveform_scale=100.0), 16000, CPU)
    silence, other = Clip("a", torch.zeros(48000)), Clip("b", torch.zeros(48000))
    noise = extractor.frames(silence) * 100
    assert noise.shape == (298, 400)
    assert float(noise.std()) == pytest.approx(2.0, rel=0.01)
    assert abs(float(noise.mean())) < 0.02
    assert not torch.equal(noise[0, 160:], noise[1, :-160])
    first, second = extractor.extract([other, silence])
    assert not torch.equal(first, second)


def test_dither_comes_before_all_other_steps():
    waveform = torch.from_numpy(noise(16000))
    dithered = Fbank(FbankParams(dither=1.0), 16000, CPU)
    frames = dithered.frames(Clip("a", waveform))
    # the dithered frames, end to end
    plain = Fbank(FbankParams(frame_shift=25.0), 16000, CPU)
    expected = plain.extract([Clip("a", frames.reshape(-1))])[0]
    assert torch.equal(dithered.extract([Clip("a", waveform)])[0], expected)


@pytest.mark.parametrize(
    ("name", "params"), [("fbank80", FbankParams()), ("mfcc13", MfccParams(use_energy=False))]
)
def test_the_packaged_config_is_torchaudios_default(name, params):
    config = load_config(name)
    waveform = noise(16000)
    ours = by_featcache(waveform, config.audio.sample_rate, config.params)
    theirs = by_torchaudio(waveform, 16000, params)
    assert ours.shape == theirs.shape
    assert max_error(ours, theirs) < 1e-3
    assert (ours.shape[1], config.dtype) == {"fbank80": (80, "float16"), "mfcc13": (13, "float32")}[
        name
    ]


LHOTSE = load_config("fbank80-lhotse")


def by_lhotse(waveform: np.ndarray, name: str = "Fbank") -> np.ndarray:
    """Lhotse's features of a clip alone, with Lhotse's defaults."""
    with warnings.catch_warnings(action="ignore"):
        return getattr(pytest.importorskip("lhotse"), name)().extract(waveform, 16000)


@pytest.mark.parametrize(
    "num_samples", [140, 159, 239, 240, 399, 400, 401, 559, 560, 16000, 16079, 16080, 54321]
)
def test_lhotses_config_is_lhotses_fbank_and_its_mfcc_can_be_asked_for(num_samples):
    """They agree up to the rounding of two float32 computations, even at the edges.
    Lhotse takes no shorter clips."""
    waveform = noise(num_samples)
    ours, theirs = by_featcache(waveform, 16000, LHOTSE.params), by_lhotse(waveform)
    assert ours.shape == theirs.shape == ((num_samples + 80) // 160, 80)
    assert max_error(ours, theirs) < 2e-3
    assert rms_error(ours, theirs) < 1e-4
    params = MfccParams(waveform_scale=1.0, high_freq=-400.0, snip_edges=False, use_energy=False)
    ours, theirs = by_featcache(waveform, 16000, params), by_lhotse(waveform, "Mfcc")
    assert ours.shape == theirs.shape
    assert max_error(ours, theirs) < 5e-3


def test_lhotses_config_has_lhotses_floor():
    """For samples in [-1, 1], the same floor is far higher relative to the signal."""
    quiet = noise(16000) / 3000
    ours, theirs = by_featcache(quiet, 16000, LHOTSE.params), by_lhotse(quiet)
    assert 0.2 < np.mean(theirs == np.log(np.float32(EPSILON))) < 0.9
    assert max_error(ours, theirs) < 2e-3


def test_lhotses_config_on_real_speech():
    """As float16, they are closer to Lhotse's than Lhotse's own lilcom, which rounds to
    1/32."""
    for clips in real_speech.sentences(5), real_speech.digits(40):
        for waveform, sample_rate in clips:
            waveform = soxr.resample(waveform, sample_rate, 16000)
            ours, theirs = by_featcache(waveform, 16000, LHOTSE.params), by_lhotse(waveform)
            assert ours.shape == theirs.shape
            assert max_error(ours, theirs) < 1e-2
            assert rms_error(ours, theirs) < 1e-4
            truth = exact(waveform, 16000, LHOTSE.params)
            assert rms_error(ours, truth) <= 1.1 * rms_error(theirs, truth)
            assert max_error(ours.astype(LHOTSE.dtype), ours) <= 1 / 2**8


def test_spec():
    spec = Fbank(FbankParams(use_energy=True), 22050, CPU).spec
    assert (spec.item_shape, spec.dtype, spec.sample_rate) == ((81,), "float32", 22050)
    assert (spec.frame_length, spec.frame_rate) == (551, 22050 / 220)
    assert spec.units == "log mel energy (natural log), 16-bit scale"
    assert (
        Fbank(LHOTSE.params, 16000, CPU).spec.units == "log mel energy (natural log), scale [-1, 1]"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"high_freq": 8001.0},
            r"params.high_freq: 8001 Hz is above 8000 Hz, .* audio.sample_rate 16000",
        ),
        (
            {"low_freq": 4000.0, "high_freq": 4000.0},
            r"params.low_freq: 4000 Hz is not between 0 and 4000 Hz",
        ),
        ({"low_freq": 8000.0}, r"params.low_freq: 8000 Hz is not between 0 and 8000 Hz"),
        (
            {"high_freq": -8000.0},
            r"params.low_freq: 20 Hz is not between 0 and 0 Hz.*high_freq -8000",
        ),
        ({"frame_length": 0.1}, r"params.frame_length: 0.1 ms are 1 samples .* at least 2"),
        ({"frame_shift": 0.05}, r"params.frame_shift: 0.05 ms are 0 samples .* at least 1"),
        (
            {"frame_length": 25.1, "round_to_power_of_two": False},
            r"params.frame_length: 25.1 ms are 401 samples",
        ),
        (
            {"num_mel_bins": 128},
            r"params.num_mel_bins: 128 bins are too many: .* bin 3 \(from 0\); ask for",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_parameters_that_do_not_go_with_the_rate(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        Fbank(FbankParams(**options), 16000, CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("num_mel_bins", 2),
            ("frame_length", 0),
            ("frame_shift", -10),
            ("low_freq", -1),
            ("dither", -1),
        ],
        *[
            ("waveform_scale", 0),
            ("preemphasis_coefficient", 1.1),
            ("window_type", "hann"),
            ("mel_bins", 80),
        ],
        *[("frame_length", float("inf")), ("high_freq", float("nan"))],
    ],
)
def test_parameters_that_are_never_right(name, value):
    with pytest.raises(ValidationError):
        FbankParams(**{name: value})


def test_more_cepstra_than_filters():
    with pytest.raises(
        ConfigError, match=r"params.num_ceps: 24 cepstra need as many filters; num_mel_bins is 23"
    ):
        Mfcc(MfccParams(num_ceps=24), 16000, CPU)
