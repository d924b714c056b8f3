"""Plays the buffer's peers by hand, one message at a time, for tests of single behaviours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stillhouse.buffer.config import BufferConfig, Release
from stillhouse.buffer.state import BufferState, Outgoing
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import Role, TaskKind, VersionSpan, WeightVersion

Array = npt.NDArray[Any]
MessageT = TypeVar("MessageT")
PROMPT = (1, 2)


def v(step: int, epoch: int = 0) -> WeightVersion:
    return WeightVersion(epoch, step)


class Driver:
    """A BufferState, a clock, and all that it has sent. One actor `a`, one teacher `t`, and the learner are there."""

    def __init__(
        self,
        *,
        staleness: int = 1,
        batch: int = 2,
        release: Release = "deadline",
        start: WeightVersion | None = None,
        carried: m.Ledger | None = None,
        vocab_size: int | None = None,
        peers: bool = True,
        **settings: Any,
    ) -> None:
        self.config = BufferConfig(max_staleness=staleness, batch_rollouts=batch, release=release, **settings)
        start = start or WeightVersion(0, 0)
        self.state = BufferState(self.config, version=start, carried=carried, vocab_size=vocab_size)
        self.now_s = 0.0
        self.sent: list[Outgoing] = []
        self.tickets: dict[str, m.Ticket] = {}
        self.holder: dict[str, str] = {}
        self.written: dict[str, list[tuple[m.Segment, tuple[Array, ...]]]] = {}
        self.work: dict[int, tuple[str, m.ScoreItem, Array]] = {}
        self.top_ids: dict[int, bytes] = {}
        """By lease: the student's likeliest tokens, if they came with it."""
        if peers:
            self.actor()
            self.teacher()
            self.join("learner", "learner")

    # --------------------------------------------------------------------------------------------------- plumbing

    def _note(self, out: list[Outgoing]) -> list[Outgoing]:
        self.sent += out
        for o in out:
            if isinstance(o.message, m.Tickets):
                for ticket in o.message.tickets:
                    self.tickets[ticket.rollout_id] = ticket
                    self.holder[ticket.rollout_id] = o.name
            if isinstance(o.message, m.ScoreWork):
                frames = iter(o.arrays)
                for item in o.message.items:
                    self.work[item.lease_id] = (o.name, item, next(frames))
                    if item.top_ids:
                        self.top_ids[item.lease_id] = next(frames).tobytes()
                assert not list(frames)
        assert self.state.snapshot(self.now_s).ledger.balanced
        return out

    def join(self, role: Role, name: str, incarnation: str = "1", pool: str = "") -> list[Outgoing]:
        return self._note(self.state.peer_joined(self.now_s, role, name, incarnation, pool))

    def lose(self, role: Role, name: str) -> list[Outgoing]:
        return self._note(self.state.peer_lost(self.now_s, role, name))

    def send(self, role: Role, name: str, message: m.Message, *arrays: Array) -> list[Outgoing]:
        return self._note(self.state.handle(self.now_s, role, name, message, arrays))

    def wait(self, seconds: float) -> list[Outgoing]:
        self.now_s += seconds
        return self._note(self.state.tick(self.now_s))

    def take(self, kind: type[MessageT], to: str | None = None) -> list[MessageT]:
        """Messages of one kind sent since they were last taken."""
        found: list[MessageT] = []
        kept: list[Outgoing] = []
        for out in self.sent:
            if isinstance(out.message, kind) and to in (None, out.name):
                found.append(out.message)
            else:
                kept.append(out)
        self.sent = kept
        return found

    @property
    def snapshot(self) -> m.Snapshot:
        return self.state.snapshot(self.now_s)

    @property
    def ledger(self) -> m.Ledger:
        return self.snapshot.ledger

    # ------------------------------------------------------------------------------------------------------ actors

    def actor(self, name: str = "a", n: int = 100, incarnation: str = "1") -> None:
        self.join("actor", name, incarnation)
        self.send("actor", name, m.TicketCredit(n, 1, 0))

    def write(
        self,
        rollout_id: str,
        n: int = 2,
        *,
        final: bool = False,
        step: int = 0,
        epoch: int = 0,
        context: int = 0,
        actor: str | None = None,
    ) -> m.SegmentAck | None:
        """The rollout's next segment: the prompt first, then `n` sampled tokens, then `context` others."""
        message, arrays = self.make(rollout_id, n, final=final, step=step, epoch=epoch, context=context)
        return self.submit(message, arrays, actor=actor)

    def make(
        self, rollout_id: str, n: int = 2, *, final: bool = False, step: int = 0, epoch: int = 0, context: int = 0
    ) -> tuple[m.Segment, tuple[Array, ...]]:
        before = self.written.setdefault(rollout_id, [])
        start = before[-1][0].end if before else 0
        n_prompt = 0 if before else len(PROMPT)
        total = n_prompt + n + context
        ids = np.array([*PROMPT[:n_prompt], *range(10, 10 + n), *[3] * context], np.int32)
        sampled = np.array([*[0] * n_prompt, *[1] * n, *[0] * context], np.uint8)
        logprobs = np.where(sampled, -0.5, 0.0).astype(np.float32)
        spans = (VersionSpan(v(step, epoch), start + n_prompt, start + n_prompt + n),) if n else ()
        finish, reward = ("stop", 1.0) if final else (None, None)
        message = m.Segment(rollout_id, len(before), start, start + total, spans, final, finish, reward)
        before.append((message, (ids, logprobs, sampled)))
        return message, (ids, logprobs, sampled)

    def submit(self, message: m.Segment, arrays: Sequence[Array], actor: str | None = None) -> m.SegmentAck | None:
        """Send a segment; returns its acknowledgement, if it got one."""
        out = self.send("actor", actor or self.holder.get(message.rollout_id, "a"), message, *arrays)
        acks = [o.message for o in out if isinstance(o.message, m.SegmentAck) and o.message.index == message.index]
        return acks[0] if acks else None

    def roll(self, task_id: int, sample: int = 0, *, n: int = 2, step: int = 0, epoch: int = 0) -> str:
        """A whole rollout in one segment, scored."""
        rollout_id = f"train-{task_id}-{sample}-0"
        ack = self.write(rollout_id, n, final=True, step=step, epoch=epoch)
        assert ack is not None and ack.status == "accepted", ack
        self.score()
        return rollout_id

    # ---------------------------------------------------------------------------------------------------- teachers

    def teacher(self, name: str = "t", pool: str = "default", tokens: int = 1_000_000, incarnation: str = "1") -> None:
        self.join("teacher", name, incarnation, pool)
        self.send("teacher", name, m.ScoreCredit(tokens, 1, 0))

    def score(self, value: float = -1.0) -> None:
        """Every teacher scores everything it was given."""
        while self.work:
            lease = next(iter(self.work))
            self.answer(lease, value)

    def answer(self, lease: int, value: float = -1.0, n_extra: int = 0) -> m.ScoresAck:
        name, item, _ = self.work.pop(lease)
        scores = np.full(item.end - item.start + n_extra, value, np.float32)
        out = self.send("teacher", name, m.Scores((lease,)), scores)
        return next(o.message for o in out if isinstance(o.message, m.ScoresAck))

    def answer_top_k(self, lease: int, payload: bytes, value: float = -1.0) -> m.ScoresAck:
        """Log-probs, and a payload for the item's top-k range."""
        name, item, _ = self.work.pop(lease)
        scores = np.full(item.end - item.start, value, np.float32)
        out = self.send("teacher", name, m.Scores((lease,), top_k=True), scores, np.frombuffer(payload, np.uint8))
        return next(o.message for o in out if isinstance(o.message, m.ScoresAck))

    def refuse_work(self, lease: int) -> m.ScoresAck:
        name, _, _ = self.work.pop(lease)
        out = self.send("teacher", name, m.ScoreFailed((lease,), "no memory"))
        return next(o.message for o in out if isinstance(o.message, m.ScoresAck))

    # ----------------------------------------------------------------------------------------------------- learner

    def offer(
        self,
        *task_ids: int,
        group: int = 1,
        teachers: tuple[str, ...] = ("default",),
        kind: TaskKind = "train",
        eval_id: str = "",
        last: bool = False,
        top_ids: m.TopIdsWanted | None = None,
        kept: bool = False,
        experts: m.ExpertShape | None = None,
    ) -> list[Outgoing]:
        asked = {"top_ids": top_ids, "top_k": 8 if kept else 0, "kept": kept, "experts": experts}
        tasks = tuple(
            m.Task(
                i,
                kind,
                group,
                m.Sampling(seed=i, max_new_tokens=10, **asked),  # pyright: ignore[reportArgumentType]
                teachers=teachers,
                eval_id=eval_id,
            )
            for i in task_ids
        )
        prompts = [np.array(PROMPT, np.int32) for _ in tasks]
        return self.send("learner", "learner", m.TasksOffered(tasks, last), *prompts)

    def want(self, step: int, epoch: int = 0) -> m.Batch | None:
        """Ask for a batch; returns it if it comes at once."""
        self.take(m.Batch)
        self.send("learner", "learner", m.BatchWanted(v(step, epoch)))
        return self.batch()

    def batch_for(self, step: int, epoch: int = 0) -> m.Batch:
        """As `want`, for a batch that must come at once."""
        batch = self.want(step, epoch)
        assert batch is not None, "no batch came"
        return batch

    def batch(self) -> m.Batch | None:
        """The batch that came since it was asked for."""
        return next(iter(self.take(m.Batch)), None)

    def frames(self, out: Sequence[Outgoing]) -> tuple[Array, ...]:
        """Frames of the batch among these messages."""
        return next(o.arrays for o in out if isinstance(o.message, m.Batch))

    def trained(self, batch: m.Batch) -> list[Outgoing]:
        """The learner made the next version out of it."""
        version = v(batch.version.step + 1, batch.version.epoch)
        return self.send("learner", "learner", m.BatchTrained(batch.batch_id, version))

    def restart_learner(
        self,
        step: int,
        epoch: int,
        incarnation: str = "2",
        *,
        next_task_id: int = 0,
        open: tuple[m.OpenTask, ...] = (),
        parent_epoch: int | None = None,
    ) -> None:
        """Another process goes on from the checkpoint of `step`, which knows tasks below `next_task_id` as settled but
        for those in `open`."""
        parent = v(step, epoch - 1 if parent_epoch is None else parent_epoch)
        self.join("learner", "learner", incarnation)
        self.send("learner", "learner", m.LearnerStarted(v(step, epoch), parent, next_task_id, open))


def rollout_ids(batch: m.Batch | None) -> list[str]:
    assert batch is not None, "no batch came"
    return [item.rollout_id for item in batch.items]


def tasks_of(batch: m.Batch | None) -> tuple[int, ...]:
    """Tasks with samples that are settled with the batch, in the order in which they are told."""
    assert batch is not None, "no batch came"
    return tuple(dict.fromkeys(one.task_id for one in batch.settled))
