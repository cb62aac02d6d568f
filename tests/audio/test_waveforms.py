"""Samples become one mono waveform at the config's rate and a copy's speed, or are
refused."""

import importlib
import re
import sys
from fractions import Fraction

import numpy as np
import pytest
from audio_files import RATE, tone, write_audio
from augment_section import SPEEDS, config_of, refusal
from corpora import speech
from hypothesis import example, given
from hypothesis import strategies as st

from featcache.audio.decode import Cut, decode
from featcache.audio.resample import WaveformBuilder, to_waveform
from featcache.config import AudioPolicy
from featcache.errors import AudioError, MissingDependencyError, Reason, install_hint


def test_mono_at_the_right_rate_is_passed_on_without_a_copy():
    samples = tone(0.1)
    for channel in ("mix", "first", 0):
        waveform = to_waveform(samples, RATE, AudioPolicy(channel=channel))
        np.testing.assert_array_equal(waveform, samples[:, 0])
        assert waveform.shape == (1600,)
        assert np.shares_memory(waveform, samples)


@pytest.mark.parametrize("channels", [2, 3, 8, 17])
def test_a_mix_is_the_mean_of_the_channels_whatever_stands_around_it(channels):
    samples = np.random.default_rng(0).normal(size=(1000, channels)).astype(np.float32)
    mixed = to_waveform(samples, RATE, AudioPolicy())
    np.testing.assert_allclose(mixed, samples.mean(axis=1, dtype=np.float64), atol=1e-6)
    assert mixed.dtype == np.float32
    assert mixed.flags.c_contiguous
    for first, stop in ((0, 1), (1, 8), (3, 700), (999, 1000)):
        np.testing.assert_array_equal(
            to_waveform(samples[first:stop], RATE, AudioPolicy()), mixed[first:stop]
        )


def test_a_channel_is_taken_as_it_is():
    samples = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    for channel, own, expected in (("first", None, 0), (2, None, 2), ("mix", 1, 1), (0, 2, 2)):
        waveform = to_waveform(samples, RATE, AudioPolicy(channel=channel), own)
        np.testing.assert_array_equal(waveform, samples[:, expected])
        assert waveform.flags.c_contiguous


@pytest.mark.parametrize(
    ("options", "channel", "reason", "words"),
    [
        ({"channel": 2}, None, Reason.NO_SUCH_CHANNEL, "has 2"),
        ({}, 2, Reason.NO_SUCH_CHANNEL, "has 2"),
        ({"channel": "first"}, -1, Reason.NO_SUCH_CHANNEL, "has 2"),
        ({"resample": "forbid", "sample_rate": 44100}, None, Reason.RATE_REFUSED, "16000 Hz"),
    ],
)
def test_what_the_policy_refuses(options, channel, reason, words):
    with pytest.raises(AudioError, match=words) as caught:
        to_waveform(tone(0.2, channels=2), RATE, AudioPolicy(**options), channel)
    assert caught.value.reason == reason
    assert len(to_waveform(tone(0.1), RATE, AudioPolicy(resample="forbid"))) == 1600


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    extra = re.escape(install_hint("extract"))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.delitem(sys.modules, "featcache.audio.recording")
    with pytest.raises(MissingDependencyError, match=f"soundfile.*{extra}"):
        importlib.import_module("featcache.audio.recording")
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(MissingDependencyError, match=f"soxr.*{extra}"):
        to_waveform(tone(0.1), 8000, AudioPolicy())


# Block by block


@pytest.mark.parametrize("resample", ["soxr_mq", "soxr_hq", "soxr_vhq"])
@pytest.mark.parametrize("rate", [8000, RATE, 22050, 44100, 48000, 192000, 37801])
@pytest.mark.parametrize("speed", [1, 0.9])
def test_blocks_of_any_size_give_the_bits_of_the_whole(resample, rate, speed):
    policy = AudioPolicy(resample=resample)
    rng = np.random.default_rng(rate)
    samples = rng.normal(scale=0.2, size=(100_003, 2)).astype(np.float32)
    whole = to_waveform(samples, rate, policy, speed=speed)
    for cuts in ([1], [65536], [0, 1, 2, 50_000], rng.integers(0, len(samples), 30).tolist()):
        for expected in (0, len(samples) // 2, len(samples)):
            builder = WaveformBuilder(rate, policy, speed=speed, num_samples=expected)
            for block in np.split(samples, sorted(cuts)):
                builder.add(block)
            waveform = builder.finish()
            assert waveform.tobytes() == whole.tobytes()
            assert waveform.flags.c_contiguous


@pytest.mark.parametrize(
    ("kind", "channels", "seconds"),
    [
        ("flac-16", 8, 24),
        ("wav-16", 8, 24),
        ("wav-24", 8, 24),
        ("vorbis", 2, 48),
        ("mp3-constant", 2, 48),
    ],
)
def test_a_clip_takes_the_memory_of_its_waveform_and_of_some_blocks(
    tmp_path, traced, kind, channels, seconds
):
    """However many channels and samples its file has."""
    rate, blocks = 48000, 12e6
    path = write_audio(tmp_path / "a", np.zeros((seconds * rate, channels), np.float32), rate, kind)

    def collect(_number, rate, num_samples):
        return WaveformBuilder(rate, AudioPolicy(), num_samples=num_samples)

    found = traced(lambda: next(decode(path, [Cut()], collect=collect)))
    waveform = seconds * RATE * 4
    assert abs(found.held - waveform) < 1e5
    assert found.peak < 1.3 * waveform + blocks < seconds * rate * channels * 4


# Another speed


def at_speed(samples, speed, source_rate=RATE, **policy):
    return to_waveform(
        samples[:, None].astype(np.float32), source_rate, AudioPolicy(**policy), speed=speed
    )


@pytest.mark.parametrize("speed", [0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0])
@pytest.mark.parametrize("source_rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize(
    ("resample", "tolerance"), [("soxr_mq", 2e-3), ("soxr_hq", 3e-4), ("soxr_vhq", 3e-4)]
)
def test_it_is_the_recording_read_at_another_rate(source_rate, speed, resample, tolerance):
    """Tones below the band's end, in closed form: sample k is what the recording is at k
    * speed / rate seconds."""
    top = 0.7 * min(source_rate, RATE / speed) / 2
    frequencies = np.linspace(100, top, 7)

    def tones(seconds):
        return 0.1 * np.sin(2 * np.pi * frequencies[:, None] * seconds + np.arange(7)[:, None]).sum(
            0
        )

    made = at_speed(
        tones(np.arange(source_rate) / source_rate), speed, source_rate, resample=resample
    )
    assert made.dtype == np.float32
    expected = tones(np.arange(len(made)) * speed / RATE)
    inside = slice(RATE // 20, -RATE // 20)
    np.testing.assert_allclose(made[inside], expected[inside], atol=tolerance)


@given(
    st.integers(1, 5000),
    st.sampled_from([0.5, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 2.0]),
    st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000]),
    st.sampled_from([8000, 16000, 22050, 24000]),
)
@example(240, 0.5, 48000, 22050)
@example(80, 0.5, 48000, 22050)
def test_its_length_is_the_recordings_by_rate_and_speed(num_samples, speed, source_rate, rate):
    """To the nearest sample; of half a sample, soxr gives either."""
    made = at_speed(np.ones(num_samples), speed, source_rate, sample_rate=rate)
    assert abs(len(made) - num_samples * rate / (source_rate * Fraction(str(speed)))) <= Fraction(
        1, 2
    )


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


# Configs


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        ([0.0, 1.0], "augment.speed.0: should be greater than or equal to 0.5, not 0"),
        ([1.0, -1.0], "augment.speed.1: should be greater than or equal to 0.5, not -1"),
        ([3], "augment.speed.0: should be less than or equal to 2, not 3"),
        ([0.9, 0.9], "augment.speed: 0.9 is there 2 times"),
        ([0.9123456789], "augment.speed: 0.9123456789 has more than six digits"),
        ([], "augment.speed: expected one number at least"),
        ([1.0], "augment: makes no copies"),
        (["fast"], "augment.speed"),
        ([float("nan")], "augment.speed"),
    ],
)
def test_speeds_that_make_no_sense_are_refused(speed, said):
    assert said in refusal({"speed": speed})


def test_speeds_need_a_resampler():
    said = "augment.speed: to change it is to resample, which audio.resample forbids"
    assert said in refusal({"speed": [0.9]}, audio={"resample": "forbid"})


def test_the_fingerprint_knows_the_speeds_and_not_their_order():
    plain, some = config_of(None), config_of({"speed": SPEEDS})
    assert "augment" not in plain.resolved()
    assert config_of({"speed": SPEEDS[::-1]}).fingerprint() == some.fingerprint()
    assert len({one.fingerprint() for one in (plain, some, config_of({"speed": [0.9, 1.0]}))}) == 3
