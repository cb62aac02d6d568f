"""The statistics of waveforms, held to numpy's and to what was put into the waveform."""

import numpy as np
import pytest
import soxr
import torch
from hypothesis import given
from hypothesis import strategies as st

from featcache.extractors.audio_stats import FLOOR, STATISTICS, AudioStats, AudioStatsParams
from featcache.extractors.base import Clip

RATE = 16_000


def statistics(waveform: np.ndarray, rate: int = RATE) -> dict[str, float]:
    extractor = AudioStats(AudioStatsParams(), rate, torch.device("cpu"))
    vector = extractor.vector(Clip("a", torch.from_numpy(waveform.astype(np.float32))))
    return dict(zip(STATISTICS, vector.tolist(), strict=True))


def noise(seconds: float, level: float = 0.1, rate: int = RATE) -> np.ndarray:
    random = np.random.default_rng(7)
    return (level * random.standard_normal(round(seconds * rate))).clip(-0.9, 0.9)


def test_levels_are_those_of_numpy():
    waveform = noise(1.5) + 0.02
    found = statistics(waveform)
    assert found["level"] == pytest.approx(10 * np.log10(np.mean(waveform**2)), abs=1e-3)
    assert found["peak"] == pytest.approx(20 * np.log10(np.abs(waveform).max()), abs=1e-3)
    assert found["dc"] == pytest.approx(waveform.mean(), abs=1e-6)
    assert (found["clipped"], found["silence"]) == (0, 0)


@given(st.floats(0.05, 0.9))
def test_the_share_of_clipped_samples_is_counted(share):
    waveform = noise(0.5)
    at = slice(0, round(share * len(waveform)))
    waveform[at] = np.sign(waveform[at]) * 32767 / 32768
    assert statistics(waveform)["clipped"] == pytest.approx(at.stop / len(waveform), abs=1e-6)


@given(st.integers(0, 8000), st.integers(0, 8000))
def test_digital_silence_at_both_ends_is_measured(before, after):
    ends = (np.zeros(before), np.full(after, 0.9 / 32768))
    found = statistics(np.concatenate([ends[0], np.full(1600, 0.1), ends[1]]))
    assert found["silent_start"] == pytest.approx(before / RATE)
    assert found["silent_end"] == pytest.approx(after / RATE)


def test_silence_has_the_lowest_level_and_no_bandwidth():
    found = statistics(np.zeros(1000))
    assert (found["level"], found["peak"], found["bandwidth"]) == (FLOOR, FLOOR, 0)
    assert (found["silence"], found["silent_start"], found["silent_end"]) == (1, 0.0625, 0)


def test_the_share_of_silence_is_that_of_quiet_windows():
    quiet = noise(1, level=3e-4)
    assert statistics(np.concatenate([noise(3), quiet]))["silence"] == pytest.approx(0.25)


@pytest.mark.parametrize("num_samples", [1, 7, RATE // 50 - 1, RATE // 50, RATE // 50 + 1, RATE])
@pytest.mark.parametrize("constant", [0.0, 1e-6, 100 / 32768, 1 / 3, -1.0])
def test_a_constant_has_no_bandwidth(constant, num_samples):
    found = statistics(np.full(num_samples, constant))
    assert found["bandwidth"] == 0
    assert found["dc"] == pytest.approx(constant)


@pytest.mark.parametrize("place", [0, 1, 7999, 8000, 8001, RATE - 1])
def test_a_click_has_all_frequencies_wherever_it_is(place):
    waveform = np.zeros(RATE)
    waveform[place] = 1
    assert statistics(waveform)["bandwidth"] == RATE / 2


@pytest.mark.parametrize("num_samples", [RATE, RATE + 1, RATE + RATE // 100, 2 * RATE - 1])
@pytest.mark.parametrize("offset", [0, 0.5])
def test_a_tone_has_its_own_bandwidth_wherever_it_ends(num_samples, offset):
    tone = 0.1 * np.sin(2 * np.pi * 1000 * np.arange(num_samples) / RATE)
    assert statistics(tone + offset)["bandwidth"] == pytest.approx(1000, abs=150)


@pytest.mark.parametrize("recorded", [8000, 12_000])
def test_upsampled_audio_has_the_bandwidth_of_its_first_rate(recorded):
    waveform = soxr.resample(noise(2, rate=recorded), recorded, RATE)
    # The edge of the resampler's filter is not steep.
    assert statistics(waveform)["bandwidth"] == pytest.approx(recorded / 2, abs=300)
    assert statistics(noise(2))["bandwidth"] == RATE / 2


@pytest.mark.parametrize("num_samples", [1, 2, 319, 320, 321])
def test_any_clip_has_finite_statistics(num_samples):
    assert np.isfinite([*statistics(np.full(num_samples, 0.5)).values()]).all()
