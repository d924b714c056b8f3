"""A student's tokens beside those of a teacher with another tokenizer, by the bytes of their text. No torch.

    student    |12|3 |4+|5 |=|      The vertical lines are ends of tokens. A *span* lies between two places at which
    teacher    |1|23 |4|+|5 |=|     tokens of both end: 12|3 and 1|23 are one, 4+ and 4|+ are one, "5 " and = are two.

What is compared is text that the student chose. So:

- A special token of the student has no text and no score. The first end of a turn is the exception: it is the same
  event in both models, and is a span with the teacher's own end of a turn. Without it, every token that goes on would
  have a cost, and the one that ends would have none: students would learn to stop.
- What comes after the first end of a turn is other text in the teacher's chat template, and has no score.
- A token that is added to a vocabulary and not special (<think>) is text. It is one token of the teacher too, if the
  teacher has it.
- The teacher may read the end of unfinished text differently once there is more of it. So the last word of unfinished
  text is not scored (`_settled`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.engines.base import Float32s, Int32s
from stillhouse.models.chat_text import closing_id, plain_text, text_ids
from stillhouse.models.token_bytes import is_byte, token_bytes
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.payloads.aligned import (
    ALONE,
    EDGE,
    END,
    INSIDE,
    LATER_TURN,
    NOT_SCORED,
    NOT_TEXT,
    OTHER_TEXT,
    SET,
    SPECIAL,
    Codes,
)
from stillhouse.protocol.payloads.kind import ScoreResult
from stillhouse.teachers.first_tokens import FirstTokens

LONGEST_WORD: Final = 32
"""Bytes. Where unfinished text has neither a space nor words for the teacher's tokenizer, this much of its end counts
as one."""
_LAST_WORD: Final = re.compile(r"\s*\S*\Z")
_WINDOW: Final = 256
"""Characters of the end of a text in which its last word is looked for."""


class Span(NamedTuple):
    student: slice
    """Where it is among the student's tokens."""
    teacher: slice
    """Where it is among the teacher's tokens."""


@dataclass(frozen=True)
class Aligned:
    """An answer as the teacher reads it."""

    ids: Int32s
    """The teacher's tokens, up to the last one that is scored."""
    spans: tuple[Span, ...]
    """Those that are scored, in order."""
    code_N: Codes
    """[N] The student's tokens from the first one asked for (`payloads.aligned`)."""
    first: int
    """The first token asked for."""
    student: Int32s
    """All tokens of the student."""

    @property
    def scored_from(self) -> int:
        """The first of the teacher's tokens whose log-prob is needed."""
        return self.spans[0].teacher.start if self.spans else len(self.ids)

    def logprobs(self, teacher_M: Float32s) -> Float32s:
        """[N] per token of the student, from the log-probs of the teacher's tokens from `scored_from` on: that of a
        span in equal parts."""
        out_N = np.full(len(self.code_N), NOT_SCORED, np.float32)
        for student, teacher in self.spans:
            part = teacher_M[teacher.start - self.scored_from : teacher.stop - self.scored_from]
            n = student.stop - student.start
            value = part[0] if len(part) == 1 else part.sum(dtype=np.float64)
            out_N[student.start - self.first : student.stop - self.first] = value if n == 1 else value / n
        return out_N

    def sets(self, scored: ScoreResult, tokens: FirstTokens) -> ScoreResult:
        """The result with the sets of the teacher's tokens from `scored_from` on, as the student's at the first token
        of each span. `top_ids` and `top_logprobs` have the marked tokens only."""
        assert scored.top_ids is not None and scored.top_logprobs is not None
        at_S, place_S = (
            np.array([getattr(one, side).start - begin for one in self.spans], np.int64)
            for side, begin in (("teacher", self.scored_from), ("student", self.first))
        )
        ids_SK, logprobs_SK = tokens.sets(scored.top_ids[at_S], scored.top_logprobs[at_S])
        has_S, code_N = np.isfinite(logprobs_SK).any(axis=1), self.code_N.copy()
        code_N[place_S[has_S]] |= SET
        for i in np.flatnonzero(has_S):
            ours, theirs = (self.student[self.spans[i].student], self.ids[self.spans[i].teacher])
            if len(ours) == len(theirs) == 1 and tokens.is_same(int(ours[0]), int(theirs[0])):
                code_N[place_S[i]] |= ALONE
        logprobs = self.logprobs(scored.logprobs)
        return ScoreResult(logprobs, ids_SK[has_S], logprobs_SK[has_S], codes=code_N)


@dataclass(slots=True)
class _Pairing:
    """What is known of an answer so far."""

    ids: list[int] = field(default_factory=list[int])
    spans: list[Span] = field(default_factory=list[Span])

    def add(self, start: int, student_ends: npt.NDArray[np.int64], ids: list[int], ends: npt.NDArray[np.int64]) -> None:
        """Spans of text whose tokens end at these bytes; `start`: the first of the student's tokens."""
        at, begin, begin_ids = len(self.ids), 0, 0
        for byte in np.intersect1d(student_ends, ends).tolist():
            end, end_ids = (int(np.searchsorted(one, byte, "right")) for one in (student_ends, ends))
            self.spans.append(Span(slice(start + begin, start + end), slice(at + begin_ids, at + end_ids)))
            begin, begin_ids = end, end_ids
        self.ids += ids


class Aligner:
    """The tokenizers of a student and of a teacher."""

    def __init__(self, student: FileTokenizer, teacher: FileTokenizer) -> None:
        """Raises TokenizerError for one whose tokens are not known as bytes, and for one without an end of a turn."""
        self._student, self._teacher = student, teacher
        self._bytes, self._teacher_bytes = (token_bytes(one.backend_tokenizer) for one in (student, teacher))
        self._ends: Final = frozenset(student.stop_token_ids)
        self._added = {i: content for content, i in student.get_added_vocab().items()}
        self._special, self._teacher_special = _special(student), _special(teacher)
        self._teacher_added = teacher.get_added_vocab()
        self._teacher_end = _end_of_turn(teacher)

    @cached_property
    def n_student(self) -> int:
        """Ids of the student's tokenizer."""
        return max(self._student.get_vocab().values()) + 1

    @cached_property
    def first_tokens(self) -> FirstTokens:
        """Added tokens of both are the same by their text, if the student's is not special or both end a turn."""
        student, added = self._student.get_added_vocab(), self._teacher_added
        of_both = {i: student[text] for text, i in added.items() if text in student}
        stops = set(self._teacher.stop_token_ids)
        same = {i: s for i, s in of_both.items() if s not in self._special or (s in self._ends and i in stops)}
        same.setdefault(self._teacher_end, _end_of_turn(self._student))
        names, of_teacher = (
            one.backend_tokenizer.get_vocab(with_added_tokens=False) for one in (self._student, self._teacher)
        )
        # Where <0x41> and A are the same bytes, each is its namesake, and other tokens of these bytes count for A.
        first = sorted(names, key=lambda name: not is_byte(name))
        ours = {names[name]: self._bytes[names[name]] for name in first if names[name] not in self._added}
        theirs = {i: text for i, text in self._teacher_bytes.items() if i not in self._teacher_special}
        namesakes = {i: names[name] for name, i in of_teacher.items() if name in names and i in theirs}
        same |= {i: token for i, token in namesakes.items() if ours.get(token, b"") == theirs[i] != b""}
        return FirstTokens.of(ours, theirs, same, end=self._teacher_end, n_student=self.n_student)

    def align(self, ids: Int32s, first: int) -> Aligned:
        """`ids`: the student's tokens behind its prompt. `first`: the first of them that is to be scored. Text is
        finished where an added token follows it, such as the end of the turn."""
        pairing, listed = _Pairing(), ids.tolist()
        code = np.full(len(listed), EDGE, np.uint8)
        at = 0
        while at < len(listed):
            token = listed[at]
            if token in self._ends:
                pairing.spans.append(Span(slice(at, at + 1), slice(len(pairing.ids), len(pairing.ids) + 1)))
                pairing.ids.append(self._teacher_end)
                code[at + 1 :] = LATER_TURN
                break
            if token in self._added or not self._bytes.get(token):
                self._one(pairing, code, at, token)
                at += 1
                continue
            end = at + 1
            while end < len(listed) and self._is_text(listed[end]):
                end += 1
            self._text(pairing, code, listed, at, end, finished=end < len(listed))
            at = end
        spans = tuple(one for one in pairing.spans if one.student.start >= first)
        for student, _ in spans:
            code[student.start : student.stop - 1] = INSIDE
            code[student.stop - 1] = END
        n_read = spans[-1].teacher.stop if spans else 0
        return Aligned(np.array(pairing.ids[:n_read], np.int32), spans, code[first:], first, ids)

    def _is_text(self, token: int) -> bool:
        return token not in self._ends and token not in self._added and bool(self._bytes.get(token))

    def _one(self, pairing: _Pairing, code: Codes, at: int, token: int) -> None:
        """An added token, or one without text."""
        content = self._added.get(token, "")
        known = self._teacher_added.get(content)
        if token in self._special or not content:
            code[at] = SPECIAL
            pairing.ids += [] if known is None else [known]
            return
        ids = [known] if known is not None else self._encoded(content)
        if ids is None:
            code[at] = OTHER_TEXT
            return
        pairing.spans.append(Span(slice(at, at + 1), slice(len(pairing.ids), len(pairing.ids) + len(ids))))
        pairing.ids += ids

    def _text(self, pairing: _Pairing, code: Codes, listed: list[int], start: int, end: int, *, finished: bool) -> None:
        """A run of tokens [start, end) with text and without added ones."""
        pieces = [self._bytes[token] for token in listed[start:end]]
        for begin, stop, text in readable(pieces, finished=finished):
            ends = np.cumsum([len(piece) for piece in pieces[begin:stop]])
            places = slice(start + begin, start + stop)
            if text is None:  # the teacher reads what people see
                code[places] = NOT_TEXT
                seen = b"".join(pieces[begin:stop]).decode(errors="replace")
                pairing.ids += self._encoded(seen) or []
                continue
            ids = self._encoded(text)
            if ids is None:
                code[places] = OTHER_TEXT
                pairing.ids += text_ids(self._teacher, plain_text(self._teacher, text))
                continue
            teacher_ends = np.cumsum([len(self._teacher_bytes[i]) for i in ids])
            if stop == len(pieces) and not finished:
                n_settled = int(np.searchsorted(teacher_ends, self._settled(text), "right"))
                ids, teacher_ends = ids[:n_settled], teacher_ends[:n_settled]
            pairing.add(start + begin, ends, ids, teacher_ends)

    def _encoded(self, text: str) -> list[int] | None:
        """The teacher's tokens of text in the middle of an answer; None if they are not exactly this text."""
        wanted = text.encode()
        for before in ("", "\n"):  # tokenizers that put a space before a text put none behind a line's end
            lead = text_ids(self._teacher, before) if before else []
            ids = text_ids(self._teacher, plain_text(self._teacher, before + text))
            if ids[: len(lead)] != lead:
                continue
            ids = ids[len(lead) :]
            if b"".join(self._teacher_bytes.get(i, b"") for i in ids) == wanted:
                return ids
        return None

    def _settled(self, text: str) -> int:
        """Bytes at the beginning of unfinished text that the teacher reads in the same way whatever follows: all but
        the last word, which is what its tokenizer takes for one, or what spaces do."""
        window = text[-_WINDOW:]
        found = _LAST_WORD.search(window)
        keep = found.start() if found else 0
        backend = self._teacher.backend_tokenizer
        if backend.pre_tokenizer is not None and backend.normalizer is None:
            words = backend.pre_tokenizer.pre_tokenize_str(window)
            keep = max(keep, words[-1][1][0] if len(words) > 1 else 0)
        settled = len(text.encode()) - len(window[keep:].encode())
        return max(settled, len(text.encode()) - LONGEST_WORD) if keep == 0 else settled


def _special(tokenizer: FileTokenizer) -> set[int]:
    added, named = tokenizer.backend_tokenizer.get_added_tokens_decoder(), set(tokenizer.all_special_tokens)
    return {i for i, token in added.items() if token.special or token.content in named}


def _end_of_turn(tokenizer: FileTokenizer) -> int:
    stops, closing = tokenizer.stop_token_ids, closing_id(tokenizer)
    return closing if closing is not None and closing in stops else stops[0]


def readable(pieces: list[bytes], *, finished: bool) -> Iterator[tuple[int, int, str | None]]:
    """Divide tokens, by the bytes of each, into runs (begin, end, text) that are UTF-8 and runs (begin, end, None) that
    are not. An incomplete character at the end of unfinished text is left out: the rest of it may follow."""
    ends = np.cumsum([len(piece) for piece in pieces])
    data, at = b"".join(pieces), 0
    while at < len(pieces):
        begin = int(ends[at - 1]) if at else 0
        try:
            yield at, len(pieces), data[begin:].decode()
            return
        except UnicodeDecodeError as error:
            wrong, incomplete = begin + error.start, error.reason == "unexpected end of data"
            behind = begin + error.end
        first = int(np.searchsorted(ends, wrong, "right"))
        while first > at and not _is_utf8(data[begin : int(ends[first - 1])]):
            first -= 1  # a token that ends in the middle of a character
        if first > at:
            yield at, first, data[begin : int(ends[first - 1])].decode()
        if incomplete and not finished:
            return
        last = int(np.searchsorted(ends, behind, "left")) + 1
        yield first, last, None
        at = last


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
