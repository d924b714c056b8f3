"""Numbers of a few bits each, one behind the other without gaps, lowest bit first. Vectorised; numpy only."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

_LANES: Final = 8
"""Words of w bits that fill w bytes."""


def pack_words(words_S: npt.NDArray[np.uint64], width: int) -> Bytes:
    """Words of `width` <= 48 bits one behind the other, lowest bit first."""
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


def unpack_words(packed: Bytes, n_words: int, width: int) -> npt.NDArray[np.uint64]:
    blocks = np.zeros((-(-n_words // _LANES), width), np.uint8)
    blocks.reshape(-1)[: len(packed)] = packed
    words = np.zeros((len(blocks), _LANES), np.uint64)
    for lane in range(_LANES):
        first_byte, shift = divmod(lane * width, 8)
        value = np.zeros(len(blocks), np.uint64)
        for byte in range(-(-(shift + width) // 8)):
            value |= blocks[:, first_byte + byte].astype(np.uint64) << np.uint64(8 * byte)
        words[:, lane] = (value >> np.uint64(shift)) & np.uint64((1 << width) - 1)
    return words.reshape(-1)[:n_words]


def n_bytes(n_words: int, width: int) -> int:
    """Of so many words."""
    return -(-n_words * width // 8)
