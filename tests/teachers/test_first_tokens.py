"""A teacher's likeliest tokens as those of a student with another tokenizer, against a search through both
vocabularies, and what a teacher sends of them against transformers."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.payloads.aligned import ALONE, END, SET, AlignedRows, AlignedSets, plain
from stillhouse.protocol.payloads.kind import PayloadPart, ScoreResult
from stillhouse.teachers import alignment
from stillhouse.teachers.alignment import Aligner
from stillhouse.teachers.config import TeacherConfig
from stillhouse.teachers.first_tokens import NONE
from tests.teachers.test_alignment import PAIRS, TEXT, bytes_of, middle_ids
from tests.teachers.test_alignment import aligner as aligner_of
from tests.teachers.test_other_tokenizer import PROMPT, item, sent_by
from tests.teachers.test_other_tokenizer import TEXT as ANSWER
from tests.teachers.tiny_tokenizers import END as STOP
from tests.teachers.tiny_tokenizers import far_model, tiny

K = 6
CONFIG = TeacherConfig(device="cpu", tokenizer="other", top_k=K, top_mass=1.0)


@cache
def slow_table(student: FileTokenizer, teacher: FileTokenizer) -> dict[int, bytes]:
    """The teacher's tokens that are text -> the bytes of the student's token that each counts for."""
    added = [one.backend_tokenizer.get_added_tokens_decoder() for one in (student, teacher)]
    ours = {bytes_of(student, i) for i in student.get_vocab().values() if i not in added[0]}
    found: dict[int, bytes] = {}
    for i in teacher.get_vocab().values():
        text = bytes_of(teacher, i)
        if i not in added[1] and text:
            found[i] = max((one for one in ours if one and text.startswith(one)), key=len, default=b"")
        elif (
            i in added[1] and not added[1][i].special and any(one.content.encode() == text for one in added[0].values())
        ):
            found[i] = text
    return found


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_token_counts_for_the_longest_one_that_it_begins_with(ours: str, theirs: str) -> None:
    student, teacher = tiny(ours, 340, think=True), tiny(theirs, 400, think=True)
    tokens = Aligner(student, teacher).first_tokens
    for i, text in slow_table(student, teacher).items():
        got = int(tokens.of_U[i])
        assert (bytes_of(student, got) if got != NONE else b"") == text
    named = {name: int(tokens.of_U[i]) for name, i in teacher.get_added_vocab().items()}
    assert named == {"<s>": NONE, STOP: student.stop_token_ids[0], "<think>": student.get_vocab()["<think>"]}
    counts = np.bincount(tokens.of_U[tokens.of_U != NONE], minlength=len(tokens.alone_V))
    np.testing.assert_array_equal(tokens.alone_V, counts == 1)


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_with_the_same_tokenizer_each_token_counts_for_itself(kind: str) -> None:
    same = tiny(kind, 340)
    tokens = Aligner(same, same).first_tokens
    special = {i for i, one in same.backend_tokenizer.get_added_tokens_decoder().items() if one.content != STOP}
    for i in same.get_vocab().values():
        assert int(tokens.of_U[i]) == (NONE if i in special else i)
        assert i in special or tokens.alone_V[i]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@settings(max_examples=6, deadline=None)
@given(text=TEXT, seed=st.integers(0, 99))
def test_sets_are_sums_over_the_teachers_tokens(ours: str, theirs: str, text: str, seed: int) -> None:
    """Of random distributions, at the first token of each span."""
    student, teacher = tiny(ours, 340), tiny(theirs, 400)
    aligner = aligner_of(ours, theirs)
    ids = np.array([*middle_ids(student, text), *student.stop_token_ids], np.int32)
    got = aligner.align(ids, 0)
    random, n = np.random.default_rng(seed), len(got.ids) - got.scored_from
    n_rows = max(teacher.get_vocab().values()) + 3  # padding rows
    logits = random.normal(0, 3, (n, n_rows))
    logits -= np.logaddexp.reduce(logits, axis=1, keepdims=True)
    top_ids = np.argsort(-logits, axis=1)[:, :40].astype(np.int32)
    top = np.take_along_axis(logits, top_ids, 1).astype(np.float32)
    result = got.sets(ScoreResult(np.zeros(n, np.float32), top_ids, top), aligner.first_tokens)
    assert result.codes is not None and result.top_ids is not None and result.top_logprobs is not None
    table, at = slow_table(student, teacher) | {teacher.get_vocab()[STOP]: STOP.encode()}, 0
    for span in got.spans:
        mass = defaultdict[bytes, float](float)
        for i, logprob in zip(
            top_ids[span.teacher.start - got.scored_from], top[span.teacher.start - got.scored_from], strict=True
        ):
            if int(i) in table:
                mass[table[int(i)]] += float(np.exp(np.float64(logprob)))
        mass.pop(b"", None)
        assert bool(result.codes[span.student.start] & SET) == bool(mass)
        if not mass:
            continue
        filled = np.isfinite(result.top_logprobs[at])
        sent = defaultdict[bytes, float](float)  # <0x41> and A are two tokens of the same bytes
        for i, x in zip(result.top_ids[at][filled], result.top_logprobs[at][filled], strict=True):
            sent[bytes_of(student, int(i))] += float(np.exp(np.float64(x)))
        assert sent == pytest.approx(mass, rel=1e-5) and (np.diff(result.top_logprobs[at][filled]) <= 0).all()
        at += 1
    assert at == len(result.top_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return far_model(tmp_path_factory.mktemp("far"))


def sent_rows(folder: Path) -> tuple[np.ndarray, AlignedRows, list[int], list[int], dict[str, float]]:
    """(log-probs, what the learner reads, the prompt in the teacher's tokens, the answer, figures) of one answer."""
    ours, theirs = (PreTrainedTokenizerFast.from_pretrained(one) for one in (STUDENT_DIR, folder))
    n = len(ours.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False))
    prompt = list(theirs.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False))
    answer = [*ours.encode(ANSWER, add_special_tokens=False), ours.eos_token_id]
    work = (item(n, len(prompt), 0, n + len(answer), last=True), [*prompt, *answer])
    aligner = Aligner(FileTokenizer(STUDENT_DIR), FileTokenizer(folder))
    ((logprobs, payload),) = sent_by(TorchScorer.load(folder, CONFIG), CONFIG, aligner, work)
    assert AlignedSets.n_tokens(payload.tobytes()) == len(answer)
    part = PayloadPart(payload.data, len(answer), np.arange(len(answer)))
    return logprobs[n:], AlignedSets.read("far", [part], len(ours)), prompt, answer, {}


def check(folder: Path) -> None:
    """At the first token of each span, the teacher's sums over tokens with the same beginning, by transformers."""
    _, rows, prompt, _, _ = sent_rows(folder)
    assert rows.sets is not None
    ours, theirs = FileTokenizer(STUDENT_DIR), FileTokenizer(folder)
    words = ["8", "+5", "+0", "=1", "3", ";3", "+9", "+1", "=1", "3", " ", "#1", "3", "3", "<|im_end|>"]
    ids = theirs.encode("".join(words), add_special_tokens=False)
    assert [theirs.decode([i], skip_special_tokens=False) for i in ids] == words
    spans = [i for i, word in enumerate(words) if word != "#1"]  # " #" is one token of the student: " #1" is one span
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].detach().double()
    probs = torch.softmax(logits, -1).numpy()
    table = slow_table(ours, theirs) | {theirs.get_vocab()["<|im_end|>"]: b"<|im_end|>"}
    codes = rows.code_R[rows.compared]
    assert len(spans) == len(codes) == int((plain(rows.code_R) == END).sum())
    for which, at in enumerate(spans):
        q_V = probs[len(prompt) + at - 1]
        mass = defaultdict[bytes, float](float)
        for i in np.argsort(-q_V)[: K + 8]:  # what the engine is asked for
            if int(i) in table:
                mass[table[int(i)]] += float(q_V[i])
        best = dict(sorted(mass.items(), key=lambda one: -one[1])[:K])
        n = int(rows.sets.counts_R[which])
        got = {
            bytes_of(ours, int(i)): float(np.exp(x))
            for i, x in zip(rows.sets.ids_RK[which, :n], rows.sets.logprobs_RK[which, :n], strict=True)
        }
        assert got == pytest.approx(best, rel=3e-2, abs=1e-3)
        assert np.exp(rows.sets.tail_R[which]) == pytest.approx(1 - sum(best.values()), abs=2e-3)
    assert bool(codes[-1] & ALONE) and not codes[1] & ALONE  # the end of the turn; "+", for which "+5" counts, too


def test_what_is_sent_is_that_of_transformers(folder: Path) -> None:
    check(folder)


def test_a_shift_by_one_byte_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = alignment._Pairing.add  # pyright: ignore[reportPrivateUsage]

    def shifted(self: Any, start: int, ours: Any, ids: Any, theirs: Any) -> None:
        add(self, start, ours, ids, np.minimum(theirs + 1, theirs[-1:]))

    monkeypatch.setattr(alignment._Pairing, "add", shifted)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError):
        check(folder)
