"""The teacher's loop over the wire: scores, failures and credit."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import stillhouse.teachers.worker
from stillhouse.buffer.config import BufferConfig
from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.base import LOGPROBS_ONLY, Int32s, ScoreOptions, ScoreRequest, ScoreResult, ScoringEngine
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.teachers.alignment import Aligner
from stillhouse.teachers.config import CREDIT_BATCHES, TeacherConfig
from stillhouse.teachers.worker import FIRST_TOKENS, LEASE_SHARE, TeacherWorker
from stillhouse.weights.snapshot import write_snapshot
from tests.patience import PATIENCE_S
from tests.wire import ScriptedBuffer, connected, real_buffer, receive, running

TEACHER: tuple[m.Role, str] = ("teacher", "teacher-0")
VOCAB, CONTEXT = 50, 100
CONFIG = TeacherConfig(max_batch_tokens=60, device="cpu")


class Fake:
    """Grades token t as -t. Fails at the configured tokens; `gate` holds it while it scores."""

    def __init__(self, *, breaks_at: int = -1, nan_at: int = -1, error: type[Exception] = RuntimeError) -> None:
        self.calls: list[list[int]] = []
        """Context tokens of each item, call by call."""
        self.gate = threading.Event()
        self.gate.set()
        self.scoring = threading.Event()
        self._breaks_at, self._nan_at, self._error = breaks_at, nan_at, error

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def max_context(self) -> int:
        return CONTEXT

    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        self.scoring.set()
        assert self.gate.wait(PATIENCE_S)
        self.calls.append([len(request.token_ids) for request in requests])
        if any(self._breaks_at in request.token_ids for request in requests):
            raise self._error("out of memory")
        scores = [-request.token_ids[request.start :].astype(np.float32) for request in requests]
        return [ScoreResult(np.where(score == -self._nan_at, np.nan, score).astype(np.float32)) for score in scores]

    def close(self) -> None: ...


@contextmanager
def teacher(
    address: str,
    engine: ScoringEngine,
    config: TeacherConfig = CONFIG,
    *,
    vocab_tokens: int | None = None,
    aligner: Aligner | None = None,
    lease_s: float = math.inf,
) -> Generator[tuple[Future[bool], Client]]:
    """A teacher at work in a thread."""
    with ExitStack() as stack:
        client = stack.enter_context(connected(address, "teacher", "default"))
        worker = TeacherWorker(client, engine, config, vocab_tokens=vocab_tokens, aligner=aligner, lease_s=lease_s)
        yield stack.enter_context(running(worker.run)), client


def work(*items: tuple[int, Sequence[int]]) -> tuple[m.ScoreWork, list[Int32s]]:
    """Items with leases 0.. : (start, token ids)."""
    leases = tuple(m.ScoreItem(i, f"train-{i}-0-0", start, len(ids)) for i, (start, ids) in enumerate(items))
    return m.ScoreWork(leases), [np.array(ids, np.int32) for _, ids in items]


def lease(lease_id: int, n: int) -> tuple[m.ScoreWork, list[Int32s]]:
    """One item of `n` tokens."""
    return m.ScoreWork((m.ScoreItem(lease_id, f"train-{lease_id}-0-0", 1, n),)), [np.ones(n, np.int32)]


def settled(peer: ScriptedBuffer, n: int) -> tuple[dict[int, list[float]], dict[int, str]]:
    """Grades and reasons by lease, once `n` leases are answered; each is answered once."""
    seen = 0
    while True:
        scores = [pair for got in peer.got(m.Scores) for pair in zip(got.message.leases, got.arrays, strict=True)]
        failed = [(i, got.message.reason) for got in peer.got(m.ScoreFailed) for i in got.message.leases]
        leases = [i for i, _ in (*scores, *failed)]
        assert len(set(leases)) == len(leases)
        if len(leases) >= n:
            return {i: score.tolist() for i, score in scores}, dict(failed)
        seen = len(peer.expect(m.Heartbeat, seen + 1))


def credit(peer: ScriptedBuffer, such: Callable[[m.ScoreCredit], bool]) -> m.ScoreCredit:
    """The first credit like this."""
    n = 1
    while True:
        got = peer.expect(m.ScoreCredit, n)
        for message, _ in got:
            if such(message):
                return message
        n = len(got) + 1


def end(peer: ScriptedBuffer, ended: Future[bool], *, ok: bool = True) -> None:
    peer.send(m.Shutdown(ok, "done"), to=TEACHER)
    assert ended.result(PATIENCE_S) is ok


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - threads
    # tqdm's monitor begins with the first model that is loaded, and stays.
    assert not [thread for thread in left if type(thread).__name__ != "TMonitor"]


@pytest.fixture(scope="module")
def scorer() -> TorchScorer:
    return TorchScorer.load(STUDENT_DIR, TeacherConfig(device="cpu"))


# ---------------------------------------------------------------------------------------------------------- scores


def test_items_are_scored_in_order_in_batches_of_at_most_max_batch_tokens() -> None:
    engine = Fake()
    engine.gate.clear()
    with ScriptedBuffer() as peer, teacher(peer.address, engine) as (ended, _):
        peer.send(*lease(0, 10), to=TEACHER)
        assert engine.scoring.wait(PATIENCE_S)
        for i, n in enumerate((20, 30, 10, 5, 90, 20), start=1):
            peer.send(*lease(i, n), to=TEACHER)
        while peer.expect(m.Heartbeat, len(peer.got(m.Heartbeat)) + 1)[-1].message.received_total < 7:
            pass
        engine.gate.set()
        settled(peer, 7)
        end(peer, ended)
    assert engine.calls == [[10], [20, 30, 10], [5], [90], [20]]


def test_a_slow_engine_holds_no_more_than_it_can_score_before_its_leases_end() -> None:
    class Slow(Fake):
        def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
            time.sleep(2e-4 * sum(len(request.token_ids) for request in requests))
            return super().score(requests, options)

    engine, tokens_in_time = Slow(), round(0.08 * LEASE_SHARE / 2e-4)
    config = TeacherConfig(max_batch_tokens=4096, device="cpu")
    with ScriptedBuffer() as peer, teacher(peer.address, engine, config, lease_s=0.08) as (ended, _):
        peer.send(*work(*[(1, [3] * 20)] * 60), to=TEACHER)
        settled(peer, 60)
        credits = [got.message.tokens for got in peer.got(m.ScoreCredit)]
        end(peer, ended)
    assert credits[0] == CREDIT_BATCHES * FIRST_TOKENS and 0 < credits[-1] <= CREDIT_BATCHES * tokens_in_time
    first, *later = map(sum, engine.calls)
    assert first <= FIRST_TOKENS and all(0 < tokens <= tokens_in_time for tokens in later)


# -------------------------------------------------------------------------------------------------------- failures


def test_an_item_that_cannot_be_scored_fails_alone_with_a_reason() -> None:
    engine = Fake()
    good = (1, [3, 4, 5])
    with ScriptedBuffer() as peer, teacher(peer.address, engine) as (ended, _):
        peer.send(*work(good, (1, [3, VOCAB]), good, (1, [3, -1, 4]), (90, [1] * (CONTEXT + 1)), good), to=TEACHER)
        scores, failed = settled(peer, 6)
        end(peer, ended)
    assert scores == {0: [-4.0, -5.0], 2: [-4.0, -5.0], 5: [-4.0, -5.0]}
    assert {i: reason.split(":")[0] for i, reason in failed.items()} == {
        1: "token_out_of_vocab",
        3: "token_out_of_vocab",
        4: "context_too_long",
    }
    assert f"{CONTEXT + 1} tokens" in failed[4] and f"{VOCAB} rows" in failed[1]


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_batch_that_breaks_the_engine_is_scored_one_by_one(error: type[Exception]) -> None:
    engine = Fake(breaks_at=7, error=error)
    with ScriptedBuffer() as peer, teacher(peer.address, engine) as (ended, _):
        peer.send(*work((1, [1, 2]), (1, [1, 7]), (1, [1, 3])), to=TEACHER)
        scores, failed = settled(peer, 3)
        peer.send(*lease(3, 2), to=TEACHER)
        settled(peer, 4)
        end(peer, ended)
    assert scores == {0: [-2.0], 2: [-3.0]}
    assert failed == {1: "engine_error: out of memory"}
    assert engine.calls == [[2, 2, 2], [2], [2], [2], [2]]


def test_scores_that_are_not_finite_are_failures_of_their_item() -> None:
    """Sent, they would be rejected by the buffer, and the item leased here again."""
    with ScriptedBuffer() as peer, teacher(peer.address, Fake(nan_at=7)) as (ended, _):
        peer.send(*work((1, [1, 2]), (1, [1, 3, 7]), (1, [1, 4])), to=TEACHER)
        scores, failed = settled(peer, 3)
        end(peer, ended)
    assert (scores, failed) == ({0: [-2.0], 2: [-4.0]}, {1: "non_finite_logprob"})


# ---------------------------------------------------------------------------------------------------------- credit


def test_credit_is_what_is_not_held_and_comes_back_with_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer subtracts what it sends, so a teacher says nothing when that arrives."""
    monkeypatch.setattr(stillhouse.teachers.worker, "CREDIT_REPEAT_S", 3600.0)
    engine = Fake()
    engine.gate.clear()
    with ScriptedBuffer() as peer, teacher(peer.address, engine) as (ended, _):
        first = credit(peer, lambda c: True)
        assert (first.tokens, first.items_received_total) == (120, 0)
        peer.send(*work((1, [1] * 40), (1, [1] * 50)), to=TEACHER)
        assert engine.scoring.wait(PATIENCE_S)
        assert len(peer.got(m.ScoreCredit)) == 1
        engine.gate.set()
        settled(peer, 2)
        back = credit(peer, lambda c: c.items_received_total == 2 and c.tokens == 120)
        assert first.seq < back.seq
        so_far = [(got.message.tokens, got.message.items_received_total) for got in peer.got(m.ScoreCredit)]
        assert so_far[:2] == [(120, 0), (70, 2)], "50 tokens are held while 40 are scored"
        peer.send(*lease(2, 500), to=TEACHER)
        assert credit(peer, lambda c: c.items_received_total == 3).tokens == 0, "more than all is held: not negative"
        settled(peer, 3)
        end(peer, ended)


@pytest.mark.parametrize(("cache_mb", "expected"), [(0, (60, 1)), (16, None)])
def test_an_item_that_takes_more_than_the_buffer_counts_is_news(
    monkeypatch: pytest.MonkeyPatch, cache_mb: int, expected: tuple[int, int] | None
) -> None:
    """Without a prefix cache, what the teacher was sent before is computed again."""
    monkeypatch.setattr(stillhouse.teachers.worker, "CREDIT_REPEAT_S", 3600.0)
    engine = Fake()
    engine.gate.clear()
    config = msgspec.structs.replace(CONFIG, prefix_cache_mb=cache_mb)
    with ScriptedBuffer() as peer, teacher(peer.address, engine, config) as (ended, _):
        credit(peer, lambda c: True)
        item = m.ScoreItem(0, "train-0-0-0", 50, 60, known_tokens=50)
        peer.send(m.ScoreWork((item,)), [np.ones(60, np.int32)], to=TEACHER)
        if expected is not None:
            held = credit(peer, lambda c: c.items_received_total == 1)
            assert (held.tokens, held.items_received_total) == expected
        assert engine.scoring.wait(PATIENCE_S)
        assert len(peer.got(m.ScoreCredit)) == (1 if expected is None else 2)
        engine.gate.set()
        settled(peer, 1)
        end(peer, ended)


def test_an_idle_teacher_says_its_credit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stillhouse.teachers.worker, "CREDIT_REPEAT_S", 0.01)
    monkeypatch.setattr(stillhouse.teachers.worker, "IDLE_WAIT_S", 0.02)
    with ScriptedBuffer() as peer, teacher(peer.address, Fake()) as (ended, _):
        said = [message for message, _ in peer.expect(m.ScoreCredit, 3)]
        assert {(c.tokens, c.items_received_total) for c in said} == {(120, 0)}
        assert [c.seq for c in said] == sorted({c.seq for c in said})
        end(peer, ended, ok=False)


def test_figures_tell_scored_from_failed_rejected_and_late() -> None:
    def answer(message: m.Message) -> m.Message | None:
        match message:
            case m.Scores(leases=leases):
                return m.ScoresAck(leases, ("accepted", "rejected", "expired"), (None, "why", "late"))
            case m.ScoreFailed(leases=leases):
                return m.ScoresAck(leases, ("accepted",), (None,))
            case m.Heartbeat():
                return m.HeartbeatReply(m.WeightVersion(0, 0))
            case _:
                return None

    expected = {
        "scored_items_total": 3.0,
        "batches_total": 1.0,
        "scored_tokens_total": 3.0,
        "context_tokens_total": 6.0,
        "failed_items_total": 2.0,
        "expired_items_total": 1.0,
        "held_tokens": 0.0,
    }
    with ScriptedBuffer(answer) as peer, teacher(peer.address, Fake()) as (ended, _):
        peer.send(*work((1, [1, 2]), (1, [1, 3]), (1, [1, 4]), (1, [1, VOCAB])), to=TEACHER)
        stats: dict[str, float] = {}
        while {name: stats.get(name) for name in expected} != expected:
            stats = peer.expect(m.Heartbeat, len(peer.got(m.Heartbeat)) + 1)[-1].message.stats
        end(peer, ended)


def test_the_engine_is_told_the_rollout_and_its_last_segment_and_its_figures_reach_the_heartbeat() -> None:
    class Keeps(Fake):
        seen: list[tuple[str, bool]] = []  # noqa: RUF012 - of one test

        @property
        def figures(self) -> dict[str, float]:
            return {"computed_tokens_total": 2.0 * len(self.seen)}

        def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
            self.seen.extend((request.rollout_id, request.last) for request in requests)
            return super().score(requests, options)

    engine = Keeps()
    with ScriptedBuffer() as peer, teacher(peer.address, engine) as (ended, _):
        items = (m.ScoreItem(0, "train-7-0-0", 1, 2), m.ScoreItem(1, "train-8-0-0", 1, 2, last=True))
        peer.send(m.ScoreWork(items), [np.array([1, 2], np.int32)] * 2, to=TEACHER)
        settled(peer, 2)
        stats: dict[str, float] = {}
        while stats.get("computed_tokens_total") != 4.0:
            stats = peer.expect(m.Heartbeat, len(peer.got(m.Heartbeat)) + 1)[-1].message.stats
        end(peer, ended)
    assert engine.seen == [("train-7-0-0", False), ("train-8-0-0", True)]


@pytest.mark.parametrize(("prefix_cache_mb", "calls"), [(None, [[50, 50, 50], [50]]), (0, [[50], [50], [50], [50]])])
def test_batches_count_the_tokens_that_are_new_to_this_teacher(
    prefix_cache_mb: int | None, calls: list[list[int]]
) -> None:
    """Unless it keeps no prefixes."""
    engine = Fake()
    config = TeacherConfig(max_batch_tokens=60, device="cpu", prefix_cache_mb=prefix_cache_mb)
    with ScriptedBuffer() as peer, teacher(peer.address, engine, config) as (ended, _):
        items = tuple(m.ScoreItem(i, f"train-{i}-0-0", 30, 50, known_tokens=30) for i in range(4))
        peer.send(m.ScoreWork(items), [np.ones(50, np.int32)] * 4, to=TEACHER)
        settled(peer, 4)
        end(peer, ended)
    assert engine.calls == calls


# ------------------------------------------------------------------------------------------------- the real buffer


def test_a_rollout_is_scored_for_the_real_buffer_as_it_grows(scorer: TorchScorer, tmp_path: Path) -> None:
    """The segments of one rollout, the second scored behind the first; scores arrive at the learner in place."""
    settings = BufferConfig(heartbeat_s=0.1, peer_timeout_s=PATIENCE_S, max_staleness=1, batch_rollouts=1)
    prompt, v0 = np.array([5, 6, 7], np.int32), m.WeightVersion(0, 0)
    with real_buffer(settings, tmp_path) as (address, buffer_ended):
        with (
            connected(address, "learner") as learner,
            connected(address, "actor") as actor,
            teacher(address, scorer, TeacherConfig(device="cpu")) as (ended, _),
        ):
            learner.send(m.TasksOffered((m.Task(0, "train", 1, m.Sampling(max_new_tokens=8)),)), (prompt,))
            learner.send(m.BatchWanted(v0))
            actor.send(m.TicketCredit(1, 0, 0))
            (ticket,) = receive(actor, m.Tickets).message.tickets
            ids = np.array([5, 6, 7, 20, 21, 22, 23, 24], np.int32)
            for index, (start, stop) in enumerate(((0, 5), (5, 8))):
                spans = (m.VersionSpan(v0, max(start, 3), stop),)
                mask = (np.arange(start, stop) >= 3).astype(np.uint8)
                segment = m.Segment(ticket.rollout_id, index, start, stop, spans, index == 1, "stop" if index else None)
                actor.send(segment, (ids[start:stop], np.where(mask, -0.5, 0.0).astype(np.float32), mask))
            batch, (got_ids, _, got_mask, got_scores) = receive(learner, m.Batch)
            np.testing.assert_array_equal(got_ids, ids)
            alone = scorer.score([ScoreRequest(ids, 3)])[0].logprobs
            np.testing.assert_allclose(got_scores[0][got_mask.astype(bool)], alone, atol=1e-4)
            learner.send(m.BatchTrained(batch.batch_id, m.WeightVersion(0, 1)))
            learner.send(m.RunFinished(True, "enough"))
            assert ended.result(PATIENCE_S) is True
        assert buffer_ended.result(PATIENCE_S) == 0


# ---------------------------------------------------------------------------------------------------- new weights


def test_new_weights_score_the_next_batch_and_their_version_is_reported(tmp_path: Path) -> None:
    scorer = TorchScorer.load(STUDENT_DIR, TeacherConfig(device="cpu"))
    model = load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    ref = write_snapshot(tmp_path, m.WeightVersion(0, 20), model.named_parameters(), keep=1)
    gone = m.WeightsRef(m.WeightVersion(0, 30), str(tmp_path / "gone"), "ab")
    ids = [5, 17, 200, 31, 8]
    with ScriptedBuffer() as peer, teacher(peer.address, scorer) as (ended, _):
        peer.send(*work((1, ids)), to=TEACHER)
        before, _ = settled(peer, 1)
        peer.send(m.TeacherWeights("default", ref), to=TEACHER)
        peer.send(m.ScoreWork((m.ScoreItem(7, "train-7-0-0", 1, len(ids)),)), [np.array(ids, np.int32)], to=TEACHER)
        after, _ = settled(peer, 2)
        peer.send(m.TeacherWeights("default", gone), to=TEACHER)
        beat = heartbeat(peer, lambda beat: beat.stats["weights_refused_total"] == 1)
        end(peer, ended)
    with torch.no_grad():
        logprobs_LV = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)
    expected = [float(logprobs_LV[t - 1, ids[t]]) for t in range(1, len(ids))]
    np.testing.assert_allclose(after[7], expected, atol=1e-4)
    assert np.abs(np.array(before[0]) - after[7]).max() > 0.1
    assert beat.version == m.WeightVersion(0, 20) and beat.stats["weights_loaded_total"] == 1


def test_an_engine_that_cannot_change_its_weights_says_so() -> None:
    with ScriptedBuffer() as peer, teacher(peer.address, Fake()) as (ended, _):
        peer.send(m.TeacherWeights("default", m.WeightsRef(m.WeightVersion(0, 1), "x", "ab")), to=TEACHER)
        beat = heartbeat(peer, lambda beat: beat.stats["weights_refused_total"] == 1)
        end(peer, ended)
    assert beat.version is None


def heartbeat(peer: ScriptedBuffer, such: Callable[[m.Heartbeat], bool]) -> m.Heartbeat:
    """The first heartbeat like this, of those with figures."""
    n = 1
    while True:
        got = peer.expect(m.Heartbeat, n)
        for message, _ in got:
            if "weights_refused_total" in message.stats and such(message):
                return message
        n = len(got) + 1


# ------------------------------------------------------------------------------------- a prompt of the teacher's own


@pytest.mark.parametrize("teacher_prompt", [[40, 41, 42, 43, 44, 45], [40]], ids=["longer", "shorter"])
def test_scores_are_those_under_the_teachers_prompt_position_by_position(teacher_prompt: list[int]) -> None:
    """Against transformers on [teacher's prompt + response]: a first segment with the prompt in it, and a later one."""
    prompt, response = [7, 8, 9], [20, 30, 10, 31, 11, 12]
    model = load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="sdpa")
    both = teacher_prompt + response
    with torch.no_grad():
        logprobs_LV = torch.log_softmax(model(input_ids=torch.tensor([both])).logits[0].float(), dim=-1)
    first = len(teacher_prompt)
    expected = [float(logprobs_LV[first + i - 1, token]) for i, token in enumerate(response)]
    n, k = len(prompt), len(teacher_prompt)
    items = tuple(
        m.ScoreItem(lease, "train-0-0-0", start, end, prompt_tokens=n, teacher_prompt_tokens=k)
        for lease, (start, end) in enumerate([(0, n + 2), (n + 2, n + 6), (0, n)])
    )
    frames = [np.array((teacher_prompt + response)[: item.context_tokens], np.int32) for item in items]
    scorer = TorchScorer.load(STUDENT_DIR, TeacherConfig(device="cpu"))
    with ScriptedBuffer() as peer, teacher(peer.address, scorer) as (ended, _):
        peer.send(m.ScoreWork(items), frames, to=TEACHER)
        scores, failed = settled(peer, 3)
        end(peer, ended)
    assert failed == {}
    np.testing.assert_allclose(scores[0], [0.0] * n + expected[:2], atol=1e-4)
    np.testing.assert_allclose(scores[1], expected[2:], atol=1e-4)
    assert scores[2] == [0.0] * n


def test_the_teachers_prompt_counts_towards_its_context_and_its_vocabulary() -> None:
    item = m.ScoreItem(0, "train-0-0-0", 3, 5, prompt_tokens=3, teacher_prompt_tokens=CONTEXT)
    other = m.ScoreItem(1, "train-1-0-0", 3, 5, prompt_tokens=3, teacher_prompt_tokens=2)
    frames = [np.ones(item.context_tokens, np.int32), np.array([VOCAB, 1, 1, 1], np.int32)]
    with ScriptedBuffer() as peer, teacher(peer.address, Fake()) as (ended, _):
        peer.send(m.ScoreWork((item, other)), frames, to=TEACHER)
        _, failed = settled(peer, 2)
        end(peer, ended)
    assert [failed[i].split(":")[0] for i in (0, 1)] == ["context_too_long", "token_out_of_vocab"]
