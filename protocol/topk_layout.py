"""Where the parts of a top-k payload are (protocol.topk_codec), and whether its lengths fit. NumPy only.

    payload   header | counts [T] | tails uint16 [T] | ids [S] | codes [S]                              little-endian
    header    "TK", version uint8, log-prob bits b, 0, count bits c (uint8 each), K uint16, T uint32, V uint32
    counts    K minus the tokens at the position, c bits each; with c = 0 every position has K
    ids       bits(V - 1) bits each, ascending within a position
    codes     the log-prob's code: b bits

Words of b, c and so on bits are planes of `protocol.bit_words`.

Legend: T positions, K tokens at the widest of them, S tokens at all positions together, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.bit_words import Packed, Words, n_bytes, pack_words, unpack_words
from stillhouse.protocol.errors import MalformedMessage

MAX_TOKENS_KEPT: Final = 4096
"""Most tokens at one position."""
BLOCK_BYTES: Final = 1 << 20
"""Payloads of so many bytes are decoded at once: few enough for the arrays to stay in the processor's cache."""
_HEADER: Final = struct.Struct("<2sBBBBHII")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"TK"
_VERSION: Final = 3
_WHAT: Final = "top-k payload"


class Shape(NamedTuple):
    """What all payloads of one teacher have in common."""

    vocab_size: int
    logprob_bits: int

    @property
    def id_bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())


class _Header(NamedTuple):
    """What a header says, and where the parts are whose lengths it gives alone."""

    shape: Shape
    count_bits: int
    widest: int
    n_positions: int
    tails_at: int
    ids_at: int


class Block(NamedTuple):
    """Neighbouring payloads whose lengths fit. What is packed may have any bits."""

    payloads: Sequence[Packed]
    headers: list[_Header]
    sizes: list[int]
    """S of each payload."""
    counts_T: npt.NDArray[np.int64]
    """One payload after the other, as the tails."""
    tail_codes_T: npt.NDArray[np.uint16]

    @property
    def shape(self) -> Shape:
        return self.headers[0].shape

    def ids(self, out: npt.NDArray[np.uint32] | None = None) -> Words:
        """The ids of all sent tokens, in `out` if it is given."""
        starts = [header.ids_at for header in self.headers]
        return self._words(starts, self.sizes, self.shape.id_bits, out)

    def codes(self) -> Words:
        """The codes of all sent tokens."""
        bits = self.shape.id_bits
        starts = [header.ids_at + n_bytes(size, bits) for header, size in zip(self.headers, self.sizes, strict=True)]
        return self._words(starts, self.sizes, self.shape.logprob_bits)

    def _words(
        self, starts: list[int], sizes: list[int], width: int, out: npt.NDArray[np.uint32] | None = None
    ) -> Words:
        parts = zip(self.payloads, starts, sizes, strict=True)
        packed = [payload[start : start + n_bytes(size, width)] for payload, start, size in parts]
        return unpack_words(packed, sizes, width, out)


def write_parts(
    shape: Shape,
    counts_T: npt.NDArray[np.integer[Any]],
    tail_codes_T: npt.NDArray[np.integer[Any]],
    ids_S: npt.NDArray[np.unsignedinteger[Any]],
    codes_S: npt.NDArray[np.unsignedinteger[Any]],
) -> bytes:
    widest = int(counts_T.max(initial=1))
    short_T = (widest - counts_T).astype(np.uint16)
    count_bits = int(short_T.max(initial=0)).bit_length()
    header = (_MAGIC, _VERSION, shape.logprob_bits, 0, count_bits, widest, len(counts_T))
    parts = (
        pack_words(short_T, count_bits),
        tail_codes_T.astype("<u2"),
        pack_words(ids_S, shape.id_bits),
        pack_words(codes_S, shape.logprob_bits),
    )
    return b"".join([_HEADER.pack(*header, shape.vocab_size), *(part.tobytes() for part in parts)])


def read_blocks(payloads: Sequence[Packed]) -> list[Block]:
    """The payloads in blocks of at most BLOCK_BYTES, if no payload has more.

    Raises MalformedMessage for what no payload can be, for lengths that do not fit a header, and for payloads that
    differ in their vocabulary or in their bits."""
    headers = [_read_header(bytes(payload[:HEADER_BYTES])) for payload in payloads]
    if len(shapes := {header.shape for header in headers}) != 1:
        got = f"payloads of {len(shapes)} shapes: {sorted(shapes)[:2]}"
        raise MalformedMessage("top-k payloads of one teacher", got=got, expected="the same vocabulary and bits")
    blocks, first, block_bytes = list[Block](), 0, 0
    for at, payload in enumerate(payloads):
        if block_bytes + len(payload) > BLOCK_BYTES and block_bytes:
            blocks.append(_read_block(payloads[first:at], headers[first:at]))
            first, block_bytes = at, 0
        block_bytes += len(payload)
    return [*blocks, _read_block(payloads[first:], headers[first:])]


def _read_block(payloads: Sequence[Packed], headers: list[_Header]) -> Block:
    shape = headers[0].shape
    for payload, header in zip(payloads, headers, strict=True):
        if len(payload) < header.ids_at:
            raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {header.ids_at}")
    counts_T, sizes = _counts(payloads, headers)
    tails = list[Packed]()
    for payload, header, size in zip(payloads, headers, sizes, strict=True):
        expected = header.ids_at + n_bytes(size, shape.id_bits) + n_bytes(size, shape.logprob_bits)
        if len(payload) != expected:
            raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"{expected}")
        tails.append(payload[header.tails_at : header.ids_at])
    tail_codes_T = np.frombuffer(b"".join(tails), "<u2")
    if any(header.widest == shape.vocab_size for header in headers):
        fit = ((tail_codes_T == 0) == (counts_T == shape.vocab_size)).all()
    else:
        fit = np.count_nonzero(tail_codes_T) == len(counts_T)  # in a fifth of the time of the comparison
    if not fit:
        raise MalformedMessage(
            _WHAT, got="no tail where tokens are left out, or one where none are", expected="one where some are"
        )
    return Block(payloads, headers, sizes, counts_T, tail_codes_T)


@functools.lru_cache(maxsize=256)  # the headers of a run's segments repeat
def _read_header(header: bytes) -> _Header:
    if len(header) < HEADER_BYTES:
        raise MalformedMessage(_WHAT, got=f"{len(header)} bytes", expected=f"at least {HEADER_BYTES}")
    magic, version, logprob_bits, rest, count_bits, widest, n_positions, vocab_size = _HEADER.unpack(header)
    if (magic, version) != (_MAGIC, _VERSION):
        raise MalformedMessage(_WHAT, got=f"{magic!r} {version}", expected=f"{_MAGIC!r} {_VERSION}")
    if rest:
        expected = "0; a release before 0.1.0 sent the rest of a small vocabulary so"
        raise MalformedMessage(_WHAT, got=f"{rest} bits for each token that is not in the set", expected=expected)
    if not (8 <= logprob_bits <= 16 and 1 <= vocab_size < 1 << 31):
        got = f"{logprob_bits} log-prob bits, a vocabulary of {vocab_size}"
        raise MalformedMessage(_WHAT, got=got, expected="8 to 16, and 1 to 2^31 - 1 tokens")
    shape, most = Shape(vocab_size, logprob_bits), min(vocab_size, MAX_TOKENS_KEPT)
    if not 1 <= widest <= most or count_bits > MAX_TOKENS_KEPT.bit_length():
        got = f"{widest} tokens at the widest position, counts of {count_bits} bits"
        raise MalformedMessage(_WHAT, got=got, expected=f"1 to {most}, at most {MAX_TOKENS_KEPT.bit_length()} bits")
    tails_at = HEADER_BYTES + n_bytes(n_positions, count_bits)
    return _Header(shape, count_bits, widest, n_positions, tails_at, tails_at + 2 * n_positions)


def _counts(payloads: Sequence[Packed], headers: list[_Header]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The counts of all positions, and their sum for each payload."""
    positions = [header.n_positions for header in headers]
    counts_T = np.array([header.widest for header in headers]).repeat(positions)
    widths = {header.count_bits for header in headers}
    if widths == {0}:
        return counts_T, [header.n_positions * header.widest for header in headers]
    ends = list(itertools.accumulate(positions))
    for width in widths:
        some = [at for at, header in enumerate(headers) if header.count_bits == width]
        packed = [payloads[at][HEADER_BYTES : headers[at].tails_at] for at in some]
        short, taken = unpack_words(packed, [positions[at] for at in some], width), 0
        for at in some:
            counts_T[ends[at] - positions[at] : ends[at]] -= short[taken : taken + positions[at]]
            taken += positions[at]
    if len(counts_T) and (least := int(counts_T.min())) < 1:
        most = max(header.widest for header in headers)
        raise MalformedMessage(_WHAT, got=f"{least} tokens at a position", expected=f"1 to {most}")
    ends_T = counts_T.cumsum()
    sums = [int(ends_T[end - 1]) if end else 0 for end in ends]
    return counts_T, [after - before for before, after in itertools.pairwise([0, *sums])]


def most_bytes(vocab_size: int, max_k: int, *, logprob_bits: int = 12) -> int:
    """The most bytes that one position takes, without the header."""
    k, shape = min(max_k, vocab_size), Shape(vocab_size, logprob_bits)
    return n_bytes(1, (k - 1).bit_length()) + 2 + n_bytes(k, shape.id_bits) + n_bytes(k, logprob_bits)


def check_payload(payload: Packed) -> int:
    """T of a payload. Its lengths must fit its header; ids and log-probs are not checked. Raises MalformedMessage."""
    return len(read_blocks([payload])[0].counts_T)


def n_positions(payload: Packed) -> int:
    """T, as the header has it; nothing is checked but the length of the header. Raises MalformedMessage."""
    if len(payload) < HEADER_BYTES:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {HEADER_BYTES}")
    return _HEADER.unpack_from(payload)[6]
