"""CRC-32C (RFC 3720): of bytes, and of parts put together."""

from __future__ import annotations

from functools import cache
from typing import Any

import crc32c as icrar
import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected
_BYTES = np.arange(256, dtype=np.uint32)


def crc32c(data: NDArray[Any] | bytes, crc: int = 0) -> int:
    """CRC-32C of bytes or of an array's, continued from `crc`; the array is C-contiguous.

    From 32 KiB on, other threads run meanwhile.
    """
    return int(icrar.crc32c(data, crc))


def hex_crc32c(data: bytes) -> str:
    """CRC-32C of bytes, as eight hex digits."""
    return f"{crc32c(data):08x}"


def combined_crc32c(crcs: NDArray[np.uint32], num_bytes: NDArray[np.int64]) -> int:
    """The CRC-32C of a whole from those of its parts, without reading the bytes again.

    To a CRC's state, another zero byte is a linear map over GF(2). So the CRC of A followed by B is the CRC of A, taken
    through as many zero bytes as B has, exclusive or the CRC of B.

    Source: Mark Adler's `crc32_combine` in zlib's `crc32.c`; the polynomial is that of RFC 3720.
    """
    states = crcs.astype(np.uint32)
    following = num_bytes.sum() - np.cumsum(num_bytes)
    for map_of_digit in _zero_bytes():
        states = _through(map_of_digit, following % 16, states)
        following //= 16
        # Those with equally many zero bytes still to come go on as one.
        first = np.flatnonzero(np.diff(following, prepend=-1))
        states, following = np.bitwise_xor.reduceat(states, first), following[first]
        if not following.any():
            break
    return int(np.bitwise_xor.reduce(states))


@cache
def _zero_bytes() -> list[NDArray[Any]]:
    """For each hexadecimal digit of a number of zero bytes, the lowest first, the maps of its 16 values.

    A map is uint32 `[4, 256]`: the image of each byte of a state, by the byte's place.
    """
    crcs: NDArray[Any] = _BYTES
    for _ in range(8):
        crcs = (crcs >> 1) ^ np.where(crcs & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    once = np.stack([crcs, _BYTES, _BYTES << 8, _BYTES << 16])
    none = np.stack([_BYTES << 8 * place for place in range(4)])
    digits = []
    for _ in range(16):
        maps = [none]
        for _ in range(16):
            maps.append(_through(once[None], 0, maps[-1]))
        once = maps.pop()
        digits.append(np.stack(maps))
    return digits


def _through(maps: NDArray[Any], which: Any, states: NDArray[Any]) -> NDArray[Any]:
    """Take states, uint32 of any shape, each through one of some maps, `[maps, 4, 256]`; `which` says which."""
    images, first = maps.reshape(-1), np.asarray(which * 1024)
    octets = np.ascontiguousarray(states, "<u4").view(np.uint8).reshape(*states.shape, 4)
    result: NDArray[Any] = images.take(first + octets[..., 0])
    for place in (1, 2, 3):
        result ^= images.take(first + 256 * place + octets[..., place])
    return result
