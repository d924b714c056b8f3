"""A BufferState among simulated peers, watched by the model: what every event goes through.

What peers do is in `tests.sim.buffer.actions`; they keep their books in `tests.sim.buffer.peers`. After each event the
ledger and the model's counts are compared, and every `check_every` events the buffer's records are audited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.core import Joined, Left
from stillhouse.buffer.state import BufferState, Outgoing
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Received
from stillhouse.protocol.messages import Role, WeightVersion
from stillhouse.protocol.server_events import FromPeer
from tests.sim.buffer.model import BufferModel, audit
from tests.sim.buffer.peers import VOCAB_SIZE, Array, SimActor, SimLearner, SimTeacher, Stream
from tests.sim.buffer.restarts import SimJournal, can_be_journaled
from tests.sim.buffer.samples import audit_samples


@dataclass
class Tally:
    """Counts of what happened, for a summary."""

    events: int = 0
    deaths: int = 0
    restarts: int = 0
    """Restarts of the learner."""
    buffer_restarts: int = 0
    drains: int = 0


class World:
    """A buffer with its peers, all connected."""

    def __init__(
        self,
        config: BufferConfig,
        *,
        n_actors: int = 3,
        pools: tuple[tuple[str, int], ...] = (("default", 2),),
        task_teachers: tuple[tuple[str, ...], ...] = (("default",),),
        group_sizes: tuple[int, ...] = (2,),
        start: WeightVersion | None = None,
        carried: m.Ledger | None = None,
        check_every: int = 1,
        journal: bool = False,
        learner_dies_often: bool = False,
    ) -> None:
        """`pools`: name and number of teachers. `task_teachers`, `group_sizes`: what tasks choose from.
        `check_every`: events between two audits. `journal`: the buffer may be restarted."""
        start = start or WeightVersion(0, 0)
        self.config = config
        self.now_s = 0.0
        self._open(config, start, carried, journal=journal)
        self.tally = Tally()
        self.check_every = check_every
        self.learner_dies_often = learner_dies_often
        self.task_teachers = task_teachers
        self.group_sizes = group_sizes
        self.over = False
        self.broadcast = start
        """Newest weights that the learner has sent to actors. The buffer may not have heard of them yet."""
        self.checkpoints: dict[WeightVersion, Stream] = {start: Stream()}
        self.left_out: set[str] = set()
        """Rollouts of which the learner left a part out of a step."""
        self.n_evals = 0
        self._n_incarnations = 0
        self.learner = SimLearner(self.incarnation(), start, Stream())
        self.actors = {f"actor-{i}": SimActor(f"actor-{i}", self.incarnation(), start) for i in range(n_actors)}
        names = [(f"teacher-{pool}-{i}", pool) for pool, n in pools for i in range(n)]
        self.teachers = {name: SimTeacher(name, self.incarnation(), pool) for name, pool in names}
        for actor in self.actors.values():
            self.join("actor", actor.name, actor.incarnation)
        for teacher in self.teachers.values():
            self.join("teacher", teacher.name, teacher.incarnation, teacher.pool)
        self.join("learner", "learner", self.learner.incarnation)

    def _open(self, config: BufferConfig, start: WeightVersion, carried: m.Ledger | None, *, journal: bool) -> None:
        self.state = BufferState(config, version=start, vocab_size=VOCAB_SIZE, carried=carried)
        self._journal = SimJournal(self.state, self.now_s) if journal and can_be_journaled(self.state) else None
        self.model = BufferModel(config, start)

    def incarnation(self) -> str:
        """A new process."""
        self._n_incarnations += 1
        return f"i{self._n_incarnations}"

    # --------------------------------------------------------------------------------------------------- events

    def join(self, role: Role, name: str, incarnation: str, pool: str = "") -> None:
        if self._journal is not None:
            self._journal.write(self.state, self.now_s, Joined(m.Hello(role, name, incarnation, "sim", "", pool)))
        self._route(self.state.peer_joined(self.now_s, role, name, incarnation, pool))

    def lose(self, role: Role, name: str) -> None:
        if self._journal is not None:
            self._journal.write(self.state, self.now_s, Left(role, name))
        self._route(self.state.peer_lost(self.now_s, role, name))

    def send(self, role: Role, name: str, message: m.Message, arrays: tuple[Array, ...] = ()) -> list[Outgoing]:
        """A peer's message reaches the buffer. Returns what the buffer sent; it has been delivered."""
        if self._journal is not None:
            self._journal.write(self.state, self.now_s, FromPeer(role, name, Received(message, arrays)))
        out = self.state.handle(self.now_s, role, name, message, arrays)
        self._route(out)
        return out

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        if self._journal is not None:
            self._journal.write(self.state, self.now_s, tick_s=self.now_s)
        if not self.over:
            self.model.teachers.ticked(self.now_s, self.state)
        self._route(self.state.tick(self.now_s))

    def deliver_all(self) -> None:
        """Nothing is on its way here: what is sent arrives at once."""

    def teacher_failed(self, teacher: SimTeacher, lease: int) -> None:
        """The teacher is about to say that it cannot score this."""
        self.model.teachers.failed(self.now_s, lease, self.state)

    def teacher_lost(self, teacher: SimTeacher, *, new_process: bool = False) -> None:
        self.model.teachers.lost(teacher.name, new_process=new_process)

    def learner_restarted(self, version: WeightVersion, parent: WeightVersion) -> None:
        """Another process of the learner has said Hello, and goes on from `parent` under the name `version`."""
        self.model.tree.fork(version, parent)

    def restart_buffer(self) -> None:
        """It is killed; another process goes on from the journal."""
        if self._journal is not None:
            self.tally.buffer_restarts += 1
            self.state = self._journal.restarted(self.state, self.now_s)

    def _deliver(
        self, model: BufferModel, state: BufferState, outgoing: list[Outgoing], to_learner: Callable[[Outgoing], None]
    ) -> None:
        """What a buffer has answered to one event goes to its model and to the peers."""
        self.tally.events += 1
        for out in outgoing:
            assert not isinstance(out.message, m.Refused), out
            pool = self.teachers[out.name].pool if out.role == "teacher" else ""
            model.watch(self.now_s, state, out, pool)
            if out.role == "actor":
                self._actor_receives(self.actors[out.name], out)
            elif out.role == "teacher":
                self._teacher_receives(self.teachers[out.name], out)
            else:
                to_learner(out)
        model.teachers.event_over(self.now_s, state)

    def _route(self, outgoing: list[Outgoing]) -> None:
        self._deliver(self.model, self.state, outgoing, self._learner_receives)
        self.model.check(self.state.snapshot(self.now_s), self.state)
        if self.tally.events % self.check_every == 0:
            audit(self.state)
            audit_samples(self.state, self.learner)
        if self.tally.events % 500 == 0:
            self.model.forget(self.state)

    def _acknowledged(self, batch_id: int, masked: tuple[str, ...]) -> None:
        """The learner hears that a batch counts as trained."""
        if not self.over:
            self.model.batch_trained(batch_id, masked)

    # ------------------------------------------------------------------------------------------------ deliveries

    def _actor_receives(self, actor: SimActor, out: Outgoing) -> None:
        assert actor.connected, f"{out.message} for {actor.name}, which is gone"
        match out.message:
            case m.Tickets():
                newest = self.learner.version
                assert all(t.min_version <= newest for t in out.message.tickets), f"a ticket for more than {newest}"
                actor.inbox.append((out.message, out.arrays))
                waiting = sum(len(tickets.tickets) for tickets, _ in actor.inbox)
                assert not actor.exact or len(actor.running) + waiting <= actor.capacity, "more tickets than credit"
            case m.CancelRollout(rollout_id=rollout_id):
                actor.end(rollout_id)
            case _:
                pass

    def _teacher_receives(self, teacher: SimTeacher, out: Outgoing) -> None:
        assert teacher.connected, f"{out.message} for {teacher.name}, which is gone"
        if isinstance(out.message, m.ScoreWork):
            assert not teacher.leaving, f"work for {teacher.name}, which is leaving"
            teacher.inbox.append((out.message, out.arrays))

    def _learner_receives(self, out: Outgoing) -> None:
        learner = self.learner
        assert learner.connected, f"{out.message} for the learner, which is gone"
        match out.message:
            case m.TasksAck(kind="train", tasks_wanted=wanted):
                learner.tasks_wanted = wanted
            case m.Batch(batch_id=0) as nothing_left:
                learner.empty_answers += 1
                learner.stream.settle(nothing_left.settled)
            case m.Batch() as batch:
                if self.config.release == "rollout":
                    learner.sees_whole_groups(batch)
                learner.receives(batch, out.arrays)
            case m.BatchTrainedAck(batch_id=batch_id):
                if batch_id in learner.unacked:
                    self._acknowledged(batch_id, learner.unacked.pop(batch_id).masked)
            case m.EvalResult() as result:
                evaluation = learner.evaluations[result.eval_id]
                evaluation.received.update(dict.fromkeys(item.rollout_id for item in result.items))
                evaluation.failed = result.failed
                missing = evaluation.expected - len(evaluation.received) - result.failed
                assert result.outstanding == missing, f"{result.outstanding} outstanding, {missing} missing"
            case _:
                pass
