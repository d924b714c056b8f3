"""The schedule of bench/scale.py on a virtual clock: the buffer's state, or that of its shards, and simulated peers in
one process.

No wire and no journal: it says what the rules of pacing and release allow, exactly, and nothing about cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import Final

from bench.scale_count import Figures, ledger_faults
from bench.scale_peers import Actor, Array, Learner, Teacher
from bench.scale_settings import Scenario
from stillhouse.buffer.state import BufferState, Outgoing
from stillhouse.protocol.codec import Received
from stillhouse.protocol.messages import Ledger, Message, Role, WeightVersion
from stillhouse.protocol.shards.merger import Merger

WIRE_S: Final = 0.002
"""From the buffer to a peer. What a peer sends arrives at once."""
TICK_S: Final = 0.05


class VirtualRun:
    """One run. `run` goes on until the learner has made its steps."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        config = scenario.buffer_config().of_shard()
        self.shards = [BufferState(config, version=WeightVersion(0, 0)) for _ in range(scenario.shards)]
        self._merger = Merger(scenario.shards)
        self.now_s = 0.0
        self._mail: list[tuple[float, int, str, Message, Sequence[Array]]] = []
        """(when, number, peer's name, or "" for the buffer, ...)."""
        self._sent = 0
        self._swaps: list[tuple[float, WeightVersion]] = []
        actors = [f"actor-{i}" for i in range(scenario.actors)]
        teachers = [f"teacher-{i}" for i in range(scenario.teachers)]
        self.actors = {name: Actor(scenario, partial(self._to_buffer, name)) for name in actors}
        self.teachers = {name: Teacher(scenario, partial(self._to_buffer, name)) for name in teachers}
        self.learner = Learner(scenario, partial(self._to_buffer, "learner-0"), self._publish)
        self._peers: dict[str, Actor | Teacher | Learner] = {**self.actors, **self.teachers, "learner-0": self.learner}
        self._due: list[tuple[float, str]] = []
        self._noted: dict[str, float] = {}
        """When each peer has something due. Other entries of `_due` are out of date."""
        self._next_tick_s = TICK_S
        self.messages = 0

    def run(self) -> Figures:
        for name, peer in self._peers.items():
            role = _role(name)
            pool = "default" if role == "teacher" else ""
            for shard in self._shards_of(name):
                self._send_out(shard, self.shards[shard].peer_joined(0.0, role, name, name, pool))
            peer.start(0.0)
        while not self.learner.done:
            self._next()
        for actor in self.actors.values():
            actor.settle_clock(self.now_s)
        ledgers = [state.snapshot(self.now_s).ledger for state in self.shards]
        return Figures(
            count=self.learner.count,
            seconds=self.now_s,
            busy_slot_s=sum(actor.busy_slot_s for actor in self.actors.values()),
            busy_teacher_s=sum(teacher.busy_s for teacher in self.teachers.values()),
            masked_tokens=sum(sum(ledger.tokens.masked.values()) for ledger in ledgers),
            accepted_tokens=sum(ledger.tokens.accepted for ledger in ledgers),
            ledger_faults=self._faults(ledgers),
            messages=self.messages,
        )

    def _faults(self, ledgers: Sequence[Ledger]) -> list[str]:
        """What is wrong with the shards' ledgers."""
        faults: list[str] = []
        for shard, ledger in enumerate(ledgers):
            actors = [actor for name, actor in self.actors.items() if shard in self._shards_of(name)]
            sent, trained = sum(one.tokens_sent for one in actors), self.learner.count.trained_by_shard[shard]
            found = ledger_faults(ledger, sent_tokens=sent, trained_tokens=trained, over=False)
            faults += [f"shard {shard}: {fault}" for fault in found]
        return faults

    def _shards_of(self, name: str) -> Sequence[int]:
        """Shards that a peer talks to."""
        n = len(self.shards)
        return range(n) if _role(name) == "learner" else [int(name.rpartition("-")[2]) % n]

    def _next(self) -> None:
        """The earliest of: a message arrives, a peer has something due, new weights, a tick."""
        mail_s = self._mail[0][0] if self._mail else float("inf")
        due_s = self._due[0][0] if self._due else float("inf")
        swap_s = self._swaps[0][0] if self._swaps else float("inf")
        self.now_s = now_s = min(mail_s, due_s, swap_s, self._next_tick_s)
        if swap_s == now_s:
            _, version = self._swaps.pop(0)
            for name, actor in self.actors.items():
                actor.weights(now_s, version)
                self._note(name)
        elif mail_s == now_s:
            _, _, to, message, arrays = heapq.heappop(self._mail)
            self._peers[to].take(now_s, message, arrays)
            self._note(to)
        elif due_s == now_s:
            _, name = heapq.heappop(self._due)
            if self._noted.get(name) == due_s:
                del self._noted[name]
                self._peers[name].advance(now_s)
                self._note(name)
        else:
            self._next_tick_s = now_s + TICK_S
            for shard, state in enumerate(self.shards):
                self._send_out(shard, state.tick(now_s))

    def _note(self, name: str) -> None:
        due_s = self._peers[name].due_s
        if due_s != float("inf") and self._noted.get(name) != due_s:
            self._noted[name] = due_s
            heapq.heappush(self._due, (due_s, name))

    def _to_buffer(self, name: str, message: Message, arrays: Sequence[Array]) -> None:
        role = _role(name)
        parts = [(shard, message, arrays) for shard in self._shards_of(name)]
        for shard, part, frames in self._merger.outgoing(message, arrays) if role == "learner" else parts:
            self.messages += 1
            self._send_out(shard, self.shards[shard].handle(self.now_s, role, name, part, frames))

    def _send_out(self, shard: int, outgoing: Sequence[Outgoing]) -> None:
        """Post what a shard sends. The learner is sent what all shards have said together."""
        for role, name, message, arrays in outgoing:
            self.messages += 1
            received: Received | None = Received(message, tuple(arrays))
            if role == "learner":
                received = self._merger.incoming(shard, received)
                self.learner.look(self.now_s + WIRE_S, some_are_here=self._merger.waits_for_pieces)
            if received is not None:
                self._sent += 1
                mail = self.now_s + WIRE_S, self._sent, name, received.message, received.arrays
                heapq.heappush(self._mail, mail)

    def _publish(self, at_s: float, version: WeightVersion) -> None:
        self._swaps.append((at_s, version))


def _role(name: str) -> Role:
    return "actor" if name.startswith("actor") else "teacher" if name.startswith("teacher") else "learner"


def virtual_run(scenario: Scenario) -> Figures:
    """One row of the table."""
    return VirtualRun(scenario).run()
