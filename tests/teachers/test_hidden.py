"""Hidden states of a teacher over the wire: its own output head turns them into its own log-probs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stillhouse.builtin import TEACHER_DIR
from stillhouse.engines.base import LOGPROBS_ONLY, EngineMismatch, ScoreOptions, ScoreRequest
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.head_file import load_head
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.protocol.payloads.hidden import decode_hidden, head_of_states
from stillhouse.teachers.config import TeacherConfig
from stillhouse.teachers.worker import TeacherWorker
from tests.teachers.test_worker import TEACHER, Fake, end, teacher
from tests.wire import ScriptedBuffer

CONFIG = TeacherConfig(device="cpu", payload="hidden", max_batch_tokens=40)


def test_a_teacher_sends_the_states_of_the_range_beside_the_log_probs() -> None:
    """A whole rollout, the next segment of one, a teacher's own prompt, and an item that is not trained. By its head,
    each state gives the distribution at its token, and at no other."""
    scorer = TorchScorer.load(TEACHER_DIR, CONFIG)
    head = load_head(TEACHER_DIR, device="cpu", dtype="float32")
    random = np.random.default_rng(0)
    items = (
        m.ScoreItem(1, "train-0-0-0", 0, 12, 4, 9),
        m.ScoreItem(2, "train-0-0-0", 12, 30, 14, 30, last=True),
        m.ScoreItem(3, "train-1-0-0", 0, 9, 3, 8, prompt_tokens=3, teacher_prompt_tokens=5),
        m.ScoreItem(4, "eval-0-0-0", 3, 8, 3, 3),
    )
    row = random.integers(0, 290, 30).astype(np.int32)
    ids = [row[:12], row, *(random.integers(0, 290, item.context_tokens).astype(np.int32) for item in items[2:])]
    with ScriptedBuffer() as peer, teacher(peer.address, scorer, CONFIG) as (ended, _):
        peer.send(m.ScoreWork(items), ids, to=TEACHER)
        found: dict[int, list[np.ndarray]] = {}  # type: ignore[type-arg]
        n = 0
        while len(found) < len(items):
            n += 1
            for got in peer.expect(m.Scores, n):
                assert got.message.top_k
                for i, lease in enumerate(got.message.leases):
                    found[lease] = [got.arrays[2 * i], got.arrays[2 * i + 1]]
        end(peer, ended)
    plain = TorchScorer.load(TEACHER_DIR, CONFIG)
    for item, token_ids in zip(items, ids, strict=True):
        logprobs, payload = found[item.lease_id]
        states_TH = decode_hidden(payload.tobytes())
        assert head_of_states(payload.tobytes()) in (head.identity, 0 if item.top_end == item.top_start else 1)
        assert states_TH.shape == (item.top_end - item.top_start, plain.hidden_size)
        exact = plain.score([ScoreRequest(token_ids, item.first + item.shift)], ScoreOptions(top_k=plain.vocab_size))[0]
        assert exact.top_ids is not None and exact.top_logprobs is not None
        np.testing.assert_allclose(logprobs[item.first - item.start :], exact.logprobs, atol=1e-4)
        states = torch.from_numpy(states_TH.view(np.int16).copy()).view(torch.bfloat16).float()
        got_TV = torch.log_softmax(head.logits(states), dim=1).numpy()
        for t in range(item.top_start, item.top_end):
            at = t - item.first
            expected_V = np.empty(plain.vocab_size, np.float32)
            expected_V[exact.top_ids[at]] = exact.top_logprobs[at]
            error = np.exp(expected_V) * np.abs(got_TV[t - item.top_start] - expected_V)
            assert error.sum() < 0.02, "mean error under the teacher, nats"


def test_states_that_are_not_finite_fail_their_item_with_a_reason() -> None:
    class Overflowing(TorchScorer):
        def score(self, requests, options=LOGPROBS_ONLY):  # type: ignore[no-untyped-def]  # pyright: ignore
            results = super().score(requests, options)
            for result in results:
                if result.hidden is not None:
                    result.hidden[:] = 0x7F80
            return results

    scorer = Overflowing.load(TEACHER_DIR, CONFIG)
    with ScriptedBuffer() as peer, teacher(peer.address, scorer, CONFIG) as (ended, _):
        peer.send(m.ScoreWork((m.ScoreItem(1, "train-0-0-0", 0, 4, 1, 4),)), [np.ones(4, np.int32)], to=TEACHER)
        (failed,) = peer.expect(m.ScoreFailed)
        end(peer, ended)
    assert failed.message.reason == "hidden: a hidden state is not finite, that of token 0; it cannot be sent"


def test_an_engine_without_hidden_states_is_refused_by_name() -> None:
    client: Client = None  # type: ignore[assignment]  # not reached
    with pytest.raises(EngineMismatch, match="payload = hidden: Fake has log-probs only"):
        TeacherWorker(client, Fake(), CONFIG)
    with pytest.raises(ValueError, match="top_k: got 8 with payload = hidden, expected 0"):
        TeacherConfig(payload="hidden", top_k=8)
