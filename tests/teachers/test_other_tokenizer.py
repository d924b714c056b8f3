"""A teacher with another tokenizer at work: what it sends for the student's tokens, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.base import ScoringEngine
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol import messages as m
from stillhouse.protocol.payloads.aligned import EDGE, END, NOT_SCORED, AlignedScores, AlignedSets, decode_aligned
from stillhouse.protocol.payloads.kind import PayloadPart
from stillhouse.teachers.alignment import Aligner
from stillhouse.teachers.config import TeacherConfig
from tests.teachers.test_worker import TEACHER, end, teacher
from tests.teachers.tiny_tokenizers import far_model
from tests.wire import ScriptedBuffer

CONFIG = TeacherConfig(device="cpu", tokenizer="other")
PROMPT = [{"role": "user", "content": "38+95="}]
TEXT = "8+5+0=13;3+9+1=13 #133"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return far_model(tmp_path_factory.mktemp("far"))


def item(n_student_prompt: int, n_prompt: int, start: int, stop: int, **more: bool) -> m.ScoreItem:
    return m.ScoreItem(
        *(0, "train-0-0-0", start, stop, max(start, n_student_prompt), stop),
        prompt_tokens=n_student_prompt,
        teacher_prompt_tokens=n_prompt,
        **more,
    )


def sent_by(
    engine: ScoringEngine, config: TeacherConfig, aligner: Aligner, *work: tuple[m.ScoreItem, list[int]]
) -> Sequence[Sequence[np.ndarray]]:
    """What such a teacher sends for each item, one after the other."""
    with ScriptedBuffer() as peer, teacher(peer.address, engine, config, aligner=aligner) as (ended, _):
        for n, (one, ids) in enumerate(work, start=1):
            peer.send(m.ScoreWork((one,)), [np.array(ids, np.int32)], to=TEACHER)
            peer.expect(m.Scores, n)
        sent = [got.arrays for got in peer.got(m.Scores)]
        end(peer, ended)
    return sent


def expect_what_the_embedded_one_sends(engine: ScoringEngine, student: Path, folder: Path, *, top_k: int) -> None:
    """Scores of spans, and with `top_k` their sets: of a whole answer, and of the end of another."""
    config = TeacherConfig(device="cpu", tokenizer="other", top_k=top_k, top_mass=1.0)
    ours, theirs = FileTokenizer(student), FileTokenizer(folder)
    prompt = theirs.encode("user\n38+95=\nassistant\n", add_special_tokens=False)
    answer = [*ours.encode(TEXT, add_special_tokens=False), ours.stop_token_ids[0]]
    n, end = len(prompt), len(prompt) + len(answer)
    work = [(item(n, n, start, end, last=True), [*prompt, *answer]) for start in (0, n + 9)]
    sent = [sent_by(one, config, Aligner(ours, theirs), *work) for one in (TorchScorer.load(folder, config), engine)]
    kind = AlignedSets if top_k else AlignedScores
    for (logprobs, embedded), (got, payload) in zip(*sent, strict=True):
        np.testing.assert_allclose(got, logprobs, atol=1e-4)
        size = kind.n_tokens(payload.data)
        wanted, found = (
            kind.read("far", [PayloadPart(one.data, size, np.arange(size))], 400) for one in (embedded, payload)
        )
        assert found.code_R.tolist() == wanted.code_R.tolist() and found.scored.sum() >= 5
        if wanted.sets is None or found.sets is None:
            continue
        for row, k in enumerate(wanted.sets.counts_R):
            a, b = (
                dict(zip(one.ids_RK[row, :k].tolist(), np.exp(one.logprobs_RK[row, :k]), strict=True))
                for one in (wanted.sets, found.sets)
            )
            assert b == pytest.approx(a, rel=0.03)


def scored(folder: Path, *work: tuple[m.ScoreItem, list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(log-probs, codes) of each item."""
    aligner = Aligner(FileTokenizer(STUDENT_DIR), FileTokenizer(folder))
    sent = sent_by(TorchScorer.load(folder, CONFIG), CONFIG, aligner, *work)
    return [(logprobs, decode_aligned(payload.tobytes())[0]) for logprobs, payload in sent]


def slow_scores(folder: Path, tokenizer: PreTrainedTokenizerFast, prompt: list[int], texts: list[str]) -> list[float]:
    """Log-prob of each text behind the others, by transformers."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    of_texts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ids = torch.tensor([prompt + [i for one in of_texts for i in one]])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0].detach().double(), -1)
    at, found = len(prompt), list[float]()
    for one in of_texts:
        found.append(sum(float(logprobs[at + k - 1, i]) for k, i in enumerate(one)))
        at += len(one)
    return found


def test_scores_of_spans_are_those_of_transformers(folder: Path) -> None:
    """In one item and in three, whose ends are in the middle of tokens of the teacher."""
    ours, theirs = (PreTrainedTokenizerFast.from_pretrained(one) for one in (STUDENT_DIR, folder))
    student_prompt, prompt = (
        list(one.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)) for one in (ours, theirs)
    )
    answer = [*ours.encode(TEXT, add_special_tokens=False), ours.eos_token_id]
    n = len(student_prompt)
    words = ["8", "+5", "+0", "=1", "3", ";3", "+9", "+1", "=1", "3", " ", "#1", "3", "3", "<|im_end|>"]
    expected = slow_scores(folder, theirs, prompt, words)
    assert [theirs.decode(i) for i in theirs.encode("".join(words), add_special_tokens=False)] == words

    ((logprobs, codes),) = scored(folder, (item(n, len(prompt), 0, n + len(answer), last=True), [*prompt, *answer]))
    assert (logprobs[:n] == 0).all() and len(codes) == len(answer)
    sums = np.add.reduceat(logprobs[n:].astype(np.float64), [0, *(np.flatnonzero(codes == END)[:-1] + 1)])
    # " #" is one token of the student, and " " and "#1" are two of the teacher: " #1" is one span
    joined = [*expected[:10], expected[10] + expected[11], *expected[12:]]
    np.testing.assert_allclose(sums, joined, atol=2e-5)

    cuts = [0, n + 7, n + 8, n + len(answer)]
    parts = [(item(n, len(prompt), a, b, last=b == cuts[-1]), [*prompt, *answer[: b - n]]) for a, b in pairwise(cuts)]
    for (part, _), (got, got_codes) in zip(parts, scored(folder, *parts), strict=True):
        same = got[max(0, n - part.start) :], logprobs[max(n, part.start) : part.end]
        of_part = got_codes <= END
        np.testing.assert_allclose(same[0][of_part], same[1][of_part], atol=2e-5)
        assert (same[0][~of_part] == NOT_SCORED).all() and set(got_codes[~of_part].tolist()) <= {EDGE}
    assert sum(int((one <= END).sum()) for _, one in scored(folder, *parts)) >= len(answer) - 4


def test_an_item_in_the_students_tokens_only_fails_with_a_reason(folder: Path) -> None:
    aligner = Aligner(FileTokenizer(STUDENT_DIR), FileTokenizer(folder))
    engine = TorchScorer.load(folder, CONFIG)
    with ScriptedBuffer() as peer, teacher(peer.address, engine, CONFIG, aligner=aligner) as (ended, _):
        peer.send(m.ScoreWork((m.ScoreItem(0, "train-0-0-0", 1, 3),)), [np.ones(3, np.int32)], to=TEACHER)
        (failed,) = peer.expect(m.ScoreFailed, 1)
        end(peer, ended)
    assert failed.message.reason.startswith("not_aligned: the prompt is in the student's tokens only")
