"""Where the parts of a top-k payload are (protocol.topk_codec), and whether its lengths fit. NumPy only.

    payload   header | counts [T] | tails uint16 [T] | ids [S] | codes [S]                              little-endian
              with rest bits also: | ranges uint16 [T, 2] | slots [T, V]
    header    "TK", version uint8, log-prob bits b, rest bits r, count bits c (uint8 each), K uint16, T uint32, V uint32
    counts    K minus the tokens at the position, c bits each; with c = 0 every position has K
    ids       bits(V - 1) bits each, ascending within a position
    codes     the log-prob's code: its upper b - r bits. The lower r bits are in the token's slot

Words of c, r and so on bits are planes of `protocol.bit_words`.

Legend: T positions, K tokens at the widest of them, S tokens at all positions together, V vocabulary.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.bit_words import Bytes, n_bytes, pack_words, unpack_words
from protocol.errors import MalformedMessage

MAX_TOKENS_KEPT: Final = 4096
"""Most tokens at one position."""
_HEADER: Final = struct.Struct("<2sBBBBHII")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"TK"
_VERSION: Final = 3
_WHAT: Final = "top-k payload"


class Shape(NamedTuple):
    """What all payloads of one teacher have in common."""

    vocab_size: int
    logprob_bits: int
    rest_bits: int

    @property
    def id_bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def code_bits(self) -> int:
        """Bits of a code outside of its slot."""
        return self.logprob_bits - self.rest_bits


class Parts(NamedTuple):
    """The parts of one payload. What is packed has the right length, but any bits."""

    shape: Shape
    counts_T: npt.NDArray[np.int64]
    n_ids: int
    tail_codes_T: npt.NDArray[np.uint16]
    ids: Bytes
    codes: Bytes
    ranges_T2: npt.NDArray[np.uint16]
    slots: Bytes


def write_parts(
    shape: Shape,
    counts_T: npt.NDArray[np.integer[Any]],
    tail_codes_T: npt.NDArray[np.integer[Any]],
    ids_S: npt.NDArray[np.unsignedinteger[Any]],
    codes_S: npt.NDArray[np.unsignedinteger[Any]],
    ranges_T2: npt.NDArray[np.integer[Any]],
    slots: npt.NDArray[np.unsignedinteger[Any]],
) -> bytes:
    """The payload. With rest bits, `codes_S` are the upper bits of the codes."""
    widest = int(counts_T.max(initial=1))
    short_T = (widest - counts_T).astype(np.uint16)
    count_bits = int(short_T.max(initial=0)).bit_length()
    header = (_MAGIC, _VERSION, shape.logprob_bits, shape.rest_bits, count_bits, widest, len(counts_T))
    parts = (
        pack_words(short_T, count_bits),
        tail_codes_T.astype("<u2"),
        pack_words(ids_S, shape.id_bits),
        pack_words(codes_S, shape.code_bits),
        ranges_T2.astype("<u2"),
        pack_words(slots, shape.rest_bits),
    )
    return b"".join([_HEADER.pack(*header, shape.vocab_size), *(part.tobytes() for part in parts)])


def read_parts(payload: bytes | memoryview) -> Parts:
    """Raises MalformedMessage for what no payload can be, and for lengths that do not fit the header."""
    n_bytes_given = len(payload)
    if n_bytes_given < HEADER_BYTES:
        raise MalformedMessage(_WHAT, got=f"{n_bytes_given} bytes", expected=f"at least {HEADER_BYTES}")
    magic, version, logprob_bits, rest_bits, count_bits, widest, n_positions, vocab_size = _HEADER.unpack_from(payload)
    if (magic, version) != (_MAGIC, _VERSION):
        raise MalformedMessage(_WHAT, got=f"{magic!r} {version}", expected=f"{_MAGIC!r} {_VERSION}")
    shape, most = Shape(vocab_size, logprob_bits, rest_bits), min(vocab_size, MAX_TOKENS_KEPT)
    if not (
        8 <= logprob_bits <= 16
        and rest_bits <= 8
        and 1 <= vocab_size < 1 << 31
        and (not rest_bits or most == vocab_size)
    ):
        raise MalformedMessage(
            _WHAT,
            got=f"{logprob_bits} log-prob bits, {rest_bits} rest bits, a vocabulary of {vocab_size}",
            expected=f"8 to 16, 0 to 8, and 1 to 2^31 - 1 tokens (with rest bits {MAX_TOKENS_KEPT})",
        )
    if not 1 <= widest <= most or count_bits > MAX_TOKENS_KEPT.bit_length():
        got = f"{widest} tokens at the widest position, counts of {count_bits} bits"
        raise MalformedMessage(_WHAT, got=got, expected=f"1 to {most}, at most {MAX_TOKENS_KEPT.bit_length()} bits")
    tails_at = HEADER_BYTES + n_bytes(n_positions, count_bits)
    ids_at = tails_at + 2 * n_positions
    if n_bytes_given < ids_at:
        raise MalformedMessage(_WHAT, got=f"{n_bytes_given} bytes", expected=f"at least {ids_at}")
    whole = np.frombuffer(payload, np.uint8)
    counts_T, n_ids = _counts(whole[HEADER_BYTES:tails_at], n_positions, count_bits, widest)
    tail_codes_T = np.frombuffer(payload, "<u2", n_positions, tails_at)
    whole_T = counts_T == vocab_size if widest == vocab_size else False
    if ((tail_codes_T == 0) != whole_T).any():
        raise MalformedMessage(
            _WHAT, got="no tail where tokens are left out, or one where none are", expected="one where some are"
        )
    codes_at = ids_at + n_bytes(n_ids, shape.id_bits)
    ranges_at = codes_at + n_bytes(n_ids, shape.code_bits)
    n_ranges = 2 * n_positions if rest_bits else 0
    slots_at = ranges_at + 2 * n_ranges
    expected = slots_at + n_bytes(n_positions * vocab_size, rest_bits)
    if n_bytes_given != expected:
        raise MalformedMessage(_WHAT, got=f"{n_bytes_given} bytes", expected=f"{expected}")
    ranges_T2 = np.frombuffer(payload, "<u2", n_ranges, ranges_at).reshape(-1, 2)
    ids, codes, slots = whole[ids_at:codes_at], whole[codes_at:ranges_at], whole[slots_at:]
    return Parts(shape, counts_T, n_ids, tail_codes_T, ids, codes, ranges_T2, slots)


def most_bytes(vocab_size: int, max_k: int, *, logprob_bits: int = 12, rest_bits: int = 0) -> int:
    """The most bytes that one position takes, without the header."""
    k, shape = min(max_k, vocab_size), Shape(vocab_size, logprob_bits, rest_bits)
    sets = n_bytes(1, (k - 1).bit_length()) + 2 + n_bytes(k, shape.id_bits) + n_bytes(k, shape.code_bits)
    return sets + (4 + n_bytes(vocab_size, rest_bits) if rest_bits else 0)


def check_payload(payload: bytes | memoryview) -> int:
    """T of a payload. Its lengths must fit its header; ids and log-probs are not checked. Raises MalformedMessage."""
    return len(read_parts(payload).counts_T)


def n_positions(payload: bytes | memoryview) -> int:
    """T, as the header has it; nothing is checked but the length of the header. Raises MalformedMessage."""
    if len(payload) < HEADER_BYTES:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {HEADER_BYTES}")
    return _HEADER.unpack_from(payload)[6]


def _counts(packed: Bytes, n_positions: int, count_bits: int, widest: int) -> tuple[npt.NDArray[np.int64], int]:
    """The positions' counts, and their sum."""
    if not count_bits:
        return np.full(n_positions, widest, np.int64), n_positions * widest
    counts_T = widest - unpack_words([packed], [n_positions], count_bits).astype(np.int64)
    if n_positions and counts_T.min() < 1:
        got = f"{counts_T.min()} to {widest} tokens at a position"
        raise MalformedMessage(_WHAT, got=got, expected=f"1 to {widest}")
    return counts_T, int(counts_T.sum())
