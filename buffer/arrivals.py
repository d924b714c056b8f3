"""Takes in what actors and teachers send: segments, scores and failures.

Segments of a rollout are accepted in the order of their index. One that arrives ahead of a missing one is held, neither
counted nor acknowledged, until the gap closes (its sender would send it again anyway). More than `max_held_segments`
held ones end the rollout as `out_of_order`. A rejected segment ends its rollout: nothing after it can be trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.evals import EvalDesk
from stillhouse.buffer.groups import GroupFilter
from stillhouse.buffer.ledger import EQUAL_REWARDS, TRUNCATED, UNSCORABLE, RejectReason
from stillhouse.buffer.lifecycle import Lifecycle
from stillhouse.buffer.peers import ActorPeer, Outbox, Peer, TeacherPeer
from stillhouse.buffer.rollouts import RolloutState, ScoreJob, SegmentState, Slot
from stillhouse.buffer.scoring import LeaseAnswer, ScoreDesk, ScoreStatus
from stillhouse.buffer.tickets import TicketDesk
from stillhouse.buffer.tokens import Array
from stillhouse.buffer.validation import SegmentChecker
from stillhouse.protocol.messages import (
    CancelRollout,
    RolloutFailed,
    RolloutFailedAck,
    ScoreFailed,
    Scores,
    ScoresAck,
    SegmentAck,
)
from stillhouse.protocol.messages import Segment as SegmentMessage

log = logging.getLogger(__name__)
LOGGED: Final = 5
"""Rewards outside the range that are logged; all are counted."""


class Arrivals:
    """Handles the messages of actors and teachers, and decides what happens to a rollout when one fails."""

    def __init__(
        self,
        config: BufferConfig,
        life: Lifecycle,
        tickets: TicketDesk,
        scoring: ScoreDesk,
        evals: EvalDesk,
        groups: GroupFilter,
        outbox: Outbox,
        vocab_size: int | None,
    ) -> None:
        self._config = config
        self._life = life
        self._book = life.book
        self._tickets = tickets
        self._scoring = scoring
        self._evals = evals
        self._groups = groups
        self._checker = SegmentChecker(config, life.versions, vocab_size)
        self._outbox = outbox
        self.reissued_total = 0
        """Attempts that were queued because an earlier one failed."""
        self.given_up_total = 0
        """Samples dropped for good."""
        self.rewards_out_of_range_total = 0

    # ------------------------------------------------------------------------------------- messages of actors

    def segment(self, now_s: float, actor: ActorPeer, message: SegmentMessage, arrays: tuple[Array, ...]) -> None:
        rollout = self._life.rollouts.get(message.rollout_id)
        if rollout is None:
            self._late_segment(actor, message)
        elif rollout.actor != actor.name:
            self._reject(actor, message, RejectReason.WRONG_ACTOR)
        elif 0 <= message.index < len(rollout.segments):
            self._acknowledge(actor, message, "duplicate")
        elif rollout.closed:
            reason = RejectReason.AFTER_FINAL if rollout.final else RejectReason.ROLLOUT_ENDED
            self._reject(actor, message, reason)
        elif message.index == len(rollout.segments):
            self._take(now_s, actor, rollout, message, arrays)
        elif message.index in rollout.held:
            return  # acknowledged when the gap closes
        elif message.index < 0 or len(rollout.held) >= self._config.max_held_segments:
            self._refuse(actor, rollout, message, RejectReason.OUT_OF_ORDER)
        else:
            rollout.held[message.index] = (message, arrays)

    def rollout_failed(self, now_s: float, actor: ActorPeer, message: RolloutFailed, arrays: Sequence[Array]) -> None:
        rollout = actor.rollouts.get(message.rollout_id)
        if rollout is not None:
            self.fail(rollout, self._book.failures.record(actor.name, message), tell_actor=False)
        self._outbox.send("actor", actor.name, RolloutFailedAck(message.rollout_id))

    def _in_range(self, message: SegmentMessage) -> SegmentMessage:
        """The final segment, without its rewards if one of them is outside the range."""
        limit = self._config.reward_limit
        given = [] if message.reward is None else [message.reward, *(part.reward for part in message.turn_rewards)]
        if (largest := max(given, key=abs, default=0.0)) and abs(largest) > limit:
            self.rewards_out_of_range_total += 1
            if self.rewards_out_of_range_total <= LOGGED:
                log.warning(
                    "rollout %s: the reward %g is outside +-%g (buffer.reward_limit), so the rollout is not scored "
                    "(reward_out_of_range)%s",
                    *(message.rollout_id, largest, limit),
                    "; more of them are only counted" if self.rewards_out_of_range_total == LOGGED else "",
                )
            return msgspec.structs.replace(message, reward=None, turn_rewards=())
        return message

    def _late_segment(self, actor: ActorPeer, message: SegmentMessage) -> None:
        n_segments = self._life.ended_segments(message.rollout_id)
        if n_segments is None:
            self._reject(actor, message, RejectReason.UNKNOWN_ROLLOUT)
        elif 0 <= message.index < n_segments:
            self._acknowledge(actor, message, "duplicate")
        else:
            self._reject(actor, message, RejectReason.ROLLOUT_ENDED)

    def _take(
        self, now_s: float, actor: ActorPeer, rollout: RolloutState, message: SegmentMessage, arrays: tuple[Array, ...]
    ) -> None:
        """Accept the rollout's next segment, and the held ones that follow it."""
        while True:
            refusal = self._checker.refusal(rollout, message, arrays)
            if refusal is not None:
                self._refuse(actor, rollout, message, refusal)
                return
            segment = self._life.accept(rollout, message, arrays)
            actor.tokens_total += segment.n_sampled
            if segment.state is SegmentState.UNSCORED:
                self._scoring.offer(rollout, segment)
            if message.final:
                self._life.mask_dropped(rollout, message.dropped, self._scoring.cancel)
                if self._config.mask_truncated and rollout.kind == "train" and message.finish_reason == "length":
                    self._life.mask_rollout(rollout, TRUNCATED, self._scoring.cancel)
                self._life.finish(rollout, self._in_range(message))
                self._tickets.returned(rollout)
                actor.done_total += 1
            else:
                self._tickets.heard(now_s, rollout)
            self._acknowledge(actor, message, "accepted")
            self._advance(rollout)
            following = rollout.held.pop(len(rollout.segments), None)
            if following is None:
                break
            message, arrays = following
            if rollout.closed:
                self._reject(actor, message, RejectReason.AFTER_FINAL)
                break
        if rollout.closed:
            self._refuse_held(rollout, RejectReason.AFTER_FINAL)

    def _acknowledge(self, actor: ActorPeer, message: SegmentMessage, status: Literal["accepted", "duplicate"]) -> None:
        self._outbox.send("actor", actor.name, SegmentAck(message.rollout_id, message.index, status))

    def _reject(self, actor: ActorPeer, message: SegmentMessage, reason: RejectReason) -> None:
        """Count a refused segment and notify its sender. The rollout, if there is one, goes on."""
        self._book.reject(reason)
        self._outbox.send("actor", actor.name, SegmentAck(message.rollout_id, message.index, "rejected", reason.value))

    def _refuse(self, actor: ActorPeer, rollout: RolloutState, message: SegmentMessage, reason: RejectReason) -> None:
        """Refuse a segment that the rollout needs, which ends the attempt."""
        self._reject(actor, message, reason)
        self.fail(rollout, f"invalid:{reason.value}", tell_actor=False)

    def _refuse_held(self, rollout: RolloutState, reason: RejectReason) -> None:
        for message, _ in rollout.held.values():
            self._book.reject(reason)
            ack = SegmentAck(message.rollout_id, message.index, "rejected", reason.value)
            self._outbox.send("actor", rollout.actor, ack)
        rollout.held.clear()

    # ----------------------------------------------------------------------------------- messages of teachers

    def scores(self, now_s: float, teacher: TeacherPeer, message: Scores, arrays: tuple[Array, ...]) -> None:
        answers, done, given_up = self._scoring.scores(now_s, teacher, message, arrays)
        teacher.done_total += len(done)
        for job in done:
            teacher.tokens_total += job.segment.n_sampled
            self._life.pool_scored(job.rollout, job.segment)
            self._advance(job.rollout)
        self.jobs_given_up(given_up)
        self.acknowledge_scores(teacher, message.leases, answers)

    def score_failed(self, now_s: float, teacher: TeacherPeer, message: ScoreFailed, arrays: Sequence[Array]) -> None:
        answers, given_up = self._scoring.failed(now_s, teacher, message.leases)
        self.jobs_given_up(given_up)
        self.acknowledge_scores(teacher, message.leases, answers)

    def acknowledge_scores(self, teacher: Peer, leases: tuple[int, ...], answers: Sequence[LeaseAnswer]) -> None:
        statuses: tuple[ScoreStatus, ...] = tuple(answer.status for answer in answers)
        reasons = tuple(answer.reason for answer in answers)
        self._outbox.send("teacher", teacher.name, ScoresAck(leases, statuses, reasons))

    def jobs_given_up(self, jobs: Iterable[ScoreJob]) -> None:
        """Settle segments that no teacher of a pool could score: train tokens are masked, an evaluation rollout is
        dropped as a whole."""
        for job in jobs:
            rollout, segment = job.rollout, job.segment
            if job.cancelled:
                continue
            self._scoring.cancel(segment)
            if rollout.kind == "eval":
                self.end_attempt(rollout, UNSCORABLE, tell_actor=True)
                self._give_up(rollout.slot)
            else:
                self._life.mask_segment(rollout, segment, UNSCORABLE)
                self._advance(rollout)

    # ------------------------------------------------------------------------------------------------ failures

    def fail(self, rollout: RolloutState, reason: str, *, tell_actor: bool) -> None:
        """End a rollout that its actor will not finish. If part of it was trained or is in a batch, it is cut off where
        it stands, and what was accepted may still be trained. Otherwise all of it is dropped and the sample is tried
        again."""
        if not rollout.untouched:
            self._stop(rollout, tell_actor=tell_actor, reason=reason)
            self._life.close(rollout, reason)
            self._advance(rollout)
            return
        slot = rollout.slot
        self.end_attempt(rollout, reason, tell_actor=tell_actor)
        if self._life.tasks.try_again(slot):
            self.reissued_total += 1
        else:
            self._give_up(slot)

    def abandon(self, rollout: RolloutState, reason: str) -> None:
        """Drop a rollout that is no longer wanted, without another attempt at its sample."""
        slot = rollout.slot
        self.end_attempt(rollout, reason, tell_actor=not rollout.closed)
        self._life.slot_over(slot)

    def _stop(self, rollout: RolloutState, *, tell_actor: bool, reason: str) -> None:
        """The rollout no longer runs at its actor."""
        if self._tickets.connected(rollout.actor):
            self._refuse_held(rollout, RejectReason.ROLLOUT_ENDED)
        rollout.held.clear()
        self._tickets.returned(rollout)
        if tell_actor and not rollout.closed:
            self._outbox.send("actor", rollout.actor, CancelRollout(rollout.rollout_id, reason))

    def end_attempt(self, rollout: RolloutState, reason: str, *, tell_actor: bool) -> None:
        """Drop whatever is open of the rollout. The caller decides what happens to its sample."""
        self._stop(rollout, tell_actor=tell_actor, reason=reason)
        for segment in rollout.segments:
            if segment.state is SegmentState.UNSCORED:
                self._scoring.cancel(segment)
        self._life.drop(rollout, reason)

    def _give_up(self, slot: Slot) -> None:
        """Drop the sample for good."""
        self.given_up_total += 1
        self._life.slot_over(slot)
        if slot.task.task.kind == "train":
            self._group_changed(slot)
            return
        self._evals.given_up(slot.task.task.eval_id)

    def _advance(self, rollout: RolloutState) -> None:
        """Something arrived or was settled: drop the group if that decides it, or deliver it to an evaluation."""
        if rollout.kind == "train":
            self._group_changed(rollout.slot)
        elif rollout.whole:
            self._evals.whole(rollout)

    def _group_changed(self, slot: Slot) -> None:
        """Drop the sample's group if there is nothing to learn from it."""
        for rollout in self._groups.take(slot.task):
            self.abandon(rollout, EQUAL_REWARDS)
