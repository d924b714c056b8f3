"""How the scores of a teacher with another tokenizer belong to the student's tokens: one code per token. NumPy only.

    payload   header | code, uint8 [T]
    header    "AL", version uint8, 0, T uint32      little-endian

A *span* is a run of the student's tokens that has the same bytes as a run of the teacher's tokens, and that no shorter
ones have. Its log-prob under the teacher is sent in equal parts, one per token of the student, so that their sum is
what the teacher gave (teachers.alignment). Codes: INSIDE a span, END of a span, and from 2 on the reasons why a token
has no score.

Legend: T tokens of a payload, R rows of one teacher.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.payloads.kind import (
    Encoder,
    ModelSizes,
    Packed,
    PayloadError,
    PayloadKind,
    PayloadOptions,
    PayloadPart,
    PayloadRows,
    ScoreOptions,
    ScoreResult,
    TopIds,
)

Codes: TypeAlias = npt.NDArray[np.uint8]

_HEADER: Final = struct.Struct("<2sBxI")
_MAGIC: Final = b"AL"
_VERSION: Final = 1
_WHAT: Final = "payload of aligned scores"

INSIDE, END = 0, 1
REASONS: Final = ("special", "edge", "not_text", "other_text", "later_turn", "not_whole")
"""Why a token has no score. special: a special token other than the end of a turn. edge: its span may go on behind the
end of the segment, or began before it. not_text: its bytes are no UTF-8. other_text: the teacher's tokenizer changes
this text. later_turn: it comes after the first end of a turn. not_whole: not all of its span is trained."""
SPECIAL, EDGE, NOT_TEXT, OTHER_TEXT, LATER_TURN, NOT_WHOLE = range(2, 2 + len(REASONS))
NOT_SCORED: Final = np.float32(2.0**-100)
"""In place of the log-prob of a token without a score. No model gives this number."""


class AlignedScores(PayloadKind):
    payload: ClassVar[str] = "top_k"
    what: ClassVar[str] = "aligned scores"
    magic: ClassVar[bytes] = _MAGIC
    header_bytes: ClassVar[int] = _HEADER.size
    distributions: ClassVar[bool] = False

    @classmethod
    def chosen_by(cls, options: PayloadOptions) -> bool:
        return options.tokenizer == "other"

    @staticmethod
    def mistake(options: PayloadOptions) -> str:
        if options.tokenizer != "other" or (options.payload == "top_k" and not options.top_k):
            return ""
        return (
            f"tokenizer: got other with payload = {options.payload}, top_k = {options.top_k}, expected top_k = 0 and "
            "no hidden states: distributions over two vocabularies are not compared; use the divergence k1, k2 or k3"
        )

    def setting(self, key: str) -> tuple[str, object]:
        return f"{key}.tokenizer", "other"

    def most_bytes(self, sizes: ModelSizes) -> int:
        return 1

    def encoder(self, engine: Any, vocab_tokens: int) -> AlignedEncoder:
        return AlignedEncoder()

    @classmethod
    def n_tokens(cls, payload: Packed) -> int:
        return len(_codes(payload))

    @classmethod
    def read(cls, teacher: str, pieces: Sequence[PayloadPart], vocab_tokens: int) -> AlignedRows:
        found: list[Codes] = []
        for one in pieces:
            code_T = decode_aligned(one.body)
            if len(code_T) != one.n_tokens:
                raise PayloadError(f"teacher {teacher!r}: aligned scores of {len(code_T)} tokens, not {one.n_tokens}")
            found.append(_only_whole(code_T, one.rows, NOT_WHOLE))
        return AlignedRows(np.concatenate(found))


class AlignedEncoder(Encoder):
    options = ScoreOptions()

    def encode(self, result: ScoreResult, place: slice, given: TopIds | None) -> bytes:
        """Spans that the place cuts are not scored."""
        if result.codes is None:
            raise EncodeError("a result of the engine that was not aligned")
        return encode_aligned(_only_whole(result.codes, np.arange(len(result.codes))[place], EDGE))


@dataclass(frozen=True)
class AlignedRows(PayloadRows):
    code_R: Codes

    @property
    def n_rows(self) -> int:
        return len(self.code_R)

    @property
    def scored(self) -> npt.NDArray[np.bool_]:
        """[R]"""
        return self.code_R <= END

    @property
    def firsts(self) -> npt.NDArray[np.int64]:
        """[R] The first row of each one's span; its own number for a row without a score."""
        begins_R = np.ones(len(self.code_R), np.bool_)
        begins_R[1:] = self.code_R[:-1] != INSIDE
        return np.maximum.accumulate(np.where(begins_R, np.arange(len(self.code_R)), 0))

    def at(self, rows: npt.NDArray[np.int64]) -> AlignedRows:
        return AlignedRows(self.code_R[rows])

    @classmethod
    def joined(cls, parts: Sequence[AlignedRows]) -> AlignedRows:
        return cls(np.concatenate([part.code_R for part in parts]))


def encode_aligned(code_T: Codes) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, len(code_T)) + code_T.astype(np.uint8).tobytes()


def decode_aligned(payload: Packed) -> Codes:
    """[T] Raises only MalformedMessage, whatever the bytes are."""
    code_T = _codes(payload)
    if len(code_T) and code_T.max() > NOT_WHOLE:
        raise MalformedMessage(_WHAT, got=f"code {code_T.max()}", expected=f"at most {NOT_WHOLE}")
    after_T = np.append(code_T[1:], SPECIAL)
    if ((code_T == INSIDE) & (after_T > END)).any():
        raise MalformedMessage(_WHAT, got="a span without an end", expected="one at its last token")
    return code_T


def _codes(payload: Packed) -> Codes:
    if len(payload) < _HEADER.size:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {_HEADER.size}")
    magic, version, n_tokens = _HEADER.unpack_from(payload)
    if (magic, version) != (_MAGIC, _VERSION) or len(payload) != _HEADER.size + n_tokens:
        got = f"{magic!r} {version}, {len(payload)} bytes for {n_tokens} tokens"
        raise MalformedMessage(_WHAT, got=got, expected=f"{_MAGIC!r} {_VERSION}, a byte per token")
    return np.frombuffer(payload, np.uint8, n_tokens, _HEADER.size)


def _only_whole(code_T: Codes, rows: npt.NDArray[np.int64], why: int) -> Codes:
    """The codes of some rows; `why` for a span of which not all tokens are among them, since its sum is not known."""
    ends_T = code_T != INSIDE
    span_T = np.cumsum(ends_T) - ends_T
    n_spans = len(code_T) + 1
    whole_S = np.bincount(span_T, minlength=n_spans) == np.bincount(span_T[rows], minlength=n_spans)
    return np.where((code_T > END) | whole_S[span_T], code_T, why)[rows].astype(np.uint8)
