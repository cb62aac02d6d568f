import kaldi_reference as reference
import numpy as np
import pytest
import real_speech
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcache.config import load_config
from featcache.errors import ConfigError
from featcache.extractors.kaldi import Mfcc, MfccParams

CPU = torch.device("cpu")

OPTIONS = [
    {},
    {"use_energy": False},
    {"htk_compat": True},
    {"htk_compat": True, "use_energy": False},
    {"raw_energy": False},
    {"energy_floor": 1e9},
    {"cepstral_lifter": 0.0},
    {"cepstral_lifter": 10.0},
    {"num_ceps": 23},
    {"num_ceps": 1},
    {"num_ceps": 40, "num_mel_bins": 40, "high_freq": -400.0, "use_energy": False},
    {"snip_edges": False, "window_type": "hamming"},
    {"waveform_scale": 1.0},
]


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (np.geomspace(1e-3, 0.2, num_samples) * rng.standard_normal(num_samples)).astype(np.float32)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_is_kaldis(options):
    reference.assert_as_close_as_they_are(noise(16000), 16000, MfccParams(**options))


@pytest.mark.parametrize("sample_rate", [8000, 16000, 22050, 24000, 44100])
def test_every_rate_is_kaldis(sample_rate):
    reference.assert_as_close_as_they_are(noise(sample_rate), sample_rate, MfccParams())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    sample_rate=st.sampled_from([8000, 16000, 22050]),
    seed=st.integers(0, 2**32 - 1),
    bins_and_ceps=st.integers(4, 40).flatmap(lambda bins: st.tuples(st.just(bins), st.integers(1, bins))),
    options=st.fixed_dictionaries(
        {
            "cepstral_lifter": st.sampled_from([0.0, 22.0, 7.5]),
            "use_energy": st.booleans(),
            "raw_energy": st.booleans(),
            "htk_compat": st.booleans(),
            "snip_edges": st.booleans(),
        }
    ),
)
def test_any_options_are_kaldis(sample_rate, seed, bins_and_ceps, options):
    num_mel_bins, num_ceps = bins_and_ceps
    params = MfccParams(num_mel_bins=num_mel_bins, num_ceps=num_ceps, **options)
    waveform = noise(sample_rate // 5, seed)
    reference.assert_as_close_as_they_are(waveform, sample_rate, params, max_factor=10, rms_factor=4)


def test_real_speech_is_as_near_to_the_formula_as_others():
    for clips in real_speech.sentences(3), real_speech.digits(40):
        sample_rate = clips[0][1]
        params = MfccParams(use_energy=False)
        ours, audio, native, truth = (
            np.concatenate([function(waveform, sample_rate, params) for waveform, _ in clips])
            for function in (
                reference.by_featcache,
                reference.by_torchaudio,
                reference.by_native,
                reference.exact,
            )
        )
        for other in audio, native:
            assert reference.max_error(ours, other) <= 2 * reference.max_error(audio, native)
            assert reference.rms_error(ours, truth) <= 1.5 * reference.rms_error(other, truth)


def test_the_packaged_config_is_torchaudios_default():
    config = load_config("mfcc13")
    waveform = noise(16000)
    ours = reference.by_featcache(waveform, config.audio.sample_rate, config.params)
    theirs = reference.by_torchaudio(waveform, 16000, MfccParams(use_energy=False))
    assert ours.shape == (98, 13)
    assert reference.max_error(ours, theirs) < 1e-3
    assert config.params.model_fields_set == set(MfccParams.model_fields), "it shows every parameter"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_samples", [140, 400, 16079, 54321])
def test_lhotses_mfcc(num_samples):
    """With Lhotse's defaults, they agree up to rounding."""
    lhotse = pytest.importorskip("lhotse")
    waveform = noise(num_samples)
    params = MfccParams(waveform_scale=1.0, high_freq=-400.0, snip_edges=False, use_energy=False)
    ours, theirs = reference.by_featcache(waveform, 16000, params), lhotse.Mfcc().extract(waveform, 16000)
    assert ours.shape == theirs.shape
    assert reference.max_error(ours, theirs) < 5e-3


def test_more_cepstra_than_filters():
    with pytest.raises(ConfigError, match=r"params.num_ceps: 24 cepstra need as many filters; num_mel_bins is 23"):
        Mfcc(MfccParams(num_ceps=24), 16000, CPU)
