"""Sound that libsndfile does not know: M4A, AAC, WebM, AMR, WMA, AC-3, the sound track of a video. FFmpeg decodes it.

PyAV brings FFmpeg in its wheels; torchcodec gives the same samples, up to 1.7 times as fast, and needs an FFmpeg of the
system. The file's first bytes decide what it is, and FFmpeg is told: left to guess, it would also find playlists, which
name other files. Files are decoded from their beginning on, since seeking gives other samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import AudioError, Reason

_FORMATS = {
    "mov": re.compile(rb".{4}(?:ftyp|moov|mdat|wide|free|skip)", re.S),  # M4A, MP4, MOV, 3GP
    "matroska": re.compile(rb"\x1a\x45\xdf\xa3"),  # WebM
    "amr": re.compile(rb"#!AMR(?:-WB)?\n"),
    "asf": re.compile(rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),  # WMA
    "aac": re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"),  # ADTS
    "ac3": re.compile(rb"\x0b\x77.{3}[\x00-\x57]", re.S),  # by its bsid; above 10, it is E-AC-3
    "eac3": re.compile(rb"\x0b\x77.{3}[\x58-\x87]", re.S),
    "avi": re.compile(rb"RIFF.{4}AVI ", re.S),
    "ogg": re.compile(rb"OggS\0\x02.{20}\x01.\x7fFLAC", re.S),  # only of FLAC, which libsndfile knows by its older mark
    "mpegts": re.compile(rb"\x47.{187}\x47.{187}\x47", re.S),
}
"""FFmpeg's names of formats, and how files of them begin."""

_ESTIMATED = ("amr", "aac", "ac3", "eac3", "mpegts")
"""Formats whose header does not say how long they are: FFmpeg estimates it."""

BEGINNING = 377  # the bytes of a file that tell its format: two packets of MPEG-TS, and one byte
_TOLERANCE_SECONDS = 0.1  # headers round the length, and encoders add or drop a little


def format_of(beginning: bytes) -> str | None:
    """The format of a file that FFmpeg is to decode, by its first `BEGINNING` bytes; None for any other file."""
    return next((name for name, pattern in _FORMATS.items() if pattern.match(beginning)), None)


class FFmpegDecoder:
    """Decodes a file from its beginning on. It has what `Recording` needs of a soundfile.SoundFile.

    `format_name` is what `format_of` says of the file, and `unknown` what stands for a number of samples that is not
    known. The descriptor's position stays. Raises AudioError if the file cannot be read, has no sound, or PyAV is not
    installed.
    """

    subtype = "FLOAT"
    """Samples may be NaN or infinite."""
    extra_info = ""
    """What libsndfile logs."""

    def __init__(self, descriptor: int, format_name: str, unknown: int) -> None:
        try:
            import av
        except ImportError as error:  # with a reason that is tried again in the next run
            needed = "M4A, AAC, MP4, WebM, AMR, WMA, AC-3, AVI and MPEG-TS need PyAV, which is not installed"
            message = f"cannot be decoded here: {needed}: pip install 'featcache[formats]'"
            raise AudioError(Reason.FILE_UNREADABLE, message) from error
        self._error: type[Exception] = av.FFmpegError
        self.format, self.frames, self.samplerate, self.channels = format_name, unknown, 0, 0
        try:
            self._container: Any = av.open(f"/proc/self/fd/{descriptor}", format=format_name)
        except (av.FFmpegError, ValueError) as error:
            hint = "; its index is missing or damaged: was it cut short?" if format_name == "mov" else ""
            raise AudioError(Reason.NOT_AUDIO, f"cannot be read as audio: {_words(error)}{hint}") from error
        self._fault: AudioError | None = None
        self._blocks = self._decoded()
        self._block = np.empty((0, 1), np.float32)
        try:
            self._next_block()
            if self._fault or not self.samplerate:
                raise self._fault or AudioError(Reason.EMPTY, "its sound track holds no samples")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def read(self, *, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Decode the next samples into `out`, `[num_samples, channels]`. Returns what was filled of it, from its start.
        Raises AudioError if what follows is damaged or missing."""
        filled = 0
        while filled < len(out) and (len(self._block) or self._next_block()):
            count = min(len(out) - filled, len(self._block))
            out[filled : filled + count] = self._block[:count]
            self._block = self._block[count:]
            filled += count
        if self._fault and not filled:
            raise self._fault
        return out[:filled]

    def _next_block(self) -> bool:
        try:
            self._block = next(self._blocks)
        except StopIteration:
            return False
        except AudioError as fault:
            self._fault = fault
            return False
        return True

    def _decoded(self) -> Iterator[NDArray[np.float32]]:
        """The samples, a frame of the codec at a time, `[num_samples, channels]`."""
        if not self._container.streams.audio:
            raise AudioError(Reason.NOT_AUDIO, "there is no sound track in it")
        stream = self._container.streams.audio[0]
        position = 0
        try:
            for frame in self._container.decode(stream):
                form = frame.sample_rate, frame.layout.nb_channels
                if not self.samplerate:
                    self.samplerate, self.channels = form
                if frame.is_corrupt or form != (self.samplerate, self.channels):
                    what = "decoding fails" if frame.is_corrupt else "its sample rate or its channels change"
                    raise AudioError(Reason.TRUNCATED, f"{what} after {position / self.samplerate:.3f} s")
                yield (samples := _as_float(frame))
                position += len(samples)
        except (self._error, ValueError) as error:
            where = f" after {position / self.samplerate:.3f} s" if position else ""
            raise AudioError(Reason.TRUNCATED, f"decoding fails{where}: {_words(error)}") from error
        promised, held = self._seconds_by_header(stream), position / max(1, self.samplerate)
        if held < promised - _TOLERANCE_SECONDS:
            message = f"its header promises {promised:.3f} s, but the file holds {held:.3f} s"
            raise AudioError(Reason.TRUNCATED, message)

    def _seconds_by_header(self, stream: Any) -> float:
        """How long the sound is; 0 if the header does not say."""
        if self.format in _ESTIMATED:
            return 0.0
        if stream.duration is not None:
            return float(stream.duration * stream.time_base)
        is_all = len(self._container.streams) == 1
        return (self._container.duration or 0) / 1e6 if is_all else 0.0


def _as_float(frame: Any) -> NDArray[np.float32]:
    """A frame's samples, `[num_samples, channels]`; integers are scaled as libsndfile does."""
    array: NDArray[Any] = frame.to_ndarray()
    samples = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    half = 2.0 ** (8 * samples.dtype.itemsize - 1)
    zero = half if samples.dtype.kind == "u" else 0.0
    return (samples.astype(np.float32) - np.float32(zero)) / np.float32(half)


def _words(error: Exception) -> str:
    words = getattr(error, "strerror", None) or str(error)
    return words[:1].lower() + words[1:]
