"""Evaluation rollouts: delivered to the learner as soon as they are whole, and kept until it confirms them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stillhouse.buffer.batch_size import Room, Size, fits_alone, size_of
from stillhouse.buffer.items import make_item
from stillhouse.buffer.ledger import TOO_LARGE
from stillhouse.buffer.lifecycle import Lifecycle
from stillhouse.buffer.peers import Outbox, Peer
from stillhouse.buffer.rollouts import RolloutState
from stillhouse.buffer.tokens import Array
from stillhouse.protocol.messages import BatchItem, EvalResult, EvalWanted

KEPT_EVALUATIONS = 64
"""Number of evaluations to keep, in case the learner asks again, of those whose results are all confirmed. They hold
only counts."""


class Result(NamedTuple):
    """One delivered rollout."""

    item: BatchItem
    arrays: tuple[Array, ...]
    size: Size


@dataclass(slots=True)
class Evaluation:
    """State of one evaluation."""

    eval_id: str
    subscribed: bool = False
    """The learner asked for results as they arrive."""
    outstanding: int = 0
    """Rollouts that are neither whole nor given up."""
    failed: int = 0
    results: dict[str, Result] = field(default_factory=dict[str, Result])
    """Results that were delivered but not confirmed, by rollout id."""
    on_the_way: dict[str, None] = field(default_factory=dict[str, None])
    """Ids of results sent since the learner last joined. The link delivers these, however slow it is."""
    unsent: dict[str, RolloutState] = field(default_factory=dict[str, RolloutState])
    """Whole rollouts that were not delivered, because the learner has not asked yet."""


class EvalDesk:
    """Owner of finished evaluation rollouts."""

    def __init__(self, life: Lifecycle, outbox: Outbox) -> None:
        self._life = life
        self._outbox = outbox
        self._evaluations: dict[str, Evaluation] = {}
        self._asked_early: dict[str, None] = {}
        """Evaluations that were asked for before any of their tasks was offered."""

    def __repr__(self) -> str:
        left = {e.eval_id: e.outstanding for e in self._evaluations.values()}
        return f"EvalDesk(outstanding={left})"

    def task_added(self, eval_id: str, group_size: int) -> None:
        evaluation = self._evaluations.get(eval_id)
        if evaluation is None:
            evaluation = self._evaluations[eval_id] = Evaluation(eval_id)
            evaluation.subscribed = eval_id in self._asked_early
            self._asked_early.pop(eval_id, None)
        evaluation.outstanding += group_size

    def whole(self, rollout: RolloutState) -> None:
        """Take a finished and scored rollout, and send it if the learner has asked."""
        evaluation = self._evaluations[rollout.slot.task.task.eval_id]
        evaluation.outstanding -= 1
        evaluation.unsent[rollout.rollout_id] = rollout
        if evaluation.subscribed:
            self._send(evaluation, self._deliver(evaluation))

    def given_up(self, eval_id: str) -> None:
        """Count a rollout that failed for good, and say so if the learner has asked."""
        evaluation = self._evaluations[eval_id]
        evaluation.outstanding -= 1
        evaluation.failed += 1
        if evaluation.subscribed:
            self._send(evaluation, [])

    def wanted(self, now_s: float, peer: Peer, message: EvalWanted, arrays: Sequence[Array]) -> None:
        """Answer the learner's request with the results that it neither has nor will receive. No answer while no task
        of this evaluation has been offered."""
        evaluation = self._evaluations.get(message.eval_id)
        if evaluation is None:
            self._asked_early[message.eval_id] = None
            return
        evaluation.subscribed = True
        self._deliver(evaluation)
        for rollout_id in message.have:
            evaluation.results.pop(rollout_id, None)
            evaluation.on_the_way.pop(rollout_id, None)
        room = Room()
        missing = [
            result
            for key, result in evaluation.results.items()
            if key not in evaluation.on_the_way and room.take([result.size])  # the rest when it asks again
        ]
        self._send(evaluation, missing)
        self._forget_old()

    def learner_away(self) -> None:
        """Stop sending results: the learner asks again when it is back."""
        for evaluation in self._evaluations.values():
            evaluation.subscribed = False
            evaluation.on_the_way.clear()

    def clear(self) -> None:
        """Forget all evaluations: the learner process that asked is gone, or the run is over."""
        self._asked_early.clear()
        self._evaluations.clear()

    def _deliver(self, evaluation: Evaluation) -> list[Result]:
        """Mark whole rollouts as delivered, and return them."""
        new: list[Result] = []
        for rollout_id, rollout in evaluation.unsent.items():
            size = size_of(rollout)
            if not fits_alone([size]):
                evaluation.failed += 1
                if rollout_id in self._life.rollouts:
                    self._life.mask_leased(rollout, self._life.lease(rollout), TOO_LARGE)
                continue
            result = Result(*make_item(rollout, tuple(rollout.offered_segments())), size)
            if rollout_id in self._life.rollouts:
                self._life.deliver(rollout)
            evaluation.results[rollout_id] = result
            new.append(result)
        evaluation.unsent.clear()
        return new

    def _send(self, evaluation: Evaluation, results: list[Result]) -> None:
        evaluation.on_the_way.update(dict.fromkeys(result.item.rollout_id for result in results))
        message = EvalResult(
            eval_id=evaluation.eval_id,
            items=tuple(result.item for result in results),
            failed=evaluation.failed,
            outstanding=evaluation.outstanding,
        )
        arrays = tuple(array for result in results for array in result.arrays)
        self._outbox.send("learner", self._outbox.learner, message, arrays)

    def _forget_old(self) -> None:
        """Forget all but the newest of the evaluations whose results the learner has."""
        done = [e for e in self._evaluations.values() if e.outstanding == 0 and not e.unsent and not e.results]
        for evaluation in done[:-KEPT_EVALUATIONS]:
            del self._evaluations[evaluation.eval_id]
