"""Audio in Kaldi's archives: a path in `wav.scp` names an archive and the byte at which its entry's data begin.

`wav-copy` of Kaldi writes an entry as a WAV file; `kaldiio`, with which ESPnet dumps audio, as `AUDIO`, how many bytes
tell the length, the length (little-endian), and a file of any format, mostly FLAC. See `read_kaldi` and
`_read_length_header` in https://github.com/nttcslab-sp/kaldiio/blob/master/kaldiio/matio.py.
"""

from __future__ import annotations

import os

from featcache.audio.tar import ByteRange
from featcache.errors import AudioError, Reason

_HEADER = 5 + 1 + 8
_UNFINISHED = 0x7F000000
"""A program that writes a WAV to a pipe leaves the largest size, or one near it."""


class ArchiveIndex:
    """The entries of an archive. An entry says itself how long it is, so nothing is known beforehand.

    Args:
        descriptor: The archive. It need not stay open.
        size: Its size in bytes.
    """

    num_bytes = 0
    """The memory that it takes."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size

    def find(self, name: str, descriptor: int) -> ByteRange:
        """Where the bytes of the audio lie whose entry begins at the byte `name`.

        Raises:
            AudioError: There is no audio, or the archive was cut short.
            OSError: The archive cannot be read.
        """
        offset = int(name)
        header = os.pread(descriptor, _HEADER, offset) if offset < self._size else b""
        if header[:4] == b"RIFF":
            size = 8 + int.from_bytes(header[4:8], "little")
            if not 8 < size < _UNFINISHED:
                raise AudioError(Reason.NOT_AUDIO, "the WAV in the archive does not say its size: wav-copy corrects it")
        elif header[:5] == b"AUDIO" and len(header) == _HEADER and header[5] <= 8:
            width = header[5]
            size = int.from_bytes(header[6 : 6 + width], "little")
            offset += 6 + width
        elif not header:
            held = f"the archive was cut short: it holds {self._size:,} bytes, and the entry begins after {offset:,}"
            raise AudioError(Reason.TRUNCATED, held)
        else:
            raise AudioError(Reason.NOT_AUDIO, f"at byte {offset:,} of the archive is no audio: features, perhaps")
        if offset + size > self._size:
            there = f"{max(0, self._size - offset):,} of the entry's {size:,} bytes are there"
            raise AudioError(Reason.TRUNCATED, f"the archive was cut short: {there}")
        return ByteRange(offset, size)
