"""Every utterance becomes the same samples, however it is cut."""

import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
from audio_files import (
    KINDS,
    RATE,
    forget_mp3_length,
    patch_file,
    tone,
    write_audio,
    write_kind,
    write_tone,
)
from decoded_audio import WHOLE, fault_of, in_seconds, read_whole, samples_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import open_files
from real_speech import DATA

from featcache.audio import recording
from featcache.audio.decode import Cut, FileIdentity, decode, probe_seconds
from featcache.audio.recording import END_TOLERANCE_SECONDS
from featcache.errors import AudioError, Reason

# --- the samples


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_what_soundfile_reads(files, kind):
    path, expected = files[kind]
    ((samples, source),) = decode(path, [WHOLE])
    assert samples.dtype == np.float32
    assert samples.flags.c_contiguous
    np.testing.assert_array_equal(samples, expected)
    status = path.stat()
    assert source == FileIdentity(status.st_size, status.st_mtime_ns, RATE)
    assert np.abs(samples).max() > 0.1
    # soundfile.read goes to the start before it reads, which changes the last bits of an MP3
    np.testing.assert_allclose(
        samples, soundfile.read(path, len(samples), always_2d=True)[0], atol=1e-6
    )


def chunk(name, content, length=None):
    return (
        name
        + struct.pack("<I", len(content) if length is None else length)
        + content
        + b"\0" * (len(content) % 2)
    )


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    levels=st.lists(st.integers(-32768, 32767), min_size=1, max_size=40),
    channels=st.sampled_from([1, 1, 2, 3, 9]),
    before=st.lists(st.sampled_from([b"LIST", b"odd", b"x" * 600]), max_size=2),
    after=st.booleans(),
    wrong=st.sampled_from(
        [None, None, None, "riff", "data", "frame", "bits", "kind", "extensible", "cut", "no rate"]
    ),
    large=st.booleans(),
)
def test_a_wav_of_any_make_is_what_libsndfile_reads(
    tmp_path, levels, channels, before, after, wrong, large
):
    """Whether its samples are taken as they lie there or libsndfile decodes them; and it
    fails where that does."""
    frame_bytes = 2 * channels + (wrong == "frame")
    kind = {"extensible": 0xFFFE, "kind": 6}.get(wrong, 1)
    form = struct.pack(
        "<HHIIHH", kind, channels, 0 if wrong == "no rate" else 8000, 16000, frame_bytes, 16
    )
    if wrong == "bits":
        form = form[:-2] + struct.pack("<H", 24)
    if wrong == "extensible":
        form += struct.pack("<HHIH", 22, 16, 0, 1) + bytes.fromhex("000000001000800000AA00389B71")
    samples = np.array(
        levels * (channels * (recording._SMALL_BYTES // 50 if large else 1)), "<i2"
    ).tobytes()
    data = b"WAVE" + chunk(b"fmt ", form) + b"".join(chunk(b"LIST", content) for content in before)
    data += chunk(b"data", samples, len(samples) + 8 if wrong == "data" else None)
    data += chunk(b"LIST", b"INFO") if after else b""
    path = tmp_path / "a.wav"
    path.write_bytes(
        chunk(b"RIFF", data, len(data) + 2 if wrong == "riff" else None)[
            : -2 if wrong == "cut" else None
        ]
    )
    (ours,) = decode(path, [WHOLE])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recording, "plain_header", lambda *_: None)
        (theirs,) = decode(path, [WHOLE])
    if isinstance(theirs, AudioError):
        assert (ours.reason, str(ours)) == (theirs.reason, str(theirs))
    else:
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1] == theirs[1]
        assert ours[0].flags.c_contiguous


def test_floats_are_left_as_they_are(tmp_path):
    loud = tone(0.1) * 30
    np.testing.assert_array_equal(
        samples_of(write_audio(tmp_path / "a.wav", loud, kind="wav-float")), loud
    )


@pytest.mark.parametrize("kind", [*KINDS, "flac-unknown", "mp3-unknown"])
def test_a_segment_is_bit_for_bit_a_cut_of_the_whole(files, kind):
    path, whole = files[kind]

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(1, len(whole))), max_size=5)
    )
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
    whole = read_whole(path)
    rng = np.random.default_rng(0)
    firsts = rng.integers(0, len(whole) - RATE, 200)
    spans = [(int(first), int(first) + int(rng.integers(1, RATE))) for first in firsts]
    for order in (spans, sorted(spans), sorted(spans, reverse=True)):
        for (first, stop), (samples, _) in zip(
            order, decode(path, [in_seconds(*s) for s in order]), strict=True
        ):
            np.testing.assert_array_equal(samples, whole[first:stop])


def test_what_a_segment_holds(files):
    path, whole = files["wav-16"]
    # each is rounded
    cuts = [Cut(duration=0.25), Cut(start=2.75), Cut(100.4 / RATE, 10.6 / RATE)]
    expected = [whole[: RATE // 4], whole[-RATE // 4 :], whole[100:111]]
    for (samples, _), part in zip(decode(path, cuts), expected, strict=True):
        np.testing.assert_array_equal(samples, part)


def test_a_segment_has_the_samples_that_lhotse_loads(tmp_path):
    """Of random seconds, and of hundredths at 22,050 Hz, every second of which lies
    between two samples."""
    lhotse = pytest.importorskip("lhotse")
    path = tmp_path / "a.wav"
    soundfile.write(path, np.arange(3 * 22050).astype(np.int16), 22050)
    rng = np.random.default_rng(0)
    cuts = [Cut(*pair) for pair in rng.uniform(0.01, 1.4, (100, 2)).tolist()]
    cuts += [Cut(*pair) for pair in (rng.integers(1, 140, (100, 2)) / 100).tolist()]
    theirs = lhotse.Recording.from_file(path)
    for cut, (ours, _) in zip(cuts, decode(path, cuts), strict=True):
        np.testing.assert_array_equal(
            ours.T, theirs.load_audio(offset=cut.start, duration=cut.duration)
        )


@pytest.mark.parametrize("kind", ["mp3-variable", "vorbis", "mp3-unknown"])
def test_what_cannot_be_seeked_is_decoded_once(files, kind, monkeypatch):
    path, whole = files[kind]
    opened, decoded = [], []

    class Counting(recording._Decoder):
        seek = None

        def __init__(self, *args, **options):
            opened.append(args)
            super().__init__(*args, **options)

        def read(self, *args, out, **options):
            got = super().read(*args, out=out, **options)
            decoded.append(len(got))
            return got

    monkeypatch.setattr(recording, "_Decoder", Counting)
    spans = [(first, first + 4000) for first in range(0, len(whole) - 4000, 1000)]
    for results in (spans, spans[::-1]):
        opened.clear(), decoded.clear()
        assert all(
            len(samples) == 4000
            for samples, _ in decode(path, [in_seconds(*span) for span in results])
        )
        # a second time as an endless file
        assert len(opened) == (2 if kind == "mp3-unknown" else 1)
        assert sum(decoded) <= len(whole)


def test_a_long_recording_that_cannot_be_seeked_is_never_held_whole(tmp_path, traced):
    path = write_tone(tmp_path / "long.mp3", 60.0, kind="mp3-constant", seed=0)
    segments = [Cut(float(second), 1.0) for second in range(59)]
    assert sum(len(samples) for samples, _ in decode(path, segments)) == 59 * RATE
    assert (
        traced(lambda: sum(len(samples) for samples, _ in decode(path, segments))).peak
        < 60 * RATE * 4 / 5
    )


def test_decoding_starts_when_it_is_asked_for_and_ends_when_it_is_closed(files):
    path, whole = files["flac-16"]
    results = decode(path, [in_seconds(0, 10)] * 1000)
    assert open_files(path) == []
    np.testing.assert_array_equal(next(results)[0], whole[:10])
    assert open_files(path) == [str(path)]
    results.close()
    assert open_files(path) == []


def test_files_are_decoded_alike_in_many_threads(files):
    jobs = [(path, whole) for path, whole in files.values()] * 4
    with ThreadPoolExecutor(8) as pool:
        for samples, (_, whole) in zip(
            pool.map(samples_of, [path for path, _ in jobs]), jobs, strict=True
        ):
            np.testing.assert_array_equal(samples, whole)


# --- lengths that the header does not say


def test_an_mp3_at_a_variable_bitrate_without_header_is_not_cut_short(tmp_path):
    """libsndfile guesses its length by the first frame, and gives less than there is."""
    samples = np.concatenate([tone(5.0), tone(5.0, seed=0)])
    path = write_audio(tmp_path / "a.mp3", samples, kind="mp3-variable")
    whole = samples_of(path)
    assert len(whole) == len(samples)
    found = samples_of(forget_mp3_length(path))
    # of LAME's encoder and any decoder, which is cut off where the header tells it
    delay = 1105
    np.testing.assert_array_equal(found[delay : delay + len(whole)], whole)
    assert len(read_whole(path)) < 0.9 * len(whole)


@pytest.mark.parametrize("kind", ["flac-unknown", "mp3-unknown"])
def test_the_end_is_found_by_decoding_where_the_header_does_not_say(files, kind):
    path, whole = files[kind]
    seconds = len(whole) / RATE
    assert probe_seconds(path) is None
    np.testing.assert_array_equal(samples_of(path, Cut(1.0)), whole[RATE:])
    np.testing.assert_array_equal(samples_of(path, Cut(1.0, seconds - 0.95)), whole[RATE:])
    for outside in (Cut(1.0, seconds), Cut(seconds), Cut(seconds + 100), Cut(seconds + 100, 1.0)):
        assert fault_of(path, outside).reason == Reason.SEGMENT_OUTSIDE
    np.testing.assert_array_equal(samples_of(path, max_seconds=seconds), whole)
    assert fault_of(path, max_seconds=seconds - 0.01).reason == Reason.TOO_LONG
    assert fault_of(path, max_seconds=0.5).reason == Reason.TOO_LONG


def test_a_header_that_promises_too_much_takes_no_memory(tmp_path, traced):
    path = write_kind(tmp_path, "flac-16")
    patch_file(path, 22, b"\xff\xff\xff\xff")
    assert fault_of(path).reason == Reason.TRUNCATED
    assert traced(lambda: fault_of(path)).peak < 50e6


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
    within, beyond = decode(
        path, [in_seconds(100, len(whole) + slack), in_seconds(100, len(whole) + slack + 1)]
    )
    np.testing.assert_array_equal(within[0], whole[100:])
    assert beyond.reason == Reason.SEGMENT_OUTSIDE
    assert f"{len(whole) / RATE:.3f} s" in str(beyond)


@pytest.mark.parametrize("kind", ["wav-16", "mp3-variable"])
def test_a_segment_that_starts_outside_or_has_no_samples_fails_and_its_neighbours_do_not(
    files, kind
):
    path, whole = files[kind]
    np.testing.assert_array_equal(samples_of(path, Cut((len(whole) - 1) / RATE)), whole[-1:])
    for start in (len(whole) / RATE, 1e9, -0.5):
        assert fault_of(path, Cut(start)).reason == Reason.SEGMENT_OUTSIDE
        assert fault_of(path, Cut(start, 0.01)).reason == Reason.SEGMENT_OUTSIDE
    for duration in (0.0, 1e-6):
        assert fault_of(path, Cut(1.0, duration)).reason == Reason.EMPTY
    before, outside, after = decode(path, [in_seconds(0, 10), Cut(99.0), in_seconds(20, 30)])
    assert outside.reason == Reason.SEGMENT_OUTSIDE
    np.testing.assert_array_equal(before[0], whole[:10])
    np.testing.assert_array_equal(after[0], whole[20:30])


def test_no_longer_than_allowed_is_not_too_long_which_is_known_before_decoding(files, monkeypatch):
    path, whole = files["flac-16"]
    np.testing.assert_array_equal(samples_of(path, max_seconds=3.0), whole)
    np.testing.assert_array_equal(samples_of(path, Cut(0.0, 1.0), max_seconds=1.0), whole[:RATE])
    monkeypatch.setattr(recording._Decoder, "read", None)
    fault = fault_of(files["wav-16"][0], max_seconds=2.999)
    assert fault.reason == Reason.TOO_LONG
    assert "3.000 s" in str(fault)
    assert "2.999" in str(fault)


def test_probe_reads_the_header(files, bad):
    assert probe_seconds(files["wav-16"][0]) == 3.0
    assert probe_seconds(str(files["flac-16"][0])) == 3.0
    assert probe_seconds(files["mp3-variable"][0]) == len(files["mp3-variable"][1]) / RATE
    for name in ("missing", "empty.wav", "text.wav", "folder"):
        assert probe_seconds(bad[name][0]) is None


# --- real speech


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared speech data")
def test_real_speech_is_the_same_from_wav_and_flac_and_nearly_from_mp3():
    for wav in sorted((DATA / "ljspeech" / "wav").glob("*.wav"))[:8]:
        whole = samples_of(wav)
        np.testing.assert_array_equal(
            samples_of(DATA / "ljspeech" / "flac" / f"{wav.stem}.flac"), whole
        )
        mp3 = samples_of(DATA / "ljspeech" / "mp3" / f"{wav.stem}.mp3")
        assert abs(len(mp3) - len(whole)) <= END_TOLERANCE_SECONDS * 22050
        shared = min(len(mp3), len(whole))
        error = mp3[:shared] - whole[:shared]
        assert np.sqrt(np.mean(error**2)) < 0.25 * np.sqrt(np.mean(whole**2))
