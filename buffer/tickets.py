"""Tickets: which actor gets the next one, and which rollouts have been silent for too long."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from stillhouse.buffer.batch_size import in_messages
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.lifecycle import Lifecycle
from stillhouse.buffer.peers import ActorPeer, Outbox
from stillhouse.buffer.rollouts import RolloutState, make_ticket
from stillhouse.buffer.tokens import Array
from stillhouse.protocol.messages import SegmentsWanted, Ticket, Tickets

ASKED_PER_S: Final = 4000
"""Rollouts per second of which actors may be asked to send what they hold. Each may be a segment more to take in."""


class TicketDesk:
    """Issues tickets and watches for timeouts. Actors with credit take turns, one ticket each."""

    def __init__(self, config: BufferConfig, life: Lifecycle, outbox: Outbox) -> None:
        self._config = config
        self._life = life
        self._tasks = life.tasks
        self._pacing = life.pacing
        self._outbox = outbox
        self._actors: dict[str, ActorPeer] = {}
        """The next one to be asked for segments first."""
        self._to_ask = 0.0
        """Number of actors that are to be asked for segments, and were not yet."""
        self._ready: OrderedDict[str, ActorPeer] = OrderedDict()
        """Actors that may have credit left, the next in turn first."""
        self._running: OrderedDict[str, RolloutState] = OrderedDict()
        """Rollouts at actors, by id, the longest silent first (the timeout is the same for all)."""

    def __repr__(self) -> str:
        return f"TicketDesk(running={len(self._running)}, ready={list(self._ready)})"

    def actor_joined(self, actor: ActorPeer) -> None:
        self._actors[actor.name] = actor
        self.credit_changed(actor)

    def actor_lost(self, actor: ActorPeer) -> None:
        del self._actors[actor.name]
        self._ready.pop(actor.name, None)

    def connected(self, actor_name: str) -> bool:
        return actor_name in self._actors

    def credit_changed(self, actor: ActorPeer) -> None:
        if actor.free > 0:
            self._ready.setdefault(actor.name, actor)

    def may_start(self, n_samples: int, begun: bool) -> bool:
        """Return True if the next train task, with `n_samples` still to issue, may get a ticket. A group that must
        leave together is started only if there is room for all of it, and is completed (`begun`) though less may be
        allowed by then: half a group could wait for places that it holds itself."""
        if self._config.release != "rollout":
            return self._pacing.free > 0
        return (self._pacing.places if begun else self._pacing.free) >= n_samples

    def may_grow(self) -> bool:
        """Return True if a train ticket could be issued now, or after the next task is offered, given enough actors."""
        group = self._tasks.next_train_group
        if group is not None:
            return self.may_start(*group)
        return not self._tasks.stream_ended and self._pacing.free > 0

    def dispatch(self, now_s: float) -> None:
        """Issue as many tickets as credit and pacing allow."""
        tickets: dict[str, list[tuple[Ticket, tuple[Array, ...]]]] = {}
        while self._ready:
            name, actor = next(iter(self._ready.items()))
            if actor.free <= 0:
                del self._ready[name]
                continue
            found = self._tasks.next_slot(self.may_start, self._pacing.issue)
            if found is None:
                break
            slot, first = found
            if first:
                self._life.slot_issued(slot)
            task = slot.task
            is_train = task.task.kind == "train"
            ticket = make_ticket(slot, self._pacing.min_version(slot.n) if is_train else task.min_version)
            rollout = self._life.open(slot, msgspec.structs.replace(ticket, row=b""), name)
            actor.ticket_sent(rollout)
            self.heard(now_s, rollout)
            tickets.setdefault(name, []).append((ticket, (task.prompt_T,)))
            self._ready.move_to_end(name)
        for name, pairs in tickets.items():
            for part, prompts in in_messages(pairs):
                self._outbox.send("actor", name, Tickets(part), prompts)

    @property
    def round_s(self) -> float:
        """Shortest time in which all actors may be asked for segments."""
        return len(self._running) / ASKED_PER_S

    def ask_for_segments(self, share: float) -> None:
        """Ask this share of the actors, in turn, to send what they hold of unfinished segments."""
        self._to_ask += min(1.0, share) * len(self._actors)
        while self._to_ask >= 1.0:
            self._to_ask -= 1.0
            name = next(iter(self._actors))
            actor = self._actors[name] = self._actors.pop(name)
            if actor.rollouts:
                self._outbox.send("actor", name, SegmentsWanted())

    def heard(self, now_s: float, rollout: RolloutState) -> None:
        """Restart the timeout of a rollout: its ticket left, or a segment arrived."""
        rollout.deadline_s = now_s + self._config.ticket_timeout_s
        self._running[rollout.rollout_id] = rollout
        self._running.move_to_end(rollout.rollout_id)

    def returned(self, rollout: RolloutState) -> None:
        """Note that the rollout no longer runs at its actor."""
        self._running.pop(rollout.rollout_id, None)
        actor = self._actors.get(rollout.actor)
        if actor is not None:
            actor.rollouts.pop(rollout.rollout_id, None)

    def overdue(self, now_s: float) -> RolloutState | None:
        """A rollout that was silent for `ticket_timeout_s`, or None."""
        rollout = next(iter(self._running.values()), None)
        return rollout if rollout is not None and rollout.deadline_s <= now_s else None
