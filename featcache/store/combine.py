"""The checksum of a whole from the checksums of its parts, without reading the bytes again.

To a CRC's state, another zero byte is a linear map over GF(2). So the CRC of A followed by B is that of A, taken
through as many zero bytes as B has, plus (exclusive or) that of B.

Source: Mark Adler's `crc32_combine` in zlib's `crc32.c`; the polynomial is that of RFC 3720.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # reflected
_BYTES = np.arange(256, dtype=np.uint32)


def combined_crc32c(crcs: NDArray[np.uint32], num_bytes: NDArray[np.int64]) -> int:
    """The CRC-32C of parts that follow one another, from each one's, uint32 `[n]`, and its bytes, int64 `[n]`."""
    states = crcs.astype(np.uint32)
    following = num_bytes.sum() - np.cumsum(num_bytes)
    zeros = _one_zero_byte()
    while following.any():
        odd = following % 2 == 1
        states[odd] = _through(zeros, states[odd])
        zeros = _through(zeros, zeros)  # twice as many zero bytes
        following //= 2
    return int(np.bitwise_xor.reduce(states))


def _one_zero_byte() -> NDArray[Any]:
    """The map of one zero byte, uint32 `[4, 256]`: where each byte of a state takes it, by the byte's place."""
    crcs: NDArray[Any] = _BYTES
    for _ in range(8):
        crcs = (crcs >> 1) ^ np.where(crcs & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return np.stack([crcs, _BYTES, _BYTES << 8, _BYTES << 16])


def _through(zeros: NDArray[Any], states: NDArray[Any]) -> NDArray[Any]:
    """Take states, uint32 of any shape, through a map."""
    result: NDArray[Any] = zeros[0][states & 255]
    for place in (1, 2, 3):
        result = result ^ zeros[place][(states >> (8 * place)) & 255]
    return result
