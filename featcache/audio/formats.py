"""The headers of audio files: where the samples are, and whether the file is complete.

libsndfile opens most truncated files as if nothing were missing. How to notice was found by
cutting files (libsndfile 1.2.2):

    WAV, W64, RF64, AIFF, AU   the header promises more bytes of samples than the file has
    NIST SPHERE                the header counts the samples
    Ogg (Vorbis, Opus)         the last page does not end the stream, or is itself cut off
    FLAC                       decoding gives fewer samples than the header counts
    MP3                        the same, with a header frame ("Xing", "Info"); without it,
                               decoding fails, unless the cut lies between frames

Other formats are believed. The sizes in a header that was written before the length was
known mean nothing: see `is_guess`.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from typing import Any, Literal, NamedTuple

UNKNOWN = 2**63 - 1
"""The number of samples if the header does not say it. libsndfile uses the same number."""

OLD_FFMPEG, FFMPEG = 1, 2
"""Marks of items that FFmpeg decoded, with values that depend on its release, and without."""

_NEAR, _LONG_HEADER = 64, 64 << 10  # bytes that headers have
_ROUND = 10_000_000, 1 << 24
_BIG_ENDIAN = b"RIFX", b"FORM", b"caff"
_CHUNKS = {
    **dict.fromkeys((b"RIFF", b"RIFX", b"RF64", b"FORM"), (4, 4, 12, 2)),  # FORM: AIFF, 8SVX
    b"riff": (16, 8, 40, 8),  # W64
    b"caff": (4, 8, 8, 1),
}
"""Bytes of a chunk's name and of its size, offset of the first chunk, alignment of chunks."""
_SOUNDS = {b"data": 0, b"SSND": 8, b"BODY": 0}  # bytes between such a chunk and its samples
_MOST_CHUNKS = 4096
_PAGE = 65536  # holds the largest Ogg page, 65,307 bytes
_VORBIS_HEADERS = 3  # packets before the sound
_NO_POSITION = b"\xff" * 8  # of a page on which no packet ends
_FAR_UP = 1 << 40  # samples
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_MP3_HEADER = re.compile(rb"(?:Xing|Info)\0\0\0[\x03\x07\x0b\x0f].{4}(.{4})", re.S)
_MP3_FRAME = 2881  # bytes, at most
_FLAC = b"fLaC\0\0\x22"  # and the type of the first block before its length
_MOST_BLOCKS = 128  # one of each type that a FLAC may have
_SHORTEN = re.compile(rb"NIST_1A\n.*\nsample_coding -s\d+ [^\n]*shorten", re.S)
_HEAD_BYTES = 512  # FFmpeg writes tags before the samples of a WAV


class View(io.FileIO):
    """A file as libsndfile shall see it: with other bytes in some places, and an end.

    libmpg123 guesses the length of an MP3 without a header frame from its first frame and
    the size of the file, and libsndfile stops there: it lost 40 % of a file at a variable
    bitrate. With a far larger `claimed_size`, all of it is read."""

    def __init__(
        self, descriptor: int, patches: dict[int, bytes], end: int, claimed_size: int
    ) -> None:
        super().__init__(descriptor, closefd=False)
        self._patches = patches
        self._end = end
        self._claimed_size = claimed_size

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to `offset`. libsndfile goes to the end to learn the size."""
        if whence == os.SEEK_END:
            return super().seek(offset + self._end if offset else self._claimed_size)
        return super().seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        """Read bytes, with the patches."""
        first = self.tell()
        room = memoryview(buffer).cast("B")[: max(0, self._end - first)]
        count = super().readinto(room) or 0
        for offset, patch in self._patches.items():
            begin = max(offset, first)
            end = min(offset + len(patch), first + count)
            if begin < end:
                room[begin - first : end - first] = patch[begin - offset : end - offset]
        return count


class Sound(NamedTuple):
    """Where the samples of a file are, by its header."""

    at: int
    length: int
    """In bytes."""
    file_end: int
    """Where the file ends; 0 if headers of this kind do not say it."""
    size_at: int
    """Where the size of the samples stands, in `size_bytes` bytes of this `order`."""
    size_bytes: int
    order: Literal["little", "big"]
    counted: int
    """The number of other bytes that this size includes."""

    def patches(self, size: int) -> dict[int, bytes]:
        """Correct the size of the samples in a file of `size` bytes, if it was unknown when
        its header was written."""
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
    """Tell whether nobody counted a size. A program that writes to a pipe leaves the
    largest number of the field, or a large round number; or one near it."""
    is_largest = 0x7F000000 <= size <= 1 << 32 or size >= (1 << 63) - _LONG_HEADER
    is_round = any(min(size % unit, -size % unit) <= _NEAR for unit in _ROUND)
    return is_largest or (is_round and size > _ROUND[0] // 2)


def find_sound(fd: int, size: int) -> Sound | None:
    """Find the samples in a file of chunks, or an AU; None if it has none."""
    head = os.pread(fd, 40, 0).ljust(40, b"\0")
    kind = head[:4]
    if kind == b".snd":
        first, length = struct.unpack_from(">II", head, 4)
        return Sound(first, length, 0, 8, 4, "big", 0)
    if kind not in _CHUNKS:
        return None
    order: Literal["little", "big"] = "big" if kind in _BIG_ENDIAN else "little"
    name_bytes, size_bytes, offset, alignment = _CHUNKS[kind]
    header_bytes = name_bytes + size_bytes
    # in W64, sizes count the header of the chunk
    counted = header_bytes if kind == b"riff" else 0
    file_end = 0
    if kind != b"caff":
        file_end = int.from_bytes(head[name_bytes:header_bytes], order) + header_bytes - counted
    long_sizes = 0  # where those of RF64 stand
    for _ in range(_MOST_CHUNKS):
        chunk = os.pread(fd, header_bytes, offset) if offset < size else b""
        if len(chunk) < header_bytes:
            break
        name = chunk[:4]
        length = int.from_bytes(chunk[name_bytes:], order) - counted
        size_at = offset + name_bytes
        offset += header_bytes
        if name == b"ds64":
            long_sizes = offset
        if name in _SOUNDS:
            if long_sizes and length == 0xFFFFFFFF:
                size_at, size_bytes = long_sizes + 8, 8
                sizes = os.pread(fd, 16, long_sizes).ljust(16, b"\0")
                file_end, length = struct.unpack("<QQ", sizes)
                file_end += header_bytes
            before = 4 if kind == b"caff" else _SOUNDS[name]
            first, length = offset + before, length - before
            counted += before
            return Sound(first, length, file_end, size_at, size_bytes, order, counted)
        offset += max(0, length) + -length % alignment
    return None


def shortfall(file: Any, fd: int, size: int) -> str | None:
    """Return what a soundfile.SoundFile that was just opened lacks of what its header
    promises. The position of `fd`, the same file of `size` bytes, does not change."""
    if file.format == "MP3":
        return _mp3_shortfall(fd, size)
    if file.format == "OGG":
        return ogg_shortfall(fd, size)
    if file.format == "NIST":
        count = re.search(rb"\nsample_count -i (\d+)", os.pread(fd, 1024, 0))
        if count is None or int(count[1]) <= file.frames:
            return None
        return f"its header promises {int(count[1]):,} samples, and it holds {file.frames:,}"
    return _sound_shortfall(fd, size, file.frames)


def gsm_samples(log: str, num_samples: int) -> int:
    """Count the samples in a WAV of GSM 6.10 by libsndfile's log: its own number includes
    noise of the byte that pads an odd number of blocks."""
    sizes = re.search(r"^ *data *: (\d+)(?: \(should be (\d+)\))?", log, re.M)
    if sizes is None:
        return num_samples
    return min(num_samples, int(sizes[2] or sizes[1]) // 65 * 320)


def cut_in_header(fd: int, size: int) -> str | None:
    """Return how a file that libsndfile refuses was cut off before its samples; None if it
    shows no sign of a cut (RFC 9639, section 8.1, and RFC 3533)."""
    head = os.pread(fd, 12, 0)
    if head.startswith(b"OggS\0\x02"):
        return ogg_shortfall(fd, size)
    lack = _sound_shortfall(fd, size, 0)
    if lack:
        return lack
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
            if header[0] & 0x80:  # the last block
                break
    return None


class Header(NamedTuple):
    """A file's description of its samples."""

    sample_rate: int
    """In Hz."""
    num_samples: int
    """No more than the file has room for, if that can be told; `UNKNOWN` if not said."""
    num_channels: int
    shortfall: str | None = None
    """The part that is missing; None if the file seems to be complete."""
    can_seek: bool = True
    """True if any sample can be reached by itself, so that the header alone tells how many
    samples the file has."""
    is_float: bool = False
    """True if samples can be NaN or infinite."""
    decoder: int = 0
    """`FFMPEG`, or 0."""
    begins: float = 0.0
    """See `ffmpeg.FFmpegDecoder.begins`."""
    samples_at: int | None = None
    """The first byte of the samples of a 16-bit WAV; None of other files."""


def plain_header(fd: int, size: int) -> Header | None:
    """Read the header of a FLAC file (RFC 9639, section 8.2), or of a WAV of 16-bit
    integers that ends with its samples; None for files that libsndfile should read."""
    head = os.pread(fd, _HEAD_BYTES, 0)
    if len(head) < 42:
        return None
    if head.startswith(b"RIFF"):
        return _wav_header(head, size)
    if not _FLAC.startswith(head[:4] + head[5:8]) or head[4] & 0x7F:
        return None
    packed = int.from_bytes(head[18:26])
    rate = packed >> 44
    channels = (packed >> 41 & 7) + 1
    bits = (packed >> 36 & 31) + 1
    num_samples = packed & (1 << 36) - 1
    if not rate or not num_samples or bits not in (8, 16, 24):
        return None
    return Header(rate, num_samples, channels)


def _wav_header(head: bytes, size: int) -> Header | None:
    end, kind = struct.unpack_from("<I4s", head, 4)
    offset, name, length, form = 12, b"", 0, b""
    while name != b"data":
        offset += length + length % 2
        if offset + 8 > len(head):
            return None
        name, length = struct.unpack_from("<4sI", head, offset)
        offset += 8
        if name == b"fmt " and length == 16:
            form = head[offset : offset + 16]
    if kind != b"WAVE" or not form or not offset + length == size == end + 8:
        return None
    coding, channels, rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", form)
    is_16_bit = coding == 1 and bits == 16 and frame_bytes == 2 * channels
    if not (is_16_bit and 0 < channels <= 8 and rate and length) or length % frame_bytes:
        return None
    return Header(rate, length // frame_bytes, channels, samples_at=offset)


def is_shorten(fd: int) -> bool:
    """Tell whether a file is NIST SPHERE whose samples are compressed by shorten."""
    return _SHORTEN.match(os.pread(fd, 1024, 0)) is not None


def mp3_end(fd: int) -> int | None:
    """Return where an MP3 ends by its header frame; None without such a frame
    (http://gabriel.mp3-tech.org/mp3infotag.html; https://id3.org/id3v2.3.0 for the tag
    before it)."""
    head = os.pread(fd, 10, 0)
    start = 0
    if head.startswith(b"ID3") and len(head) == 10:
        for digit in head[6:]:
            start = (start << 7) + digit
        start += 10
    frame = _MP3_HEADER.search(os.pread(fd, 4096, start))
    return start + int.from_bytes(frame[1]) if frame else None


def _mp3_shortfall(fd: int, size: int) -> str | None:
    end = mp3_end(fd)
    if end is None or size - end <= _MP3_FRAME:
        return None
    after = os.pread(fd, 3, end)
    if after == b"ID3" or (after[0] == 0xFF and after[1] >= 0xE0):
        where = f"after {end:,} of {size:,} bytes"
        return f"its header ends it {where}; another MP3 follows, which cannot be read"
    return None


def ogg_shortfall(fd: int, size: int) -> str | None:
    """Return what an Ogg file lacks of its end; None if it seems to be complete."""
    tail = os.pread(fd, _PAGE, max(0, size - _PAGE))
    start = tail.rfind(b"OggS")
    if start < 0:
        return None  # something else follows, longer than a page
    # RFC 3533, section 6: flags in byte 5, serial number in 14-17, number of segments in
    # 26, then their sizes
    page = tail[start:]
    if len(page) < 27 or len(page) < _page_bytes(page):
        return "its last Ogg page is cut off"
    if not page[5] & 4:
        return "its last Ogg page does not end the stream"
    if page[14:18] != os.pread(fd, 4, 14):
        return "it holds several Ogg streams, and only the first can be read"
    return None


def vorbis_patches(fd: int, size: int) -> dict[int, bytes]:
    """Move an Ogg Vorbis that begins before 0 to where libsndfile reads all of it.

    FFmpeg writes such files when it copies from the middle of another: the position of the
    first page is below its number of samples, and libsndfile counts too few or too many. It
    takes the difference of two positions, so the positions of the first and the last page
    of sound are moved far up. In a complete file that begins at 0, this changes no
    sample."""
    if os.pread(fd, 7, 28) != b"\x01vorbis" or ogg_shortfall(fd, size):
        return {}
    first, packets = 0, 0
    for _ in range(_MOST_CHUNKS):
        head = os.pread(fd, 27 + 255, first)
        if len(head) < 27 or not head.startswith(b"OggS"):
            return {}
        if packets >= _VORBIS_HEADERS and head[6:14] != _NO_POSITION:
            break
        packets += sum(length < 255 for length in head[27 : 27 + head[26]])
        first += _page_bytes(head)
    tail = max(0, size - _PAGE)
    last = tail + os.pread(fd, _PAGE, tail).rfind(b"OggS")
    if last < tail or last <= first:
        return {}
    return _moved_page(fd, first) | _moved_page(fd, last)


def _page_bytes(page: bytes | bytearray) -> int:
    num_segments = page[26]
    return 27 + num_segments + sum(page[27 : 27 + num_segments])


def _moved_page(fd: int, offset: int) -> dict[int, bytes]:
    """Return the position and the checksum of a moved Ogg page (RFC 3533, section 6)."""
    page = bytearray(os.pread(fd, _PAGE, offset))
    del page[_page_bytes(page) :]
    position = int.from_bytes(page[6:14], "little", signed=True) + _FAR_UP
    page[6:14] = position.to_bytes(8, "little", signed=True)
    page[22:26] = bytes(4)
    # zlib's CRC has the same polynomial, and the bits of each byte in the other order
    mirrored = zlib.crc32(page.translate(_MIRRORED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    checksum = int(f"{mirrored:032b}"[::-1], 2).to_bytes(4, "little")
    return {offset + 6: bytes(page[6:14]), offset + 22: checksum}


def _sound_shortfall(fd: int, size: int, num_samples: int) -> str | None:
    sound = find_sound(fd, size)
    if sound is None or sound.length <= size - sound.at or sound.patches(size):
        return None
    held = size - sound.at
    # bytes of a sample; 0 if samples are compressed
    width = held // num_samples if num_samples else 0
    # what is missing is a part of a sample, or padding
    if width and sound.length // width <= num_samples:
        return None
    return f"its header promises {sound.length:,} bytes, and it holds {held:,}"
