"""What is wrong with a file has its own reason, and spoils no more than it must."""

import errno
import os
import struct
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
from audio_files import (
    KINDS,
    RATE,
    forget_mp3_length,
    patch_file,
    tone,
    with_metadata,
    write_audio,
    write_kind,
    write_tone,
)
from decoded_audio import WHOLE, fault_of, in_seconds, read_whole, samples_of

from featcache.audio import formats, recording
from featcache.audio.decode import Cut, decode
from featcache.audio.formats import find_sound
from featcache.errors import AudioError, Reason

# --- what is wrong


def test_every_bad_file_has_its_reason_and_a_message_that_leaves_the_path_to_the_caller(bad):
    for name, (path, reason) in bad.items():
        fault, *others = decode(path, [WHOLE, Cut(1.0), Cut(0.5, 1.0)])
        assert (fault.reason, bool(str(fault))) == (reason, True), name
        assert str(path.parent) not in str(fault)
        assert "after 0.000 s" not in str(fault)  # which says nothing of where
        # faults of the file are those of each segment
        if name in ("missing", "empty.wav", "text.wav"):
            assert [other.reason for other in others] == [reason] * 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = write_tone(tmp_path / "a.wav")
    path.chmod(0)
    assert fault_of(path).reason == Reason.FILE_UNREADABLE


def test_an_error_of_the_operating_system(files, monkeypatch):
    for owner, name, error in (
        (recording._Decoder, "read", soundfile.LibsndfileError(2)),
        (recording._Decoder, "__init__", soundfile.LibsndfileError(2)),
        (os, "pread", OSError(errno.EIO, "Input/output error")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=error))
            fault = fault_of(files["vorbis"][0])
        assert fault.reason == Reason.FILE_UNREADABLE
    assert str(fault) == "the file cannot be read: Input/output error"


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = write_tone(tmp_path / "a.wav")
    results = decode(path, [Cut(0.0, 0.5), Cut(0.5, 0.5)])
    assert len(next(results)[0]) == RATE // 2
    with path.open("ab") as file:
        file.write(b"more")
    fault = next(results)
    assert fault.reason == Reason.FILE_UNREADABLE
    assert "changed" in str(fault)


def test_the_message_says_where_a_float_is_not_finite(tmp_path):
    samples = tone(2.0, channels=2)
    samples[RATE + RATE // 4, 1] = np.nan
    path = tmp_path / "a.wav"
    soundfile.write(path, samples, RATE, subtype="FLOAT")
    assert "1.250 s" in str(fault_of(path, Cut(0.5)))
    np.testing.assert_array_equal(
        samples_of(path, Cut(0.5, 0.75)), samples[RATE // 2 : RATE + RATE // 4]
    )


# --- truncation


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.tells_truncation])
@pytest.mark.parametrize("keep", [0.45, 0.7, 0.95, -1])
def test_of_a_truncated_file_only_what_is_missing_fails(files, tmp_path, kind, keep):
    path, whole = files[kind]
    data, cut = path.read_bytes(), tmp_path / path.name
    cut.write_bytes(data[: -1 if keep == -1 else int(keep * len(data))])
    before = in_seconds(100, int(0.02 * len(whole)))
    good, rest, all_of_it = decode(cut, [before, Cut(before.duration), WHOLE])
    assert [rest.reason, all_of_it.reason] == [Reason.TRUNCATED] * 2
    np.testing.assert_array_equal(good[0], whole[100 : int(0.02 * len(whole))])


@pytest.mark.parametrize("kind", ["flac-16", "flac-24", "vorbis", "opus", "wav-16"])
@pytest.mark.parametrize("keep", [41, 60, 700])
def test_a_stump_is_truncated_and_no_less_audio_than_a_longer_one(files, tmp_path, kind, keep):
    """A FLAC as the program of that name writes it: 8 kB of padding before its samples."""
    data, path = files[kind][0].read_bytes(), tmp_path / files[kind][0].name
    if kind.startswith("flac"):
        data = data[:42] + bytes([1]) + (8192).to_bytes(3, "big") + bytes(8192) + data[42:]
    path.write_bytes(data)
    assert len(samples_of(path))
    path.write_bytes(data[:keep])
    fault = fault_of(path)
    assert fault.reason == (Reason.EMPTY if (kind, keep) == ("wav-16", 41) else Reason.TRUNCATED), (
        fault
    )


def test_a_truncated_mp3_without_a_header_fails_from_the_block_of_the_cut_on(tmp_path):
    path = forget_mp3_length(write_kind(tmp_path, "mp3-constant", 10.0))
    whole = samples_of(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 10])
    good, all_of_it = decode(path, [in_seconds(100, 60000), WHOLE])
    assert all_of_it.reason == Reason.TRUNCATED
    np.testing.assert_array_equal(good[0], whole[100:60000])


def test_damage_in_a_flac_spoils_only_what_lies_there(tmp_path):
    path = write_tone(tmp_path / "damaged.flac", 10.0, kind="flac-16", seed=0)
    whole = read_whole(path)
    patch_file(path, path.stat().st_size // 2, bytes(500))
    all_of_it, before, middle, after = decode(
        path, [WHOLE, Cut(1.0, 2.0), Cut(4.0, 2.0), Cut(9.0, 0.5)]
    )
    assert [all_of_it.reason, middle.reason] == [Reason.TRUNCATED] * 2
    np.testing.assert_array_equal(before[0], whole[RATE : 3 * RATE])
    np.testing.assert_array_equal(after[0], whole[9 * RATE : 9 * RATE + RATE // 2])


OF_CHUNKS = [kind for kind in KINDS if kind.startswith(("wav", "rf64", "w64", "ai", "au", "caf"))]
LARGEST = (1 << 31) - 1
GUESSES = (
    *(-1, -37, LARGEST, LARGEST - 36, LARGEST + 1, 0x7FFFF000, 0x7F000008),
    *(2_000_000_000, 20_000_000, 3 << 28),
)


def write_streamed(path, kind, stated, file_stated=None):
    """Write a file whose header was written before its length was known. Returns what it
    holds."""
    write_audio(path, tone(0.2, channels=KINDS[kind].channels, seed=1), kind=kind)
    whole, data = samples_of(path), path.read_bytes()
    with path.open("rb") as file:
        sound = find_sound(file.fileno(), len(data))

    def put(at, width, number):
        patch_file(path, at, (number % (1 << 8 * width)).to_bytes(width, sound.order))

    put(sound.size_at, sound.size_bytes, stated)
    if file_stated is not None and kind not in ("au", "caf", "caf-alac"):
        at, width = {"w64": (16, 8), "rf64": (20, 8)}.get(kind, (4, 4))
        put(at, width, file_stated)
    return whole


@pytest.mark.parametrize("kind", OF_CHUNKS)
@pytest.mark.parametrize("stated", GUESSES)
def test_a_size_that_nobody_counted_is_no_promise(tmp_path, kind, stated):
    """As in what was written to a pipe."""
    path = tmp_path / f"a.{KINDS[kind].suffix}"
    for file_stated in (None, stated + 36, -1, 0):
        whole = write_streamed(path, kind, stated, file_stated)
        np.testing.assert_array_equal(samples_of(path), whole)


@pytest.mark.parametrize("kind", OF_CHUNKS)
def test_a_size_that_was_never_filled_in_is_no_promise(tmp_path, kind):
    path = tmp_path / f"a.{KINDS[kind].suffix}"
    for file_stated in (0, 36, -1):
        whole = write_streamed(path, kind, 0, file_stated)
        np.testing.assert_array_equal(samples_of(path), whole)


@pytest.mark.parametrize("kind", OF_CHUNKS)
@pytest.mark.parametrize("stated", [123_456_789, 9_999_000, 115_200_000])
def test_a_size_that_was_counted_is_a_promise(tmp_path, kind, stated):
    """Of an hour at 16 kHz, for example."""
    path = tmp_path / f"a.{KINDS[kind].suffix}"
    write_streamed(path, kind, stated, stated + 36)
    assert fault_of(path).reason == Reason.TRUNCATED


def test_a_round_size_that_is_there_ends_the_samples(tmp_path, monkeypatch):
    path = write_tone(tmp_path / "a.wav", 1.25, seed=0)
    whole = samples_of(path)
    monkeypatch.setattr(formats, "_ROUND", (40_000, 1 << 24))
    path.write_bytes(path.read_bytes() + b"LIST" + struct.pack("<I", 4) + b"INFO")
    np.testing.assert_array_equal(samples_of(path), whole)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.tells_truncation])
def test_a_file_that_is_cut_anywhere_is_noticed(tmp_path, kind):
    path = write_kind(tmp_path, kind, 1.0)
    data = path.read_bytes()
    for keep in np.linspace(1, len(data) - 1, 40).astype(int).tolist():
        path.write_bytes(data[:keep])
        (found,) = decode(path, [WHOLE])
        assert isinstance(found, AudioError), keep
        # of a few bytes, nobody can say what they were
        assert found.reason == Reason.TRUNCATED or keep < 5000, (keep, found)


def test_chunks_around_the_samples_of_a_wav(tmp_path):
    path = write_tone(tmp_path / "chunks.wav", seed=0)
    wav, whole = path.read_bytes(), read_whole(path)
    listing = b"LIST" + struct.pack("<I", 12) + b"INFOINAM" + struct.pack("<I", 0)
    # and 300 chunks before are more than libsndfile logs
    behind = (listing, listing[:7], bytes(5), b"something else")
    for data in (
        *(wav + more for more in behind),
        with_metadata(wav, 3),
        with_metadata(wav, 300),
    ):  # libsndfile logs less
        path.write_bytes(data)
        np.testing.assert_array_equal(samples_of(path), whole)
    path.write_bytes((wav + listing)[:20000])
    assert fault_of(path).reason == Reason.TRUNCATED


def test_what_follows_an_ogg(tmp_path):
    path = write_kind(tmp_path, "vorbis", 2.0)
    ogg, whole = path.read_bytes(), read_whole(path)
    for junk in (bytes(100), bytes(100_000)):
        path.write_bytes(ogg + junk)
        np.testing.assert_array_equal(samples_of(path), whole)
    path.write_bytes(ogg + write_kind(tmp_path, "vorbis", 1.0).read_bytes())
    assert "several" in str(fault_of(path))


def test_what_surrounds_an_mp3(tmp_path):
    path = write_kind(tmp_path, "mp3-variable")
    mp3, whole = path.read_bytes(), read_whole(path)
    tag = b"ID3\x03\0\0\0\0\x08\0" + bytes(1024)
    for data in (
        tag + mp3,
        mp3 + b"TAG" + b"x" * 125,
        mp3 + b"APETAGEX" + b"x" * 9000,
        tag + mp3 + bytes(9000),
    ):
        path.write_bytes(data)
        np.testing.assert_array_equal(samples_of(path), whole)
    path.write_bytes(tag + mp3 + mp3)
    part, all_of_it = decode(path, [Cut(0.0, 1.0), WHOLE])
    np.testing.assert_array_equal(part[0], whole[:RATE])
    assert all_of_it.reason == Reason.TRUNCATED
    assert "another MP3 follows" in str(all_of_it)


# --- more than a header counts


def test_a_flac_that_holds_more_than_its_header_counts(tmp_path):
    """As FFmpeg's concat demuxer makes it, with `-c copy`."""
    path = write_kind(tmp_path, "flac-16")
    data, whole = path.read_bytes(), samples_of(path)
    at = data.index(b"\xff\xf8")  # the first frame
    path.write_bytes(data + data[at:])
    np.testing.assert_array_equal(samples_of(path), np.concatenate((whole, whole)))
    np.testing.assert_array_equal(samples_of(path, Cut(0.0, 1.0)), whole[:RATE])
    fault = fault_of(path, max_seconds=4.0)
    assert (fault.reason, "4 s" in str(fault)) == (Reason.TOO_LONG, True)


def shift_positions(path, by):
    """Shift the granule positions of an Ogg's pages, as a copy from the middle of another
    file does."""
    data, at = bytearray(path.read_bytes()), 0
    while at < len(data):
        length = 27 + data[at + 26] + sum(data[at + 27 : at + 27 + data[at + 26]])
        position = int.from_bytes(data[at + 6 : at + 14], "little", signed=True)
        if position not in (0, -1):
            data[at + 6 : at + 14] = (position + by).to_bytes(8, "little", signed=True)
            data[at + 22 : at + 26] = bytes(4)
            checksum = 0
            for byte in data[at : at + length]:
                checksum ^= byte << 24
                for _ in range(8):
                    checksum = (checksum << 1) ^ (0x104C11DB7 if checksum >> 31 else 0)
            data[at + 22 : at + 26] = checksum.to_bytes(4, "little")
        at += length
    path.write_bytes(data)


@pytest.mark.parametrize("by", [-100, -5000, -RATE, 1, 100_000])
def test_a_vorbis_that_does_not_begin_at_0_is_read_whole(tmp_path, by):
    path = write_audio(tmp_path / "a.ogg", tone(2.0, seed=0), kind="vorbis")
    whole = samples_of(path)
    shift_positions(path, by)
    np.testing.assert_array_equal(samples_of(path), whole)
    np.testing.assert_array_equal(samples_of(path, Cut(1.0)), whole[RATE:])


def test_an_opus_that_does_not_begin_at_0_leaves_out_its_pre_skip(tmp_path):
    path = write_audio(tmp_path / "a.opus", tone(2.0, seed=0), kind="opus")
    whole = samples_of(path)
    shift_positions(path, 48000)
    np.testing.assert_array_equal(samples_of(path), whole)


def test_mp3_inside_wav_is_read_to_its_end(tmp_path):
    """Of a variable bitrate, whose length libsndfile guesses; the end is found by decoding."""
    quiet_and_loud = np.concatenate([0.01 * tone(2.0), tone(2.0, seed=0)])
    mp3 = write_audio(tmp_path / "a.mp3", quiet_and_loud, kind="mp3-variable")
    frames = forget_mp3_length(mp3).read_bytes()
    expected = samples_of(mp3)
    form = struct.pack("<HHIIHHHHIHHH", 0x55, 1, RATE, 4000, 1, 0, 12, 1, 2, 576, 1, 1105)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    body += b"fact" + struct.pack("<II", 4, len(quiet_and_loud) + 3000)
    body += b"data" + struct.pack("<I", len(frames)) + frames
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    np.testing.assert_array_equal(samples_of(path), expected)
    path.write_bytes(path.read_bytes()[:-1000])
    assert fault_of(path).reason == Reason.TRUNCATED
