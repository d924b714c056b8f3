"""Several BufferStates, one for each shard, among the same simulated peers and watched by the same model: one for what
each shard does, and the learner's own books for the whole.

What the learner sends to a shard may be late, and is lost if the learner dies before, so a new learner finds shards
that know different things of its predecessor. What is not late is LearnerStarted: no shard may hear of weights from an
actor before it hears of their epoch from the learner.
"""

from __future__ import annotations

from collections import ChainMap, Counter, deque
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import numpy as np

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.core import Entry, Joined, Left
from stillhouse.buffer.state import BufferState, Outgoing
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Received
from stillhouse.protocol.messages import Role, WeightVersion
from stillhouse.protocol.server_events import FromPeer
from stillhouse.protocol.shards.merger import Merger
from stillhouse.protocol.shards.snapshots import whole_snapshot
from tests.sim.buffer.model import BufferModel, ModelRollout, audit
from tests.sim.buffer.peers import VOCAB_SIZE, Array, SimTeacher
from tests.sim.buffer.restarts import SimJournal
from tests.sim.buffer.samples import audit_samples
from tests.sim.buffer.world import World

LATE = 0.3
"""Share of the learner's messages that a shard does not get at once."""


class Shard:
    """One shard, its model, and what the learner has sent to it."""

    def __init__(self, config: BufferConfig, start: WeightVersion, carried: m.Ledger | None, *, journal: bool) -> None:
        self.state = BufferState(config, version=start, vocab_size=VOCAB_SIZE, carried=carried)
        self.model = BufferModel(config, start)
        self.journal = SimJournal(self.state, 0.0) if journal else None
        self.late: deque[tuple[m.Message, tuple[Array, ...]]] = deque()
        self.unacked: dict[int, tuple[str, ...]] = {}
        """Pieces that the learner has trained, by batch id: rollouts that it left out."""
        self.acked: set[int] = set()
        """Pieces that the shard has said to be trained."""
        self.answered: set[WeightVersion] = set()
        """Versions for which it has sent a piece, or said that it has nothing."""

    def write(self, now_s: float, *entries: Entry, tick_s: float | None = None) -> None:
        if self.journal is not None:
            self.journal.write(self.state, now_s, *entries, tick_s=tick_s)


class _Whole:
    """What tests and actions ask of the buffer's state."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = shards

    def __repr__(self) -> str:
        return f"{[shard.state for shard in self._shards]}"

    def snapshot(self, now_s: float) -> m.Snapshot:
        return whole_snapshot([shard.state.snapshot(now_s) for shard in self._shards])


class _Models:
    """What actions tell the model, and ask it."""

    def __init__(self, world: ShardedWorld) -> None:
        self._world = world
        self.tasks: dict[tuple[str, int], m.Task] = {}
        self.rejected: Counter[str] = Counter()
        for shard in world.shards:
            shard.model.tasks = self.tasks

    @property
    def rollouts(self) -> Mapping[str, ModelRollout]:
        return ChainMap(*[shard.model.rollouts for shard in self._world.shards])

    @property
    def forgotten(self) -> Mapping[str, ModelRollout]:
        return ChainMap(*[shard.model.forgotten for shard in self._world.shards])

    def segment_sent(self, message: m.Segment, arrays: tuple[Array, ...]) -> None:
        self._world.shards[int(message.rollout_id.split("-")[1]) % len(self._world.shards)].model.segment_sent(
            message, arrays
        )

    def learner_restarted(self) -> None:
        self._world.learner_died()


class ShardedWorld(World):
    """`config.shards` shards. Actors and teachers are dealt to them in turn."""

    def _open(self, config: BufferConfig, start: WeightVersion, carried: m.Ledger | None, *, journal: bool) -> None:
        own = config.of_shard()
        self.shards = [Shard(own, start, None if i else carried, journal=journal) for i in range(config.shards)]
        self._places: dict[str, int] = {}
        self._rng = Random(config.shards)
        self._merger = Merger(config.shards)
        whole: Any = _Whole(self.shards)
        models: Any = _Models(self)
        self.state, self.model = whole, models

    def shard_of(self, role: Role, name: str) -> Shard:
        """The shard that an actor or teacher is with: of its role and pool, the next in turn."""
        number = int(name.rpartition("-")[2])
        return self.shards[self._places.setdefault(f"{role} {name}", number % len(self.shards))]

    # --------------------------------------------------------------------------------------------------- events

    def join(self, role: Role, name: str, incarnation: str, pool: str = "") -> None:
        for shard in self.shards if role == "learner" else [self.shard_of(role, name)]:
            shard.write(self.now_s, Joined(m.Hello(role, name, incarnation, "sim", "", pool)))
            self._route_of(shard, shard.state.peer_joined(self.now_s, role, name, incarnation, pool))

    def lose(self, role: Role, name: str) -> None:
        for shard in self.shards if role == "learner" else [self.shard_of(role, name)]:
            shard.write(self.now_s, Left(role, name))
            self._route_of(shard, shard.state.peer_lost(self.now_s, role, name))

    def send(self, role: Role, name: str, message: m.Message, arrays: tuple[Array, ...] = ()) -> list[Outgoing]:
        if role != "learner":
            out = self._take(self.shard_of(role, name), role, name, message, arrays)
            self._deliver_late(0.3)
            return out
        for number, part, frames in self._merger.outgoing(message, arrays):
            self.shards[number].late.append((part, tuple(frames)))
            if isinstance(part, m.BatchTrained) and isinstance(message, m.BatchTrained):
                self._note_trained(number, part.batch_id, message.masked)
        at_once = isinstance(message, (m.LearnerStarted, m.RunFinished))
        return self._deliver_late(1.0 if at_once else 1.0 - LATE)

    def _note_trained(self, number: int, piece_id: int, masked: tuple[str, ...]) -> None:
        """The learner has trained a piece of this shard. `masked`: rollouts of the whole batch that it left out."""
        shard = self.shards[number]
        if piece_id not in shard.acked:
            own = [one for one in masked if int(one.split("-")[1]) % len(self.shards) == number]
            shard.unacked[piece_id] = tuple(own)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self._deliver_late(0.5)
        for shard in self.shards:
            shard.write(self.now_s, tick_s=self.now_s)
            if not self.over:
                shard.model.teachers.ticked(self.now_s, shard.state)
            self._route_of(shard, shard.state.tick(self.now_s))

    def restart_buffer(self) -> None:
        """One shard is killed; another process of it goes on from the journal."""
        shard = self._rng.choice(self.shards)
        if shard.journal is not None:
            self.tally.buffer_restarts += 1
            shard.state = shard.journal.restarted(shard.state, self.now_s)

    def deliver_all(self) -> None:
        self._deliver_late(1.0)

    def teacher_failed(self, teacher: SimTeacher, lease: int) -> None:
        shard = self.shard_of("teacher", teacher.name)
        shard.model.teachers.failed(self.now_s, lease, shard.state)

    def teacher_lost(self, teacher: SimTeacher, *, new_process: bool = False) -> None:
        self.shard_of("teacher", teacher.name).model.teachers.lost(teacher.name, new_process=new_process)

    def learner_died(self) -> None:
        """What it has sent and no shard has received is lost."""
        self._merger = Merger(len(self.shards))
        for shard in self.shards:
            shard.late.clear()
            shard.unacked.clear()
            shard.model.learner_restarted()

    def learner_restarted(self, version: WeightVersion, parent: WeightVersion) -> None:
        for shard in self.shards:
            shard.model.tree.fork(version, parent)

    # ------------------------------------------------------------------------------------------------ internals

    def _deliver_late(self, share: float) -> list[Outgoing]:
        """Each shard gets, with this probability, all that the learner has sent to it."""
        out: list[Outgoing] = []
        for shard in self.shards:
            while shard.late and self.learner.connected and self._rng.random() < share:
                out += self._take(shard, "learner", "learner", *shard.late.popleft())
        return out

    def _take(
        self, shard: Shard, role: Role, name: str, message: m.Message, arrays: tuple[Array, ...]
    ) -> list[Outgoing]:
        shard.write(self.now_s, FromPeer(role, name, Received(message, arrays)))
        out = shard.state.handle(self.now_s, role, name, message, arrays)
        self._route_of(shard, out)
        return out

    def _route_of(self, shard: Shard, outgoing: list[Outgoing]) -> None:
        self._deliver(shard.model, shard.state, outgoing, partial(self._learner_receives_of, shard))
        shard.model.check(shard.state.snapshot(self.now_s), shard.state)
        self._check_whole()
        if self.tally.events % self.check_every == 0:
            self._audit()
        if self.tally.events % 500 == 0:
            for one in self.shards:
                one.model.forget(one.state)

    def _learner_receives_of(self, shard: Shard, out: Outgoing) -> None:
        if isinstance(out.message, m.BatchTrainedAck) and out.message.batch_id in shard.unacked:
            masked = shard.unacked.pop(out.message.batch_id)
            shard.acked.add(out.message.batch_id)
            if not self.over:
                shard.model.batch_trained(out.message.batch_id, masked)
        if isinstance(out.message, m.Batch):
            shard.answered.add(out.message.version)
        whole = self._merger.incoming(self.shards.index(shard), Received(out.message, out.arrays))
        if whole is None:
            return
        if isinstance(whole.message, m.EvalResult) and whole.message.eval_id not in self.learner.evaluations:
            return  # asked for again, late, when it had all
        if isinstance(whole.message, m.Batch):
            self._check_batch(whole.message, whole.arrays)
        self._learner_receives(Outgoing("learner", "learner", whole.message, whole.arrays))

    def _acknowledged(self, batch_id: int, masked: tuple[str, ...]) -> None:
        """Each model has heard it from its own shard."""

    # --------------------------------------------------------------------------------------------------- checks

    def _check_batch(self, batch: m.Batch, arrays: tuple[Array, ...]) -> None:
        """It is made of what the shards have given out for this step: nothing is missing, added or mixed up."""
        assert all(batch.version in shard.answered for shard in self.shards), "a shard has not answered"
        given: dict[str, tuple[m.BatchItem, tuple[Array, ...]]] = {}
        hist: Counter[int] = Counter()
        for shard in self.shards:
            for piece in shard.model.batches.values():
                if piece.message.version == batch.version and not piece.trained:
                    for i, item in enumerate(piece.message.items):
                        given[item.rollout_id] = item, piece.arrays[4 * i : 4 * i + 4]
                    hist.update(piece.message.staleness)
        assert [item.rollout_id for item in batch.items] == list(given), f"{batch.batch_id}: other rollouts"
        assert len(arrays) == 4 * len(batch.items) and dict(hist) == batch.staleness
        for i, item in enumerate(batch.items):
            own, frames = given[item.rollout_id]
            assert own == item and all(np.array_equal(a, b) for a, b in zip(frames, arrays[4 * i :], strict=False))

    def _check_whole(self) -> None:
        """The sums over all shards, from the models alone."""
        snapshot = self.state.snapshot(self.now_s)
        ledger, models = snapshot.ledger, [shard.model for shard in self.shards]
        assert ledger.balanced, ledger
        accepted = sum((model.accepted for model in models), Counter[str]())
        trained = sum((model.trained for model in models), Counter[str]())
        assert ledger.rollouts.accepted == accepted["train rollouts"], (ledger, accepted)
        assert ledger.segments.accepted == accepted["train segments"], (ledger, accepted)
        assert ledger.tokens.accepted == accepted["train tokens"], (ledger, accepted)
        assert ledger.tokens.trained == trained["tokens"], (ledger, trained)
        assert ledger.eval_tokens.trained == trained["eval tokens"], (ledger, trained)
        limit = (self.config.max_staleness + 1) * self.config.batch_rollouts
        assert 0 <= snapshot.queues["rollouts_live"] <= limit, f"pacing: {snapshot.queues}"
        assert max(snapshot.staleness_hist, default=0) <= self.config.max_staleness

    def _audit(self) -> None:
        for number, shard in enumerate(self.shards):
            audit(shard.state)
            if not shard.late and not self._merger.waits_for_pieces:
                audit_samples(shard.state, self.learner, lambda task, n=number: task % len(self.shards) == n)
