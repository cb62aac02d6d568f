"""Sound that libsndfile refuses, decoded by FFmpeg: the signal that was encoded, and
segments as of decoding it all."""

import sys
from fractions import Fraction

import numpy as np
import pytest
import soundfile
from cache_contents import items, only_version, provenance
from corpora import Corpus, speech
from decoded_audio import WHOLE, fault_of, samples_of

import featcache
from featcache.audio.decode import Cut, decode
from featcache.audio.ffmpeg import format_of
from featcache.audio.formats import FFMPEG, OLD_FFMPEG
from featcache.errors import Reason, install_hint
from featcache.extraction.audio_files import read_headers
from featcache.manifest.read import read_manifest
from featcache.version.records import library_versions

av = pytest.importorskip("av")

# How PyAV encodes each, the delay that decoding leaves in samples, and how near to the
# signal that decoding comes.
KINDS = {
    "aac.m4a": ("aac", 16000, 1, 0, 0.98),
    "alac.m4a": ("alac", 16000, 2, 0, 1),
    "around.m4a": ("aac", 48000, 8, 0, 0.98),
    "opus.webm": ("libopus", 48000, 2, 0, 0.98),
    "two.wma": ("wmav2", 16000, 1, None, 0.9),
    "narrow.amr": ("libopencore_amrnb", 8000, 1, None, 0.8),
    "raw.aac": ("aac", 16000, 1, 1024, 0.98),
    "video.mp4": ("aac", 16000, 2, 0, 0.98),
    "sound.ts": ("aac", 16000, 1, 1024, 0.98),
    "sound.ac3": ("ac3", 48000, 2, None, 0.98),
    "sound.eac3": ("eac3", 48000, 2, None, 0.98),
    "sound.avi": ("ac3", 48000, 2, None, 0.98),
    "flac.ogg": ("flac", 16000, 2, 0, 1),
    "alac.caf": ("alac", 16000, 2, 0, 1),
    "g722.wav": ("g722", 16000, 1, None, 0.98),
    "g726.wav": ("g726", 8000, 1, 0, 0.9),
    "yamaha.wav": ("adpcm_yamaha", 16000, 2, 0, 0.98),
    "g722.w64": ("g722", 16000, 1, None, 0.98),
}


def signal(rate: int, channels: int) -> np.ndarray:
    samples = speech(1.5, rate, channels=channels, seed=3)
    kernel = np.hanning(31) / np.hanning(31).sum()  # what a codec for speech keeps
    smooth = np.stack([np.convolve(channel, kernel, "same") for channel in samples.T], 1)
    return (smooth * 32767).round().astype(np.int16)


def encode(path, kind: str) -> np.ndarray:
    """Write a file of a kind. Returns its signal, int16 `[num_samples, channels]`."""
    codec, rate, channels, _, _ = KINDS[kind]
    if codec not in av.codecs_available:
        pytest.skip(f"FFmpeg has no {codec}")
    samples = signal(rate, channels)
    layout = {1: "mono", 2: "stereo", 8: "7.1"}[channels]
    form = {".aac": "adts", ".wma": "asf"}.get(path.suffix)
    with av.open(str(path), "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        stream.bit_rate = 12200 if "amr" in codec else 64000 * channels
        if kind == "video.mp4":
            video = container.add_stream("mpeg4", rate=10)
            video.width, video.height, video.pix_fmt = 64, 64, "yuv420p"
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        container.mux([*stream.encode(frame), *stream.encode(None)])
        if kind == "video.mp4":
            picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))
            container.mux([*video.encode(picture), *video.encode(None)])
    return samples


@pytest.mark.parametrize("kind", KINDS)
def test_the_signal_that_was_encoded(scratch, kind):
    """At its place, but for the delay of formats that do not state it; and each segment
    is that of the whole."""
    _, rate, channels, delay, likeness = KINDS[kind]
    path = scratch / kind
    expected = encode(path, kind) / 32768
    with pytest.raises(soundfile.LibsndfileError):
        soundfile.info(path)
    whole = samples_of(path)
    assert (whole.dtype, whole.shape[1]) == (np.float32, channels)
    assert abs(len(whole) - len(expected)) < 4096
    if likeness == 1:
        np.testing.assert_array_equal(whole, expected.astype(np.float32))
    near = range(3000) if delay is None else [delay]
    middle = slice(5000, 5000 + rate // 2)
    alike = max(
        np.corrcoef(whole[middle.start + by : middle.stop + by, 0], expected[middle, 0])[0, 1]
        for by in near
    )
    assert alike >= likeness - 1e-6
    cuts = [Cut(0.75, 0.25), Cut(0.0, 0.5), Cut(0.123, 0.7), Cut(1.0)]
    for cut, found in zip(cuts, decode(path, cuts), strict=True):
        first = round(cut.start * rate)
        stop = None if cut.duration is None else first + round(cut.duration * rate)
        assert found[0].tobytes() == whole[first:stop].tobytes()
        assert (found[1].sample_rate, found[1].decoder) == (rate, FFMPEG)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_short_fails(scratch, capfd, kind):
    encode(scratch / kind, kind)
    data = (scratch / kind).read_bytes()
    (scratch / kind).write_bytes(data[: len(data) * 2 // 3 + 5])
    assert fault_of(scratch / kind).reason in (Reason.TRUNCATED, Reason.NOT_AUDIO)
    assert capfd.readouterr() == ("", "")


def test_playlists_and_whatever_else_is_no_sound_is_not_given_to_ffmpeg(scratch):
    """It would read the files that they name."""
    for beginning in (
        b"#EXTM3U\n",
        b"ffconcat version 1.0\n",
        b"v=0\r\n",
        b"<?xml",
        b"RIFF",
        b"",
        b"\0" * 16,
    ):
        assert format_of(beginning) is None
    (scratch / "a.m4a").write_bytes(b"#EXTM3U\n/etc/passwd\n")
    assert fault_of(scratch / "a.m4a").reason == Reason.NOT_AUDIO
    (scratch / "b.m4a").write_bytes(b"\0\0\0\x18ftypM4A " + bytes(range(256)) * 20)
    assert fault_of(scratch / "b.m4a").reason == Reason.NOT_AUDIO


@pytest.mark.parametrize("kind", ["aac.m4a", "g722.wav", "alac.caf"])
def test_without_the_extra_a_file_fails_in_a_line_that_names_it(scratch, monkeypatch, kind):
    encode(scratch / kind, kind)
    monkeypatch.setitem(sys.modules, "av", None)
    fault = fault_of(scratch / kind)
    assert fault.reason == Reason.FILE_UNREADABLE
    assert install_hint("formats") in str(fault)


def test_a_codec_that_ffmpeg_lacks_is_no_audio(scratch):
    encode(scratch / "a.wav", "g722.wav")
    data = (scratch / "a.wav").read_bytes()
    (scratch / "a.wav").write_bytes(data[:20] + b"\x99\x99" + data[22:])
    assert fault_of(scratch / "a.wav").reason == Reason.NOT_AUDIO


def test_sphere_compressed_by_shorten_says_what_to_do(scratch):
    fields = (
        "sample_count -i 16000",
        "sample_n_bytes -i 2",
        "channel_count -i 1",
        "sample_rate -i 16000",
    )
    coding = "sample_coding -s26 pcm,embedded-shorten-v2.00"
    header = "\n".join(["NIST_1A", "   1024", *fields, coding, "end_head", ""]).encode()
    (scratch / "a.sph").write_bytes(header.ljust(1024) + b"ajkg" + bytes(1000))
    fault = fault_of(scratch / "a.sph", WHOLE)
    assert (fault.reason, "sph2pipe -f wav" in str(fault)) == (Reason.NOT_AUDIO, True)


def test_a_shard_says_which_items_ffmpeg_has_decoded(scratch):
    encode(scratch / "b.m4a", "alac.m4a")
    samples = samples_of(scratch / "b.m4a")
    soundfile.write(scratch / "a.wav", samples, 16000, "PCM_16")
    corpus = Corpus(scratch)
    for name in ("a.wav", "b.m4a"):
        corpus.add(name, name)
    cache = scratch / "c"
    featcache.extract(corpus.manifest(), "fbank80", cache, featcache.Options("cpu", 1))
    assert {id_: item.decoder for id_, item in provenance(cache).items()} == {
        "a.wav": 0,
        "b.m4a": FFMPEG,
    }
    found = items(cache)
    assert found["a.wav"] == found["b.m4a"]
    (name,) = only_version(cache).shard_names()
    assert only_version(cache).shard(name).info.made_by["av"] == av.__version__


@pytest.fixture
def mixed(scratch, monkeypatch):
    """A version of two M4A files, of which an older featcache has decoded the first, with an
    older PyAV; its cache and its manifest."""
    corpus = Corpus(scratch)
    for name in ("a.m4a", "b.m4a"):
        encode(scratch / name, "alac.m4a")
        corpus.add(name, name)
    older = {**library_versions(), "av": "17.0.0"}
    with monkeypatch.context() as patch:
        patch.setattr("featcache.audio.recording.FFMPEG", OLD_FFMPEG)
        patch.setattr("featcache.extraction.jobs.library_versions", lambda: older)
        first = corpus.manifest(corpus.rows[:1], "first.csv")
        featcache.extract(first, "fbank80", scratch / "c", featcache.Options("cpu", 1))
    manifest = corpus.manifest()
    featcache.extract(manifest, "fbank80", scratch / "c", featcache.Options("cpu", 1))
    return scratch / "c", manifest


def test_what_an_older_featcache_has_decoded_is_said_and_made_again(mixed, cli):
    cache, manifest = mixed
    assert [item.decoder for item in provenance(cache).values()] == [OLD_FFMPEG, FFMPEG]
    said = cli("verify", cache).with_code(0).out
    assert "1 utterance decoded by FFmpeg as older versions of featcache did" in said
    assert "as older versions" in cli("show", cache, "a.m4a").with_code(0).out
    assert "as older versions" not in cli("show", cache, "b.m4a").with_code(0).out
    why = cli("why", cache, manifest, "-c", "fbank80", "--check-sources").with_code(0).out
    assert "how FFmpeg decodes its file" in why
    again = ("extract", manifest, "-c", "fbank80", "-o", cache, "--check-sources")
    cli(*again).with_code(0)
    assert [item.decoder for item in provenance(cache).values()] == [FFMPEG, FFMPEG]
    assert "older versions of featcache" not in cli("verify", cache).with_code(0).out


def test_a_cache_of_several_decoders_names_them(mixed, cli):
    cache, _ = mixed
    libraries = {"av": ["17.0.0", av.__version__]}
    (document,) = cli("info", cache, "--json").with_code(0).json()["versions"]
    assert document["libraries"] == libraries
    assert f"made with av 17.0.0, {av.__version__}" in cli("info", cache).with_code(0).out


def test_verify_names_the_library_of_what_it_cannot_recompute(mixed, cli):
    cache, _ = mixed
    for name in ("a.m4a", "b.m4a"):
        encode(cache.parent / name, "aac.m4a")
    problems = cli("verify", cache, "--recompute", 2).with_code(1).out.splitlines()
    (first,) = [line for line in problems if "a.m4a: extracted again" in line]
    (second,) = [line for line in problems if "b.m4a: extracted again" in line]
    assert f"av 17.0.0 (here {av.__version__})" in first
    assert "an older way to decode it by FFmpeg" in first
    assert "was made with" not in second


def test_durations_are_those_of_the_samples_that_are_decoded(scratch):
    """Not what headers say, which leave out or add some: a row with its duration has all
    samples."""
    for kind in ("aac.m4a", "alac.m4a"):
        encode(scratch / kind, kind)
    soundfile.write(scratch / "a.mp3", signal(16000, 1), 16000)
    data = (scratch / "a.mp3").read_bytes()
    # without the header frame
    (scratch / "a.mp3").write_bytes(data[data.index(b"\xff\xf3", 4) :])
    manifest = read_manifest(scratch)
    found = read_headers(manifest, 2, report=print)
    assert not found.failures
    for row, name in enumerate(manifest.paths):
        assert found.durations[row] * found.headers[row].sample_rate == len(
            samples_of(scratch / name)
        )
