"""A teacher: leases items from the buffer by credit, scores them in packed batches, and sends the scores back.

The loop (one thread; the client's own thread keeps the connection and the heartbeats):

    input   ScoreWork from the buffer: items hold a whole prefix, so any teacher can take any item
            TeacherWeights: new weights for the engine, read before the next batch
    output  Scores | ScoreFailed, one lease each, sent again until the buffer acknowledges them
    waits   for work (unblocked by the buffer, as actors stream), never for an acknowledgement
    leaves  when asked to (SIGTERM): a credit of 0, then what it holds within `drain_s`, then Goodbye
    credit  at most CREDIT_BATCHES batches of new tokens are held: without what the rollout's former item has brought.
            The credit is renewed as items are scored
    batch   at most `max_batch_tokens`, and no more than can be scored in time (`_pace`)

The buffer prefers to send a growing rollout to the same teacher, which may have kept its prefix; nothing but speed
depends on it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from stillhouse.engines.base import (
    LOGPROBS_ONLY,
    BudgetSpent,
    EngineLost,
    EngineMismatch,
    ReportsFigures,
    ScoreOptions,
    ScoreResult,
    ScoringEngine,
    TakesSnapshots,
    shared_engine,
)
from stillhouse.engines.provider import ScorerSource, TeacherModel
from stillhouse.engines.registry import find_engine
from stillhouse.models.files import TokenizerError
from stillhouse.models.flops import ForwardFlops, forward_flops
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.client import Client, worker_client
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.messages import (
    ScoreCredit,
    ScoreFailed,
    ScoreItem,
    Scores,
    ScoresAck,
    ScoreWork,
    Shutdown,
    TeacherWeights,
    WeightsRef,
    WeightVersion,
    is_training,
)
from stillhouse.protocol.payloads.aligned import REASONS, alignment_counts
from stillhouse.protocol.turns import ALONE, Alone, EngineTurns
from stillhouse.teachers.alignment import Aligner
from stillhouse.teachers.config import CREDIT_BATCHES, FLUSH_TIMEOUT_S, TeacherConfig
from stillhouse.teachers.held import HeldItem, Scored
from stillhouse.teachers.leaving import on_sigterm
from stillhouse.teachers.self_check import self_check
from stillhouse.tracing import events
from stillhouse.weights.errors import SnapshotRefused

log = logging.getLogger(__name__)

GATHER_S: Final = 0.005
"""Longest time a single item waits for others to share its batch."""
FIRST_TOKENS: Final = 512
"""Most tokens of the first batch, after which the engine's speed is known."""
LEASE_SHARE: Final = 0.25
"""A batch has the tokens that take this share of a lease. Twice as many are held, and the machine may slow down."""
IDLE_WAIT_S: Final = 0.2
"""Longest single wait for work, and so the longest time until a request to stop is noticed."""
CREDIT_REPEAT_S: Final = 2.0
"""Interval at which an idle teacher repeats its credit: credits are not acknowledged, and a reconnect may lose one."""


class TeacherWorker:
    """Scores leased items until Shutdown arrives. After `leave` it finishes the items it holds and takes no new
    ones."""

    def __init__(
        self,
        client: Client,
        engine: ScoringEngine,
        config: TeacherConfig,
        *,
        vocab_tokens: int | None = None,
        gauges: Mapping[str, float] | None = None,
        aligner: Aligner | None = None,
        forward: ForwardFlops | None = None,
        turns: EngineTurns | Alone = ALONE,
        lease_s: float = math.inf,
    ) -> None:
        """`vocab_tokens`: number of ids of the tokenizer, if fewer than the engine's rows. `gauges`: further figures
        for the heartbeat. `aligner`: for a teacher with another tokenizer than the student. `forward`: what tokens cost
        the teacher; None: not known. `lease_s`: time until scores are too late. Raises EngineMismatch for an engine
        that cannot give what the run's payloads need."""
        self._gauges = gauges or {}
        self._client = client
        self._engine = engine
        self._turns = turns
        self._aligner = aligner
        self._forward = forward
        self._config = config
        sent = vocab_tokens or engine.vocab_size if aligner is None else aligner.n_student
        try:
            self._encoder = config.sends.encoder(engine, sent)
        except ValueError as error:
            raise EngineMismatch(str(error)) from error
        self._held: deque[HeldItem] = deque()
        self._held_tokens = 0
        self._lease_s = lease_s
        self._batch_tokens = min(FIRST_TOKENS, config.max_batch_tokens)
        """Most tokens of the next batch. A batch has one item at least."""
        self._new_weights: WeightsRef | None = None
        """The newest weights announced and not loaded yet."""
        self._version: WeightVersion | None = None
        """Version of the weights that score; None: the ones loaded at the start."""
        self._received_total = 0
        self._received_tokens = 0
        """New tokens of all items received, as the buffer counts them."""
        self._credit_seq = 0
        self._credit_reach = -1
        """How many tokens the buffer may have sent in all, by the last credit."""
        self._totals = _no_totals(counts_flops=forward is not None, aligned=aligner is not None)
        self._started_s = time.monotonic()
        self._credit_sent_s = 0.0
        self._shutdown: Shutdown | None = None
        self.leaving = False

    def leave(self) -> None:
        """Finish the items held, then stop. Safe to call from a signal handler."""
        self.leaving = True

    def run(self) -> bool:
        """Score until Shutdown arrives or the teacher has left; True when the run ended well."""
        events.mark("ready")
        self._send_credit()
        while self._shutdown is None and not self.leaving:
            mine = self._turns.mine(wanted=bool(self._held or self._new_weights))
            self._receive(0.0 if self._held and mine else self._turns.wait_s(IDLE_WAIT_S))
            if self._held and self._held_tokens < self._batch_tokens:
                self._receive(GATHER_S)
            if mine:
                self._take_weights()
            if self._held and mine and self._shutdown is None:
                self._score_batch(self._next_batch())
                self._send_credit()
            elif time.monotonic() - self._credit_sent_s > CREDIT_REPEAT_S:
                self._send_credit()
            self._report()
        if self._shutdown is None:
            self._drain()
        return self._shutdown is not None and self._shutdown.ok

    def _drain(self) -> None:
        """Withdraw the credit, then score what is held and what was sent before the buffer read that."""
        deadline_s = time.monotonic() + self._config.drain_s
        self._send_credit()
        self._report()
        self._client.flush(self._config.drain_s)
        self._receive(0.0)
        log.info("leaving after %d more items", len(self._held))
        while self._held and self._shutdown is None and time.monotonic() < deadline_s:
            if self._turns.mine(wanted=True):
                self._score_batch(self._next_batch())
            self._receive(self._turns.wait_s(0.0))
        if self._held:
            log.warning(
                "leaving with %d items that could not be scored in %.1f s", len(self._held), self._config.drain_s
            )

    def _receive(self, timeout_s: float) -> None:
        got_work = False
        received = self._client.recv(timeout_s)
        while received is not None:
            message = received.message
            match message:
                case ScoreWork():
                    frames = iter(received.arrays)
                    for item in message.items:
                        token_ids, top_ids = next(frames), next(frames).tobytes() if item.top_ids else b""
                        self._held.append(HeldItem(item, token_ids, time.monotonic(), top_ids))
                        self._held_tokens += self._new_tokens(item)
                        self._received_tokens += item.new_tokens
                    self._received_total += len(message.items)
                    got_work = True
                case TeacherWeights():
                    self._new_weights = message.weights
                case ScoresAck():
                    self._note_refused(message)
                case Shutdown():
                    self._shutdown = message
                    return
                case _:
                    log.warning("a teacher does not expect %s", type(message).__name__)
            received = self._client.recv(0.0)
        if got_work and self._received_tokens + self._free_tokens != self._credit_reach:
            self._send_credit()  # otherwise the buffer knows: it subtracts what it sends

    def _take_weights(self) -> None:
        """Switch to the newest announced weights. If they cannot be read, count it and keep the old ones."""
        ref, self._new_weights = self._new_weights, None
        if ref is None:
            return
        try:
            if not isinstance(self._engine, TakesSnapshots):
                raise SnapshotRefused(
                    f"{type(self._engine).__name__} cannot change its weights; use teacher.engine torch"
                )
            with events.span("scoring", "load weights", version=str(ref.version)):
                self._engine.load_snapshot(ref)
        except SnapshotRefused as error:
            self._totals["weights_refused_total"] += 1
            log.error(
                "weights of version %s were not loaded, scores are still by %s: %s",
                ref.version,
                self._version or "the initial weights",
                error,
            )
            return
        self._version = ref.version
        self._totals["weights_loaded_total"] += 1
        log.info("scoring with the average of version %s", ref.version)

    def _note_refused(self, ack: ScoresAck) -> None:
        for lease, status, reason in zip(ack.leases, ack.statuses, ack.reasons, strict=True):
            if status == "rejected":
                log.error("the buffer rejected the scores of lease %d: %s", lease, reason)
                self._totals["failed_items_total"] += 1
            elif status == "expired":
                self._totals["expired_items_total"] += 1

    def _next_batch(self) -> list[HeldItem]:
        batch = [self._held.popleft()]
        tokens = self._new_tokens(batch[0].item)
        while self._held and tokens + self._new_tokens(self._held[0].item) <= self._batch_tokens:
            batch.append(self._held.popleft())
            tokens += self._new_tokens(batch[-1].item)
        self._held_tokens -= tokens
        return batch

    def _new_tokens(self, item: ScoreItem) -> int:
        """Tokens that the engine is expected to compute."""
        return item.context_tokens if self._config.prefix_cache_mb == 0 else item.new_tokens

    def _score_batch(self, batch: list[HeldItem]) -> None:
        began_s, began_ns = time.monotonic(), events.now_ns()
        scored = self._score([held for held in batch if self._fits(held)])
        good = [(held, outcome) for held, outcome in scored if isinstance(outcome, Scored)]
        if good:
            self._client.send(
                Scores(leases=tuple(held.item.lease_id for held, _ in good), top_k=self._encoder is not None),
                [frame for _, one in good for frame in one.frames],
            )
        for held, outcome in scored:
            if isinstance(outcome, str):
                self._fail(held, outcome)
        totals = self._totals
        done_s = time.monotonic()
        self._pace(sum(self._new_tokens(held.item) for held in batch), done_s - began_s)
        totals["busy_s_total"] += done_s - began_s
        totals["score_s_total"] += sum(done_s - held.arrived_s for held, _ in good)
        totals["batches_total"] += 1
        totals["scored_items_total"] += len(good)
        totals["scored_tokens_total"] += sum(h.item.end - h.item.start for h, _ in good)
        totals["context_tokens_total"] += sum(h.item.context_tokens for h, _ in good)
        if self._forward is not None:
            totals["flops_total"] += sum(
                self._forward.of(*_read(h.item)) for h, _ in good if is_training(h.item.rollout_id)
            )
        totals["top_k_bytes_total"] += sum(len(one.payload or b"") for _, one in good)
        if events.tracing():
            items = [(held.item.rollout_id, held.item.start, held.item.end) for held, _ in good]
            tokens = sum(end - start for _, start, end in items)
            events.done("scoring", "score", began_ns, items=items, tokens=tokens, failed=len(batch) - len(good))

    def _pace(self, tokens: int, busy_s: float) -> None:
        """Let the next batch have the tokens that end in time at the speed of the last one: a large model on a CPU may
        need minutes for `max_batch_tokens`, and what comes after its lease is lost."""
        if tokens:
            in_time = self._lease_s * LEASE_SHARE * tokens / max(busy_s, 1e-6)
            self._batch_tokens = int(max(1, min(self._config.max_batch_tokens, in_time)))

    def _fits(self, held: HeldItem) -> bool:
        """True if the engine can score the item; otherwise fail its lease with the reason."""
        if self._encoder is not None and held.wants_sets:
            try:
                held.given = self._encoder.given(held.top_ids, held.item.top_end - held.item.top_start)
            except (EncodeError, MalformedMessage) as error:
                self._fail(held, f"top_ids: {error}")
                return False
        if self._aligner is not None:
            try:
                held.align(self._aligner)
            except ValueError as error:
                self._fail(held, f"not_aligned: {error}")
                return False
        ids = held.token_ids
        if len(ids) > self._engine.max_context:
            self._fail(held, f"context_too_long: {len(ids)} tokens, this teacher takes {self._engine.max_context}")
        elif int(ids.min()) < 0 or int(ids.max()) >= self._engine.vocab_size:
            self._fail(held, f"token_out_of_vocab: ids {ids.min()}..{ids.max()}, {self._engine.vocab_size} rows")
        else:
            return True
        return False

    def _score(self, batch: list[HeldItem]) -> list[tuple[HeldItem, Scored | str]]:
        """Scores of each item, or the reason for their absence. Items without trainable tokens (evaluation, tool
        output) are scored separately when the others need payloads, which are expensive on a server."""
        if self._encoder is None:
            return self._score_alike(batch, LOGPROBS_ONLY)
        wanted = [held for held in batch if held.wants_sets]
        others = [held for held in batch if not held.wants_sets]
        return self._score_alike(wanted, self._encoder.options) + self._score_alike(others, LOGPROBS_ONLY)

    def _score_alike(self, batch: list[HeldItem], options: ScoreOptions) -> list[tuple[HeldItem, Scored | str]]:
        """Score items in one way. After an error the items are scored one by one, so that a bad one does not fail
        the others."""
        if not batch:
            return []
        asked = [held.request for held in batch if held.is_asked]
        try:
            scored = iter(self._engine.score(asked, options) if asked else ())
            empty = ScoreResult.empty(0)
            results = [held.result(next(scored) if held.is_asked else empty, self._aligner) for held in batch]
        except (ValueError, RuntimeError) as error:
            if len(batch) == 1:
                return [(batch[0], f"engine_error: {error}")]
            log.exception("scoring %d items together failed; scoring them one by one", len(batch))
            return [pair for held in batch for pair in self._score_alike([held], options)]
        return [(held, self._scored(held, result)) for held, result in zip(batch, results, strict=True)]

    def _scored(self, held: HeldItem, result: ScoreResult) -> Scored | str:
        logprobs, item = result.logprobs, held.item
        if result.codes is not None and held.wants_sets:
            for name, n in alignment_counts(result, held.sets_at):
                self._totals[f"{name}_total"] += n
        if item.first > item.start:
            logprobs = np.concatenate([np.zeros(item.first - item.start, np.float32), logprobs])
        if not np.isfinite(logprobs).all():
            return "non_finite_logprob"
        try:
            if self._encoder is None:
                return Scored(logprobs, None)
            return Scored(logprobs, self._encoder.encode(result, held.sets_at, held.given))
        except EncodeError as error:
            return f"{self._config.payload}: {error}"

    def _fail(self, held: HeldItem, reason: str) -> None:
        log.error("lease %d (rollout %s): %s", held.item.lease_id, held.item.rollout_id, reason)
        self._totals["failed_items_total"] += 1
        self._client.send(ScoreFailed(leases=(held.item.lease_id,), reason=reason))

    @property
    def _free_tokens(self) -> int:
        return 0 if self.leaving else max(0, self._batch_tokens * CREDIT_BATCHES - self._held_tokens)

    def _send_credit(self) -> None:
        self._credit_seq += 1
        self._credit_sent_s = time.monotonic()
        tokens = self._free_tokens
        self._credit_reach = self._received_tokens + tokens
        self._client.send(ScoreCredit(tokens=tokens, seq=self._credit_seq, items_received_total=self._received_total))

    def _report(self) -> None:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        stats = {**self._totals, **self._gauges, **self._turns.stats}
        if isinstance(self._engine, ReportsFigures):
            stats |= self._engine.figures
        stats["busy_fraction"] = stats["busy_s_total"] / elapsed_s
        stats["elapsed_s_total"] = elapsed_s
        stats["held_tokens"] = float(self._held_tokens)
        stats["draining"] = float(self.leaving)
        self._client.set_heartbeat(self._version, stats)


def _no_totals(*, counts_flops: bool, aligned: bool) -> dict[str, float]:
    return {
        "scored_tokens_total": 0.0,
        "scored_items_total": 0.0,
        "context_tokens_total": 0.0,
        "batches_total": 0.0,
        "failed_items_total": 0.0,
        "expired_items_total": 0.0,
        "top_k_bytes_total": 0.0,
        **({"flops_total": 0.0} if counts_flops else {}),
        **({f"unaligned_{reason}_tokens_total": 0.0 for reason in REASONS[:-1]} if aligned else {}),
        **(dict.fromkeys(("sets_total", "sets_mass_total", "spans_total"), 0.0) if aligned else {}),
        "weights_loaded_total": 0.0,
        "weights_refused_total": 0.0,
        "busy_s_total": 0.0,
        "score_s_total": 0.0,
    }


def _read(item: ScoreItem) -> tuple[int, int]:
    """Where the tokens that an item adds stand in the text that the teacher reads."""
    return (item.start + item.shift if item.start else 0), item.context_tokens


class Leases(Protocol):
    """The part of the buffer's configuration that a teacher reads."""

    @property
    def lease_s(self) -> float: ...


class TeacherRunConfig(Protocol):
    """The parts of the run's configuration that a teacher reads."""

    @property
    def teacher(self) -> TeacherConfig: ...
    @property
    def buffer(self) -> Leases: ...
    @property
    def models(self) -> TeacherModel: ...


def main(ctx: RoleContext[TeacherRunConfig]) -> int:
    """Entry of a teacher process (see launch.workers.roles)."""
    try:
        return _run(ctx, find_engine(ctx.config.teacher.engine).scorer(ctx))
    except (EngineMismatch, TokenizerError) as error:
        log.error("%s", error)
        return ExitCode.USELESS
    except EngineLost as error:
        log.error("server lost: %s", error)
        return ExitCode.SERVER_LOST
    except BudgetSpent as error:
        log.error("%s", error)
        return ExitCode.SPENT


def _run(ctx: RoleContext[TeacherRunConfig], source: ScorerSource) -> int:
    config = ctx.config.teacher
    fingerprint, aligner = source.fingerprint, None
    if config.tokenizer == "other":
        student, teacher = (FileTokenizer(path) for path in (ctx.config.models.student, ctx.config.models.teacher))
        fingerprint, aligner = student.fingerprint, Aligner(student, teacher)
    client = worker_client(ctx, fingerprint, pool=config.pool)
    turn = ctx.first_turn()
    with contextlib.closing(source.start()) as engine, client:
        turns = ALONE if turn is None else EngineTurns(turn, shared_engine(engine))
        client.connect()
        checked = self_check(engine, source.vocab_tokens)
        worker = TeacherWorker(
            client,
            engine,
            config,
            vocab_tokens=source.vocab_tokens,
            gauges=checked.gauges() if checked else None,
            aligner=aligner,
            forward=None if config.api.url else forward_flops(Path(ctx.config.models.teacher)),
            turns=turns,
            lease_s=ctx.config.buffer.lease_s,
        )
        with on_sigterm(worker.leave, config.leaving_s):
            ended_well = worker.run()
            client.flush(FLUSH_TIMEOUT_S)
        client.close("asked to leave" if worker.leaving else "run over")
    if worker.leaving and not ended_well:
        return ExitCode.TERMINATED
    return ExitCode.OK if ended_well else ExitCode.FAILED
