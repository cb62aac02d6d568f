"""Every utterance becomes the same waveform, however it is cut, or fails with its own reason."""

from __future__ import annotations

import errno
import importlib
import math
import os
import shutil
import struct
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
from audio_files import (
    KINDS,
    RATE,
    bad_files,
    cut_file,
    forget_flac_length,
    forget_mp3_length,
    patch_file,
    tone,
    with_metadata,
    write_audio,
    write_kind,
    write_tone,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featcache import recording
from featcache.audio import END_TOLERANCE_SECONDS, Segment, Source, decode, probe_seconds, to_waveform
from featcache.config import AudioPolicy
from featcache.errors import AudioError, MissingDependencyError, Reason

DATA = Path(__file__).parents[2] / "shared" / "data"
WHOLE = Segment()
TELLING = [name for name, kind in KINDS.items() if kind.tells_truncation]

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared speech data")


def samples_of(path, segment=WHOLE, **options):
    (result,) = decode(path, [segment], **options)
    if isinstance(result, AudioError):
        raise result
    return result[0]


def fault_of(path, segment=WHOLE, **options) -> AudioError:
    (result,) = decode(path, [segment], **options)
    assert isinstance(result, AudioError)
    return result


def reference(path) -> np.ndarray:
    """All samples, in one read from the start."""
    with soundfile.SoundFile(path) as file:
        return file.read(file.frames, "float32", always_2d=True)


def in_seconds(first: int, stop: int, rate: int = RATE) -> Segment:
    return Segment(first / rate, (stop - first) / rate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("audio")


@pytest.fixture(scope="module")
def files(folder):
    """A file of three seconds of each kind, with its samples; and two whose headers do not say how many."""
    found = {kind: (path := write_kind(folder, kind), reference(path)) for kind in KINDS}
    flac = forget_flac_length(shutil.copy(found["flac-16"][0], folder / "unknown.flac"))
    mp3 = forget_mp3_length(shutil.copy(found["mp3-constant"][0], folder / "unknown.mp3"))
    return found | {"flac-unknown": (flac, found["flac-16"][1]), "mp3-unknown": (mp3, samples_of(mp3))}


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    return bad_files(tmp_path_factory.mktemp("bad"))


# --- the samples


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_what_soundfile_reads(files, kind):
    path, expected = files[kind]
    ((samples, source),) = decode(path, [WHOLE])
    assert samples.dtype == np.float32
    assert samples.flags.c_contiguous
    np.testing.assert_array_equal(samples, expected)
    status = path.stat()
    assert source == Source(status.st_size, status.st_mtime_ns, RATE)
    assert np.abs(samples).max() > 0.1
    # soundfile.read goes to the start before it reads, which changes the last bits of an MP3
    np.testing.assert_allclose(samples, soundfile.read(path, len(samples), always_2d=True)[0], atol=1e-6)


def test_integers_are_scaled_to_the_unit_interval(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, np.array([-32768, -1, 0, 1, 32767], np.int16), RATE)
    np.testing.assert_array_equal(samples_of(path)[:, 0] * 32768, [-32768, -1, 0, 1, 32767])


def test_floats_are_left_as_they_are(tmp_path):
    loud = tone(0.1) * 30
    np.testing.assert_array_equal(samples_of(write_audio(tmp_path / "a.wav", loud, kind="wav-float")), loud)


@pytest.mark.parametrize("kind", [*KINDS, "flac-unknown", "mp3-unknown"])
def test_a_segment_is_bit_for_bit_a_cut_of_the_whole(files, kind):
    path, whole = files[kind]

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(1, len(whole))), max_size=5))
    def check(pieces):
        spans = [(first, min(first + count, len(whole))) for first, count in pieces]
        results = list(decode(path, [in_seconds(*span) for span in spans]))
        assert len(results) == len(spans)
        for (first, stop), (samples, _) in zip(spans, results, strict=True):
            np.testing.assert_array_equal(samples, whole[first:stop])
            assert samples.flags.c_contiguous

    check()


@pytest.mark.parametrize("kind", ["flac-16", "vorbis", "opus", "mp3-variable"])
def test_many_segments_of_a_longer_file(tmp_path, kind):
    path = write_kind(tmp_path, kind, 30.0)
    whole = reference(path)
    rng = np.random.default_rng(0)
    firsts = rng.integers(0, len(whole) - RATE, 200)
    spans = [(int(first), int(first) + int(rng.integers(1, RATE))) for first in firsts]
    for order in (spans, sorted(spans), sorted(spans, reverse=True)):
        for (first, stop), (samples, _) in zip(order, decode(path, [in_seconds(*s) for s in order]), strict=True):
            np.testing.assert_array_equal(samples, whole[first:stop])


def test_a_segment_without_start_or_duration_reaches_to_that_end(files):
    path, whole = files["wav-16"]
    np.testing.assert_array_equal(samples_of(path, Segment(duration=0.25)), whole[: RATE // 4])
    np.testing.assert_array_equal(samples_of(path, Segment(start=2.75)), whole[-RATE // 4 :])


def test_start_and_duration_are_each_rounded_to_samples(files):
    path, whole = files["wav-16"]
    np.testing.assert_array_equal(samples_of(path, Segment(100.4 / RATE, 10.6 / RATE)), whole[100:111])


@pytest.mark.parametrize("kind", ["mp3-variable", "vorbis", "mp3-unknown"])
def test_what_cannot_be_seeked_is_decoded_once(files, kind, monkeypatch):
    path, whole = files[kind]
    opened, decoded, seeks = [], [], []

    class Counting(recording._Decoder):
        def __init__(self, *args, **options):
            opened.append(args)
            super().__init__(*args, **options)

        def read(self, *args, out, **options):
            got = super().read(*args, out=out, **options)
            decoded.append(len(got))
            return got

        def seek(self, *args):
            seeks.append(args)
            return super().seek(*args)

    monkeypatch.setattr(recording, "_Decoder", Counting)
    spans = [(first, first + 4000) for first in range(0, len(whole) - 4000, 1000)]
    for results in (spans, spans[::-1]):
        opened.clear(), decoded.clear()
        assert all(len(samples) == 4000 for samples, _ in decode(path, [in_seconds(*span) for span in results]))
        assert len(opened) == (2 if kind == "mp3-unknown" else 1)  # a second time as an endless file
        assert sum(decoded) <= len(whole)
        assert not seeks


def test_a_long_recording_that_cannot_be_seeked_is_never_held_whole(tmp_path):
    path = write_tone(tmp_path / "long.mp3", 60.0, kind="mp3-constant", seed=0)
    segments = [Segment(float(second), 1.0) for second in range(59)]
    tracemalloc.start()
    count = sum(len(samples) for samples, _ in decode(path, segments))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 59 * RATE
    assert peak < 60 * RATE * 4 / 5


def test_decoding_starts_when_it_is_asked_for_and_ends_when_it_is_closed(files):
    path, whole = files["flac-16"]
    results = decode(path, [in_seconds(0, 10)] * 1000)
    open_files = len(os.listdir("/proc/self/fd"))
    np.testing.assert_array_equal(next(results)[0], whole[:10])
    assert len(os.listdir("/proc/self/fd")) == open_files + 1
    results.close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_files_are_decoded_alike_in_many_threads(files):
    jobs = [(path, whole) for path, whole in files.values()] * 4
    with ThreadPoolExecutor(8) as pool:
        for samples, (_, whole) in zip(pool.map(samples_of, [path for path, _ in jobs]), jobs, strict=True):
            np.testing.assert_array_equal(samples, whole)


# --- what is wrong


def test_every_bad_file_has_its_reason(bad):
    found = {name: fault_of(path).reason for name, (path, _) in bad.items()}
    assert found == {name: reason for name, (_, reason) in bad.items()}


def test_messages_are_about_the_fault_and_leave_the_path_to_the_caller(bad):
    for name, (path, _) in bad.items():
        message = str(fault_of(path))
        assert message, name
        assert str(path.parent) not in message


def test_a_fault_of_the_file_is_one_of_each_segment(bad):
    for name in ("missing", "empty.wav", "text.wav"):
        results = list(decode(bad[name][0], [WHOLE, Segment(1.0), Segment(0.5, 1.0)]))
        assert [result.reason for result in results] == [bad[name][1]] * 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = write_tone(tmp_path / "a.wav")
    path.chmod(0)
    assert fault_of(path).reason == Reason.FILE_UNREADABLE


def test_an_error_of_the_operating_system(files, monkeypatch):
    def fail_in_libsndfile(*args, **options):
        raise soundfile.LibsndfileError(2)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    for owner, name, failure in (
        (recording._Decoder, "read", fail_in_libsndfile),
        (recording._Decoder, "__init__", fail_in_libsndfile),
        (os, "pread", fail),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failure)
            fault = fault_of(files["vorbis"][0])
        assert fault.reason == Reason.FILE_UNREADABLE
    assert str(fault) == "the file cannot be read: Input/output error"


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = write_tone(tmp_path / "a.wav")
    results = decode(path, [Segment(0.0, 0.5), Segment(0.5, 0.5)])
    assert len(next(results)[0]) == RATE // 2
    with path.open("ab") as file:
        file.write(b"more")
    fault = next(results)
    assert fault.reason == Reason.FILE_UNREADABLE
    assert "changed" in str(fault)


def test_the_message_says_where_a_float_is_not_finite(tmp_path):
    samples = tone(2.0, channels=2)
    samples[RATE + RATE // 4, 1] = np.nan
    path = write_audio(tmp_path / "a.wav", samples, kind="wav-float")
    assert "1.250 s" in str(fault_of(path, Segment(0.5)))
    np.testing.assert_array_equal(samples_of(path, Segment(0.5, 0.75)), samples[RATE // 2 : RATE + RATE // 4])


# --- truncation


@pytest.mark.parametrize("kind", TELLING)
@pytest.mark.parametrize("keep", [0.45, 0.7, 0.95, -1])
def test_of_a_truncated_file_only_what_is_missing_fails(files, tmp_path, kind, keep):
    path, whole = files[kind]
    cut = cut_file(path, tmp_path, -1 if keep == -1 else int(keep * path.stat().st_size))
    before = in_seconds(100, int(0.02 * len(whole)))
    good, rest, all_of_it = decode(cut, [before, Segment(before.duration), WHOLE])
    assert [rest.reason, all_of_it.reason] == [Reason.TRUNCATED] * 2
    np.testing.assert_array_equal(good[0], whole[100 : int(0.02 * len(whole))])


def test_a_truncated_mp3_without_a_header_fails_from_the_block_of_the_cut_on(tmp_path):
    path = forget_mp3_length(write_kind(tmp_path, "mp3-constant", 10.0))
    whole = samples_of(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 10])
    good, all_of_it = decode(path, [in_seconds(100, 60000), WHOLE])
    assert all_of_it.reason == Reason.TRUNCATED
    np.testing.assert_array_equal(good[0], whole[100:60000])


def test_damage_in_a_flac_spoils_only_what_lies_there(tmp_path):
    path = write_tone(tmp_path / "damaged.flac", 10.0, kind="flac-16", seed=0)
    whole = reference(path)
    patch_file(path, path.stat().st_size // 2, bytes(500))
    all_of_it, before, middle, after = decode(path, [WHOLE, Segment(1.0, 2.0), Segment(4.0, 2.0), Segment(9.0, 0.5)])
    assert [all_of_it.reason, middle.reason] == [Reason.TRUNCATED] * 2
    np.testing.assert_array_equal(before[0], whole[RATE : 3 * RATE])
    np.testing.assert_array_equal(after[0], whole[9 * RATE : 9 * RATE + RATE // 2])


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0xFFFFFFFF - 36, 0x80000000, 0x7FFFFFFF, 0x7FFFFFFF - 36, 0x7FFFF000])
def test_a_wav_that_was_written_to_a_pipe_is_whole(tmp_path, size):
    path = write_tone(tmp_path / "piped.wav", seed=0)
    whole = reference(path)
    patch_file(path, 40, struct.pack("<I", size))
    np.testing.assert_array_equal(samples_of(path), whole)


def test_an_aiff_that_was_written_to_a_pipe_is_whole(tmp_path):
    path = write_tone(tmp_path / "piped.aiff", kind="aiff", seed=0)
    whole = reference(path)
    patch_file(path, path.read_bytes().index(b"SSND") + 4, struct.pack(">I", 0x7F000008))
    np.testing.assert_array_equal(samples_of(path), whole)


def test_chunks_around_the_samples_of_a_wav(tmp_path):
    path = write_tone(tmp_path / "chunks.wav", seed=0)
    wav, whole = path.read_bytes(), reference(path)
    listing = b"LIST" + struct.pack("<I", 12) + b"INFOINAM" + struct.pack("<I", 0)
    for data in (
        wav + listing,
        wav + listing[:7],  # cut behind the samples
        wav + bytes(5),
        wav + b"something else",
        with_metadata(wav, 3),
        with_metadata(wav, 300),  # more than libsndfile logs
    ):
        path.write_bytes(data)
        np.testing.assert_array_equal(samples_of(path), whole)
    path.write_bytes((wav + listing)[:20000])
    assert fault_of(path).reason == Reason.TRUNCATED


def test_what_follows_an_ogg(tmp_path):
    path = write_kind(tmp_path, "vorbis", 2.0)
    ogg, whole = path.read_bytes(), reference(path)
    for junk in (bytes(100), bytes(100_000)):
        path.write_bytes(ogg + junk)
        np.testing.assert_array_equal(samples_of(path), whole)
    path.write_bytes(ogg + write_kind(tmp_path, "vorbis", 1.0).read_bytes())
    assert "several" in str(fault_of(path))


def test_what_surrounds_an_mp3(tmp_path):
    path = write_kind(tmp_path, "mp3-variable")
    mp3, whole = path.read_bytes(), reference(path)
    tag = b"ID3\x03\0\0\0\0\x08\0" + bytes(1024)
    for data in (tag + mp3, mp3 + b"TAG" + b"x" * 125, mp3 + b"APETAGEX" + b"x" * 9000, tag + mp3 + bytes(9000)):
        path.write_bytes(data)
        np.testing.assert_array_equal(samples_of(path), whole)
    path.write_bytes(tag + mp3 + mp3)
    part, all_of_it = decode(path, [Segment(0.0, 1.0), WHOLE])
    np.testing.assert_array_equal(part[0], whole[:RATE])
    assert all_of_it.reason == Reason.TRUNCATED
    assert "another MP3 follows" in str(all_of_it)


# --- lengths that the header does not say


def test_an_mp3_at_a_variable_bitrate_without_header_is_not_cut_short(tmp_path):
    """libsndfile guesses its length by the first frame, and gives less than there is."""
    samples = np.concatenate([tone(5.0), tone(5.0, seed=0)])
    path = write_audio(tmp_path / "a.mp3", samples, kind="mp3-variable")
    whole = samples_of(path)
    assert len(whole) == len(samples)
    found = samples_of(forget_mp3_length(path))
    delay = 1105  # of LAME's encoder and any decoder, which is cut off where the header tells it
    np.testing.assert_array_equal(found[delay : delay + len(whole)], whole)
    assert len(reference(path)) < 0.9 * len(whole)


@pytest.mark.parametrize("kind", ["flac-unknown", "mp3-unknown"])
def test_the_end_is_found_by_decoding_where_the_header_does_not_say(files, kind):
    path, whole = files[kind]
    seconds = len(whole) / RATE
    assert probe_seconds(path) is None
    np.testing.assert_array_equal(samples_of(path, Segment(1.0)), whole[RATE:])
    np.testing.assert_array_equal(samples_of(path, Segment(1.0, seconds - 0.95)), whole[RATE:])
    for outside in (Segment(1.0, seconds), Segment(seconds), Segment(seconds + 100), Segment(seconds + 100, 1.0)):
        assert fault_of(path, outside).reason == Reason.SEGMENT_OUTSIDE
    np.testing.assert_array_equal(samples_of(path, max_seconds=seconds), whole)
    assert fault_of(path, max_seconds=seconds - 0.01).reason == Reason.TOO_LONG
    assert fault_of(path, max_seconds=0.5).reason == Reason.TOO_LONG


def test_a_header_that_promises_too_much_takes_no_memory(tmp_path):
    path = write_kind(tmp_path, "flac-16")
    patch_file(path, 22, b"\xff\xff\xff\xff")
    tracemalloc.start()
    assert fault_of(path).reason == Reason.TRUNCATED
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6


def test_silence_that_compresses_beyond_belief(tmp_path):
    silence = np.zeros((2_000_000, 1), np.float32)
    path = write_audio(tmp_path / "silence.flac", silence, kind="flac-16")
    assert len(silence) > 64 * path.stat().st_size
    np.testing.assert_array_equal(samples_of(path), silence)


# --- segments and lengths


@pytest.mark.parametrize("kind", ["wav-16", "flac-16", "vorbis", "mp3-variable"])
def test_a_segment_may_run_past_the_end_by_the_tolerance(files, kind):
    path, whole = files[kind]
    slack = round(END_TOLERANCE_SECONDS * RATE)
    within, beyond = decode(path, [in_seconds(100, len(whole) + slack), in_seconds(100, len(whole) + slack + 1)])
    np.testing.assert_array_equal(within[0], whole[100:])
    assert beyond.reason == Reason.SEGMENT_OUTSIDE
    assert f"{len(whole) / RATE:.3f} s" in str(beyond)


@pytest.mark.parametrize("kind", ["wav-16", "mp3-variable"])
def test_a_segment_that_starts_outside(files, kind):
    path, whole = files[kind]
    np.testing.assert_array_equal(samples_of(path, Segment((len(whole) - 1) / RATE)), whole[-1:])
    for start in (len(whole) / RATE, 1e9, -0.5):
        assert fault_of(path, Segment(start)).reason == Reason.SEGMENT_OUTSIDE
        assert fault_of(path, Segment(start, 0.01)).reason == Reason.SEGMENT_OUTSIDE


def test_a_segment_of_no_samples(files):
    for duration in (0.0, 1e-6):
        assert fault_of(files["wav-16"][0], Segment(1.0, duration)).reason == Reason.EMPTY


def test_one_segment_fails_and_its_neighbours_do_not(files):
    for kind in ("wav-16", "mp3-variable"):
        path, whole = files[kind]
        results = list(decode(path, [in_seconds(0, 10), Segment(99.0), in_seconds(20, 30)]))
        np.testing.assert_array_equal(results[0][0], whole[:10])
        assert results[1].reason == Reason.SEGMENT_OUTSIDE
        np.testing.assert_array_equal(results[2][0], whole[20:30])


def test_too_long_is_known_before_decoding(files, monkeypatch):
    monkeypatch.setattr(recording._Decoder, "read", None)
    fault = fault_of(files["wav-16"][0], max_seconds=2.999)
    assert fault.reason == Reason.TOO_LONG
    assert "3.000 s" in str(fault)
    assert "2.999" in str(fault)


def test_no_longer_than_allowed_is_not_too_long(files):
    path, whole = files["flac-16"]
    np.testing.assert_array_equal(samples_of(path, max_seconds=3.0), whole)
    np.testing.assert_array_equal(samples_of(path, Segment(0.0, 1.0), max_seconds=1.0), whole[:RATE])


def test_probe_reads_the_header(files, bad):
    assert probe_seconds(files["wav-16"][0]) == 3.0
    assert probe_seconds(str(files["flac-16"][0])) == 3.0
    assert probe_seconds(files["mp3-variable"][0]) == len(files["mp3-variable"][1]) / RATE
    for name in ("missing", "empty.wav", "text.wav", "folder"):
        assert probe_seconds(bad[name][0]) is None


# --- waveforms


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
    monkeypatch.delitem(sys.modules, "featcache.recording")
    with pytest.raises(MissingDependencyError, match=r"soundfile.*featcache\[extract\]"):
        importlib.import_module("featcache.recording")
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(MissingDependencyError, match=r"soxr.*featcache\[extract\]"):
        to_waveform(tone(0.1), 8000, policy())


# --- real speech


@needs_data
def test_real_speech_is_the_same_from_wav_and_flac_and_nearly_from_mp3():
    for wav in sorted((DATA / "ljspeech" / "wav").glob("*.wav"))[:8]:
        whole = samples_of(wav)
        np.testing.assert_array_equal(samples_of(DATA / "ljspeech" / "flac" / f"{wav.stem}.flac"), whole)
        mp3 = samples_of(DATA / "ljspeech" / "mp3" / f"{wav.stem}.mp3")
        assert abs(len(mp3) - len(whole)) <= END_TOLERANCE_SECONDS * 22050
        shared = min(len(mp3), len(whole))
        error = mp3[:shared] - whole[:shared]
        assert np.sqrt(np.mean(error**2)) < 0.25 * np.sqrt(np.mean(whole**2))


@needs_data
def test_real_digits_are_what_soundfile_reads():
    for wav in sorted((DATA / "fsdd").rglob("*.wav"))[::100]:
        np.testing.assert_array_equal(samples_of(wav), reference(wav))
