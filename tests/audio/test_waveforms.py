"""Samples become one mono waveform at the config's rate, or are refused."""

from __future__ import annotations

import importlib
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from audio_files import RATE, tone

from featcache.audio.resample import to_waveform
from featcache.config import AudioPolicy
from featcache.errors import AudioError, MissingDependencyError, Reason


def policy(**options) -> AudioPolicy:
    return AudioPolicy(**{"sample_rate": RATE, **options})


def test_mono_at_the_right_rate_is_passed_on_without_a_copy():
    samples = tone(0.1)
    for channel in ("mix", "first", 0):
        waveform = to_waveform(samples, RATE, policy(channel=channel))
        np.testing.assert_array_equal(waveform, samples[:, 0])
        assert waveform.shape == (1600,)
        assert np.shares_memory(waveform, samples)


@pytest.mark.parametrize("channels", [2, 3, 8, 17])
def test_a_mix_is_the_mean_of_the_channels_whatever_stands_around_it(channels):
    samples = np.random.default_rng(0).normal(size=(1000, channels)).astype(np.float32)
    mixed = to_waveform(samples, RATE, policy())
    np.testing.assert_allclose(mixed, samples.mean(axis=1, dtype=np.float64), atol=1e-6)
    assert mixed.dtype == np.float32
    assert mixed.flags.c_contiguous
    for first, stop in ((0, 1), (1, 8), (3, 700), (999, 1000)):
        np.testing.assert_array_equal(to_waveform(samples[first:stop], RATE, policy()), mixed[first:stop])


def test_a_channel_is_taken_as_it_is():
    samples = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    for channel, own, expected in (("first", None, 0), (2, None, 2), ("mix", 1, 1), (0, 2, 2)):
        waveform = to_waveform(samples, RATE, policy(channel=channel), own)
        np.testing.assert_array_equal(waveform, samples[:, expected])
        assert waveform.flags.c_contiguous


def test_a_channel_that_is_not_there():
    for configured, own in ((2, None), ("mix", 2), ("first", -1)):
        with pytest.raises(AudioError, match="has 2") as caught:
            to_waveform(tone(0.1, channels=2), RATE, policy(channel=configured), own)
        assert caught.value.reason == Reason.NO_SUCH_CHANNEL


def test_another_rate_may_be_refused():
    with pytest.raises(AudioError, match="44100 Hz") as caught:
        to_waveform(tone(0.1), 44100, policy(resample="forbid"))
    assert caught.value.reason == Reason.RATE_REFUSED
    assert len(to_waveform(tone(0.1), RATE, policy(resample="forbid"))) == 1600


def test_the_policy_refuses_what_is_too_long():
    with pytest.raises(AudioError, match=r"0\.1\b") as caught:
        to_waveform(tone(0.2), RATE, policy(max_seconds=0.1))
    assert caught.value.reason == Reason.TOO_LONG
    assert len(to_waveform(tone(0.1), RATE, policy(max_seconds=0.1))) == 1600


@pytest.mark.parametrize("resample", ["soxr_mq", "soxr_hq", "soxr_vhq"])
@pytest.mark.parametrize("source_rate", [8000, 22050, 44100, 48000])
def test_resampling_keeps_a_tone(source_rate, resample):
    waveform = to_waveform(tone(1.0, source_rate, hertz=1000.0), source_rate, policy(resample=resample))
    assert waveform.dtype == np.float32
    inside = slice(RATE // 10, -RATE // 10)  # the edges ring
    np.testing.assert_allclose(waveform[inside], tone(1.0, hertz=1000.0)[inside, 0], atol=2e-3)


@pytest.mark.parametrize(("source_rate", "rate"), [(22050, 16000), (48000, 16000), (16000, 22050), (8000, 24000)])
def test_the_length_of_what_is_resampled(source_rate, rate):
    for num_samples in (1, 2, 3, 50, 441, 12345):
        samples = np.ones((num_samples, 1), np.float32)
        expected = math.floor(num_samples * rate / source_rate + 0.5)
        assert len(to_waveform(samples, source_rate, policy(sample_rate=rate))) == expected


def test_resampling_gives_the_same_bits_in_any_thread():
    samples = tone(2.0, 22050, seed=0)
    expected = to_waveform(samples, 22050, policy())
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: to_waveform(samples, 22050, policy()), range(20)):
            np.testing.assert_array_equal(found, expected)


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.delitem(sys.modules, "featcache.audio.recording")
    with pytest.raises(MissingDependencyError, match=r"soundfile.*featcache\[extract\]"):
        importlib.import_module("featcache.audio.recording")
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(MissingDependencyError, match=r"soxr.*featcache\[extract\]"):
        to_waveform(tone(0.1), 8000, policy())
