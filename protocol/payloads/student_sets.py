"""A teacher's log-probs of the student's likeliest tokens, as the student was when it sampled: all teachers score the
same sets. What teachers send has the bytes of their own sets (`payloads.top_k`); the ids go from the actor to them as

    payload   header | counts uint16 [T] | ids, w bits each (protocol.bit_words) [S]      little-endian
    header    "TI", version uint8, w uint8, T uint32

Legend: T positions, S ids at all positions together, K most ids at a position.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.bit_words import n_bytes, pack_words, unpack_words
from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.messages import TopIdsWanted
from stillhouse.protocol.payloads.kind import Encoder, EngineNeed, PayloadOptions, ScoreOptions, ScoreResult, TopIds
from stillhouse.protocol.payloads.top_k import SetsKind, no_sets
from stillhouse.protocol.topk_codec import encode_given
from stillhouse.protocol.topk_layout import MAX_TOKENS_KEPT

_HEADER: Final = struct.Struct("<2sBBI")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"TI"
_VERSION: Final = 2
_WHAT: Final = "payload of the student's likeliest ids"

REPORTS_LIKELIEST: Final = EngineNeed("actor", "reports the student's likeliest tokens")
REPORTS_KEPT: Final = EngineNeed("actor", "reports the tokens that top-p, top-k and min-p leave")
MIXES_TEACHER: Final = EngineNeed("actor", "mixes a teacher's distribution into the one that it samples from")
SCORES_GIVEN: Final = EngineNeed("teacher", "scores given tokens")


class StudentSets(SetsKind):
    needs: ClassVar[tuple[EngineNeed, ...]] = (REPORTS_LIKELIEST, SCORES_GIVEN)

    @classmethod
    def chosen_by(cls, options: PayloadOptions) -> bool:
        return options.payload == cls.payload and options.top_k > 0 and options.top_k_of == "student"

    @staticmethod
    def mistake(options: PayloadOptions) -> str:
        if options.top_k_of != "student":
            return ""
        if not options.top_k:
            return "top_k_of is student with top_k = 0, expected a top_k above 0, e.g. 64: there are no sets"
        if options.tail != "each":
            return ""
        return (
            "tail is each with top_k_of = student, expected pooled or auto: if every token is sent, it does not "
            "matter whose set it is"
        )

    def setting(self, key: str) -> tuple[str, object]:
        return "teacher.top_k_of", "student"  # of all pools

    def instead(self, key: str) -> str:
        return "teacher.top_k_of = teacher"

    def doubts(self, divergence: str) -> str:
        if divergence not in ("forward_kl", "mixed", "jsd"):
            return ""
        return (
            "which weighs tokens by the teacher's probabilities: likely ones that the student does not know of are "
            "pooled in the tail; teacher shows them"
        )

    @property
    def top_ids(self) -> TopIdsWanted:
        return TopIdsWanted(self.options.top_k, self.options.top_mass)

    def encoder(self, engine: Any, vocab_tokens: int) -> GivenEncoder:
        return GivenEncoder(vocab_tokens)


@dataclass(frozen=True)
class GivenEncoder(Encoder):
    vocab_tokens: int
    options = ScoreOptions()

    def given(self, top_ids: bytes, n_tokens: int) -> TopIds:
        """Without ids past the tokenizer's last one, which are padding rows of the embedding."""
        ids_TK, counts_T = decode_top_ids(top_ids)
        if len(counts_T) != n_tokens:
            raise MalformedMessage(
                "sets of the student's likeliest ids", got=f"{len(counts_T)}", expected=f"{n_tokens}"
            )
        sent_TK = np.arange(ids_TK.shape[1]) < counts_T[:, None]
        tokens_TK = sent_TK & (ids_TK < self.vocab_tokens)
        if not tokens_TK.any(axis=1).all():
            raise EncodeError(f"all likeliest ids of a position are past the vocabulary of {self.vocab_tokens} tokens")
        order_TK = np.argsort(~tokens_TK, axis=1, kind="stable")
        ids_TK = np.take_along_axis(np.where(tokens_TK, ids_TK, 0), order_TK, axis=1)
        return TopIds(ids_TK, tokens_TK.sum(axis=1))

    def encode(self, result: ScoreResult, place: slice, given: TopIds | None) -> bytes:
        if given is None or result.top_logprobs is None:
            return no_sets(self.vocab_tokens)
        logprobs_TK = result.top_logprobs[place]
        return encode_given(given.ids_TK, logprobs_TK, given.counts_T, vocab_size=self.vocab_tokens)


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


def most_kept_bytes(top_k: int, rows: int) -> int:
    """Most bytes per token of sets of at most `top_k` of `rows` ids."""
    return 2 + n_bytes(min(top_k, rows), max(1, (rows - 1).bit_length()))


def read_kept(
    payload: bytes | memoryview, vocab_size: int | None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(ids [S], counts [T]) of sets that tokens were sampled from. Raises MalformedMessage, also for a set that is not
    in ascending order, which would name a token twice, or has an id outside the vocabulary."""
    counts_T, width = _read_counts(payload)
    n_ids = int(counts_T.sum())
    ids_S = unpack_words([payload[_HEADER.size + 2 * len(counts_T) :]], [n_ids], width).astype(np.int64)
    rises_S = np.diff(ids_S, prepend=-1) > 0
    rises_S[np.cumsum(counts_T)[:-1]] = True  # the first of a set
    if not rises_S.all():
        raise MalformedMessage(_WHAT, got="ids that do not ascend", expected="each kept id once, in ascending order")
    if n_ids and vocab_size is not None and int(ids_S.max()) >= vocab_size:
        raise MalformedMessage(_WHAT, got=f"the id {ids_S.max()}", expected=f"ids below {vocab_size}")
    return ids_S.astype(np.int32), counts_T


def without_sampled(ids_S: npt.NDArray[np.int32], counts_T: npt.NDArray[np.int64], tokens_T: npt.NDArray[Any]) -> int:
    """How many of T sets do not have the token that was sampled from them."""
    sampled_S = ids_S == np.repeat(tokens_T, counts_T)
    return len(counts_T) - len(np.unique(np.repeat(np.arange(len(counts_T)), counts_T)[sampled_S]))


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
