"""Slow packing of words in planes: one long integer per plane (protocol.bit_words)."""

from __future__ import annotations

from collections.abc import Sequence


def _planes(width: int) -> list[int]:
    """13 bits: 8, 4, 1."""
    return [bits for bits in (16, 8, 4, 2, 1) if bits & width]


def slow_pack(words: Sequence[int], width: int) -> bytes:
    packed, shift = b"", 0
    for bits in _planes(width):
        number = sum((word >> shift) % 2**bits << (i * bits) for i, word in enumerate(words))
        packed += number.to_bytes(-(-len(words) * bits // 8), "little")
        shift += bits
    return packed


def slow_unpack(packed: bytes, n_words: int, width: int) -> tuple[list[int], bytes]:
    """The words, and the bytes after them."""
    words, shift = [0] * n_words, 0
    for bits in _planes(width):
        n_bytes = -(-n_words * bits // 8)
        number = int.from_bytes(packed[:n_bytes], "little")
        for i in range(n_words):
            words[i] += (number >> (i * bits)) % 2**bits << shift
        packed, shift = packed[n_bytes:], shift + bits
    return words, packed
