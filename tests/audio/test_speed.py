"""Copies at other speeds: what they hold, how long they are, and that all else takes them as any utterance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from augment_section import SPEEDS, config_of
from corpora import speech
from hypothesis import given
from hypothesis import strategies as st

from featcache.audio.resample import to_waveform
from featcache.config import AudioPolicy, load_config, packaged_configs
from featcache.errors import AudioError, ConfigError, Reason

RATE = 16000


def at_speed(samples, speed, source_rate=RATE, **policy):
    return to_waveform(samples[:, None].astype(np.float32), source_rate, AudioPolicy(**policy), speed=speed)


# The waveform


@pytest.mark.parametrize("speed", [0.5, 0.8, 0.9, 1.1, 1.25, 2.0])
@pytest.mark.parametrize("source_rate", [8000, 16000, 22050, 48000])
def test_it_is_the_recording_read_at_another_rate(source_rate, speed):
    """Tones below the band's end, in closed form: sample k is what the recording is at k * speed / rate seconds."""
    top = 0.7 * min(source_rate, RATE / speed) / 2
    frequencies = np.linspace(100, top, 7)

    def tones(seconds):
        return 0.1 * np.sin(2 * np.pi * frequencies[:, None] * seconds + np.arange(7)[:, None]).sum(0)

    made = at_speed(tones(np.arange(source_rate) / source_rate), speed, source_rate)
    expected = tones(np.arange(len(made)) * speed / RATE)
    inside = slice(RATE // 20, -RATE // 20)
    np.testing.assert_allclose(made[inside], expected[inside], atol=3e-4)


def test_it_is_what_torchaudio_gives():
    from torchaudio.functional import resample

    samples = speech(1.0, RATE)[:, 0]
    samples = np.convolve(samples, np.hanning(9) / np.hanning(9).sum(), "same")  # little near the band's end
    for speed, (source, target) in {0.9: (9, 10), 1.1: (11, 10)}.items():
        sinc = {"lowpass_filter_width": 128, "resampling_method": "sinc_interp_kaiser", "beta": 14.0}
        theirs = resample(torch.from_numpy(samples), source, target, rolloff=0.95, **sinc).numpy()
        ours = at_speed(samples, speed)
        assert abs(len(ours) - len(theirs)) <= 1
        inside = slice(1000, min(len(ours), len(theirs)) - 1000)
        difference = np.sqrt(np.mean((ours[inside] - theirs[inside]) ** 2) / np.mean(theirs[inside] ** 2))
        assert difference < 1e-3


@given(
    st.integers(1, 5000),
    st.sampled_from([0.5, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 2.0]),
    st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000]),
)
def test_its_length_is_the_recordings_by_the_speed(num_samples, speed, source_rate):
    made = at_speed(np.zeros(num_samples), speed, source_rate)
    assert len(made) == int(num_samples * RATE / (source_rate * speed) + 0.5 + 1e-9)


def test_rate_and_speed_are_one_step(monkeypatch):
    import soxr

    asked = []
    real = soxr.resample
    monkeypatch.setattr(soxr, "resample", lambda *args: asked.append(args[1:]) or real(*args))
    at_speed(speech(0.2, 8000)[:, 0], 0.9, 8000)
    assert asked == [(9, 20, "HQ")]


def test_where_speed_and_rate_cancel_out_samples_stay_what_they_are():
    samples = speech(0.3, 12800)[:, 0].astype(np.float32)
    assert at_speed(samples, 1.25, 12800).tobytes() == samples.tobytes()


def test_a_limit_is_on_how_long_the_copy_lasts():
    samples = np.zeros(RATE)
    assert len(at_speed(samples, 1.0, max_seconds=1.0)) == RATE
    assert len(at_speed(samples, 1.1, max_seconds=0.95)) < RATE
    with pytest.raises(AudioError) as caught:
        at_speed(samples, 0.9, max_seconds=1.05)
    assert caught.value.reason == Reason.TOO_LONG


# Configs


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        ([0.0, 1.0], "augment.speed: 0 is outside 0.5 to 2 times"),
        ([-1.0], "augment.speed: -1 is outside 0.5 to 2 times"),
        ([0.1, 3], "augment.speed: 0.1 is outside 0.5 to 2 times, 3 is outside 0.5 to 2 times"),
        ([0.9, 0.9], "augment.speed: 0.9 is there 2 times"),
        ([0.9123456789], "augment.speed: 0.9123456789 has more than six digits"),
        ([], "augment.speed: expected one number at least"),
        ([1.0], "augment: makes no copies"),
        (["fast"], "augment.speed"),
        ([float("nan")], "augment.speed"),
    ],
)
def test_speeds_that_make_no_sense_are_refused(speed, said):
    with pytest.raises(ConfigError) as caught:
        config_of({"speed": speed})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        config_of({"speed": [7], "pitch": 2}, audio={"sample_rate": 1})
    message = str(caught.value)
    assert all(path in message for path in ("augment.speed: 7", "augment.pitch", "audio.sample_rate"))


def test_speeds_need_a_resampler():
    with pytest.raises(
        ConfigError, match=r"augment\.speed: to change it is to resample, which audio\.resample forbids"
    ):
        config_of({"speed": [0.9]}, audio={"resample": "forbid"})


def test_the_fingerprint_knows_the_speeds_and_not_their_order():
    plain, some = config_of(None), config_of({"speed": SPEEDS})
    assert "augment" not in plain.resolved()
    assert config_of({"speed": SPEEDS[::-1]}).fingerprint() == some.fingerprint()
    assert len({one.fingerprint() for one in (plain, some, config_of({"speed": [0.9, 1.0]}))}) == 3


def test_packaged_configs_without_copies_have_no_trace_of_the_section():
    for name in ("fbank80", "mfcc13", "whisper-mel80"):
        assert "augment" not in load_config(name).resolved()
    assert load_config("fbank80-speed").resolved()["augment"] == {"speed": SPEEDS, "noise": None}
    assert "fbank80-speed" in packaged_configs()
