"""The ids of a student's likeliest tokens in few bytes: per position the set that its engine reported. NumPy only.

    payload   header | counts uint16 [T] | ids, w bits each (protocol.bit_words) [S]      little-endian
    header    "TI", version uint8, w uint8, T uint32

They go from the actor to the teachers, which send the log-probs of these tokens (`protocol.topk_codec`).

Legend: T positions, S ids at all positions together, K most ids at a position.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.bit_words import n_bytes, pack_words, unpack_words
from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.topk_layout import MAX_TOKENS_KEPT

_HEADER: Final = struct.Struct("<2sBBI")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"TI"
_VERSION: Final = 2
_WHAT: Final = "payload of the student's likeliest ids"


class TopIds(NamedTuple):
    """The sets of T positions."""

    ids_TK: npt.NDArray[np.int32]
    """Each row likeliest first; 0 after its first `counts_T` columns."""
    counts_T: npt.NDArray[np.int64]
    """At least 1 each."""


def encode_top_ids(sets: Sequence[npt.NDArray[np.int32]]) -> bytes:
    """Encode one set of ids per position. Raises EncodeError for a negative id, and for a set that is empty or has more
    than MAX_TOKENS_KEPT ids."""
    counts_T = np.array([len(one) for one in sets], np.int64)
    if len(counts_T) and not 1 <= counts_T.min() <= counts_T.max() <= MAX_TOKENS_KEPT:
        raise EncodeError(
            f"sets of {counts_T.min()} to {counts_T.max()} likeliest ids; expected 1 to {MAX_TOKENS_KEPT} at a position"
        )
    ids_S = np.concatenate(sets) if sets else np.zeros(0, np.int32)
    if len(ids_S) and int(ids_S.min()) < 0:
        raise EncodeError(f"token id {ids_S.min()} among the likeliest; expected ids of at least 0")
    width = max(1, int(ids_S.max(initial=0)).bit_length())
    header = _HEADER.pack(_MAGIC, _VERSION, width, len(sets))
    return header + counts_T.astype("<u2").tobytes() + pack_words(ids_S.astype(np.uint64), width).tobytes()


def decode_top_ids(payload: bytes | memoryview) -> TopIds:
    """Raises only MalformedMessage, whatever the bytes are."""
    counts_T, width = _read_counts(payload)
    body = payload[_HEADER.size + 2 * len(counts_T) :]
    columns_TK = np.arange(int(counts_T.max(initial=1))) < counts_T[:, None]
    ids_TK = np.zeros(columns_TK.shape, np.int32)
    ids_TK[columns_TK] = unpack_words([body], [int(counts_T.sum())], width)
    return TopIds(ids_TK, counts_T)


def check_top_ids(payload: bytes | memoryview) -> int:
    """T of a payload whose lengths fit its header. Raises MalformedMessage."""
    return len(_read_counts(payload)[0])


def _read_counts(payload: bytes | memoryview) -> tuple[npt.NDArray[np.int64], int]:
    if len(payload) < _HEADER.size:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {_HEADER.size}")
    magic, version, width, n_tokens = _HEADER.unpack_from(payload)
    if (magic, version) != (_MAGIC, _VERSION):
        raise MalformedMessage(_WHAT, got=f"{magic!r} {version}", expected=f"{_MAGIC!r} {_VERSION}")
    if not 1 <= width <= 31:
        raise MalformedMessage(_WHAT, got=f"ids of {width} bits", expected="1 to 31")
    body_at = _HEADER.size + 2 * n_tokens
    if len(payload) < body_at:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {body_at}")
    counts_T = np.frombuffer(payload, "<u2", n_tokens, _HEADER.size).astype(np.int64)
    if n_tokens and not 1 <= counts_T.min() <= counts_T.max() <= MAX_TOKENS_KEPT:
        got = f"{counts_T.min()} to {counts_T.max()} ids at a position"
        raise MalformedMessage(_WHAT, got=got, expected=f"1 to {MAX_TOKENS_KEPT}")
    expected = body_at + n_bytes(int(counts_T.sum()), width)
    if len(payload) != expected:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"{expected}")
    return counts_T, width
