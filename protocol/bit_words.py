"""Words of any number of bits, packed without gaps, lowest bit first. Little-endian. NumPy only."""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

_LANES: Final = 8
"""Words of w bits that fill w bytes."""


def pack_words(words_S: npt.NDArray[np.uint64], width: int) -> Bytes:
    """Words of `width` <= 48 bits, concatenated without gaps, lowest bit first."""
    n_words = len(words_S)
    padded = np.zeros(-(-n_words // _LANES) * _LANES, np.uint64)
    padded[:n_words] = words_S
    lanes = padded.reshape(-1, _LANES)
    packed = np.zeros((len(lanes), width), np.uint8)
    for lane in range(_LANES):
        first_byte, shift = divmod(lane * width, 8)
        value = lanes[:, lane] << np.uint64(shift)
        for byte in range(-(-(shift + width) // 8)):
            packed[:, first_byte + byte] |= (value >> np.uint64(8 * byte)).astype(np.uint8)
    return packed.reshape(-1)[: n_bytes(n_words, width)]


def unpack_words(packed: Bytes, n_words: int, width: int) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint64]:
    """`n_words` words of `width` <= 48 bits, each read with the bytes around it as one integer that need not
    be aligned: of 32 bits if each word fits into one with the bits before it in its first byte."""
    lanes = _LANES // math.gcd(width, _LANES)  # after as many words a word begins at a byte again
    step = lanes * width // 8
    places = [divmod(lane * width, 8) for lane in range(lanes)]
    dtype = np.dtype("<u4" if max(shift for _, shift in places) + width <= 32 else "<u8")
    n_blocks = -(-n_words // lanes)
    padded = np.empty((n_blocks + 1) * step + dtype.itemsize, np.uint8)
    padded[: len(packed)], padded[len(packed) :] = packed, 0
    words = np.empty((n_blocks, lanes), dtype)
    for lane, (first_byte, shift) in enumerate(places):
        around = np.ndarray((n_blocks,), dtype, padded.data, first_byte, (step,))
        np.right_shift(around, dtype.type(shift), out=words[:, lane])
    words &= dtype.type((1 << width) - 1)
    return words.reshape(-1)[:n_words]


def n_bytes(n_words: int, width: int) -> int:
    """Bytes of packed words."""
    return -(-n_words * width // 8)
