"""What libsndfile does not say or know of files: whether they are whole, and sound in
other formats.

It opens most truncated files as if nothing were missing, with the samples that are left.
How to notice was found by cutting files (libsndfile 1.2.2):

    WAV, W64, RF64, AIFF, AU   the header promises more bytes of samples than there are
    NIST SPHERE                the header counts the samples
    Ogg (Vorbis, Opus)         the last page does not end the stream, or is itself cut off
    FLAC                       decoding fails, or gives fewer samples than the header counts
    MP3                        decoding gives fewer samples than the header frame of LAME
                               and FFmpeg ("Xing", "Info") counts; without that frame,
                               decoding fails, unless the cut lies between frames

CAF has no more chunks than there are, and other formats are believed. A size in a header
that was written before the length was known says nothing, and what there is counts: see
`is_guess`.

FFmpeg decodes M4A, AAC, WebM, AMR, WMA, AC-3, the sound track of a video, and WAV, AIFF and
CAF with codecs that libsndfile lacks. PyAV brings FFmpeg in its wheels; torchcodec needs an
FFmpeg of the system, is up to 1.7 times as fast, and gives other samples of AAC in
Matroska, WMA, Speex and ADPCM. The file's first bytes decide what it is, and FFmpeg is
told: left to guess, it would also find playlists, which name other files. Files are
decoded from their beginning on, since seeking gives other samples.

The samples do not depend on FFmpeg's release. libopus decodes Opus: FFmpeg's own decoder
differs by a quarter of the signal in the modes for speech. Sound in MP4 and CAF ends where
the edit list or the packet table says, and not with the last packet. Where packets have
timestamps, samples lie where players play them, and between them there is silence.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import AudioError, Reason, install_hint

# the number of samples of a file whose header does not say it; libsndfile uses the same
# number
UNKNOWN = 2**63 - 1

_FORMATS = {
    "mov": re.compile(rb".{4}(?:ftyp|moov|mdat|wide|free|skip)", re.S),  # M4A, MP4, MOV, 3GP
    "matroska": re.compile(rb"\x1a\x45\xdf\xa3"),  # WebM
    "amr": re.compile(rb"#!AMR(?:-WB)?\n"),
    "asf": re.compile(rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),  # WMA
    "aac": re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"),  # ADTS
    # by its bsid; above 10, it is E-AC-3
    "ac3": re.compile(rb"\x0b\x77.{3}[\x00-\x57]", re.S),
    "eac3": re.compile(rb"\x0b\x77.{3}[\x58-\x87]", re.S),
    "avi": re.compile(rb"RIFF.{4}AVI ", re.S),
    # only of FLAC, which libsndfile knows by its older mark
    "ogg": re.compile(rb"OggS\0\x02.{20}\x01.\x7fFLAC", re.S),
    "mpegts": re.compile(rb"\x47.{187}\x47.{187}\x47", re.S),
    # only with codecs that libsndfile refuses
    "wav": re.compile(rb"(?:RIFF|RIFX|RF64|BW64).{4}WAVE", re.S),
    "w64": re.compile(rb"riff\x2e\x91\xcf\x11"),
    "aiff": re.compile(rb"FORM.{4}AIF[FC]", re.S),
    "caf": re.compile(rb"caff"),
}
"""FFmpeg's names of formats, and how files of them begin."""

_ESTIMATED = ("amr", "aac", "ac3", "eac3", "mpegts", "caf")
"""Formats whose header does not say how long they are: FFmpeg estimates it."""

_TIMED = ("mov", "matroska", "mpegts")
"""Formats in which packets state the time at which they are played."""

OLD_FFMPEG, FFMPEG = 1, 2
"""Marks of items that FFmpeg decoded: before the second paragraph above held, and since."""

# the bytes of a file that tell its format: two packets of MPEG-TS, and one byte
BEGINNING = 377
_TOLERANCE_SECONDS = 0.1  # headers round the length, and encoders add or drop a little
_LATE_SECONDS = 0.01  # where a file begins later, players differ
_LONGEST_GAP_SECONDS = 600.0  # of silence; timestamps that leap further are wrong
_BLOCK = 65536  # samples
_HELD_BLOCKS = 4  # frames, of which an encoder's padding may take up three
_ITUNES = re.compile(r"(?: *[0-9A-F]{8}){3} ([0-9A-F]{16})\b", re.I)

_NEAR, _LONG_HEADER = 64, 64 << 10  # bytes that headers have
_ROUND = 10_000_000, 1 << 24
_BIG_ENDIAN = b"RIFX", b"FORM", b"caff"
_CHUNKS = {
    **dict.fromkeys((b"RIFF", b"RIFX", b"RF64", b"FORM"), (4, 4, 12, 2)),  # FORM: AIFF, 8SVX
    b"riff": (16, 8, 40, 8),  # W64
    b"caff": (4, 8, 8, 1),
}
_SOUNDS = {b"data": 0, b"SSND": 8, b"BODY": 0}  # bytes between such a chunk and its samples
_MOST_CHUNKS = 4096
_PAGE = 65536  # holds the largest Ogg page, 65,307 bytes
_VORBIS_HEADERS = 3  # packets before the sound
_NO_POSITION = b"\xff" * 8  # of a page on which no packet ends
_FAR_UP = 1 << 40  # samples
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_MP3_HEADER = re.compile(rb"(?:Xing|Info)\0\0\0[\x03\x07\x0b\x0f].{4}(.{4})", re.S)
_FLAC = b"fLaC\0\0\x22"  # and the type of the first block before its length
_MOST_BLOCKS = 128  # one of each type that there may be
_SHORTEN = re.compile(rb"NIST_1A\n.*\nsample_coding -s\d+ [^\n]*shorten", re.S)
_MP3_FRAME = 2881  # bytes, at most
_HEAD_BYTES = 512  # of a file: FFmpeg writes what it is called before the samples of a WAV


def format_of(beginning: bytes) -> str | None:
    """The format of a file that FFmpeg is to decode, by its first `BEGINNING` bytes; None
    for any other file."""
    return next((name for name, pattern in _FORMATS.items() if pattern.match(beginning)), None)


class FFmpegDecoder:
    """Decodes a file from its beginning on, as a soundfile.SoundFile does.

    `format_name` is what `format_of` says of the file. The descriptor's position stays.
    Raises AudioError if the file cannot be read, has no sound, or PyAV is not
    installed."""

    begins = 0.0
    """The first timestamp, in seconds, if players do not all count from there; else 0."""

    def __init__(self, descriptor: int, format_name: str) -> None:
        try:
            import av
        except ImportError as error:  # with a reason that is tried again in the next run
            raise AudioError(
                Reason.FILE_UNREADABLE, f"decoding needs PyAV: {install_hint('formats')}"
            ) from error
        self._av, self._descriptor = av, descriptor
        self._to_float = av.AudioResampler("flt")  # scales integers as libsndfile does
        self._format, self.samplerate, self.channels = format_name, 0, 0
        self._position = 0  # of the sample that comes next
        self._origin = 0.0  # when the first sample is played, in seconds by the file's clock
        self._end: float | None = None  # when the last frame ends by its samples
        self._stated_end = 0.0  # and by its stated duration
        path = f"/proc/self/fd/{descriptor}"
        # tags that are not UTF-8, which later releases take
        tags: dict[str, Any] = (
            {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
        )
        try:
            self._container: Any = av.open(path, format=format_name, **tags)
        except (av.FFmpegError, ValueError) as error:
            hint = (
                "; its index is missing or damaged: was it cut short?"
                if format_name == "mov"
                else ""
            )
            raise AudioError(
                Reason.NOT_AUDIO, f"cannot be read as audio: {_words(error)}{hint}"
            ) from error
        self._blocks = self._decoded()
        try:
            self._block = next(self._blocks)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def read(self, *, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Decode the next samples into `out`, `[num_samples, channels]`. Returns what was
        filled of it, from its start: nothing at the end of the file. Raises AudioError if
        what follows is damaged or missing."""
        if not len(self._block):
            self._block = next(self._blocks, self._block)
        count = min(len(out), len(self._block))
        out[:count], self._block = self._block[:count], self._block[count:]
        return out[:count]

    def _decoded(self) -> Iterator[NDArray[np.float32]]:
        """Yield the samples that are played, `[num_samples, channels]`, in blocks of which
        none is empty."""
        if not self._container.streams.audio:
            raise AudioError(Reason.NOT_AUDIO, "there is no sound track in it")
        stream = self._container.streams.audio[0]
        priming, num_samples = _caf_edges(self._descriptor) if self._format == "caf" else (0, 0)
        held: list[NDArray[np.float32]] = []  # the last blocks, which may have to be cut
        try:
            for block in self._played(stream, priming):
                held.append(block)
                if len(held) > _HELD_BLOCKS:
                    yield held.pop(0)
        except (self._av.FFmpegError, ValueError) as error:
            yield from held
            raise self._fault("decoding fails", f": {_words(error)}") from error
        except AudioError:
            yield from held
            raise
        if not held:
            raise AudioError(Reason.EMPTY, "its sound track holds no samples")
        last = np.concatenate(held)
        promised = num_samples / self.samplerate or self._end_by_header(stream)
        if self._format in ("mov", "caf"):
            ends = promised, self._stated_end, self._end_by_tag()
            surplus = [
                self._position - round((end - self._origin) * self.samplerate) for end in ends
            ]
            within = [count for count in surplus if 0 < count < len(last)]
            last = last[: len(last) - max(within, default=0)]
        yield last
        reached = self._origin + self._position / self.samplerate
        if reached < promised - _TOLERANCE_SECONDS:
            what = f"its header promises {promised:.3f} s, and it holds {reached:.3f} s"
            raise AudioError(Reason.TRUNCATED, what)

    def _played(self, stream: Any, priming: int) -> Iterator[NDArray[np.float32]]:
        """Yield what is decoded after so many samples, and silence where nothing is played."""
        context, is_opus = stream.codec_context, False
        if context is None:
            raise AudioError(Reason.NOT_AUDIO, "FFmpeg has no decoder of its codec")
        if self._format == "caf":  # since 8.1, FFmpeg skips what its packet table says, too
            context.flags2 |= self._av.codec.context.Flags2.skip_manual
        if context.name == "opus":
            is_opus = self._format != "caf"
            context, pre_skip = self._libopus(context)
            priming = priming or pre_skip
        packets = self._container.demux(stream)
        for frame in chain.from_iterable(map(context.decode, packets)):
            form = frame.sample_rate, frame.layout.nb_channels
            if not self.samplerate:
                self.samplerate, self.channels = form
            if frame.is_corrupt:
                raise self._fault("decoding fails")
            if form != (self.samplerate, self.channels):
                raise self._fault("its sample rate or its channels change")
            blocks = [packed.to_ndarray() for packed in self._to_float.resample(frame)]
            samples: NDArray[Any] = np.concatenate(blocks, axis=None).reshape(-1, self.channels)
            skipped = frame.side_data.get("SKIP_SAMPLES") if is_opus else None
            leading, trailing = struct.unpack_from("<II", skipped or bytes(8))
            priming = max(priming, leading)
            late, stop = min(priming, len(samples)), max(0, len(samples) - trailing)
            samples = samples[late:stop]
            priming -= late
            missing = self._missing_before(frame, late, len(samples), stream)
            for first in range(0, missing, _BLOCK):
                silence = np.zeros((min(_BLOCK, missing - first), self.channels), np.float32)
                self._position += len(silence)
                yield silence
            self._position += len(samples)
            if len(samples):
                yield samples

    def _libopus(self, context: Any) -> tuple[Any, int]:
        """The reference decoder, which leaves skipping to its caller; and how many samples to
        skip first, by Opus' own header: Matroska's was often wrong for sound of 16 kHz."""
        try:
            opus = self._av.CodecContext.create("libopus", "r")
        except ValueError as error:
            what = "decoding Opus needs a PyAV with libopus, as its wheels have it"
            raise AudioError(Reason.FILE_UNREADABLE, what) from error
        # RFC 7845, section 5.1
        head = context.extradata or b"OpusHead\1%c\0\0\x80\xbb\0\0\0\0\0" % context.channels
        opus.extradata = head
        opus.options = {"request_sample_fmt": "flt", "flags2": "+skip_manual"}
        return opus, int.from_bytes(head[10:12], "little")

    def _missing_before(self, frame: Any, late: int, num_samples: int, stream: Any) -> int:
        """Count the samples of silence before so many of a frame, without its first ones."""
        if frame.pts is None or self._format not in _TIMED:
            return 0
        time = float(frame.pts * stream.time_base)
        self._stated_end = time + float(frame.duration * stream.time_base)
        time += late / self.samplerate
        is_first = self._end is None
        if self._end is None:
            others = [
                float(max(0, other.start_time) * other.time_base)
                for other in self._container.streams
                if other.type in ("audio", "video") and other.index != stream.index
                if other.start_time is not None
            ]
            self._origin = self._end = min(time, *others, time)
            can_begin = self._format == "mpegts" or "iTunSMPB" in self._container.metadata
            if self._origin > _LATE_SECONDS and not can_begin:
                self.begins = self._origin
        leap = time - self._end
        if not -_TOLERANCE_SECONDS <= leap <= _LONGEST_GAP_SECONDS:
            raise self._fault(f"its timestamps leap by {leap:.3f} s")
        self._end = time + num_samples / self.samplerate
        gap = time - self._origin - self._position / self.samplerate
        return round(gap * self.samplerate) if is_first or gap > _TOLERANCE_SECONDS else 0

    def _end_by_header(self, stream: Any) -> float:
        """When the sound ends, in seconds; 0 if the header does not say."""
        if self._format in _ESTIMATED:
            return 0.0
        if stream.duration is not None:
            start = (stream.start_time or 0) if self._format == "mov" else 0
            return float((start + stream.duration) * stream.time_base)
        return (self._container.duration or 0) / 1e6 if len(self._container.streams) == 1 else 0.0

    def _end_by_tag(self) -> float:
        """When the sound ends by iTunes' tag, which stands in place of an edit list, or 0."""
        found = _ITUNES.match(self._container.metadata.get("iTunSMPB", ""))
        return self._origin + int(found[1], 16) / self.samplerate if found else 0.0

    def _fault(self, what: str, why: str = "") -> AudioError:
        where = f" after {self._position / self.samplerate:.3f} s" if self._position else ""
        return AudioError(Reason.TRUNCATED, f"{what}{where}{why}")


def _caf_edges(fd: int) -> tuple[int, int]:
    """How many samples a CAF's packet table leaves out first, and how many it then plays;
    zeros if it does not say (Apple's Core Audio Format Specification)."""
    at = 8
    for _ in range(_MOST_BLOCKS):
        chunk = os.pread(fd, 36, at)
        if len(chunk) < 12:
            break
        name, length = struct.unpack_from(">4sq", chunk)
        if name == b"pakt" and len(chunk) == 36:
            num_samples, priming, remainder = struct.unpack_from(">qii", chunk, 20)
            return (max(0, priming), num_samples) if priming or remainder else (0, 0)
        if not 0 <= length < 1 << 62:  # -1: until the end of the file
            break
        at += 12 + length
    return 0, 0


def _words(error: Exception) -> str:
    words = getattr(error, "strerror", None) or str(error)
    return words[:1].lower() + words[1:]


class View(io.FileIO):
    """A file as libsndfile shall see it: with other bytes in some places, and an end.

    One that `is_endless` claims to be far longer than it is. libmpg123 guesses the length
    of an MP3 without a header frame from the bitrate of its first frame and the size of
    the file, and libsndfile reads no more than that: it lost 40 % of a file at a variable
    bitrate. With a longer file, the guess is longer, too, and all of it is read."""

    def __init__(
        self, descriptor: int, patches: dict[int, bytes], end: int, is_endless: bool = False
    ) -> None:
        super().__init__(descriptor, closefd=False)
        self._patches, self._end = patches, end
        self._claimed_end = 64 * end if is_endless else end

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to `offset`. Going to the end, which is how libsndfile learns the size,
        gives the claimed size."""
        if whence == os.SEEK_END:
            return super().seek(offset + self._end if offset else self._claimed_end)
        return super().seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        """Read bytes, as they are seen here."""
        first = self.tell()
        room = memoryview(buffer).cast("B")[: max(0, self._end - first)]
        count = super().readinto(room) or 0
        for at, new in self._patches.items():
            begin, end = max(at, first), min(at + len(new), first + count)
            if begin < end:
                room[begin - first : end - first] = new[begin - at : end - at]
        return count


class Sound(NamedTuple):
    """Where the samples of a file are, by its header."""

    at: int
    length: int  # in bytes
    file_end: int
    """Where the file ends; 0 if headers of this kind do not say it."""
    size_at: int
    """Where the size of the samples stands, as so many bytes, in this order."""
    size_bytes: int
    order: Literal["little", "big"]
    counted: int
    """How many other bytes this size counts, too."""

    def patches(self, size: int) -> dict[int, bytes]:
        """The right size of the samples in a file of `size` bytes, if its header was
        written before that was known; else none."""
        held = size - self.at
        was_unknown = self.file_end != size
        if self.length > 0:
            is_guessed = is_guess(self.length) or is_guess(self.file_end)
            was_unknown = self.length > held and (is_guessed or 0 < self.file_end <= _NEAR)
        if held <= 0 or not was_unknown:
            return {}
        number = min(held + self.counted, (1 << 8 * self.size_bytes) - 1)
        return {self.size_at: number.to_bytes(self.size_bytes, self.order)}


def is_guess(size: int) -> bool:
    """Whether a size is one that nobody counted. A program that writes to a pipe cannot go
    back to fill it in. It leaves the largest number of the field, or one near it; or a
    round number that is large enough, and the bytes of a header more."""
    is_largest = 0x7F000000 <= size <= 1 << 32 or size >= (1 << 63) - _LONG_HEADER
    is_round = any(min(size % unit, -size % unit) <= _NEAR for unit in _ROUND)
    return is_largest or (is_round and size > _ROUND[0] // 2)


def find_sound(fd: int, size: int) -> Sound | None:
    """Find the samples in a file of chunks, or an AU; None if there are none."""
    head = os.pread(fd, 40, 0).ljust(40, b"\0")
    kind = head[:4]
    if kind == b".snd":
        at, length = struct.unpack_from(">II", head, 4)
        return Sound(at, length, 0, 8, 4, "big", 0)
    order: Literal["little", "big"] = "big" if kind in _BIG_ENDIAN else "little"
    # bytes of a chunk's name and of its size; where the first one is; their alignment
    name_bytes, size_bytes, at, alignment = _CHUNKS.get(kind, (4, 4, size, 2))
    header_bytes = name_bytes + size_bytes
    # in W64, sizes count the header of the chunk
    own_bytes = header_bytes if kind == b"riff" else 0
    file_end = int.from_bytes(head[name_bytes:header_bytes], order) + header_bytes - own_bytes
    long_sizes = 0  # where those of RF64 stand
    for _ in range(_MOST_CHUNKS):
        chunk = os.pread(fd, header_bytes, at)
        if len(chunk) < header_bytes:
            break
        name, length = chunk[:4], int.from_bytes(chunk[name_bytes:], order) - own_bytes
        size_at, at = at + name_bytes, at + header_bytes
        if name == b"ds64":
            long_sizes = at
        if name in _SOUNDS:
            if long_sizes and length == 0xFFFFFFFF:
                size_at, size_bytes = long_sizes + 8, 8
                file_end, length = struct.unpack("<QQ", os.pread(fd, 16, long_sizes))
                file_end += header_bytes
            before = 4 if kind == b"caff" else _SOUNDS[name]
            file_end = 0 if kind == b"caff" else file_end
            counted = own_bytes + before
            return Sound(
                at + before, length - before, file_end, size_at, size_bytes, order, counted
            )
        at += max(0, length) + -length % alignment
    return None


def shortfall(file: Any, fd: int, size: int) -> str | None:
    """What a file, a soundfile.SoundFile that was just opened, lacks of what its header
    promises; None if it seems to be whole. The position of `fd`, the same file of `size`
    bytes, does not change."""
    match file.format:
        case "FLAC":
            return None
        case "MP3":
            return _mp3_shortfall(fd, size)
        case "OGG":
            return ogg_shortfall(fd, size)
        case "NIST":
            promised = re.search(rb"\nsample_count -i (\d+)", os.pread(fd, 1024, 0))
            if promised and int(promised[1]) > file.frames:
                return (
                    f"its header promises {int(promised[1]):,} samples, and it holds "
                    f"{file.frames:,}"
                )
            return None
        case _:
            return _sound_shortfall(find_sound(fd, size), size, file.frames)


def gsm_samples(log: str, num_samples: int) -> int:
    """The number of samples in a WAV of GSM 6.10 by libsndfile's log, which counts
    `num_samples`: it makes a block of noise of the byte that pads an odd number of blocks."""
    found = re.search(r"^ *data *: (\d+)(?: \(should be (\d+)\))?", log, re.M)
    return min(num_samples, int(found[2] or found[1]) // 65 * 320) if found else num_samples


def cut_in_header(fd: int, size: int) -> str | None:
    """That a file which libsndfile refuses begins as audio, and ends before its samples;
    None if nothing says so (RFC 9639, section 8.1, and RFC 3533)."""
    head = os.pread(fd, 12, 0)
    if head.startswith(b"OggS\0\x02"):
        return ogg_shortfall(fd, size)
    if why := _sound_shortfall(find_sound(fd, size), size, 0):
        return why
    promised = int.from_bytes(head[4:8], "little") + 8
    if (head[:4], head[8:]) == (b"RIFF", b"WAVE") and size < promised and not is_guess(promised):
        return f"its header promises {promised:,} bytes, and it holds {size:,}"
    if len(head) > 4 and _FLAC.startswith(head[:4] + head[5:8]):
        block = 4
        for _ in range(_MOST_BLOCKS):
            header = os.pread(fd, 4, block).ljust(4, b"\0")
            block += 4 + int.from_bytes(header[1:])
            if block >= size:
                return "it ends within its header"
            if header[0] & 0x80:  # the last one
                break
    return None


class Header(NamedTuple):
    """What a file says of its samples."""

    sample_rate: int
    """In Hz."""
    num_samples: int
    """The number of samples, no more than the file has room for, if that can be told;
    `UNKNOWN` if not said."""
    num_channels: int
    shortfall: str | None = None
    """What the file lacks of what it promises; None if nothing is known to be missing."""
    can_seek: bool = True
    """Whether any sample can be reached by itself, so that the header alone tells how
    many there are."""
    is_float: bool = False
    """Whether samples can be NaN or infinite."""
    decoder: int = 0
    """`FFMPEG`, or 0."""
    begins: float = 0.0
    """See `FFmpegDecoder.begins`."""
    samples_at: int | None = None
    """The first byte of the samples of a WAV that needs no decoder; None of other files."""


def plain_header(fd: int, size: int) -> Header | None:
    """The header of a FLAC file (RFC 9639, section 8.2), or of a WAV of 16-bit integers
    that ends with its samples; None if it has no such header, or one that libsndfile
    should look at."""
    head = os.pread(fd, _HEAD_BYTES, 0)
    if head.startswith(b"RIFF"):
        return _wav_header(head, size)
    if len(head) < 42 or not _FLAC.startswith(head[:4] + head[5:8]) or head[4] & 0x7F:
        return None
    packed = int.from_bytes(head[18:26])
    rate, channels, bits = packed >> 44, (packed >> 41 & 7) + 1, (packed >> 36 & 31) + 1
    num_samples = packed & (1 << 36) - 1
    return (
        Header(rate, num_samples, channels)
        if rate and num_samples and bits in (8, 16, 24)
        else None
    )


def _wav_header(head: bytes, size: int) -> Header | None:
    if head[8:12] != b"WAVE" or int.from_bytes(head[4:8], "little") + 8 != size:
        return None
    at, form = 12, None
    while at + 8 <= len(head):
        name, length = head[at : at + 4], int.from_bytes(head[at + 4 : at + 8], "little")
        at += 8
        if name == b"data":
            if form is None or at + length != size:
                return None
            kind, channels, rate, _, frame_bytes, bits = form
            is_plain = (
                kind == 1 and bits == 16 and 0 < channels <= 8 and frame_bytes == 2 * channels
            )
            if not (is_plain and rate and length and length % frame_bytes == 0):
                return None
            return Header(rate, length // frame_bytes, channels, samples_at=at)
        if name == b"fmt " and length == 16 and at + length <= len(head):
            form = struct.unpack_from("<HHIIHH", head, at)
        at += length + length % 2
    return None


def is_shorten(fd: int) -> bool:
    """Whether a file is NIST SPHERE whose samples are compressed by shorten."""
    return _SHORTEN.match(os.pread(fd, 1024, 0)) is not None


def mp3_end(fd: int) -> int | None:
    """Where an MP3 ends by its header frame, in bytes from the start of the file; None
    without such a frame (http://gabriel.mp3-tech.org/mp3infotag.html;
    https://id3.org/id3v2.3.0 for the tag before the frame)."""
    head = os.pread(fd, 10, 0)
    is_tagged = head.startswith(b"ID3") and len(head) == 10
    start = (
        10 + sum(digit << 7 * place for place, digit in enumerate(reversed(head[6:])))
        if is_tagged
        else 0
    )
    found = _MP3_HEADER.search(os.pread(fd, 4096, start))
    return start + int.from_bytes(found[1]) if found else None


def _mp3_shortfall(fd: int, size: int) -> str | None:
    end = mp3_end(fd)
    if end is None or size - end <= _MP3_FRAME:
        return None
    after = os.pread(fd, 3, end)
    if after == b"ID3" or (after[0] == 0xFF and after[1] >= 0xE0):
        return (
            f"its header ends it after {end:,} of {size:,} bytes; another MP3 follows, "
            "which cannot be read"
        )
    return None


def ogg_shortfall(fd: int, size: int) -> str | None:
    """What an Ogg file lacks of its end; None if it seems to be whole."""
    tail = os.pread(fd, _PAGE, max(0, size - _PAGE))
    start = tail.rfind(b"OggS")
    if start < 0:
        return None  # something else follows, longer than a page
    # RFC 3533, section 6: flags in byte 5, serial number in 14-17, number of segments in
    # 26, then their sizes
    page = tail[start:]
    if len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]]):
        return "its last Ogg page is cut off"
    if not page[5] & 4:
        return "its last Ogg page does not end the stream"
    if page[14:18] != os.pread(fd, 4, 14):
        return "it holds several Ogg streams, and only the first can be read"
    return None


def vorbis_patches(fd: int, size: int) -> dict[int, bytes]:
    """Move an Ogg Vorbis that begins before 0 to where libsndfile reads all of it.

    FFmpeg writes such files when it copies from the middle of another: the first page says
    a lower position than it has samples. libsndfile then counts too few samples and plays
    the first ones, or too many. It takes the difference of two positions, so those of the
    first and the last page of sound are moved far up. In a whole file that begins at 0,
    this changes no sample."""
    if os.pread(fd, 7, 28) != b"\x01vorbis" or ogg_shortfall(fd, size):
        return {}
    at, packets = 0, 0
    for _ in range(_MOST_CHUNKS):
        head = os.pread(fd, 27 + 255, at)
        if len(head) < 27 or not head.startswith(b"OggS"):
            return {}
        segments = head[27 : 27 + head[26]]
        if packets >= _VORBIS_HEADERS and head[6:14] != _NO_POSITION:
            break
        packets += sum(length < 255 for length in segments)
        at += 27 + len(segments) + sum(segments)
    tail = max(0, size - _PAGE)
    last = os.pread(fd, _PAGE, tail).rfind(b"OggS")
    if last < 0 or tail + last <= at:
        return {}
    return _moved_page(fd, at) | _moved_page(fd, tail + last)


def _moved_page(fd: int, at: int) -> dict[int, bytes]:
    """The position and the checksum of an Ogg page that is moved (RFC 3533, section 6)."""
    page = bytearray(os.pread(fd, _PAGE, at))
    del page[27 + page[26] + sum(page[27 : 27 + page[26]]) :]
    position = int.from_bytes(page[6:14], "little", signed=True) + _FAR_UP
    page[6:14] = position.to_bytes(8, "little", signed=True)
    page[22:26] = bytes(4)
    # zlib's CRC has the same polynomial, and the bits of each byte in the other order
    mirrored = zlib.crc32(page.translate(_MIRRORED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    checksum = int(f"{mirrored:032b}"[::-1], 2).to_bytes(4, "little")
    return {at + 6: bytes(page[6:14]), at + 22: checksum}


def _sound_shortfall(sound: Sound | None, size: int, num_samples: int) -> str | None:
    if sound is None or sound.length <= size - sound.at or sound.patches(size):
        return None
    promised, held = sound.length, size - sound.at
    # bytes of a sample; 0 if samples are compressed
    width = held // num_samples if num_samples else 0
    # what is missing is a part of a sample, or padding
    if width and promised // width <= num_samples:
        return None
    return f"its header promises {promised:,} bytes, and it holds {held:,}"
