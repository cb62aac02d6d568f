"""An open audio file, and its samples by position, bit for bit as decoding all of it gives
them.

Measured with libsndfile 1.2.2: seeking gives other samples in MP3 and Opus, and once in a
thousand times in Vorbis; it is exact in FLAC, and where samples have a fixed size. A
decoder of FLAC that met damage cannot be used again.

dr_flac, from the package miniaudio, decodes FLAC in two thirds of the time of libsndfile,
but reports little about damage, so libsndfile decodes again what dr_flac does not finish.
Opening a file with libsndfile takes long, so headers of FLAC and 16-bit WAV are read here."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

from featcache.audio.blocks import Samples, Segment
from featcache.audio.content_hash import UNKNOWN_HASH, ContentHashes
from featcache.audio.ffmpeg import BEGINNING, FFmpegDecoder, format_of
from featcache.audio.formats import (
    FFMPEG,
    UNKNOWN,
    Header,
    View,
    cut_in_header,
    find_sound,
    gsm_samples,
    is_shorten,
    mp3_end,
    plain_header,
    shortfall,
    vorbis_patches,
)
from featcache.audio.members import copy_of, open_file
from featcache.audio.remote import Fetched, FileStamp
from featcache.errors import AudioError, MissingDependencyError, Reason
from featcache.manifest.audio_locations import AudioSource, CopiedSource

try:
    import miniaudio
    import soundfile
except (ImportError, OSError) as error:  # OSError: soundfile has no libsndfile
    package = getattr(error, "name", None) or "soundfile"
    raise MissingDependencyError(package, "decoding audio") from error

END_TOLERANCE_SECONDS = 0.1
"""A segment that ends at most this much after the end of its file is cut off there:
manifests round durations, and encoders of MP3 add or drop a little. A later end fails."""

_SEEKABLE = ["PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"]
_BLOCK = 65536  # samples that are read at once of a file that cannot be seeked
_BLOCK_VALUES = 1 << 20  # of all channels, in a block
_MORE = 4096  # samples that are asked for after the last one of a FLAC
_FLAC_AT_ONCE = 64 << 20  # bytes of the largest FLAC that is read into memory whole
_SMALL_BYTES = 1 << 20  # of a file that is read once, and hashed and decoded in memory
_MOST_HASHED = 64 << 30  # bytes: hashing more takes minutes, and it is mostly holes
_LEVEL = np.float32(2**-15)  # the step of 16-bit samples
_SYSTEM_ERROR = 2  # libsndfile's code for an error of the operating system

Span = tuple[int, int]
"""The first sample, and the one after the last."""

_Spans = dict[int, Span]


class Recording:
    """A file that one thread at a time decodes, or the copy that `fetched` gives. Raises
    AudioError if it cannot be opened, or is not audio."""

    stamp: FileStamp
    """The file's size and time before it was opened."""

    def __init__(
        self, location: AudioSource | str, fetched: Callable[[CopiedSource], Fetched] = copy_of
    ) -> None:
        self._is_copy = isinstance(location, CopiedSource)
        if isinstance(location, CopiedSource):
            copy = fetched(location)
            self._file, self.stamp = copy.open(), copy.stamp
        else:
            self._file, self.stamp = open_file(location)
        self._bytes: bytes | None = None  # all of a small file, once they were read
        self._decoder: Any = None  # of a FLAC or 16-bit WAV, None until it is needed
        self.position = 0
        self.damage: AudioError | None = None
        """The fault that ends decoding at `position`, if one is known."""
        try:
            header = plain_header(self._file.fileno(), self.stamp.size)
            if header is None or (header.samples_at is None and self.stamp.size > _FLAC_AT_ONCE):
                self._decoder, header = _start(self._file)
        except _FAULTS as error:
            self._file.close()
            raise _fault(error) from None
        self.header = header
        self._is_plain = self._decoder is None

    def close(self) -> None:
        """Close the file."""
        if self._decoder is not None:
            self._decoder.close()
        self._file.close()

    def content_hash(self, hashes: ContentHashes) -> int:
        """Hash the file's bytes. Returns `UNKNOWN_HASH` if they cannot all be read, or are
        too many."""
        if self.stamp.size > _MOST_HASHED:
            return UNKNOWN_HASH
        with suppress(OSError):  # a bad sector, maybe outside of the segments
            if self.stamp.size <= _SMALL_BYTES:
                return int(xxhash.xxh3_64_intdigest(self._bytes_at(0, self.stamp.size)))
            return hashes.of(self._file.fileno())
        return UNKNOWN_HASH

    def has_changed(self) -> bool:
        """Tell whether the file has changed since it was opened. A copy does not change."""
        status = os.fstat(self._file.fileno())
        return not self._is_copy and (status.st_size, status.st_mtime_ns) != self.stamp

    def count_samples(self) -> int:
        """Count the samples of a channel by decoding them. Raises AudioError for damage."""
        while len(self._read(_BLOCK)):
            pass
        if self.damage:
            raise self.damage
        return min(self.position, self.header.num_samples)

    def cut(self, spans: _Spans, begin: Callable[[int], Segment]) -> Iterator[Segment]:
        """Decode the samples of each span, by its number, and yield their segments, which
        `begin` starts, in the order of `spans`. A segment has fewer samples than its span
        if the recording ends before, or is damaged.

        A file that cannot be seeked is decoded once, in its own order; segments that are
        due later wait."""
        if self.header.can_seek:
            return self._cut_seeking(spans, begin)
        return self._cut_forwards(spans, begin)

    def _cut_seeking(self, spans: _Spans, begin: Callable[[int], Segment]) -> Iterator[Segment]:
        for number, span in spans.items():
            segment = begin(number)
            if not self._add_plain(span, segment):
                if segment.num_samples:  # some of them may be damaged
                    segment = begin(number)
                self._add_decoded(span, segment)
            yield segment

    def _add_decoded(self, span: Span, segment: Segment) -> None:
        first, stop = span
        if self._decoder is None or self.damage:
            self.restart()
        if first != self.position and not self.damage:
            self.position = first
            try:
                self._decoder.seek(first)
            except soundfile.LibsndfileError as error:
                self.damage = _fault(error, first / self.header.sample_rate)
        while self.position < stop:
            block = self._read(stop - self.position)
            if not len(block):
                break
            segment.add(block)

    def _cut_forwards(self, spans: _Spans, begin: Callable[[int], Segment]) -> Iterator[Segment]:
        coming = sorted(spans, key=spans.__getitem__, reverse=True)
        segments: dict[int, Segment] = {}
        unfinished: set[int] = set()
        for due in spans:
            while due not in segments or due in unfinished:
                while coming and spans[coming[-1]][0] <= self.position:
                    number = coming.pop()
                    segments[number] = begin(number)
                    unfinished.add(number)
                # up to where a segment begins or ends
                bounds = [spans[number][1] for number in unfinished]
                bounds += [spans[number][0] for number in coming[-1:]]
                wanted = min(self._block, min(bounds) - self.position)
                block = self._read(wanted)
                if len(block):
                    for number in unfinished:
                        segments[number].add(block)
                if len(block) < wanted:  # the recording ends, or is damaged
                    segments |= {number: begin(number) for number in coming}
                    coming.clear()
                    unfinished.clear()
                unfinished -= {number for number in unfinished if spans[number][1] <= self.position}
            yield segments.pop(due)

    def restart(self) -> None:
        """Start a new decoder, after damage or a `cut` that was given up."""
        try:
            if self._decoder is not None:
                self._decoder.close()
            self._decoder, _ = _start(self._file)
            self.position, self.damage = 0, None
        except _FAULTS as error:
            self.damage = _fault(error)

    def _bytes_at(self, first: int, count: int) -> bytes:
        """Read up to `count` bytes of the file; a small file is read once, and kept."""
        if self.stamp.size > _SMALL_BYTES:
            return os.pread(self._file.fileno(), count, first)
        if self._bytes is None:
            self._bytes = os.pread(self._file.fileno(), self.stamp.size, 0)
        return self._bytes[first : first + count]

    def _add_plain(self, span: Span, segment: Segment) -> bool:
        """Add samples of a WAV as they lie in it, or all of a FLAC by dr_flac. Returns
        False if it does not give all of them."""
        if not self._is_plain:
            return False
        with suppress(OSError):  # libsndfile meets it too, and says where
            if self.header.samples_at is not None:
                return self._add_levels(self.header.samples_at, span, segment)
            if span == (0, self.header.num_samples):
                return self._add_flac(segment)
        return False

    def _add_levels(self, samples_at: int, span: Span, segment: Segment) -> bool:
        width = 2 * self.header.num_channels
        for first in range(*span, self._block):
            samples = self._room_for(span[1] - first)
            data = self._bytes_at(samples_at + width * first, width * len(samples))
            if len(data) < width * len(samples):
                return False
            np.multiply(np.frombuffer(data, "<i2"), _LEVEL, out=samples.reshape(-1))
            segment.add(samples)
        return True

    def _add_flac(self, segment: Segment) -> bool:
        """Decode all of a FLAC file into [-1, 1). Returns False if damaged frames leave
        fewer samples than its header counts. There may be more: FFmpeg's concat demuxer
        copies the header of the first of several files."""
        header, lib, ffi = self.header, miniaudio.lib, miniaudio.ffi
        data = self._bytes_at(0, self.stamp.size)
        decoder = lib.ma_dr_flac_open_memory(data, len(data), ffi.NULL)
        if not decoder:
            return False
        try:
            promised = decoder.channels, decoder.totalPCMFrameCount
            if promised != (header.num_channels, header.num_samples):
                return False
            count = wanted = 0
            while count == wanted and not segment.is_full:
                missing = header.num_samples - segment.num_samples
                samples = self._room_for(missing if missing > 0 else _MORE)
                wanted, room = len(samples), ffi.from_buffer("float[]", samples)
                count = int(lib.ma_dr_flac_read_pcm_frames_f32(decoder, wanted, room))
                if count:
                    segment.add(samples[:count])
            return segment.num_samples >= header.num_samples
        finally:
            lib.ma_dr_flac_close(decoder)

    def _read(self, num_samples: int) -> Samples:
        """Decode the next samples, at most a block: `[num_samples, channels]`; fewer if the
        recording ends before, or is damaged."""
        samples = self._room_for(num_samples)
        # at most this is lost if a stream breaks off
        at_once = len(samples) if self.header.can_seek else _BLOCK
        filled = 0
        while filled < len(samples) and not self.damage:
            try:
                count = len(self._decoder.read(out=samples[filled : filled + at_once]))
            except (soundfile.LibsndfileError, AudioError) as error:
                self.damage = _fault(error, self.position / self.header.sample_rate)
                break
            if count == 0:
                break
            filled += count
            self.position += count
        return samples[:filled]

    def _room_for(self, num_samples: int) -> Samples:
        return np.empty((min(num_samples, self._block), self.header.num_channels), np.float32)

    @property
    def _block(self) -> int:
        return max(1, _BLOCK_VALUES // self.header.num_channels)


class _Decoder(soundfile.SoundFile):  # type: ignore[misc]
    """A SoundFile that seeks only when it is told to: after each read, soundfile would, and
    in an MP3 change the next samples."""

    def seekable(self) -> bool:
        return False


def _start(file: io.FileIO) -> tuple[Any, Header]:
    file.seek(0)
    descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
    sound = find_sound(descriptor, size)
    patches = sound.patches(size) if sound else vorbis_patches(descriptor, size)
    try:
        seen = View(descriptor, patches, size, size) if patches else descriptor
        decoder = _Decoder(seen, closefd=False)
    except soundfile.LibsndfileError as refusal:
        return _start_ffmpeg(descriptor, size, refusal)
    num_samples = decoder.frames
    if decoder.subtype == "OPUS":
        decoder.seek(0)  # if it does not begin at 0, only this leaves out the pre-skip
    is_endless = decoder.format == "MP3" and mp3_end(descriptor) is None
    if sound and decoder.subtype.startswith("MPEG_LAYER"):  # in a WAV, whose count is a guess
        is_endless = True
        patches = {sound.size_at: b"\xff" * sound.size_bytes}
    if is_endless:
        decoder.close()
        file.seek(0)
        end = min(size, sound.at + sound.length) if sound and sound.length > 0 else size
        decoder = _Decoder(View(descriptor, patches, end, claimed_size=64 * end))
        num_samples = UNKNOWN
    if decoder.subtype == "GSM610":
        num_samples = gsm_samples(decoder.extra_info, num_samples)
    lack = shortfall(decoder, descriptor, size)
    can_seek = num_samples != UNKNOWN and decoder.subtype in _SEEKABLE
    is_float = decoder.subtype in ("FLOAT", "DOUBLE")
    form = decoder.samplerate, num_samples, decoder.channels
    return decoder, Header(*form, lack, can_seek, is_float)


def _start_ffmpeg(
    descriptor: int, size: int, refusal: soundfile.LibsndfileError
) -> tuple[FFmpegDecoder, Header]:
    if is_shorten(descriptor):
        what = "compressed by shorten: `sph2pipe -f wav` makes a WAV of it"
        raise AudioError(Reason.NOT_AUDIO, what) from None
    format_name = format_of(os.pread(descriptor, BEGINNING, 0))
    lack = cut_in_header(descriptor, size)
    try:
        if format_name is None:
            raise refusal
        decoder = FFmpegDecoder(descriptor, format_name)
    except (AudioError, soundfile.LibsndfileError):
        if lack:
            raise AudioError(Reason.TRUNCATED, lack) from None
        raise
    form = decoder.samplerate, UNKNOWN, decoder.channels
    return decoder, Header(*form, lack, False, True, FFMPEG, decoder.begins)


_FAULTS = (OSError, soundfile.LibsndfileError, AudioError)


def _fault(error: Exception, seconds: float | None = None) -> AudioError:
    if isinstance(error, AudioError):
        return error
    if isinstance(error, OSError):
        return AudioError(Reason.FILE_UNREADABLE, f"the file cannot be read: {error.strerror}")
    assert isinstance(error, soundfile.LibsndfileError)
    if error.code == _SYSTEM_ERROR:
        return AudioError(Reason.FILE_UNREADABLE, "the file cannot be read: an error of the system")
    words: str = error.error_string.removeprefix("Error : ").rstrip(".")
    if words.startswith("File does not exist"):  # of an MP3
        words = "format not recognised"
    words = words[:1].lower() + words[1:]
    if seconds is None:
        return AudioError(Reason.NOT_AUDIO, f"cannot be read as audio: {words}")
    where = f" somewhere after {seconds:.3f} s" if seconds else ""
    return AudioError(Reason.TRUNCATED, f"decoding fails{where}: {words}")
