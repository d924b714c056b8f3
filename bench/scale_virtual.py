"""The schedule of bench/scale.py on a virtual clock: the buffer's state and simulated peers in one process.

No wire and no journal: it says what the rules of pacing and release allow, exactly, and nothing about cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import Final

from bench.scale_count import Figures
from bench.scale_peers import Actor, Array, Learner, Teacher
from bench.scale_settings import Scenario
from buffer.state import BufferState, Outgoing
from protocol.messages import Message, Role, WeightVersion

WIRE_S: Final = 0.002
"""From the buffer to a peer. What a peer sends arrives at once."""
TICK_S: Final = 0.05


class VirtualRun:
    """One run. `run` goes on until the learner has made its steps."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.state = BufferState(scenario.buffer_config(), version=WeightVersion(0, 0))
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
            self._send_out(self.state.peer_joined(0.0, role, name, name, pool))
            peer.start(0.0)
        while not self.learner.done:
            self._next()
        for actor in self.actors.values():
            actor.settle_clock(self.now_s)
        ledger = self.state.snapshot(self.now_s).ledger
        return Figures(
            count=self.learner.count,
            seconds=self.now_s,
            busy_slot_s=sum(actor.busy_slot_s for actor in self.actors.values()),
            busy_teacher_s=sum(teacher.busy_s for teacher in self.teachers.values()),
            masked_tokens=sum(ledger.tokens.masked.values()),
            accepted_tokens=ledger.tokens.accepted,
            balanced=ledger.balanced and not ledger.rejected,
            messages=self.messages,
        )

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
            peer = self._peers[to]
            peer.take(now_s, message, arrays)
            self._note(to)
        elif due_s == now_s:
            _, name = heapq.heappop(self._due)
            if self._noted.get(name) == due_s:
                del self._noted[name]
                self._peers[name].advance(now_s)
                self._note(name)
        else:
            self._next_tick_s = now_s + TICK_S
            self._send_out(self.state.tick(now_s))

    def _note(self, name: str) -> None:
        due_s = self._peers[name].due_s
        if due_s != float("inf") and self._noted.get(name) != due_s:
            self._noted[name] = due_s
            heapq.heappush(self._due, (due_s, name))

    def _to_buffer(self, name: str, message: Message, arrays: Sequence[Array]) -> None:
        self.messages += 1
        self._send_out(self.state.handle(self.now_s, _role(name), name, message, arrays))

    def _send_out(self, outgoing: Sequence[Outgoing]) -> None:
        for _, name, message, arrays in outgoing:
            self.messages += 1
            self._sent += 1
            heapq.heappush(self._mail, (self.now_s + WIRE_S, self._sent, name, message, arrays))

    def _publish(self, at_s: float, version: WeightVersion) -> None:
        self._swaps.append((at_s, version))


def _role(name: str) -> Role:
    return "actor" if name.startswith("actor") else "teacher" if name.startswith("teacher") else "learner"


def virtual_run(scenario: Scenario) -> Figures:
    """One row of the table."""
    return VirtualRun(scenario).run()
