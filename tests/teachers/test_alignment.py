"""The student's tokens beside a teacher's: on random text with tokenizers of both kinds, against transformers' table of
bytes and a slow search for common ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stillhouse.builtin import STUDENT_DIR
from stillhouse.models.files import TokenizerError
from stillhouse.models.token_bytes import token_bytes
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.payloads.aligned import (
    EDGE,
    LATER_TURN,
    NOT_SCORED,
    NOT_TEXT,
    OTHER_TEXT,
    SPECIAL,
    encode_aligned,
)
from stillhouse.protocol.payloads.aligned import END as CODE_END
from stillhouse.protocol.payloads.aligned import INSIDE as CODE_INSIDE
from stillhouse.teachers import alignment
from stillhouse.teachers.alignment import Aligned, Aligner
from tests.teachers.tiny_tokenizers import END, KINDS, tiny

PAIRS: Final = [*itertools.product(KINDS, KINDS)]
SOME_TEXT: Final = st.text(
    st.sampled_from([*"thestudnwr  \n'.,;+=%0123456789éï東🙂и", "\u0301", "\ufdd0"]), max_size=40
)
TEXT: Final = st.one_of(SOME_TEXT, st.text(max_size=20))


@cache
def aligner(student: str, teacher: str) -> Aligner:
    return Aligner(tiny(student, 340), tiny(teacher, 400))


def bytes_of(tokenizer: FileTokenizer, token: int) -> bytes:
    """A second way to a token's bytes."""
    return slow_bytes(tokenizer)[token]


@cache
def slow_bytes(tokenizer: FileTokenizer) -> dict[int, bytes]:
    backend, letters = tokenizer.backend_tokenizer, {letter: byte for byte, letter in bytes_to_unicode().items()}
    added, spaces = backend.get_added_tokens_decoder(), "▁" in backend.to_str()
    found: dict[int, bytes] = {}
    for text, i in backend.get_vocab().items():
        if i in added:
            found[i] = text.encode()
        elif spaces:
            found[i] = bytes.fromhex(text[3:5]) if text.startswith("<0x") else text.replace("▁", " ").encode()
        else:
            found[i] = bytes(letters[letter] for letter in text)
    return found


def middle_ids(tokenizer: FileTokenizer, text: str) -> list[int]:
    """Tokens of text in the middle of an answer."""
    lead = tokenizer.encode("\n", add_special_tokens=False)
    ids = tokenizer.encode(f"\n{text}", add_special_tokens=False)
    return ids[len(lead) :] if ids[: len(lead)] == lead else tokenizer.encode(text, add_special_tokens=False)


def check(student: FileTokenizer, teacher: FileTokenizer, ids: Sequence[int], got: Aligned) -> None:
    """Spans are the shortest runs of the same bytes, in order, and codes say where they end."""
    for one in got.spans:
        ours = b"".join(bytes_of(student, i) for i in ids[one.student])
        theirs = b"".join(bytes_of(teacher, int(i)) for i in got.ids[one.teacher])
        assert ours == theirs or (ours, theirs) == (END.encode(), END.encode())
        ends = [
            {len(b"".join(bytes_of(tokenizer, int(i)) for i in run[:k])) for k in range(1, len(run))}
            for tokenizer, run in ((student, list(ids[one.student])), (teacher, list(got.ids[one.teacher])))
        ]
        assert not ends[0] & ends[1]
    for former, one in itertools.pairwise(got.spans):
        assert former.student.stop <= one.student.start and former.teacher.stop <= one.teacher.start
    coded = [i for i, code in enumerate(got.code_N) if code <= CODE_END]
    assert coded == [i - got.first for one in got.spans for i in range(one.student.start, one.student.stop)]
    assert [i for i in coded if got.code_N[i] == CODE_END] == [one.student.stop - 1 - got.first for one in got.spans]
    encode_aligned(got.code_N)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@settings(max_examples=8, deadline=None)
@given(text=TEXT)
def test_finished_text_is_covered_by_spans_of_the_same_bytes(ours: str, theirs: str, text: str) -> None:
    student, teacher = tiny(ours, 340), tiny(theirs, 400)
    ids = [*middle_ids(student, text), *student.stop_token_ids]
    got = aligner(ours, theirs).align(np.array(ids, np.int32), 0)
    check(student, teacher, ids, got)
    data = b"".join(bytes_of(student, i) for i in ids[:-1])
    if data.decode(errors="replace") == data.decode(errors="ignore") and OTHER_TEXT not in got.code_N:
        assert (got.code_N <= CODE_END).all()
        assert b"".join(bytes_of(teacher, int(i)) for i in got.ids[:-1]) == data
    assert got.ids[-1] == teacher.stop_token_ids[0]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_whatever_the_student_samples(ours: str, theirs: str, data: st.DataObject) -> None:
    """Random tokens: bytes that are no text, control tokens, the end of a turn in the middle, tokens of one byte."""
    student, teacher = tiny(ours, 340), tiny(theirs, 400)
    ids = data.draw(st.lists(st.sampled_from(sorted(student.get_vocab().values())), min_size=1, max_size=30))
    first = data.draw(st.integers(0, len(ids) - 1))
    got = aligner(ours, theirs).align(np.array(ids, np.int32), first)
    assert got.first == first and len(got.code_N) == len(ids) - first
    check(student, teacher, ids, got)
    stop = ids.index(student.stop_token_ids[0]) if student.stop_token_ids[0] in ids else len(ids)
    assert (got.code_N[max(0, stop + 1 - first) :] == LATER_TURN).all()
    scores_M = -np.arange(1.0, len(got.ids) - got.scored_from + 1, dtype=np.float32)
    spread_N = got.logprobs(scores_M)
    for one in got.spans:  # the sum is that of the teacher
        mine, its = spread_N[one.student.start - first : one.student.stop - first], got.scored_from
        np.testing.assert_allclose(mine.sum(), scores_M[one.teacher.start - its : one.teacher.stop - its].sum(), 1e-6)
    assert (spread_N[got.code_N > CODE_END] == NOT_SCORED).all()


@pytest.mark.parametrize("theirs", [kind for kind in KINDS if kind != "bytes_without_words"])
@pytest.mark.parametrize("ours", KINDS)
@settings(max_examples=8, deadline=None)
@given(text=TEXT, more=TEXT)
def test_what_is_scored_of_unfinished_text_stays_as_it_is(ours: str, theirs: str, text: str, more: str) -> None:
    """A streamed answer is scored in parts. (Without words, BPE gives no such promise: `LONGEST_WORD`.)"""
    student, both = tiny(ours, 340), aligner(ours, theirs)
    ids = middle_ids(student, text)
    whole = np.array([*ids, *middle_ids(student, more), *student.stop_token_ids], np.int32)
    part = both.align(whole[: len(ids)], 0)
    later = both.align(whole, 0)
    if OTHER_TEXT not in later.code_N and NOT_TEXT not in later.code_N:
        assert set(map(str, part.spans)) <= set(map(str, later.spans))
        np.testing.assert_array_equal(part.ids, later.ids[: len(part.ids)])
    assert set(part.code_N.tolist()) <= {CODE_INSIDE, CODE_END, EDGE, OTHER_TEXT, NOT_TEXT}


def test_a_shift_by_one_byte_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    add = alignment._Pairing.add  # pyright: ignore[reportPrivateUsage]

    def shifted(self: Any, start: int, ours: Any, ids: Any, theirs: Any) -> None:
        add(self, start, ours, ids, np.minimum(theirs + 1, theirs[-1:]))

    student, teacher = tiny("bytes", 340), tiny("spaces", 400)
    ids = [*middle_ids(student, "the student writes"), *student.stop_token_ids]
    both = Aligner(student, teacher)
    check(student, teacher, ids, both.align(np.array(ids, np.int32), 0))
    monkeypatch.setattr(alignment._Pairing, "add", shifted)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError):
        check(student, teacher, ids, both.align(np.array(ids, np.int32), 0))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_are_those_that_the_decoder_shows(kind: str) -> None:
    tokenizer = tiny(kind)
    table, lead = token_bytes(tokenizer.backend_tokenizer), tokenizer.encode("x", add_special_tokens=False)
    for text in ("the student", " the  teacher\n", "naïve 東京 🙂", "isn't 3.14"):
        ids = middle_ids(tokenizer, text)
        assert b"".join(table[i] for i in ids).decode() == text
        assert tokenizer.decode([*lead, *ids], skip_special_tokens=False) == f"x{text}"
    assert all(bytes_of(tokenizer, i) == data for i, data in table.items())


def test_special_tokens_have_no_score_and_the_end_of_a_turn_has() -> None:
    student, teacher = tiny("bytes", 340, think=True), tiny("spaces", 400)
    start, end = (student.backend_tokenizer.token_to_id(text) for text in ("<s>", END))
    think = student.backend_tokenizer.token_to_id("<think>")
    ids = [*middle_ids(student, "the"), start, think, *middle_ids(student, " student"), end, *middle_ids(student, "x")]
    got = Aligner(student, teacher).align(np.array(ids, np.int32), 0)
    at = {"start": ids.index(start), "think": ids.index(think), "end": ids.index(end)}
    assert got.code_N[at["start"]] == SPECIAL
    assert got.code_N[at["think"]] == CODE_END  # text, which the teacher spells
    assert got.code_N[at["end"]] == CODE_END and (got.code_N[at["end"] + 1 :] == LATER_TURN).all()
    assert b"".join(bytes_of(teacher, int(i)) for i in got.ids) == b"the<s><think> student</s>"
    with_it = Aligner(student, tiny("spaces", 400, think=True)).align(np.array(ids, np.int32), 0)
    assert tiny("spaces", 400, think=True).get_added_vocab()["<think>"] in with_it.ids


def test_a_control_token_that_the_student_spells_is_text_for_the_teacher() -> None:
    student, teacher = tiny("bytes", 340), tiny("bytes_without_words", 400)
    spelled = [student.backend_tokenizer.token_to_id(letter) for letter in END]
    got = Aligner(student, teacher).align(np.array([*spelled, *student.stop_token_ids], np.int32), 0)
    assert got.ids.tolist().count(teacher.stop_token_ids[0]) == 1 and (got.code_N <= CODE_END).all()


def test_a_character_in_two_parts_waits_for_its_second() -> None:
    both = aligner("bytes", "spaces")
    first, second = (
        tiny("bytes", 340).backend_tokenizer.token_to_id(bytes_to_unicode()[byte]) for byte in "ß".encode()
    )
    assert both.align(np.array([first], np.int32), 0).code_N.tolist() == [EDGE]
    ids = [first, second, *tiny("bytes", 340).stop_token_ids]
    assert both.align(np.array(ids, np.int32), 0).code_N.tolist() == [CODE_END, CODE_END, CODE_END]
    broken = both.align(np.array([first, *tiny("bytes", 340).stop_token_ids], np.int32), 0)
    assert (
        broken.code_N.tolist() == [NOT_TEXT, CODE_END]
        and b"".join(bytes_of(tiny("spaces", 400), int(i)) for i in broken.ids[:-1]) == b"\xef\xbf\xbd"
    )


def test_the_same_tokenizer_gives_the_same_tokens() -> None:
    builtin = FileTokenizer(STUDENT_DIR)
    ids = np.array([*builtin.encode("3+8+0=11;9+5+1=15 #151", add_special_tokens=False), builtin.stop_token_ids[0]])
    got = Aligner(builtin, builtin).align(ids.astype(np.int32), 0)
    np.testing.assert_array_equal(got.ids, ids)
    assert (got.code_N == CODE_END).all()


def test_a_tokenizer_without_bytes_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="decoder is WordPiece; expected ByteLevel"):
        token_bytes(words)
