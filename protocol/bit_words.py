"""Words of a few bits in whole bytes, as planes. A width is split by its binary digits: words of 13 bits make a plane
of their lowest 8 bits, then one of the next 4, then one of the last. A plane's bits stand without gaps, the first word
in the lowest ones; each plane begins at a byte. Little-endian. NumPy only.

So the larger part of every word is read as it is, and what remains is spread out two words at a time, in operations on
neighbouring bytes. Words without gaps, as one stream of bits, would be read one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Packed: TypeAlias = bytes | memoryview
Words: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

MOST_BITS: Final = 31
_PLANES: Final = (16, 8, 4, 2, 1)


def pack_words(words: npt.NDArray[np.unsignedinteger[Any]], width: int) -> Bytes:
    """Words of `width` <= MOST_BITS bits. A width of 0 takes no bytes."""
    packed, shift = list[Bytes](), 0
    for bits in _planes(width):
        plane = (words >> words.dtype.type(shift)) & words.dtype.type((1 << bits) - 1)
        packed.append(plane.astype("<u2").view(np.uint8) if bits == 16 else _squeezed(plane.astype(np.uint8), bits))
        shift += bits
    return np.concatenate(packed) if packed else np.zeros(0, np.uint8)


def unpack_words(
    packed: Sequence[Packed], sizes: Sequence[int], width: int, out: npt.NDArray[np.uint32] | None = None
) -> Words:
    """All words of several packed arrays of `sizes` words, one after the other. Each array has `n_bytes(size, width)`
    bytes. They are written to `out` if it is given, with a width of at least 1; otherwise they are in the smallest type
    that holds them, perhaps a view of `packed`."""
    words: Words | None = out
    starts, shift = [0] * len(sizes), 0
    for bits in _planes(width):
        ends = [start + (size * bits + 7 >> 3) for start, size in zip(starts, sizes, strict=True)]
        plane = _plane([one[start:end] for one, start, end in zip(packed, starts, ends, strict=True)], sizes, bits)
        if shift:
            assert words is not None
            upper = plane.astype(words.dtype)
            upper *= words.dtype.type(1 << shift)  # NumPy's shifts take twice as long
            words |= upper
        elif words is not None:
            np.copyto(words, plane)
        else:
            words = plane if bits == width else plane.astype(_dtype(width))
        starts, shift = ends, shift + bits
    return words if words is not None else np.zeros(sum(sizes), np.uint8)


def n_bytes(n_words: int, width: int) -> int:
    """Bytes of packed words."""
    whole = n_words * (width >> 3)  # the planes of 16 and 8 bits
    if width & 4:
        whole += n_words + 1 >> 1
    if width & 2:
        whole += n_words + 3 >> 2
    return whole + (n_words + 7 >> 3) if width & 1 else whole


@functools.cache
def _planes(width: int) -> tuple[int, ...]:
    """Bits of each plane, the lowest first."""
    return tuple(bits for bits in _PLANES if width & bits)


@functools.cache
def _dtype(width: int) -> np.dtype[Any]:
    return np.dtype("u1" if width <= 8 else "<u2" if width <= 16 else "<u4")


def _plane(parts: Sequence[Packed], sizes: Sequence[int], bits: int) -> Words:
    """The words of one plane of several arrays."""
    whole = parts[0] if len(parts) == 1 else b"".join(parts)
    if bits == 8:
        return np.frombuffer(whole, np.uint8)
    if bits == 16:
        pairs = np.frombuffer(whole, "<u2")
        return pairs if pairs.flags.aligned else pairs.copy()
    spread, of_byte = _spread(np.frombuffer(whole, np.uint8), bits), 8 // bits
    if len(parts) == 1 or not any(size % of_byte for size in sizes):
        return spread[: sum(sizes)]
    at, words = 0, list[Bytes]()
    for part, size in zip(parts, sizes, strict=True):
        words.append(spread[at : at + size])
        at += len(part) * of_byte
    return np.concatenate(words)


def _spread(packed: Bytes, bits: int) -> Bytes:
    """Words of 4, 2 or 1 bits, one in each byte: every byte becomes two with half of its bits, as often as needed."""
    if bits == 1:
        return np.unpackbits(packed, bitorder="little")
    words, half = packed, 4
    while half >= bits:
        pairs = words.astype("<u2")
        pairs |= pairs * np.uint16(1 << 8 - half)
        pairs &= np.uint16(0x0101 * ((1 << half) - 1))
        words, half = pairs.view(np.uint8), half // 2
    return words


def _squeezed(words: Bytes, bits: int) -> Bytes:
    """The opposite of `_spread`, for 8 bits too."""
    while bits < 8:
        if len(words) % 2:
            words = np.append(words, np.uint8(0))
        words = words[::2] | words[1::2] << np.uint8(bits)
        bits *= 2
    return words
