"""Noise that stays in memory once decoded, since copies cut from the same files again and again.

Opening a file, seeking in it and decoding half a second takes longer than adding that to a clip. So noise is decoded in
pieces of 65,536 samples, which are kept: mono, at the file's own rate, as 16-bit integers where these give the same
bits. It is not kept resampled: a cut from a resampled noise has other values than a cut that is resampled by itself.

Every place of a noise is as likely to be asked for as any other, whatever was asked for before. So nothing is gained by
dropping one piece for another: what is in memory stays, and once that is full, the rest is decoded cut by cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from featcache.errors import AudioError

LIMIT = 1 << 30
"""Bytes of noise: 9 hours at 16 kHz, of 16 bits. MUSAN's noise is 6 hours."""

_PIECE = 1 << 16  # samples
_STEP = np.float32(2**-15)  # of 16-bit samples

Span = tuple[int, int]
"""Samples of a noise: the first, and the one after the last."""

Piece = NDArray[np.int16] | NDArray[np.float32]
"""Mono samples at the file's rate, `[num_samples]`: multiples of 2^-15, or as they are."""

Decode = Callable[[Sequence[Span]], list[NDArray[np.float32]]]
"""Decodes spans of one noise, in order: each mono, float32 `[num_samples]`, at the file's rate. Raises AudioError."""


class NoiseMemory:
    """Decoded pieces of noises, as many as there is room for. Its methods may be called from several threads.

    Args:
        limit: bytes that they may take.

    Attributes:
        num_bytes: that they take.
    """

    def __init__(self, limit: int) -> None:
        self.num_bytes = 0
        self._limit = limit
        self._is_full = False
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._lock = threading.Lock()

    def cut(self, number: int, num_samples: int, span: Span, decode: Decode) -> NDArray[np.float32]:
        """A span of a noise: bit for bit what `decode` gives for it.

        Args:
            number: of the noise.
            num_samples: of the whole noise.
            span: within it; not empty.
            decode: of this noise.

        Returns:
            float32 `[stop - first]`; the caller's own.

        Raises:
            AudioError: the span cannot be decoded.
        """
        first, stop = span
        places = range(first // _PIECE, (stop - 1) // _PIECE + 1)
        pieces: dict[int, Piece | None] = {place: self._pieces.get((number, place)) for place in places}
        if missing := [place for place, piece in pieces.items() if piece is None]:
            if self._is_full:
                return decode([span])[0]
            try:
                decoded = decode([(place * _PIECE, min((place + 1) * _PIECE, num_samples)) for place in missing])
            except AudioError:  # of the pieces; the span may still be good
                return decode([span])[0]
            for place, samples in zip(missing, decoded, strict=True):
                pieces[place] = self._keep((number, place), _compact(samples))
        cut = np.empty(stop - first, np.float32)
        for place, piece in pieces.items():
            assert piece is not None
            start = place * _PIECE
            part = piece[max(first - start, 0) : stop - start]
            room = cut[max(start - first, 0) :][: len(part)]
            if part.dtype == np.int16:
                np.multiply(part, _STEP, out=room)
            else:
                room[:] = part
        return cut

    def _keep(self, key: tuple[int, int], piece: Piece) -> Piece:
        """The same piece, which is kept where there is room."""
        with self._lock:
            if key not in self._pieces:  # else another thread was faster
                if self.num_bytes + piece.nbytes > self._limit:
                    self._is_full = True
                else:
                    self._pieces[key] = piece
                    self.num_bytes += piece.nbytes
        return piece


_memories: WeakValueDictionary[Hashable, NoiseMemory] = WeakValueDictionary()
_memories_lock = threading.Lock()


def shared_memory(noises: Hashable) -> NoiseMemory:
    """The one memory of all in this process who name the same noises; it goes with the last of them."""
    with _memories_lock:
        memory = _memories.get(noises)
        if memory is None:
            memory = _memories[noises] = NoiseMemory(LIMIT)
        return memory


def _compact(samples: NDArray[np.float32]) -> Piece:
    """The samples as 16-bit integers where these give the same bits: not where one is -0.0, say; else themselves."""
    with np.errstate(invalid="ignore", over="ignore"):  # what is no 16-bit integer is found out below
        integers = (samples / _STEP).astype(np.int16)
    is_same = np.array_equal((integers * _STEP).view(np.uint32), samples.view(np.uint32))
    return integers if is_same else samples.copy()  # the samples may be a view of several channels
