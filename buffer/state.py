"""The state of the buffer: events and clock readings in, messages out. No socket, thread, sleep or wall clock in here.

    LearnerStarted --> LearnerDesk --> go_back --> Lifecycle, TaskBook
    TasksOffered --> LearnerDesk --> TaskBook --(pacing, credit)--> TicketDesk --> Tickets
    Segment      --> Arrivals --> Lifecycle, ScoreDesk --(credit)--> ScoreWork
    Scores       --> Arrivals --> ScoreDesk, Lifecycle
    BatchWanted  --> LearnerDesk --> BatchDesk --(release policy, hard check)--> Batch
    BatchTrained --> LearnerDesk --> BatchDesk --> Lifecycle

Only `Lifecycle` changes the state of segments, rollouts and samples, together with the ledger. After each event,
`_pump` sends whatever the event made possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

from stillhouse.buffer.arrivals import Arrivals
from stillhouse.buffer.blobs import numbered
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.evals import EvalDesk
from stillhouse.buffer.groups import GroupFilter
from stillhouse.buffer.holdings import Place, Progress
from stillhouse.buffer.learner_desk import LearnerDesk
from stillhouse.buffer.ledger import RUN_ENDED, RejectReason
from stillhouse.buffer.lifecycle import Lifecycle
from stillhouse.buffer.peers import ActorPeer, Outbox, Outgoing, Peer, PeerTable, TeacherPeer
from stillhouse.buffer.release import BatchDesk
from stillhouse.buffer.scoring import LeaseAnswer, ScoreDesk
from stillhouse.buffer.tickets import TicketDesk
from stillhouse.buffer.tokens import Array
from stillhouse.protocol import messages as m
from stillhouse.protocol.flow import SENDERS
from stillhouse.protocol.messages import Message, Role, WeightVersion

__all__ = ["BufferState", "Outgoing"]

Handler: TypeAlias = Callable[[float, Any, Any, tuple[Array, ...]], None]
"""(now_s, peer, message, arrays). The types of peer and message depend on the handler."""


class BufferState:
    """Owner of every task, ticket, rollout, lease and batch, and of the ledger. `now_s` is any clock that never goes
    back.

    Messages from a peer may arrive twice, late and out of order, and each takes effect once. Messages to a peer are
    assumed to arrive once per incarnation (`protocol.flow`). Work that dies with a peer is recovered when the peer is
    declared lost, or by lease and ticket timeouts.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        version: WeightVersion,
        carried: m.Ledger | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`version`: weights that the run (re)starts from. `carried`: ledger of the run before a restart.
        `vocab_size`: token ids at or above it are rejected; None: only negative ones are."""
        self._config = config
        self._phase: Literal["running", "finished", "failed"] = "running"
        self._phase_reason = ""
        self._peers = PeerTable()
        self._teacher_weights: dict[str, m.WeightsRef] = {}
        """Newest weights for the teachers of a pool, which start with their own."""
        self.blobs_total = 0
        """Blobs that came in messages so far."""
        out = self._out = Outbox()
        life = self._life = Lifecycle(config, version, carried)
        tickets = self._tickets = TicketDesk(config, life, out)
        scoring = self._scoring = ScoreDesk(config, life.book, life.held, out)
        batches = self._batches = BatchDesk(config, life)
        evals = self._evals = EvalDesk(life, out)
        groups = self._groups = GroupFilter(config)
        arrivals = self._arrivals = Arrivals(config, life, tickets, scoring, evals, groups, out, vocab_size)
        self._learner = LearnerDesk(
            config, life, tickets, batches, evals, groups, arrivals, out, vocab_size, snapshot=self.snapshot
        )

    def __repr__(self) -> str:
        return (
            f"BufferState({self._phase}, {self._life.versions!r}, {self._life.pacing!r}, {self._life.tasks!r},"
            f" {self._tickets!r}, {self._scoring!r}, {self._batches!r}, {self._evals!r})"
        )

    @property
    def published(self) -> WeightVersion:
        """Newest version that the learner has published (for Welcome)."""
        return self._life.versions.published

    @property
    def held_back(self) -> dict[str, str]:
        """Teachers with an open circuit breaker, and the items that they failed."""
        return self._scoring.held_back

    @property
    def phase(self) -> Literal["running", "finished", "failed"]:
        """No longer `running` after RunFinished: all peers have been sent Shutdown."""
        return self._phase

    @property
    def counts_are_right(self) -> bool:
        """Compare what is counted as held with a recount of everything that is held."""
        held = self._life.held.counts
        return all(held[kind].only_counted() == counts.only_counted() for kind, counts in self._life.recount().items())

    # -------------------------------------------------------------------------------------------------- events

    def peer_joined(self, now_s: float, role: Role, name: str, incarnation: str, pool: str = "") -> list[Outgoing]:
        """Handle a Hello, the first one or one after a reconnect. The server sends the Welcome."""
        former = self._peers.find(role, name)
        if former is not None and former.alive and former.incarnation != incarnation:
            self._lose(now_s, former, for_good=True)
        if former is not None and former.incarnation == incarnation:
            peer, came = former, not former.alive
        else:
            peer, came = self._new_peer(now_s, role, name, incarnation, pool, former), True
        self._peers.enter(peer)
        peer.alive = True
        peer.heard_s = now_s
        if self._phase != "running":
            self._send_shutdown(peer)
            return self._out.take()
        if role == "learner":
            self._learner.joined(peer, is_new=peer is not former)
            self._send_membership()
        elif came and isinstance(peer, ActorPeer):
            self._tickets.actor_joined(peer)
            for rollout_id in peer.taken_back:
                self._out.send("actor", name, m.CancelRollout(rollout_id, "actor_lost"))
            peer.taken_back.clear()
            self._send_membership()
        elif came and isinstance(peer, TeacherPeer):
            if (weights := self._teacher_weights.get(peer.pool)) is not None:
                self._out.send("teacher", name, m.TeacherWeights(peer.pool, weights))
            self._scoring.teacher_joined(peer)
        self._pump(now_s)
        return self._out.take()

    def peer_lost(self, now_s: float, role: Role, name: str) -> list[Outgoing]:
        """Handle a peer that was silent for too long. A learner's batch stays leased until it says Goodbye or another
        incarnation joins: the learner may only be cut off, and report later that it has trained the batch."""
        peer = self._peers.find(role, name)
        if peer is not None and peer.alive:
            self._lose(now_s, peer, for_good=False)
            self._pump(now_s)
        return self._out.take()

    def handle(
        self, now_s: float, role: Role, name: str, message: Message, arrays: Sequence[Array] = ()
    ) -> list[Outgoing]:
        """Handle any message but Hello. Messages that a peer of this role cannot send are answered with Refused."""
        arrays = numbered(message, arrays, self.blobs_total)
        self.blobs_total = max((self.blobs_total, *arrays.numbers))
        peer = self._peers.find(role, name)
        if peer is None or not peer.alive:
            got = f"{type(message).__name__} from {role} {name}"
            self._out.send(role, name, m.Refused("not_hello_first", "say Hello first", got, "Hello"))
            return self._out.take()
        peer.heard_s = now_s
        handler = self._handlers.get(type(message))
        if handler is None or role not in SENDERS[type(message)]:
            expected = ", ".join(kind.__name__ for kind in self._handlers if role in SENDERS[kind])
            self._out.send(
                role, name, m.Refused("role", f"a {role} does not send this", type(message).__name__, expected)
            )
        elif self._phase == "running" or isinstance(message, _ANSWERED_ALWAYS):
            handler(now_s, peer, message, arrays)
            self._pump(now_s)
        else:
            self._handle_late(peer, message)
        return self._out.take()

    def tick(self, now_s: float) -> list[Outgoing]:
        """Check for overdue leases, overdue tickets and idle release."""
        if self._phase == "running":
            self._arrivals.jobs_given_up(self._scoring.expire(now_s))
            while (rollout := self._tickets.overdue(now_s)) is not None:
                self._arrivals.fail(rollout, "ticket_timeout", tell_actor=True)
            self._batches.tick(now_s)
            share = self._batches.actors_to_ask(now_s, self._tickets.round_s, self._scoring.usual_s)
            self._tickets.ask_for_segments(share)
            self._pump(now_s)
        return self._out.take()

    def give_up(self, reason: str) -> list[Outgoing]:
        """End the run because of SIGTERM, as if the learner had sent RunFinished(ok=False)."""
        if self._phase == "running":
            self._end(ok=False, reason=reason)
        return self._out.take()

    def snapshot(self, now_s: float) -> m.Snapshot:
        """Immutable view of everything at this moment. While the run goes on it costs the same whatever is held; its
        last ones recount everything that is left."""
        counts = self._life.held.counts if self._phase == "running" else self._life.recount()
        train, evaluation = counts["train"], counts["eval"]
        running = train.progress[Progress.RUNNING] + evaluation.progress[Progress.RUNNING]
        return m.Snapshot(
            time_s=now_s,
            phase=self._phase,
            phase_reason=self._phase_reason,
            version=self._life.pacing.trained_version,
            published=self.published,
            ledger=self._life.book.frozen(train.held, evaluation.held),
            queues={
                "tasks_queued": self._life.tasks.n_queued,
                "tickets_outstanding": running,
                "rollouts_waiting": train.progress[Progress.FINISHED],
                "tokens_unscored": train.tokens[Place.UNSCORED],
                "tokens_scoring": train.tokens[Place.SCORING],
                "tokens_scored": train.tokens[Place.SCORED],
                "tokens_in_batch": train.tokens[Place.IN_BATCH],
                "top_k_bytes": train.top_k_bytes,
                "tickets_free": self._life.pacing.free,
                "rollouts_live": self._life.pacing.live,
                "rollouts_allowed": self._life.pacing.allowed,
                "rollouts_reissued_total": self._arrivals.reissued_total,
                "rollouts_given_up_total": self._arrivals.given_up_total,
                "reward_out_of_range_total": self._arrivals.rewards_out_of_range_total,
                **self._scoring.counts,
                **self._groups.counts,
            },
            staleness_hist=dict(sorted(self._learner.staleness_hist.items())),
            max_staleness=self._config.max_staleness,
            peers=tuple(
                peer.view(now_s, len(self._batches.leased) if peer.role == "learner" else None) for peer in self._peers
            ),
            forgotten=dict(self._peers.forgotten),
            failures=self._life.book.failures.records,
        )

    # ------------------------------------------------------------------------------------------------ handlers

    @cached_property
    def _handlers(self) -> dict[type[Any], Handler]:
        """Handlers by type of message. `protocol.flow.SENDERS` says which roles may send it."""
        learner, arrivals = self._learner, self._arrivals
        return {
            m.Heartbeat: self._heartbeat,
            m.Goodbye: self._goodbye,
            m.SnapshotWanted: self._snapshot_wanted,
            m.TicketCredit: self._ticket_credit,
            m.Segment: arrivals.segment,
            m.RolloutFailed: arrivals.rollout_failed,
            m.ScoreCredit: self._score_credit,
            m.Scores: arrivals.scores,
            m.ScoreFailed: arrivals.score_failed,
            m.LearnerStarted: learner.started,
            m.TasksOffered: learner.tasks_offered,
            m.BatchWanted: learner.batch_wanted,
            m.BatchTrained: learner.batch_trained,
            m.EvalWanted: self._evals.wanted,
            m.VersionPublished: learner.version_published,
            m.PostWeightPlan: self._post_weight_plan,
            m.TeacherWeights: self._new_teacher_weights,
            m.RunFinished: self._run_finished,
        }

    def _heartbeat(self, now_s: float, peer: Peer, message: m.Heartbeat, arrays: Sequence[Array]) -> None:
        peer.version = message.version
        peer.stats = message.stats
        self._out.send(peer.role, peer.name, m.HeartbeatReply(self.published))

    def _goodbye(self, now_s: float, peer: Peer, message: m.Goodbye, arrays: Sequence[Array]) -> None:
        self._lose(now_s, peer, for_good=True)

    def _snapshot_wanted(self, now_s: float, peer: Peer, message: m.SnapshotWanted, arrays: Sequence[Array]) -> None:
        self._out.send(peer.role, peer.name, self.snapshot(now_s))

    def _ticket_credit(self, now_s: float, actor: ActorPeer, message: m.TicketCredit, arrays: Sequence[Array]) -> None:
        actor.give_credit(message)
        self._tickets.credit_changed(actor)

    def _score_credit(
        self, now_s: float, teacher: TeacherPeer, message: m.ScoreCredit, arrays: Sequence[Array]
    ) -> None:
        teacher.give_credit(message)
        self._scoring.credit_changed(teacher)

    def _post_weight_plan(self, now_s: float, peer: Peer, message: m.PostWeightPlan, arrays: Sequence[Array]) -> None:
        for name in message.plan.members:
            actor = self._peers.find("actor", name)
            if actor is not None and actor.alive:
                self._out.send("actor", name, message.plan)

    def _new_teacher_weights(
        self, now_s: float, peer: Peer, message: m.TeacherWeights, arrays: Sequence[Array]
    ) -> None:
        self._teacher_weights[message.pool] = message.weights
        for teacher in self._peers:
            if isinstance(teacher, TeacherPeer) and teacher.alive and teacher.pool == message.pool:
                self._out.send("teacher", teacher.name, message)

    def _run_finished(self, now_s: float, peer: Peer, message: m.RunFinished, arrays: Sequence[Array]) -> None:
        self._end(ok=message.ok, reason=message.reason)

    def _end(self, *, ok: bool, reason: str) -> None:
        self._phase = "finished" if ok else "failed"
        self._phase_reason = reason
        self._batches.leased.clear()
        self._batches.forget_request()
        for rollout in list(self._life.rollouts.values()):
            self._arrivals.abandon(rollout, RUN_ENDED)
        for slot in self._life.tasks.clear():
            self._life.slot_over(slot)
        self._evals.clear()
        for other in self._peers:
            if other.alive:
                self._send_shutdown(other)

    def _handle_late(self, peer: Peer, message: Message) -> None:
        """Answer a message that arrives after RunFinished: messages that need an answer get one, others a Shutdown."""
        match message:
            case m.Segment():
                self._life.book.reject(RejectReason.RUN_OVER)
                reason = RejectReason.RUN_OVER.value
                ack = m.SegmentAck(message.rollout_id, message.index, "rejected", reason)
                self._out.send("actor", peer.name, ack)
            case m.RolloutFailed():
                self._out.send("actor", peer.name, m.RolloutFailedAck(message.rollout_id))
            case m.Scores() | m.ScoreFailed():
                self._arrivals.acknowledge_scores(peer, message.leases, [LeaseAnswer("expired")] * len(message.leases))
            case _:
                self._send_shutdown(peer)

    # ----------------------------------------------------------------------------------------------- internals

    def _pump(self, now_s: float) -> None:
        """Send what the event made possible: score leases, a batch and tickets. Ask for tasks if needed."""
        if self._phase != "running":
            return
        self._scoring.dispatch(now_s)
        self._learner.form_batch(now_s)
        self._tickets.dispatch(now_s)
        self._learner.ask_for_tasks()

    def _new_peer(self, now_s: float, role: Role, name: str, incarnation: str, pool: str, former: Peer | None) -> Peer:
        if role == "actor":
            return ActorPeer(name, incarnation, now_s, former)
        if role == "teacher":
            return TeacherPeer(name, pool, incarnation, now_s, self._scoring.new_breaker(name), former)
        return Peer(role, name, incarnation, now_s, former)

    def _lose(self, now_s: float, peer: Peer, *, for_good: bool) -> None:
        """Take back the tickets and leases of a peer. `for_good`: this process of it will not be heard again."""
        peer.alive = False
        if peer.role == "launcher":
            self._peers.remove(peer)  # every link of a launcher has a name of its own, and its record holds nothing
            return
        if self._phase != "running":
            return
        if isinstance(peer, ActorPeer):
            self._tickets.actor_lost(peer)
            for rollout in peer.lost():
                self._arrivals.fail(rollout, "actor_lost", tell_actor=False)
            self._send_membership()
        elif isinstance(peer, TeacherPeer):
            peer.lost()
            self._arrivals.jobs_given_up(self._scoring.teacher_lost(now_s, peer))
        elif peer.role == "learner":
            self._learner.lost(peer, for_good=for_good)
            return
        if isinstance(forgotten := self._peers.gone(peer), TeacherPeer):
            self._scoring.teacher_forgotten(forgotten)

    def _send_membership(self) -> None:
        actors = [peer for peer in self._peers if peer.role == "actor" and peer.alive]
        membership = m.Membership(tuple(a.name for a in actors), tuple(a.incarnation for a in actors))
        self._out.send("learner", self._out.learner, membership)

    def _send_shutdown(self, peer: Peer) -> None:
        self._out.send(peer.role, peer.name, m.Shutdown(self._phase == "finished", self._phase_reason))


_ANSWERED_ALWAYS = (m.Heartbeat, m.Goodbye, m.SnapshotWanted, m.BatchTrained)
"""Messages that are handled after RunFinished as before."""
