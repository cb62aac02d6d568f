"""Sound that libsndfile does not know, decoded by FFmpeg, which PyAV brings in its wheels.

The file's first bytes decide its format, since FFmpeg would also guess playlists, which
name other files. Files are decoded from their beginning on, since seeking gives other
samples. FFmpeg's own decoder of Opus differs from libopus by a quarter of the signal in the
modes for speech."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.audio.blocks import Samples
from featcache.errors import AudioError, Reason, install_hint

_FORMATS = {
    "mov": re.compile(rb".{4}(?:ftyp|moov|mdat|wide|free|skip)", re.S),  # M4A, MP4, MOV, 3GP
    "matroska": re.compile(rb"\x1a\x45\xdf\xa3"),  # WebM
    "amr": re.compile(rb"#!AMR(?:-WB)?\n"),
    "asf": re.compile(rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),  # WMA
    "aac": re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"),  # ADTS
    "ac3": re.compile(rb"\x0b\x77.{3}[\x00-\x57]", re.S),
    "eac3": re.compile(rb"\x0b\x77.{3}[\x58-\x87]", re.S),  # by its bsid
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

BEGINNING = 377  # bytes of a file that tell its format: two packets of MPEG-TS, and a byte
_TOLERANCE_SECONDS = 0.1  # headers round the length, and encoders add or drop a little
_LATE_SECONDS = 0.01  # where a file begins later, players differ
_LONGEST_GAP_SECONDS = 600.0  # of silence; timestamps that leap further are wrong
_BLOCK = 65536  # samples
_HELD_BLOCKS = 4  # frames; an encoder's padding may take up three
_MOST_CHUNKS = 128  # of a CAF before its packet table
_ITUNES = re.compile(r"(?: *[0-9A-F]{8}){3} ([0-9A-F]{16})\b", re.I)


def format_of(beginning: bytes) -> str | None:
    """Name the format of a file that FFmpeg is to decode, by its first `BEGINNING` bytes;
    None for any other file."""
    return next((name for name, pattern in _FORMATS.items() if pattern.match(beginning)), None)


class FFmpegDecoder:
    """Decodes a file from its beginning on, as a soundfile.SoundFile does. Raises
    AudioError if the file cannot be read, has no sound, or PyAV is not installed."""

    begins = 0.0
    """The first timestamp, in seconds, if players do not all count from there; else 0."""

    def __init__(self, descriptor: int, format_name: str) -> None:
        try:
            import av
        except ImportError as error:  # with a reason that is tried again in the next run
            what = f"decoding needs PyAV: {install_hint('formats')}"
            raise AudioError(Reason.FILE_UNREADABLE, what) from error
        self._av = av
        self._descriptor = descriptor
        self._format = format_name
        self.samplerate = self.channels = 0
        self._to_float = av.AudioResampler("flt")  # scales integers as libsndfile does
        self._position = 0  # of the sample that comes next
        self._origin = 0.0  # when the first sample is played, in seconds by the file's clock
        self._end: float | None = None  # when the last frame ends by its samples
        self._stated_end = 0.0  # when it ends by its stated duration
        options: dict[str, Any] = {}
        if int(av.__version__.split(".")[0]) < 19:  # later releases take tags that are not UTF-8
            options["metadata_errors"] = "ignore"
        try:
            path = f"/proc/self/fd/{descriptor}"
            self._container: Any = av.open(path, format=format_name, **options)
        except (av.FFmpegError, ValueError) as error:
            message = f"cannot be read as audio: {_words(error)}"
            if format_name == "mov":
                message += "; its index is missing or damaged: was it cut short?"
            raise AudioError(Reason.NOT_AUDIO, message) from error
        self._blocks = self._decoded()
        try:
            self._block = next(self._blocks)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def read(self, *, out: Samples) -> Samples:
        """Decode the next samples into the start of `out`, `[num_samples, channels]`.
        Returns that part: nothing at the end of the file. Raises AudioError if the next
        samples are damaged or missing."""
        if not len(self._block):
            self._block = next(self._blocks, self._block)
        count = min(len(out), len(self._block))
        out[:count] = self._block[:count]
        self._block = self._block[count:]
        return out[:count]

    def _decoded(self) -> Iterator[Samples]:
        """Yield the samples that are played, `[num_samples, channels]`, in blocks."""
        if not self._container.streams.audio:
            raise AudioError(Reason.NOT_AUDIO, "there is no sound track in it")
        stream = self._container.streams.audio[0]
        priming = num_samples = 0
        if self._format == "caf":
            priming, num_samples = _caf_edges(self._descriptor)
        held: list[Samples] = []  # the last blocks, which may have to be cut
        try:
            for block in self._played(stream, priming):
                held.append(block)
                if len(held) > _HELD_BLOCKS:
                    yield held.pop(0)
        except (self._av.FFmpegError, ValueError, AudioError) as error:
            yield from held
            if isinstance(error, AudioError):
                raise
            raise self._fault("decoding fails", f": {_words(error)}") from error
        if not held:
            raise AudioError(Reason.EMPTY, "its sound track holds no samples")
        promised = num_samples / self.samplerate or self._end_by_header(stream)
        last = np.concatenate(held)
        yield last[: len(last) - self._surplus(promised, len(last))]
        reached = self._origin + self._position / self.samplerate
        if reached < promised - _TOLERANCE_SECONDS:
            what = f"its header promises {promised:.3f} s, and it holds {reached:.3f} s"
            raise AudioError(Reason.TRUNCATED, what)

    def _played(self, stream: Any, priming: int) -> Iterator[Samples]:
        """Yield the decoded samples without the first `priming`, and silence in gaps."""
        context = stream.codec_context
        if context is None:
            raise AudioError(Reason.NOT_AUDIO, "FFmpeg has no decoder of its codec")
        if self._format == "caf":  # since 8.1, FFmpeg skips what its packet table says, too
            context.flags2 |= self._av.codec.context.Flags2.skip_manual
        marks_skips = False
        if context.name == "opus":
            marks_skips = self._format != "caf"
            context, pre_skip = self._libopus(context)
            priming = priming or pre_skip
        packets = self._container.demux(stream)
        for frame in chain.from_iterable(map(context.decode, packets)):
            samples = self._samples_of(frame)
            trailing = 0
            if marks_skips and (skips := frame.side_data.get("SKIP_SAMPLES")):
                leading, trailing = struct.unpack_from("<II", skips)
                priming = max(priming, leading)
            late = min(priming, len(samples))
            priming -= late
            samples = samples[late : max(0, len(samples) - trailing)]
            missing = self._missing_before(frame, late, len(samples), stream)
            for first in range(0, missing, _BLOCK):
                silence = np.zeros((min(_BLOCK, missing - first), self.channels), np.float32)
                self._position += len(silence)
                yield silence
            self._position += len(samples)
            if len(samples):
                yield samples

    def _samples_of(self, frame: Any) -> NDArray[Any]:
        form = frame.sample_rate, frame.layout.nb_channels
        if not self.samplerate:
            self.samplerate, self.channels = form
        if frame.is_corrupt:
            raise self._fault("decoding fails")
        if form != (self.samplerate, self.channels):
            raise self._fault("its sample rate or its channels change")
        blocks = [packed.to_ndarray() for packed in self._to_float.resample(frame)]
        return np.concatenate(blocks, axis=None).reshape(-1, self.channels)

    def _libopus(self, context: Any) -> tuple[Any, int]:
        """Return the reference decoder, which does not skip samples, and how many to skip
        first by Opus' own header: Matroska's was often wrong at 16 kHz."""
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
        """Count the samples of silence before a frame that plays `num_samples`, after
        skipping `late`."""
        if frame.pts is None or self._format not in _TIMED:
            return 0
        start = float(frame.pts * stream.time_base)
        self._stated_end = start + float(frame.duration * stream.time_base)
        start += late / self.samplerate
        is_first = self._end is None
        if self._end is None:
            self._origin = self._end = min([start, *self._other_starts(stream)])
            can_begin = self._format == "mpegts" or "iTunSMPB" in self._container.metadata
            if self._origin > _LATE_SECONDS and not can_begin:
                self.begins = self._origin
        leap = start - self._end
        if not -_TOLERANCE_SECONDS <= leap <= _LONGEST_GAP_SECONDS:
            raise self._fault(f"its timestamps leap by {leap:.3f} s")
        self._end = start + num_samples / self.samplerate
        gap = start - self._origin - self._position / self.samplerate
        return round(gap * self.samplerate) if is_first or gap > _TOLERANCE_SECONDS else 0

    def _other_starts(self, stream: Any) -> list[float]:
        """List when the other sound and video tracks begin, in seconds."""
        return [
            float(max(0, other.start_time) * other.time_base)
            for other in self._container.streams
            if other.type in ("audio", "video") and other.index != stream.index
            if other.start_time is not None
        ]

    def _surplus(self, promised: float, num_held: int) -> int:
        """Count the samples to cut off the last `num_held`: an encoder's padding."""
        if self._format not in ("mov", "caf"):
            return 0
        surplus = 0
        for end in (promised, self._stated_end, self._end_by_tag()):
            count = self._position - round((end - self._origin) * self.samplerate)
            if count < num_held:
                surplus = max(surplus, count)
        return surplus

    def _end_by_header(self, stream: Any) -> float:
        """Return when the sound ends, in seconds; 0 if the header does not say."""
        if self._format in _ESTIMATED:
            return 0.0
        if stream.duration is not None:
            end = stream.duration
            if self._format == "mov":
                end += stream.start_time or 0
            return float(end * stream.time_base)
        if len(self._container.streams) > 1:
            return 0.0
        return (self._container.duration or 0) / 1e6

    def _end_by_tag(self) -> float:
        """Return when the sound ends by iTunes' tag, which replaces an edit list, or 0."""
        tag = _ITUNES.match(self._container.metadata.get("iTunSMPB", ""))
        return self._origin + int(tag[1], 16) / self.samplerate if tag else 0.0

    def _fault(self, what: str, why: str = "") -> AudioError:
        where = f" after {self._position / self.samplerate:.3f} s" if self._position else ""
        return AudioError(Reason.TRUNCATED, f"{what}{where}{why}")


def _caf_edges(fd: int) -> tuple[int, int]:
    """Count the samples that a CAF's packet table leaves out first, and those that it then
    plays; zeros if unknown (Apple's Core Audio Format Specification)."""
    offset = 8
    for _ in range(_MOST_CHUNKS):
        chunk = os.pread(fd, 36, offset)
        if len(chunk) < 12:
            break
        name, length = struct.unpack_from(">4sq", chunk)
        if name == b"pakt" and len(chunk) == 36:
            num_samples, priming, remainder = struct.unpack_from(">qii", chunk, 20)
            if priming or remainder:
                return max(0, priming), num_samples
            break
        if not 0 <= length < 1 << 62:  # -1: until the end of the file
            break
        offset += 12 + length
    return 0, 0


def _words(error: Exception) -> str:
    words = getattr(error, "strerror", None) or str(error)
    return words[:1].lower() + words[1:]
