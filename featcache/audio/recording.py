"""An open audio file, and its samples by position: bit for bit those that decoding all of it gives.

This file relies on measurements of libsndfile 1.2.2 and soundfile 0.14. Seeking gives other samples in MP3
and Opus, and once in a thousand times in Vorbis; it is exact in FLAC and where samples have a fixed size. A
decoder of FLAC that met damage cannot be used again. An MP3 without a header frame has a length that is guessed.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.audio.containers import EndlessFile, mp3_end, shortfall
from featcache.audio.flac import decode_flac
from featcache.errors import AudioError, MissingDependencyError, Reason

try:
    import soundfile
except (ImportError, OSError) as error:  # OSError: the package is there, libsndfile is not
    raise MissingDependencyError("soundfile", "decoding audio") from error

UNKNOWN = 2**63 - 1
"""The number of samples of a file that does not say; libsndfile's own."""

END_TOLERANCE_SECONDS = 0.1
"""How far a segment may run past the end of its file, to be cut off there: manifests round durations, and
encoders of MP3 add or drop a little. What runs further is a failure."""

_SEEKABLE = frozenset({"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"})
_BLOCK = 65536  # samples
_SAMPLES_PER_BYTE = 64  # more than speech is ever compressed to
_FLAC_AT_ONCE = 64 << 20  # bytes of a file that is read into memory to be decoded
_SYSTEM_ERROR = 2  # libsndfile's code for an error of the operating system

Span = tuple[int, int]
"""The first sample, and the one after the last."""


class Recording:
    """A file that is being decoded; one thread at a time.

    Attributes:
        size: of the file, in bytes, before it was opened.
        mtime_ns: when it was last modified, in nanoseconds since the epoch, before it was opened.
        sample_rate: in Hz.
        num_channels: of each sample.
        num_samples: by the header, but no more than the file has room for where that can be told; `UNKNOWN`
            where the header does not say.
        shortfall: what the file lacks of what its header promises; None where nothing is known to be missing.
        is_float: whether its samples can be NaN or infinite.
        position: of the sample that would be decoded next.
        damage: why nothing can be decoded from there on, if so.

    Raises:
        AudioError: the file cannot be opened, or is not audio.
    """

    def __init__(self, path: str | Path) -> None:
        self._file, status = _open(path)
        try:
            self._decoder, states_length = _start(self._file)
            self.shortfall = shortfall(self._decoder, self._file.fileno(), status.st_size)
        except (OSError, soundfile.LibsndfileError) as error:
            self._file.close()
            raise _refusal(error) from error
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
        self.sample_rate: int = self._decoder.samplerate
        self.num_channels: int = self._decoder.channels
        self.num_samples: int = self._decoder.frames if states_length else UNKNOWN
        subtype = self._decoder.subtype
        self.is_float = subtype in ("FLOAT", "DOUBLE")
        self.position = 0
        self.damage: AudioError | None = None
        self._can_seek = states_length and subtype in _SEEKABLE
        self._is_flac = self._decoder.format == "FLAC" and states_length and self.size <= _FLAC_AT_ONCE

    def close(self) -> None:
        """Close the file."""
        self._decoder.close()
        self._file.close()

    def has_changed(self) -> bool:
        """Whether the file is not what it was before it was opened, by its size and mtime."""
        status = os.fstat(self._file.fileno())
        return (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns)

    def cut(self, spans: Sequence[Span]) -> Iterator[NDArray[np.float32]]:
        """The samples of each span, float32 `[num_samples, channels]`, in the order given.

        There are fewer where the recording ends, or is damaged. What cannot be seeked is decoded once, in the
        order of the file; what is asked for in another order waits in memory.
        """
        return self._cut_seeking(spans) if self._can_seek else self._cut_forwards(spans)

    def _cut_seeking(self, spans: Sequence[Span]) -> Iterator[NDArray[np.float32]]:
        for first, stop in spans:
            if self._is_flac and (first, stop) == (0, self.num_samples):
                whole = decode_flac(os.pread(self._file.fileno(), self.size, 0))
                if whole is not None and whole.shape == (stop, self.num_channels):
                    yield whole
                    continue
            if self.damage:
                self._restart()
            if first != self.position:
                self._seek(first)
            yield self._read(stop - first)

    def _cut_forwards(self, spans: Sequence[Span]) -> Iterator[NDArray[np.float32]]:
        order = sorted(range(len(spans)), key=spans.__getitem__)
        waiting: dict[int, NDArray[np.float32]] = {}
        due = 0
        decoded = self._read(0)  # from the current span's first sample up to the position
        for place, following in zip_longest(order, order[1:]):
            first, stop = spans[place]
            while self.position < first and len(self._read(min(_BLOCK, first - self.position))):
                pass
            if stop > self.position:
                more = self._read(stop - self.position)
                decoded = np.concatenate((decoded, more)) if len(decoded) else more
            waiting[place] = decoded[: stop - first]
            shared = len(decoded) if following is None else spans[following][0] - first
            decoded = decoded[shared:].copy()
            while due in waiting:
                yield waiting.pop(due)
                due += 1

    def _restart(self) -> None:
        try:
            self._decoder.close()
            self._decoder, _ = _start(self._file)
        except (OSError, soundfile.LibsndfileError) as error:  # the file has changed
            self.damage = _refusal(error)
        else:
            self.position, self.damage = 0, None

    def _seek(self, position: int) -> None:
        self.position = position
        try:
            self._decoder.seek(position)
        except soundfile.LibsndfileError as error:
            self.damage = _damage(error, position / self.sample_rate)

    def _read(self, num_samples: int) -> NDArray[np.float32]:
        """The next samples, `[num_samples, channels]`; fewer where the recording ends or is damaged."""
        believable = num_samples <= _SAMPLES_PER_BYTE * self.size  # else the room grows with what turns up
        samples = np.empty((num_samples if believable else _BLOCK, self.num_channels), np.float32)
        at_once = num_samples if self._can_seek else _BLOCK  # what is lost where a stream breaks off
        filled = 0
        while filled < num_samples and not self.damage:
            if filled == len(samples):
                samples = np.concatenate((samples, np.empty_like(samples)))
            room = samples[filled : min(filled + at_once, num_samples)]
            try:
                count = len(self._decoder.read(out=room))
            except soundfile.LibsndfileError as error:
                self.damage = _damage(error, self.position / self.sample_rate)
                break
            if count == 0:
                break
            filled += count
            self.position += count
        return samples[:filled]


class _Decoder(soundfile.SoundFile):  # type: ignore[misc]
    """A SoundFile that seeks only when it is told to.

    After each read soundfile seeks to where the decoder already is. That changes the samples that follow in an
    MP3, and takes time everywhere; soundfile leaves it out for what cannot seek.
    """

    def seekable(self) -> bool:
        return False


def _open(path: str | Path) -> tuple[io.FileIO, os.stat_result]:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise AudioError(Reason.FILE_MISSING, f"the path is {kind}")
        if status.st_size == 0:
            raise AudioError(Reason.EMPTY, "the file holds 0 bytes")
        return io.FileIO(path), status
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AudioError(Reason.FILE_MISSING, "there is no such file") from error
    except OSError as error:
        raise _refusal(error) from error
    except ValueError as error:  # a zero byte, say
        raise AudioError(Reason.FILE_MISSING, f"not a valid path: {error}") from error


def _start(file: io.FileIO) -> tuple[_Decoder, bool]:
    """A decoder at the start of a file, and whether the file states how many samples it holds."""
    file.seek(0)
    decoder = _Decoder(file.fileno(), closefd=False)
    if decoder.format != "MP3" or mp3_end(file.fileno()) is not None:
        return decoder, decoder.frames != UNKNOWN
    decoder.close()
    file.seek(0)
    return _Decoder(EndlessFile(file.fileno(), closefd=False)), False


def _refusal(error: OSError | soundfile.LibsndfileError) -> AudioError:
    """Why a file cannot be opened."""
    if isinstance(error, OSError):
        return AudioError(Reason.FILE_UNREADABLE, f"the file cannot be read: {error.strerror}")
    if error.code == _SYSTEM_ERROR:
        return AudioError(Reason.FILE_UNREADABLE, "the file cannot be read: an error of the system")
    return AudioError(Reason.NOT_AUDIO, f"cannot be read as audio: {_words(error)}")


def _damage(error: soundfile.LibsndfileError, seconds: float) -> AudioError:
    """Why a file cannot be decoded from somewhere on."""
    if error.code == _SYSTEM_ERROR:
        return _refusal(error)
    where = f" somewhere after {seconds:.3f} s" if seconds else ""
    return AudioError(Reason.TRUNCATED, f"decoding fails{where}: {_words(error)}")


def _words(error: soundfile.LibsndfileError) -> str:
    words: str = error.error_string.removeprefix("Error : ").rstrip(".")
    if words.startswith("File does not exist"):  # so libsndfile says of an MP3 that it cannot open
        return "format not recognised"
    return words[:1].lower() + words[1:]
