"""An actor: takes tickets, runs many rollouts at once on one engine, and streams their segments.

The loops:

    main thread      (here) tickets in, segments out, one engine step at a time. Waits, when nothing runs here, for the
                     buffer (unblocked by a ticket), an environment (by its answer), weights (by the receiver) or
                     the tokens of a remote engine (by its thread).
    environments     (actors.env_runner) a thread for each rollout; unblocked by the main thread, answers to it.
    weight receiver  (weights.receiver) waits inside a broadcast for the learner; stages what came into the
                     engine, which swaps it in between two steps of the main thread.
    client           (protocol.client) the connection, resending, heartbeats.

Credit: the buffer may place up to `max_concurrent_rollouts` rollouts here, including those already running. Nothing
here waits for an acknowledgement. A SIGKILL loses only what was not acknowledged, and the buffer issues the ticket
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Protocol

from stillhouse.actors.config import ActorConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.episodes import EpisodeThreads
from stillhouse.actors.failures import TooManyFailures
from stillhouse.actors.rollouts_running import RunningRollouts
from stillhouse.engines.base import EngineLost, EngineMismatch, GenerationEngine, shared_engine
from stillhouse.engines.provider import Student, StudentModel, StudentSource
from stillhouse.engines.registry import find_engine
from stillhouse.models.flops import forward_flops
from stillhouse.protocol.client import Client, worker_client
from stillhouse.protocol.codec import Received
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.protocol.keys import run_client_keys
from stillhouse.protocol.messages import (
    CancelRollout,
    SegmentAck,
    SegmentsWanted,
    Shutdown,
    TicketCredit,
    Tickets,
    WeightPlan,
    WeightVersion,
)
from stillhouse.protocol.turns import ALONE, Alone, EngineTurns, Turn
from stillhouse.tracing import events
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.errors import SnapshotRefused
from stillhouse.weights.receiver import WeightReceiver, WeightReceiverFailed

log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.2
"""Longest wait for the buffer while nothing runs."""
CREDIT_REPEAT_S: Final = 2.0
"""Interval at which an unchanged credit is sent again, because credits are not acknowledged."""
REPORT_EVERY_S: Final = 0.25
"""Interval at which the gauges for the next heartbeat are updated."""
FLUSH_TIMEOUT_S: Final = 5.0
"""Longest wait of a leaving actor for the acknowledgement of its last segments."""


class TaskSettings(Protocol):
    @property
    def env(self) -> str: ...


class LearnerSettings(Protocol):
    @property
    def tasks(self) -> TaskSettings: ...


class ActorRunConfig(Protocol):
    """The parts of the run's configuration that an actor reads."""

    @property
    def actor(self) -> ActorConfig: ...
    @property
    def models(self) -> StudentModel: ...
    @property
    def weights(self) -> WeightsConfig: ...
    @property
    def learner(self) -> LearnerSettings: ...
    @property
    def mixed_teacher(self) -> str: ...


class WeightSource(Protocol):
    """The part of the weight receiver that the worker uses."""

    def handle_plan(self, plan: WeightPlan) -> None: ...

    def raise_if_failed(self) -> None: ...

    @property
    def stats(self) -> dict[str, float]: ...


class ActorWorker:
    """Runs rollouts until Shutdown."""

    def __init__(
        self,
        client: Client,
        engine: GenerationEngine,
        weights: WeightSource,
        episodes: EpisodeThreads,
        rollouts: RunningRollouts,
        config: ActorConfig,
        turns: EngineTurns | Alone = ALONE,
    ) -> None:
        self._client = client
        self._turns = turns
        self._engine = engine
        self._weights = weights
        self._episodes = episodes
        self._rollouts = rollouts
        self._config = config
        self._tickets_received_total = 0
        self._credit_seq = 0
        self._credit_sent = (-1, -1)
        self._credit_sent_s = 0.0
        self._started_s = time.monotonic()
        self._reported_s = 0.0
        self._version_reported: WeightVersion | None = None
        self._shutdown: Shutdown | None = None

    def run(self) -> bool:
        """Run rollouts until Shutdown arrives; True when the run ended well."""
        events.mark("ready")
        while self._shutdown is None:
            self._send_credit()
            self._receive(self._wait_s())
            self._rollouts.take_news()
            if self._turns.mine(wanted=self._rollouts.wants_engine):
                self._rollouts.take_deltas(self._engine.poll(0.0))
                self._rollouts.start_ready()
            self._report()
        return self._shutdown.ok

    def _wait_s(self) -> float:
        """Longest wait for the buffer: none while the engine has work in this thread. Weights, environments and a
        remote engine wake the client; tickets delayed after a failure have their own time."""
        wait_s = self._turns.wait_s(min(IDLE_WAIT_S, self._rollouts.ready_in_s()))
        return 0.0 if self._turns.taken and self._rollouts.generating and self._engine.works_in_poll else wait_s

    def _receive(self, timeout_s: float) -> None:
        received = self._client.recv(timeout_s)
        while received is not None:
            self._take(received)
            received = self._client.recv(0.0)

    def _take(self, received: Received) -> None:
        message = received.message
        match message:
            case Tickets():
                self._tickets_received_total += len(message.tickets)
                for ticket, prompt_ids in zip(message.tickets, received.arrays, strict=True):
                    self._rollouts.add(ticket, prompt_ids)
            case CancelRollout():
                self._rollouts.cancel(message.rollout_id, message.reason)
            case SegmentsWanted():
                self._rollouts.send_early()
            case SegmentAck():
                self._rollouts.cancel(message.rollout_id, f"segment {message.index} rejected: {message.reason}")
            case WeightPlan():
                self._weights.handle_plan(message)
            case Shutdown():
                log.info("shutdown: %s", message.reason)
                self._shutdown = message
            case _:
                log.warning("an actor does not expect %s", type(message).__name__)

    def _send_credit(self) -> None:
        free = max(0, self._config.max_concurrent_rollouts - len(self._rollouts))
        # The buffer subtracts the tickets that it sends, so that one has come is no news. A reconnect is news: the
        # buffer may have counted this actor as lost.
        credit = (free + self._tickets_received_total, self._client.connects_total)
        now_s = time.monotonic()
        if credit == self._credit_sent and now_s - self._credit_sent_s < CREDIT_REPEAT_S:
            return
        self._credit_seq += 1
        self._credit_sent, self._credit_sent_s = credit, now_s
        self._client.send(
            TicketCredit(n=free, seq=self._credit_seq, tickets_received_total=self._tickets_received_total)
        )

    def _report(self) -> None:
        now_s = time.monotonic()
        version = self._engine.version
        swapped = version != self._version_reported
        if not swapped and now_s - self._reported_s < REPORT_EVERY_S:
            return
        self._reported_s, self._version_reported = now_s, version
        self._weights.raise_if_failed()
        stats = self._engine.stats
        elapsed_s = max(now_s - self._started_s, 1e-9)
        gauges = {
            "sampled_tokens_total": float(stats.sampled_tokens_total),
            "decode_steps_total": float(stats.decode_steps_total),
            "weight_swaps_total": float(stats.weight_swaps_total),
            "busy_fraction": stats.busy_s_total / elapsed_s,
            "busy_s_total": stats.busy_s_total,
            "elapsed_s_total": elapsed_s,
            "weight_pauses_total": float(stats.weight_pauses_total),
            "weight_pause_s_total": stats.weight_pause_s_total,
            "running": float(stats.running),
            "rollouts_in_hand": float(len(self._rollouts)),
            "waiting_for_weights": float(self._rollouts.waiting_for_weights),
            **self._episodes.gauges,
            **self._weights.stats,
            **self._turns.stats,
        }
        gauges.update(self._rollouts.counts)
        self._client.set_heartbeat(version, gauges, at_once=swapped)


def main(ctx: RoleContext[ActorRunConfig]) -> int:
    """Entry of an actor process (see launch.workers.roles)."""
    try:
        return _write(ctx, find_engine(ctx.config.actor.engine).student(ctx))
    except TooManyFailures as error:  # its message says where in the user's code; our frames would only hide it
        raise error.with_traceback(None) from None
    except EngineMismatch as error:
        log.error("%s", error)
        return ExitCode.USELESS
    except EngineLost as error:
        log.error("server lost: %s", error)
    except WeightReceiverFailed as error:
        if not isinstance(error.__cause__, EngineLost):
            raise
        log.error("server lost while it took weights: %s", error.__cause__)
    return ExitCode.SERVER_LOST


def _write(ctx: RoleContext[ActorRunConfig], source: StudentSource) -> int:
    """Connect and run rollouts until Shutdown."""
    config = ctx.config.actor
    with ExitStack() as stack:
        client = stack.enter_context(worker_client(ctx, source.fingerprint))
        turn = ctx.first_turn()
        student = source.start(client.wake)
        stack.callback(student.engine.close)
        turns = _turns_of(turn, student)
        client.connect()
        keys = run_client_keys(ctx.run_dir, "actor", ctx.name, "learner")
        receiver = WeightReceiver(student.weights, name=ctx.name, on_staged=client.wake, keys=keys, within=turns.lent)
        receiver.start()
        stack.callback(receiver.close)
        episodes = _start_episodes(ctx.config, source, student.max_context, client.wake)
        stack.callback(episodes.close)
        rollouts = RunningRollouts(
            student.engine,
            episodes,
            config,
            environments=config.environments_of(ctx.config.learner.tasks.env),
            stop_token_ids=source.stop_token_ids,
            max_context_tokens=student.max_context,
            send=client.send,
            forward=forward_flops(Path(ctx.config.models.student)),
        )
        ended_well = ActorWorker(client, student.engine, receiver, episodes, rollouts, config, turns).run()
        client.flush(FLUSH_TIMEOUT_S)
    return ExitCode.OK if ended_well else ExitCode.FAILED


def _turns_of(turn: Turn | None, student: Student) -> EngineTurns | Alone:
    """`turn`: that in which the engine was started."""
    if turn is None:
        return ALONE
    with suppress(SnapshotRefused):  # the receiver meets it again, and says so
        student.weights.prepare()  # in this turn: a server may have to load the student
    return EngineTurns(turn, shared_engine(student.engine))


def _start_episodes(
    config: ActorRunConfig, source: StudentSource, max_context_tokens: int, wake: Callable[[], None]
) -> EpisodeThreads:
    environments = config.actor.environments_of(config.learner.tasks.env)
    return EpisodeThreads(
        environments,
        TextTokenizer(source.tokenizer),
        max_threads=2 * config.actor.max_concurrent_rollouts,
        stop_token_ids=source.stop_token_ids,
        max_context_tokens=max_context_tokens,
        wake=wake,
    )
