"""Which samples a sound track gives, whatever FFmpeg decodes it: Opus as libopus decodes it,
ends where the container says, and positions by timestamps."""

import struct
from fractions import Fraction

import numpy as np
import pytest
import soundfile
from corpora import speech
from decoded_audio import fault_of, samples_of

from featcache.audio.decode import Cut
from featcache.errors import Reason

av = pytest.importorskip("av")

RATE = 48000
KERNEL = np.hanning(61) / np.hanning(61).sum()  # what a codec for speech keeps
SMOOTH = np.convolve(speech(2.0, RATE, seed=3)[:, 0], KERNEL, "same")
SOURCE = (SMOOTH[:, None] * 32767).round().astype(np.int16)
LATE = 0.5  # seconds from the beginning of the picture to that of the sound


def encode(path, codec, samples=SOURCE, rate=RATE, *, at=0.0, picture=False, head=None, **options):
    """Write samples as a sound track that begins `at` so many seconds; with a `picture`
    from 0, and with the metadata in `head`."""
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[samples.shape[1]]
    with av.open(str(path), "w", options={"avoid_negative_ts": "disabled"}) as container:
        container.metadata.update(head or {})
        if picture:
            name = {".webm": "vp8", ".ts": "mpeg2video"}.get(path.suffix, "mpeg4")
            video = container.add_stream(name, rate=25)
            video.width, video.height, video.pix_fmt = 64, 64, "yuv420p"
        stream = container.add_stream(codec, rate=rate, layout=layout, options=options)
        if picture:
            for _ in range(3):
                image = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))
                container.mux(video.encode(image))
            container.mux(video.encode(None))
        form = "s16"
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format=form, layout=layout)
        frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
        frame.pts = round(at * rate)
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return path


def remux(source, target, keep=lambda number: True):
    """Write the packets of a file into another container: those whose number is to be kept."""
    with av.open(str(source)) as given, av.open(str(target), "w") as container:
        stream = container.add_stream_from_template(given.streams.audio[0])
        packets = [packet for packet in given.demux(audio=0) if packet.pts is not None]
        for number, packet in enumerate(packets):
            if keep(number):
                packet.stream = stream
                container.mux(packet)
    return target


def in_ogg(path) -> np.ndarray:
    """What libsndfile decodes, by libopus."""
    samples, _ = soundfile.read(path, dtype="float32", always_2d=True)
    # libsndfile keeps Vorbis's order of channels
    return samples[:, [0, 2, 1, 5, 3, 4]] if samples.shape[1] == 6 else samples


@pytest.mark.parametrize("suffix", ["webm", "mkv", "mp4"])
@pytest.mark.parametrize(
    ("channels", "options"),
    [
        (1, {"application": "voip", "b": "12000"}),
        (1, {"application": "voip", "b": "12000", "frame_duration": "60"}),
        (2, {"application": "voip", "b": "20000", "frame_duration": "10"}),
        (1, {"application": "voip", "b": "12000", "dtx": "1"}),
        (6, {"b": "200000"}),
    ],
)
def test_opus_has_the_samples_that_it_has_in_ogg(scratch, suffix, channels, options):
    """FFmpeg's own decoder is off by a tenth of the signal and more in the modes for speech."""
    samples = np.repeat(SOURCE, channels, axis=1)
    if "dtx" in options:
        samples = np.concatenate([samples, np.zeros_like(samples), samples])
    encode(scratch / "a.opus", "libopus", samples, **options)
    found = samples_of(remux(scratch / "a.opus", scratch / f"a.{suffix}"))
    expected = in_ogg(scratch / "a.opus")
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-3


def test_opus_begins_where_its_own_header_says(scratch):
    """Not where Matroska's CodecDelay says, which FFmpeg 5 writes wrongly for sound of 16 kHz."""
    encode(scratch / "a.opus", "libopus", b="12000")
    path = remux(scratch / "a.opus", scratch / "a.webm")
    delay = [b"\x56\xaa\x83" + round(1e9 * count / 48000).to_bytes(3) for count in (312, 104)]
    data = path.read_bytes()
    assert data.count(delay[0]) == 1
    path.write_bytes(data.replace(*delay))
    found, expected = samples_of(path), in_ogg(scratch / "a.opus")
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-3


def test_without_libopus_opus_is_refused_in_a_line(scratch, monkeypatch):
    encode(scratch / "a.webm", "libopus")

    def create(*_):
        raise ValueError("libopus")

    monkeypatch.setattr(av, "CodecContext", type("None", (), {"create": create}))
    fault = fault_of(scratch / "a.webm")
    assert (fault.reason, "libopus" in str(fault)) == (Reason.FILE_UNREADABLE, True)


@pytest.mark.parametrize("num_samples", [1056, 4848, 24000, 96000])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.m4a", {}),
        ("a.mov", {}),
        ("a.mp4", {"movflags": "+delay_moov+frag_keyframe", "frag_duration": "300000"}),
    ],
)
def test_aac_ends_where_it_was_ended(scratch, name, options, num_samples):
    """After as many samples as were encoded, and not with its last packet. (Edit lists round
    to milliseconds.)"""
    path, samples = scratch / name, SOURCE[:num_samples]
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, 0, Fraction(1, RATE)
        container.mux([*stream.encode(frame), *stream.encode(None)])
    found = samples_of(path)
    assert len(found) == num_samples
    assert np.corrcoef(found[:, 0], samples[:, 0])[0, 1] > 0.9


def test_an_edit_list_ends_the_sound_where_it_says(scratch):
    data = bytearray(encode(scratch / "a.m4a", "aac").read_bytes())
    (ticks,) = struct.unpack_from(">I", data, data.index(b"mvhd") + 16)  # in a second
    struct.pack_into(">I", data, data.index(b"elst") + 12, round(1.234 * ticks))
    (scratch / "b.m4a").write_bytes(data)
    whole, short = samples_of(scratch / "a.m4a"), samples_of(scratch / "b.m4a")
    assert len(short) == round(1.234 * RATE)
    np.testing.assert_array_equal(short, whole[: len(short)])


def test_the_tag_of_itunes_ends_the_sound(scratch):
    """It stands in files without an edit list; one of another recording changes nothing."""
    for length, expected in ((95000, 95000), (50000, 97280), (200000, 97280)):
        tag = f" 00000000 00000000 000008E8 {length:016X} 00000000"
        path, head = scratch / f"{length}.m4a", {"iTunSMPB": tag}
        with av.open(
            str(path), "w", options={"use_editlist": "0", "movflags": "use_metadata_tags"}
        ) as container:
            container.metadata.update(head)
            stream = container.add_stream("aac", rate=RATE, layout="mono")
            frame = av.AudioFrame.from_ndarray(SOURCE.T, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE, 0, Fraction(1, RATE)
            container.mux([*stream.encode(frame), *stream.encode(None)])
        assert abs(len(samples_of(path)) - expected) < (1 if expected == 95000 else 1025)


def caf(packets, priming: int, num_samples: int, extradata: bytes) -> bytes:
    """A CAF of AAC as an iPhone writes it: a packet table that states padding."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return name + struct.pack(">q", len(body)) + body

    def length(value: int) -> bytes:
        return bytes([0x80 | value >> 7, value & 127]) if value > 127 else bytes([value])

    remainder = len(packets) * 1024 - priming - num_samples
    table = struct.pack(">qqii", len(packets), num_samples, priming, remainder)

    def descriptor(tag: int, body: bytes) -> bytes:
        return bytes([tag, 0x80, 0x80, 0x80, len(body)]) + body

    specific = descriptor(5, extradata)
    config = descriptor(4, b"\x40\x15" + bytes(11) + specific)
    cookie = descriptor(3, bytes(3) + config + descriptor(6, b"\2"))
    return b"".join(
        (
            b"caff\0\1\0\0",
            chunk(b"desc", struct.pack(">d4sIIIII", RATE, b"aac ", 0, 0, 1024, 1, 0)),
            chunk(b"kuki", cookie),
            chunk(b"pakt", table + b"".join(length(len(packet)) for packet in packets)),
            chunk(b"data", bytes(4) + b"".join(packets)),
        )
    )


def test_aac_in_caf_has_the_samples_between_its_padding(scratch):
    encode(scratch / "a.m4a", "aac")
    with av.open(str(scratch / "a.m4a")) as container:
        extradata = container.streams.audio[0].codec_context.extradata
        packets = [bytes(packet) for packet in container.demux(audio=0) if packet.size]
    data = caf(packets, 1024, len(SOURCE), extradata)
    (scratch / "a.caf").write_bytes(data)
    found, expected = samples_of(scratch / "a.caf"), samples_of(scratch / "a.m4a")
    assert len(found) == len(expected) == len(SOURCE)
    np.testing.assert_array_equal(found[2048:], expected[2048:])
    (scratch / "b.caf").write_bytes(data[: len(data) * 2 // 3])
    assert fault_of(scratch / "b.caf").reason == Reason.TRUNCATED
    part = samples_of(scratch / "b.caf", Cut(0.25, 0.5))
    np.testing.assert_array_equal(part, found[RATE // 4 : RATE * 3 // 4])


# Where a container rounds times, sound may lie a millisecond beside them.
CONTAINERS = {
    "a.mkv": ("flac", 48),
    "a.mp4": ("alac", 48),
    "a.mov": ("alac", 48),
    "a.webm": ("libopus", 400),
    "a.ts": ("mp2", 48),
}


def place_of(found: np.ndarray, expected: np.ndarray) -> int:
    """The sample of `found` at which `expected` is, by their correlation."""
    size = 1 << (len(found) + len(expected)).bit_length()
    product = np.fft.rfft(found, size) * np.conj(np.fft.rfft(expected, size))
    return int(np.fft.irfft(product, size)[: len(found)].argmax())


@pytest.mark.parametrize("name", CONTAINERS)
def test_sound_after_the_picture_lies_where_it_is_played(scratch, name):
    codec, rounding = CONTAINERS[name]
    path = encode(scratch / name, codec, at=LATE, picture=True)
    whole = samples_of(path)
    middle = SOURCE[24000:72000, 0] / 32768
    assert abs(place_of(whole[:, 0], middle) - 24000 - LATE * RATE) <= rounding
    assert not whole[: round(0.47 * RATE)].any()
    part = samples_of(path, Cut(0.75, 1.0))
    assert part.tobytes() == whole[36000:84000].tobytes()
    assert fault_of(path, Cut(0.75, 5.0)).reason == Reason.SEGMENT_OUTSIDE


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.webm"])
def test_a_file_that_begins_late_is_whole_and_its_segments_are_refused(scratch, name):
    """Some players count from its first sample, and others from 0."""
    path = encode(scratch / name, CONTAINERS[name][0], at=LATE)
    assert abs(len(samples_of(path)) - len(SOURCE)) <= 400
    for segment in (Cut(0.75, 0.5), Cut(0.0, 0.5), Cut(0.75)):
        fault = fault_of(path, segment)
        assert fault.reason == Reason.SEGMENT_OUTSIDE
        assert "begin at 0.5" in str(fault) or "begin at 0.4" in str(fault)
        assert "ffmpeg -i FILE -c copy NEW" in str(fault)


def test_mpegts_counts_from_its_first_sample(scratch):
    """Its timestamps may begin anywhere."""
    early = samples_of(encode(scratch / "a.ts", "mp2"))
    late = samples_of(encode(scratch / "b.ts", "mp2", at=LATE), Cut(0.5, 1.0))
    np.testing.assert_array_equal(late, early[24000:72000])


def test_where_packets_are_missing_there_is_silence(scratch):
    encode(scratch / "a.mkv", "flac")
    expected = samples_of(scratch / "a.mkv")
    remux(scratch / "a.mkv", scratch / "b.mkv", keep=lambda number: not 5 <= number < 10)
    found = samples_of(scratch / "b.mkv")
    hole = slice(5 * 4608, 10 * 4608)
    assert abs(len(found) - len(expected)) <= 48
    np.testing.assert_array_equal(found[: hole.start], expected[: hole.start])
    assert not found[hole.start : hole.stop - 48].any()
    np.testing.assert_array_equal(found[-20000:], expected[-20000:])


def test_a_row_after_timestamps_go_back_is_refused(scratch):
    data = encode(scratch / "a.ts", "mp2").read_bytes()
    (scratch / "b.ts").write_bytes(data + data)
    segment, later = Cut(0.25, 0.5), Cut(2.5, 0.5)
    np.testing.assert_array_equal(
        samples_of(scratch / "b.ts", segment), samples_of(scratch / "a.ts", segment)
    )
    fault = fault_of(scratch / "b.ts", later)
    assert (fault.reason, "timestamps leap by -" in str(fault)) == (Reason.TRUNCATED, True)


def test_a_leap_of_hours_is_no_silence(scratch):
    """It would take all memory, and is no more than a flipped bit."""
    encode(scratch / "a.ts", "mp2")
    encode(scratch / "b.ts", "mp2", at=7200.0)
    data = (scratch / "a.ts").read_bytes() + (scratch / "b.ts").read_bytes()
    (scratch / "c.ts").write_bytes(data)
    fault = fault_of(scratch / "c.ts")
    assert (fault.reason, "timestamps leap by 719" in str(fault)) == (Reason.TRUNCATED, True)


def test_tags_that_are_not_utf8_are_passed_over(scratch):
    data = encode(scratch / "a.m4a", "alac", head={"title": "Mathese"}).read_bytes()
    (scratch / "b.m4a").write_bytes(data.replace(b"Mathese", b"Math\xe9se"))
    assert samples_of(scratch / "b.m4a").tobytes() == samples_of(scratch / "a.m4a").tobytes()


@pytest.mark.parametrize("num_blocks", [24, 25])
def test_gsm_has_no_block_of_the_byte_that_pads_it(scratch, num_blocks):
    samples = speech(num_blocks * 320 / 8000, 8000)
    path = scratch / "a.wav"
    soundfile.write(path, samples, 8000, "GSM610")
    if num_blocks % 2:  # as sox does
        data = path.read_bytes() + b"\0"
        size = struct.pack("<I", len(data) - 8)
        at = data.index(b"data") + 4
        length = struct.pack("<I", num_blocks * 65 + 1)
        path.write_bytes(data[:4] + size + data[8:at] + length + data[at + 4 :])
    assert len(samples_of(path)) == num_blocks * 320
    assert fault_of(path, Cut(num_blocks * 0.04 + 0.02)).reason == Reason.SEGMENT_OUTSIDE
