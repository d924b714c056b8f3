"""How the scores of a teacher with another tokenizer belong to the student's tokens: one code per token, and for
divergences between distributions its likeliest tokens at the beginnings of spans. NumPy only.

    payload   header | code, uint8 [T] | with sets: a top-k payload (protocol.topk_codec) of the tokens marked SET
    header    "AL", or "AS" with sets, version uint8, 0, T uint32      little-endian

A *span* is a run of the student's tokens that has the same bytes as a run of the teacher's tokens, and that no shorter
ones have. Its log-prob under the teacher is sent in equal parts, one per token of the student, so that their sum is
what the teacher gave (teachers.alignment). Codes: INSIDE a span, END of a span, and from 2 on the reasons why a token
has no score. SET is added at a token that has a set, which is the first one of its span; ALONE where this set says all
about the span: it is one token in both, and no other token of the teacher counts for the student's.

Legend: T tokens of a payload, R rows of one teacher, S positions with a set, K columns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from stillhouse.protocol.payloads.top_k import PADDING_ROWS, TopKSets, TopRows, no_sets
from stillhouse.protocol.topk_codec import encode_given
from stillhouse.protocol.topk_layout import HEADER_BYTES, check_payload, most_bytes

Codes: TypeAlias = npt.NDArray[np.uint8]

_HEADER: Final = struct.Struct("<2sBxI")
_VERSION: Final = 1
_WHAT: Final = "payload of aligned scores"

INSIDE, END = 0, 1
REASONS: Final = ("special", "edge", "not_text", "other_text", "later_turn", "not_whole")
"""Why a token has no score. special: a special token other than the end of a turn. edge: its span may go on behind the
end of the segment, or began before it. not_text: its bytes are no UTF-8. other_text: the teacher's tokenizer changes
this text. later_turn: it comes after the first end of a turn. not_whole: not all of its span is trained."""
SPECIAL, EDGE, NOT_TEXT, OTHER_TEXT, LATER_TURN, NOT_WHOLE = range(2, 2 + len(REASONS))
SET, ALONE = np.uint8(64), np.uint8(128)
_CODE: Final = np.uint8(63)
NOT_SCORED: Final = np.float32(2.0**-100)
"""In place of the log-prob of a token without a score. No model gives this number."""


class AlignedScores(PayloadKind):
    payload: ClassVar[str] = "top_k"
    what: ClassVar[str] = "aligned scores"
    magic: ClassVar[bytes] = b"AL"
    header_bytes: ClassVar[int] = _HEADER.size
    distributions: ClassVar[bool] = False

    @classmethod
    def chosen_by(cls, options: PayloadOptions) -> bool:
        return options.tokenizer == "other" and not options.top_k

    @staticmethod
    def mistake(options: PayloadOptions) -> str:
        if options.tokenizer != "other":
            return ""
        wrong = [
            f"{name} = {got}"
            for name, got, able in (
                ("payload", options.payload, ("top_k",)),
                ("top_k_of", options.top_k_of, ("teacher",)),
                ("tail", options.tail, ("auto", "pooled")),
            )
            if got not in able
        ]
        if not wrong:
            return ""
        return (
            f"tokenizer: got other with {', '.join(wrong)}, expected payload = top_k, top_k_of = teacher and tail = "
            "pooled: of two vocabularies only the teacher's likeliest tokens are compared, with the rest as one"
        )

    def setting(self, key: str) -> tuple[str, object]:
        return f"{key}.tokenizer", "other"

    def most_bytes(self, sizes: ModelSizes) -> int | None:
        return 1

    def encoder(self, engine: Any, vocab_tokens: int) -> Encoder:
        return AlignedEncoder()

    @classmethod
    def n_tokens(cls, payload: Packed) -> int:
        return len(_codes(payload, cls.magic)[0])

    @classmethod
    def read(cls, teacher: str, pieces: Sequence[PayloadPart], vocab_tokens: int) -> AlignedRows:
        found, sets = list[Codes](), list[PayloadPart]()
        for one in pieces:
            code_T, body = decode_aligned(one.body, cls.magic)
            if len(code_T) != one.n_tokens:
                raise PayloadError(f"teacher {teacher!r}: aligned scores of {len(code_T)} tokens, not {one.n_tokens}")
            code_R = _only_whole(code_T, one.rows, NOT_WHOLE)
            found.append(code_R)
            set_T = (code_T & SET) > 0
            rows = (np.cumsum(set_T) - 1)[one.rows[(code_R & SET) > 0]]
            sets.append(PayloadPart(memoryview(body), int(set_T.sum()), rows))
        code_R = np.concatenate(found)
        if cls.magic == AlignedScores.magic:
            return AlignedRows(code_R)
        return AlignedRows(code_R, TopKSets.read(teacher, sets, vocab_tokens))


class AlignedSets(AlignedScores):
    """With the teacher's likeliest tokens, as those of the student that they count for (teachers.first_tokens)."""

    what: ClassVar[str] = "aligned sets"
    magic: ClassVar[bytes] = b"AS"
    header_bytes: ClassVar[int] = _HEADER.size + HEADER_BYTES
    distributions: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    @classmethod
    def chosen_by(cls, options: PayloadOptions) -> bool:
        return options.tokenizer == "other" and options.top_k > 0

    def setting(self, key: str) -> tuple[str, object]:
        return f"{key}.top_k", self.options.top_k

    def most_bytes(self, sizes: ModelSizes) -> int | None:
        rows = sizes.vocabulary
        return None if rows is None else 1 + most_bytes(rows, self.options.top_k)

    def encoder(self, engine: Any, vocab_tokens: int) -> SetsEncoder:
        asked = min(self.options.top_k + PADDING_ROWS, engine.vocab_size)
        return SetsEncoder(vocab_tokens, ScoreOptions(top_k=asked), self.options.top_k, self.options.top_mass)


class AlignedEncoder(Encoder):
    options = ScoreOptions()

    def encode(self, result: ScoreResult, place: slice, given: TopIds | None) -> bytes:
        """Spans that the place cuts are not scored."""
        return encode_aligned(_cut(result, place))


@dataclass(frozen=True)
class SetsEncoder(Encoder):
    vocab_tokens: int
    """Ids of the student's tokenizer."""
    options: ScoreOptions
    max_k: int
    mass: float

    def encode(self, result: ScoreResult, place: slice, given: TopIds | None) -> bytes:
        """Spans that the place cuts are not scored. The result has the sets of its marked tokens only."""
        code_T, sets = _cut(result, place), no_sets(self.vocab_tokens)
        assert result.codes is not None
        rows_T = (np.cumsum((result.codes & SET) > 0) - 1)[place][(code_T & SET) > 0]
        if len(rows_T) and result.top_ids is not None and result.top_logprobs is not None:
            ids_SK, logprobs_SK = result.top_ids[rows_T, : self.max_k], result.top_logprobs[rows_T, : self.max_k]
            covered_SK = np.exp(logprobs_SK.astype(np.float64)).cumsum(axis=1)
            enough_S = (covered_SK < self.mass).sum(axis=1) + 1
            counts_S = np.minimum(enough_S, np.isfinite(logprobs_SK).sum(axis=1))
            sets = encode_given(ids_SK, logprobs_SK, counts_S, vocab_size=self.vocab_tokens)
        return encode_aligned(code_T, sets)


def _cut(result: ScoreResult, place: slice) -> Codes:
    if result.codes is None:
        raise EncodeError("a result of the engine that was not aligned")
    return _only_whole(result.codes, np.arange(len(result.codes))[place], EDGE)


@dataclass(frozen=True)
class AlignedRows(PayloadRows):
    code_R: Codes
    sets: TopRows | None = None
    """A row for each one marked SET; None without sets."""

    @property
    def n_rows(self) -> int:
        return len(self.code_R)

    @property
    def scored(self) -> npt.NDArray[np.bool_]:
        """[R]"""
        return plain(self.code_R) <= END

    @property
    def compared(self) -> npt.NDArray[np.bool_]:
        """[R] Whether it has a set."""
        return (self.code_R & SET) > 0

    @property
    def rest(self) -> npt.NDArray[np.bool_]:
        """[R] Whether it is scored, and its set, if it has one, does not say all about its span."""
        return self.scored & ((self.code_R & ALONE) == 0)

    @property
    def own_sets(self) -> TopRows | None:
        """Its sets, with the random numbers of their rows."""
        return None if self.sets is None else replace(self.sets, uniform_RS=self.drawn(np.flatnonzero(self.compared)))

    @property
    def firsts(self) -> npt.NDArray[np.int64]:
        """[R] The first row of each one's span; its own number for a row without a score."""
        begins_R = np.ones(len(self.code_R), np.bool_)
        begins_R[1:] = plain(self.code_R[:-1]) != INSIDE
        return np.maximum.accumulate(np.where(begins_R, np.arange(len(self.code_R)), 0))

    def at(self, rows: npt.NDArray[np.int64]) -> AlignedRows:
        raise NotImplementedError("spans are not divided")

    @classmethod
    def joined(cls, parts: Sequence[AlignedRows]) -> AlignedRows:
        raise NotImplementedError("a microbatch has the sets alone")


def plain(code_T: Codes) -> Codes:
    """The codes without marks."""
    return code_T & _CODE


def alignment_counts(result: ScoreResult, place: slice) -> Iterator[tuple[str, float]]:
    """What is counted of a result's tokens at `place`: those without a score by reason, spans, spans with a set, and
    the probability of these sets."""
    assert result.codes is not None
    code_T = plain(result.codes[place])
    for code, n in zip(*np.unique(code_T[code_T > END], return_counts=True), strict=True):
        yield f"unaligned_{REASONS[code - SPECIAL]}_tokens", float(n)
    if result.top_logprobs is not None:
        own = (np.cumsum((result.codes & SET) > 0) - 1)[place][(result.codes[place] & SET) > 0]
        yield "spans", float((code_T == END).sum())
        yield "sets", float(len(own))
        yield "sets_mass", float(np.exp(result.top_logprobs[own].astype(np.float64)).sum())


def encode_aligned(code_T: Codes, sets: bytes | None = None) -> bytes:
    magic = AlignedScores.magic if sets is None else AlignedSets.magic
    return _HEADER.pack(magic, _VERSION, len(code_T)) + code_T.astype(np.uint8).tobytes() + (sets or b"")


def decode_aligned(payload: Packed, magic: bytes = AlignedScores.magic) -> tuple[Codes, Packed]:
    """(codes [T], the bytes behind them). Raises only MalformedMessage, whatever the bytes are."""
    code_T, body = _codes(payload, magic)
    plain_T, set_T = plain(code_T), (code_T & SET) > 0
    if len(code_T) and plain_T.max() > NOT_WHOLE:
        raise MalformedMessage(_WHAT, got=f"code {plain_T.max()}", expected=f"at most {NOT_WHOLE}")
    after_T = np.append(plain_T[1:], SPECIAL)
    if ((plain_T == INSIDE) & (after_T > END)).any():
        raise MalformedMessage(_WHAT, got="a span without an end", expected="one at its last token")
    first_T = np.append(True, plain_T[:-1] != INSIDE) & (plain_T <= END)
    alone_T = (code_T & ALONE) > 0
    if (set_T & ~first_T[: len(code_T)]).any() or (alone_T & ~(set_T & (plain_T == END))).any():
        raise MalformedMessage(_WHAT, got="a set that is not at the first token of a span", expected="one there")
    return code_T, body


def _codes(payload: Packed, magic: bytes) -> tuple[Codes, Packed]:
    if len(payload) < _HEADER.size:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {_HEADER.size}")
    found, version, n_tokens = _HEADER.unpack_from(payload)
    behind = _HEADER.size + n_tokens
    fits = len(payload) == behind if magic == AlignedScores.magic else len(payload) >= behind
    if (found, version) != (magic, _VERSION) or not fits:
        got = f"{found!r} {version}, {len(payload)} bytes for {n_tokens} tokens"
        raise MalformedMessage(_WHAT, got=got, expected=f"{magic!r} {_VERSION}, a byte per token")
    code_T = np.frombuffer(payload, np.uint8, n_tokens, _HEADER.size)
    n_sets = int(((code_T & SET) > 0).sum())
    if magic == AlignedSets.magic and (sent := check_payload(payload[behind:])) != n_sets:
        raise MalformedMessage(_WHAT, got=f"{sent} sets for {n_sets} tokens marked", expected="one each")
    if magic == AlignedScores.magic and len(code_T) and code_T.max() > _CODE:
        raise MalformedMessage(_WHAT, got=f"code {code_T.max()}", expected=f"at most {NOT_WHOLE}")
    return code_T, payload[behind:]


def _only_whole(code_T: Codes, rows: npt.NDArray[np.int64], why: int) -> Codes:
    """The codes of some rows; `why` for a span of which not all tokens are among them, since its sum is not known."""
    plain_T = plain(code_T)
    ends_T = plain_T != INSIDE
    span_T = np.cumsum(ends_T) - ends_T
    n_spans = len(code_T) + 1
    whole_S = np.bincount(span_T, minlength=n_spans) == np.bincount(span_T[rows], minlength=n_spans)
    return np.where((plain_T > END) | whole_S[span_T], code_T, why)[rows].astype(np.uint8)
