"""The actor's loop over the wire: credit, tickets in, segments out, cancellation, reconnecting, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stillhouse.actors.worker
from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.episodes import EpisodeThreads
from stillhouse.actors.rollouts_running import RunningRollouts
from stillhouse.actors.worker import ActorWorker
from stillhouse.buffer.config import BufferConfig
from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.base import EngineStats, GenerationDelta, GenerationEngine, GenerationRequest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from tests.actors.in_hand import BREAKABLE, STOP, V0, V1, Breakable, ScriptedEngine, ids_of, ticket
from tests.patience import PATIENCE_S, Limit, eventually
from tests.wire import Got, ScriptedBuffer, acknowledgement, connected, real_buffer, receive, running

ACTOR: tuple[m.Role, str] = ("actor", "actor-0")
PROMPT = ids_of(1, 2, 3)
CONFIG = ActorConfig(
    segment_tokens=4, max_concurrent_rollouts=3, environments={"env": EnvConfig(name=BREAKABLE, max_turns=1)}
)


class NoWeights:
    """A weight receiver that notes its plans."""

    def __init__(self) -> None:
        self.plans: list[m.WeightPlan] = []
        self.failure: Exception | None = None
        self.got_plan = threading.Event()

    def handle_plan(self, plan: m.WeightPlan) -> None:
        self.plans.append(plan)
        self.got_plan.set()

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    @property
    def stats(self) -> dict[str, float]:
        return {"plans": float(len(self.plans))}


class Talkative(ScriptedEngine):
    """Says two tokens at a time; ends each request after `length` of them."""

    def __init__(self, length: int = 6) -> None:
        super().__init__()
        self.length = length
        self._said: dict[str, int] = {}

    def submit(self, request: GenerationRequest) -> None:
        super().submit(request)
        self._said[request.request_id] = 0

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        for request_id in self.requests:
            self._said[request_id] += 2
            done = self._said[request_id] == self.length
            self.say(request_id, 20, STOP if done else 21, end="stop" if done else None)
        return super().poll(timeout_s)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(len(self.requests), 0, 0, sum(self._said.values()), 0, 0.0, 0, self.version)


@contextmanager
def actor(
    address: str,
    engine: GenerationEngine,
    tokenizer: TextTokenizer,
    config: ActorConfig = CONFIG,
    weights: NoWeights | None = None,
    **client: Any,
) -> Generator[tuple[Future[bool], Client]]:
    """A whole actor at work in a thread, as its main builds it."""
    with ExitStack() as stack:
        connection = stack.enter_context(connected(address, "actor", **client))
        environments = config.environments_of("single_turn")
        episodes = EpisodeThreads(
            environments,
            tokenizer,
            max_threads=2 * config.max_concurrent_rollouts,
            stop_token_ids=(STOP,),
            max_context_tokens=200,
            wake=connection.wake,
        )
        stack.callback(episodes.close)
        rollouts = RunningRollouts(
            engine,
            episodes,
            config,
            environments=environments,
            stop_token_ids=(STOP,),
            max_context_tokens=200,
            send=connection.send,
        )
        worker = ActorWorker(connection, engine, weights or NoWeights(), episodes, rollouts, config)
        ended = stack.enter_context(running(worker.run))
        try:
            yield ended, connection
        except BaseException:
            connection.close("the test failed")  # else the worker would never end
            raise


def give(peer: ScriptedBuffer, *tickets: m.Ticket) -> None:
    peer.send(m.Tickets(tickets), [PROMPT] * len(tickets), to=ACTOR)


def credit(peer: ScriptedBuffer, such: Callable[[m.TicketCredit], bool]) -> m.TicketCredit:
    """The first credit like this."""
    n, limit = 1, Limit()
    got: list[Got[m.TicketCredit]] = []
    while not limit.passed:
        for message, _ in (got := peer.expect(m.TicketCredit, n)):
            if such(message):
                return message
        n = len(got) + 1
    raise AssertionError(f"no such credit came; the last ones: {[message for message, _ in got][-3:]}")


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    threads = set(threading.enumerate())
    Breakable.closed.clear()
    yield
    assert set(threading.enumerate()) <= threads


def test_credit_is_what_is_free_and_is_renewed_as_rollouts_end_but_not_as_tickets_come(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer subtracts the tickets that it sends."""
    monkeypatch.setattr(stillhouse.actors.worker, "CREDIT_REPEAT_S", 3600.0)
    engine = ScriptedEngine()
    with ScriptedBuffer() as peer, actor(peer.address, engine, tokenizer) as (ended, _):
        first = credit(peer, lambda c: True)
        assert (first.n, first.tickets_received_total) == (3, 0)
        give(peer, ticket(0, env="env"), ticket(1, env="env", min_version=V1))
        peer.send(m.CancelRollout("train-1-0-0", "not wanted"), to=ACTOR)
        assert credit(peer, lambda c: c.n == 2).seq > first.seq
        peer.send(m.CancelRollout("train-0-0-0", "not wanted"), to=ACTOR)
        assert credit(peer, lambda c: c.n == 3 and c.tickets_received_total == 2)
        said = [(got.message.n, got.message.tickets_received_total) for got in peer.got(m.TicketCredit)]
        assert said == [(3, 0), (2, 2), (3, 2)], "a ticket that waits for its weights takes a place, too"
        peer.send(m.Shutdown(True, "done"), to=ACTOR)
        assert ended.result(PATIENCE_S) is True


def test_credit_is_said_again_though_nothing_changed(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that counted the actor as lost in between has forgotten it."""
    monkeypatch.setattr(stillhouse.actors.worker, "CREDIT_REPEAT_S", 0.02)
    with ScriptedBuffer() as peer, actor(peer.address, ScriptedEngine(), tokenizer) as (ended, _):
        said = [message for message, _ in peer.expect(m.TicketCredit, 3)]
        assert {(c.n, c.tickets_received_total) for c in said} == {(3, 0)}
        assert [c.seq for c in said] == sorted({c.seq for c in said})
        peer.send(m.Shutdown(True, "done"), to=ACTOR)
        assert ended.result(PATIENCE_S)


def test_credit_is_said_again_after_a_reconnect(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new buffer knows nothing of it, and all that was sent before has been confirmed by the former one."""
    monkeypatch.setattr(stillhouse.actors.worker, "CREDIT_REPEAT_S", 3600.0)
    with ExitStack() as stack:
        former = stack.enter_context(ScriptedBuffer(peer_timeout_s=0.4))
        ended, client = stack.enter_context(actor(former.address, ScriptedEngine(), tokenizer))
        former.expect(m.TicketCredit)
        assert client.flush(20.0)
        former.close()
        peer = stack.enter_context(ScriptedBuffer(bind=former.address))
        assert credit(peer, lambda c: True).n == 3
        peer.send(m.Shutdown(True, "done"), to=ACTOR)
        assert ended.result(PATIENCE_S)


def test_segments_follow_tickets_in_order_and_each_once(tokenizer: TextTokenizer) -> None:
    with ScriptedBuffer() as peer, actor(peer.address, Talkative(), tokenizer) as (ended, client):
        give(peer, *(ticket(number, env="env") for number in range(3)))
        segments = peer.expect(m.Segment, 6)
        assert client.flush(20.0)
        peer.send(m.Shutdown(False, "no more"), to=ACTOR)
        assert ended.result(PATIENCE_S) is False, "the run did not end well"
    for number in range(3):
        first, last = (got for got in segments if got.message.rollout_id == f"train-{number}-0-0")
        assert (first.message.index, last.message.index) == (0, 1)
        assert first.arrays[0].tolist() == [1, 2, 3, 20, 21, 20, 21] and last.arrays[0].tolist() == [20, STOP]
        assert last.message.final and last.message.finish_reason == "stop"
    assert len(peer.got(m.Segment)) == 6 and not peer.got(m.RolloutFailed)


def test_a_rejected_segment_ends_its_rollout(tokenizer: TextTokenizer) -> None:
    """Going on would write tokens that nobody takes."""

    def reject(message: m.Message) -> m.Message | None:
        if isinstance(message, m.Segment) and message.rollout_id == "train-0-0-0":
            return m.SegmentAck(message.rollout_id, message.index, "rejected", "nan_logprob")
        return acknowledgement(message)

    engine = ScriptedEngine()
    with ScriptedBuffer(reject) as peer, actor(peer.address, engine, tokenizer) as (ended, _):
        give(peer, ticket(0, env="env"), ticket(1, env="env", min_version=V1))
        credit(peer, lambda c: c.n == 1)
        eventually(lambda: "train-0-0-0/0" in engine.requests, "the request")
        engine.say("train-0-0-0/0", *range(20, 28))
        credit(peer, lambda c: c.n == 2 and c.tickets_received_total == 2)
        assert engine.aborted == ["train-0-0-0/0"]
        peer.send(m.Shutdown(True, "done"), to=ACTOR)
        assert ended.result(PATIENCE_S)
    assert not peer.got(m.RolloutFailed), "the buffer knows"


def test_what_is_sampled_is_sent_when_the_buffer_asks(tokenizer: TextTokenizer) -> None:
    engine = ScriptedEngine()
    with ScriptedBuffer() as peer, actor(peer.address, engine, tokenizer) as (ended, _):
        give(peer, ticket(0, env="env"))
        eventually(lambda: "train-0-0-0/0" in engine.requests, "the request")
        engine.say("train-0-0-0/0", 20, 21)

        def asked() -> bool:
            peer.send(m.SegmentsWanted(), to=ACTOR)
            return bool(peer.got(m.Segment))

        eventually(asked, "the first token")
        (segment, (ids, *_)), *_ = peer.got(m.Segment)
        assert ids.tolist() == [1, 2, 3, 20] and not segment.final
        peer.send(m.Shutdown(True, "done"), to=ACTOR)
        assert ended.result(PATIENCE_S)


def test_plans_go_to_the_weight_receiver_and_its_failure_ends_the_actor(tokenizer: TextTokenizer) -> None:
    weights = NoWeights()
    plan = m.WeightPlan(1, "127.0.0.1", 1, "gloo", ("actor-0",), 2, 1.0)
    with ScriptedBuffer() as peer, actor(peer.address, ScriptedEngine(), tokenizer, weights=weights) as (ended, _):
        peer.send(plan, to=ACTOR)
        assert weights.got_plan.wait(PATIENCE_S) and weights.plans == [plan]
        weights.failure = RuntimeError("the receiver is gone")
        with pytest.raises(RuntimeError, match="receiver is gone"):
            ended.result(PATIENCE_S)


def test_heartbeats_say_version_and_figures(tokenizer: TextTokenizer) -> None:
    engine = Talkative()
    engine.version = V1
    with ScriptedBuffer() as peer, actor(peer.address, engine, tokenizer) as (ended, _):
        give(peer, ticket(env="env"))
        ended_one = "rollouts_finished_total"
        eventually(lambda: bool(got := peer.got(m.Heartbeat)) and got[-1].message.stats.get(ended_one) == 1, "its end")
        message, _ = peer.got(m.Heartbeat)[-1]
        assert message.version == V1
        assert (message.stats["sampled_tokens_total"], message.stats["rollouts_in_hand"]) == (6.0, 0.0)
        assert {"busy_fraction", "waiting_for_weights", "plans", "segments_total"} <= message.stats.keys()
        peer.send(m.Shutdown(True, "done"), to=ACTOR)
        assert ended.result(PATIENCE_S)


def test_the_student_writes_a_batch_that_the_buffer_accepts(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """The real engine and the real buffer, which checks every segment; the learner is played by the test."""
    model = load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="sdpa")
    engine = TorchEngine(model, EngineConfig(max_concurrent=3, max_context=200, device="cpu"))
    settings = BufferConfig(heartbeat_s=0.1, peer_timeout_s=PATIENCE_S, max_staleness=1, batch_rollouts=4)
    prompt = tokenizer.encode("<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n")
    sampling = m.Sampling(max_new_tokens=12)
    tasks = tuple(m.Task(i, "train", 2, sampling, teachers=(), ground_truth="7") for i in range(2))
    with real_buffer(settings, tmp_path) as (address, buffer_ended):
        with connected(address, "learner") as learner, actor(address, engine, tokenizer) as (ended, _):
            learner.send(m.TasksOffered(tasks, last=True), [prompt] * 2)
            learner.send(m.BatchWanted(V0))
            batch, arrays = receive(learner, m.Batch)
            assert sorted(item.rollout_id for item in batch.items) == [
                f"train-{i}-{j}-0" for i in (0, 1) for j in (0, 1)
            ]
            for i, item in enumerate(batch.items):
                ids, logprobs, mask, _ = arrays[4 * i : 4 * i + 4]
                np.testing.assert_array_equal(ids[: len(prompt)], prompt)
                assert item.final and item.reward in (0.0, 1.0) and 1 <= int(mask.sum()) <= 12
                assert (logprobs[mask.astype(bool)] < 0).all()
            assert batch.snapshot.ledger.rejected == {}
            learner.send(m.BatchTrained(batch.batch_id, V1))
            learner.send(m.RunFinished(True, "enough"))
            assert ended.result(PATIENCE_S) is True
        assert buffer_ended.result(PATIENCE_S) == 0
    engine.close()
