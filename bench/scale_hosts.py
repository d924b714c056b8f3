"""The peers of bench/scale.py over real links: a few processes, each with many simulated workers and their clients.

    host process   for each of its workers: client.recv -> take, then advance -> client.send; every POLL_S
    learner's own  the same for one worker; new versions reach the hosts by shared memory, as a broadcast would

The buffer is the real one, each shard in a process of its own, with its journal on disk (bench/scale_processes.py).
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from bench.scale_count import Figures, ShardFigures, TokenCount, ledger_faults
from bench.scale_peers import Actor, Array, Learner, Teacher
from bench.scale_processes import END_S, RUN, START_S, VOCABULARY, Processes, Shards, Shared, cpu_s, heard, idle_s
from bench.scale_settings import Scenario
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import Message, WeightVersion
from stillhouse.protocol.shards.client import client_of_all
from stillhouse.protocol.shards.division import all_addresses, shard_address

POLL_S: Final = 0.005
PEERS_PER_HOST: Final = 96
"""A client has threads and descriptors of its own, of which a process has about 1,000."""
RESEND_S: Final = 60.0
"""Nothing is lost here. A segment that came twice, the second time after the end, would be refused though it counts."""
FIGURES: Final = {f"some_figure_{i:02}_total": float(i) for i in range(32)}
"""As many as a real actor says with each heartbeat."""


class Link:
    """One worker's client, and what was sent and received by it."""

    def __init__(self, addresses: str, role: m.Role, name: str) -> None:
        hello = m.Hello(role, name, f"{name}-first", RUN, VOCABULARY, "default" if role == "teacher" else "")
        self.client = client_of_all(addresses, hello, connect_timeout_s=START_S, resend_s=RESEND_S)
        self.client.set_heartbeat(None, FIGURES)
        self.messages = 0
        self.over = False
        """The buffer has said that the run is over."""

    def send(self, message: Message, arrays: Sequence[Array]) -> None:
        self.messages += 1
        self.client.send(message, arrays)

    def deliver(self, peer: Actor | Teacher | Learner, clock: Clock) -> None:
        """Give the worker everything that came."""
        while (received := self.client.recv(0.0)) is not None:
            self.messages += 1
            if isinstance(received.message, m.Shutdown):
                self.over = True
            else:
                peer.take(clock.now_s(), received.message, received.arrays)


class Clock:
    """Simulated seconds since the common beginning."""

    def __init__(self, shared: Shared, time_scale: float) -> None:
        self._shared = shared
        self._time_scale = time_scale

    def now_s(self) -> float:
        return (time.monotonic() - self._shared[0]) / self._time_scale

    def wait_for_start(self) -> None:
        deadline_s = time.monotonic() + START_S
        while not self._shared[0]:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not all peers were connected after {START_S:.0f} s")
            time.sleep(0.01)


class HostReport(msgspec.Struct):
    """What one process of workers did."""

    messages: int
    sent_tokens: dict[int, int] = {}
    """By shard: sampled tokens in segments, without those that were refused because the run was over."""
    busy_slot_s: float = 0.0
    busy_teacher_s: float = 0.0
    late_s: float = 0.0
    """Longest time, simulated, by which something was done too late."""
    cpu_s: float = 0.0


@dataclass(frozen=True)
class LearnerReport:
    """What the learner's process did."""

    count: TokenCount
    ended_s: float
    late_s: float
    messages: int
    cpu_s: float
    buffer_cpu_s: tuple[float, ...]
    """CPU time of each shard from the end of the warm-up to the end of the last step."""
    measured_s: float
    """Real seconds between these two."""


def shard_of_peer(name: str, n_shards: int) -> int:
    """Actors and teachers are dealt to the shards in turn, as a launcher deals them."""
    return int(name.rpartition("-")[2]) % n_shards


def host(address: str, scenario: Scenario, names: Sequence[str], shared: Shared, report: Connection) -> None:
    """A process of actors and teachers."""
    clock = Clock(shared, scenario.time_scale)
    with ExitStack() as stack:
        peers: dict[str, tuple[Actor | Teacher, Link]] = {}
        for name in names:
            role: m.Role = "actor" if name.startswith("actor") else "teacher"
            link = Link(shard_address(address, shard_of_peer(name, scenario.shards)), role, name)
            peers[name] = (Actor if role == "actor" else Teacher)(scenario, link.send), link
            stack.enter_context(link.client)
            link.client.connect()
        report.send("ready")
        clock.wait_for_start()
        for peer, _ in peers.values():
            peer.start(0.0)
        newest = 0
        while not shared[3]:
            newest = _take_weights(shared, clock, newest, [one for one, _ in peers.values() if isinstance(one, Actor)])
            for peer, link in peers.values():
                link.deliver(peer, clock)
                if not link.over:
                    peer.advance(clock.now_s())
            time.sleep(POLL_S)
        for peer, link in peers.values():  # what was on its way to the buffer is accepted or refused
            link.client.flush(END_S)
            link.deliver(peer, clock)
        report.send(_report(peers, scenario.shards, clock.now_s()))


def _take_weights(shared: Shared, clock: Clock, newest: int, actors: Sequence[Actor]) -> int:
    with shared.get_lock():
        step, from_s = int(shared[1]), shared[2]
    if step == newest or clock.now_s() < from_s:
        return newest
    for actor in actors:
        actor.weights(clock.now_s(), WeightVersion(0, step))
    return step


def _report(peers: dict[str, tuple[Actor | Teacher, Link]], n_shards: int, now_s: float) -> HostReport:
    report = HostReport(sum(link.messages for _, link in peers.values()), cpu_s=time.process_time())
    sent = Counter[int]()
    for name, (peer, _) in peers.items():
        report.late_s = max(report.late_s, peer.late_s)
        if isinstance(peer, Actor):
            peer.settle_clock(now_s)
            report.busy_slot_s += peer.busy_slot_s
            sent[shard_of_peer(name, n_shards)] += peer.tokens_sent
        else:
            report.busy_teacher_s += peer.busy_s
    report.sent_tokens = dict(sent)
    return report


def learn(address: str, scenario: Scenario, pids: Sequence[int], shared: Shared, report: Connection) -> None:
    """The learner's process, which also reads the CPU time of the buffer's processes at the end of its steps."""

    def publish(at_s: float, version: WeightVersion) -> None:
        with shared.get_lock():
            shared[1], shared[2] = version.step, at_s

    clock = Clock(shared, scenario.time_scale)
    link = Link(all_addresses(address, scenario.shards), "learner", "learner-0")
    learner = Learner(scenario, link.send, publish)
    with link.client as client:
        client.connect()
        report.send("ready")
        clock.wait_for_start()
        learner.start(0.0)
        readings: dict[int, tuple[float, list[float]]] = {}
        while not learner.done:
            learner.look(clock.now_s(), some_are_here=client.waits_for_shards)
            link.deliver(learner, clock)
            if link.over:
                raise RuntimeError("the buffer ended the run before the learner")
            learner.advance(clock.now_s())
            if learner.steps not in readings:
                readings[learner.steps] = time.monotonic(), cpu_s(pids)
            time.sleep(POLL_S)
        ended_s = clock.now_s()
        client.flush(END_S)
        client.send(m.RunFinished(True, f"{learner.steps} steps"))
        deadline_s = time.monotonic() + END_S
        while time.monotonic() < deadline_s:
            received = client.recv(0.1)
            if received is not None and isinstance(received.message, m.Shutdown):
                break
        shared[3] = 1.0
    (began_s, before_s), (last_s, after_s) = readings[scenario.warm_up], readings[scenario.steps]
    used_s = tuple(after - before for after, before in zip(after_s, before_s, strict=True))
    work = learner.count, ended_s, learner.late_s, link.messages, time.process_time()
    report.send(LearnerReport(*work, used_s, last_s - began_s))


def wire_run(scenario: Scenario, run_dir: Path, limit_s: float) -> Figures:
    """One row of the table. Raises TimeoutError after `limit_s`."""
    processes = Processes()
    try:
        shards = Shards(processes, scenario, run_dir)
        names = [f"actor-{i}" for i in range(scenario.actors)] + [f"teacher-{i}" for i in range(scenario.teachers)]
        n_hosts = max(1, math.ceil(len(names) / PEERS_PER_HOST))
        common = shards.address, scenario
        hosts = [processes.start(host, *common, names[i::n_hosts], processes.shared) for i in range(n_hosts)]
        learner = processes.start(learn, *common, shards.pids, processes.shared)
        for connection in (*hosts, learner):
            heard(connection, START_S, "a process of simulated peers")
        idle_cpu = shards.cpu_when_idle()
        idle_before_s, began_s = idle_s(), time.monotonic()
        processes.shared[0] = time.monotonic()
        learned: LearnerReport = heard(learner, limit_s, "the learner")
        wall_s = time.monotonic() - began_s
        idle = (idle_s() - idle_before_s) / (wall_s * (os.cpu_count() or 1))
        reports: list[HostReport] = [heard(connection, END_S, "a host") for connection in hosts]
        peaks_mb = shards.peaks_mb()
    finally:
        processes.close()
    finals = shards.last_words()
    return Figures(
        count=learned.count,
        seconds=learned.ended_s,
        busy_slot_s=sum(one.busy_slot_s for one in reports),
        busy_teacher_s=sum(one.busy_teacher_s for one in reports),
        masked_tokens=sum(sum(final.ledger.tokens.masked.values()) for final in finals),
        accepted_tokens=sum(final.ledger.tokens.accepted for final in finals),
        ledger_faults=_faults(finals, reports, learned.count),
        messages=learned.messages + sum(one.messages for one in reports),
        shards=tuple(map(ShardFigures, learned.buffer_cpu_s, idle_cpu, peaks_mb)),
        measured_s=learned.measured_s,
        peers_cpu_s=learned.cpu_s + sum(one.cpu_s for one in reports),
        wall_s=wall_s,
        idle_share=max(0.0, min(1.0, idle)),
        late_s=max(learned.late_s, *(one.late_s for one in reports)),
    )


def _faults(finals: Sequence[m.Snapshot], reports: Sequence[HostReport], count: TokenCount) -> list[str]:
    """What is wrong with the shards' ledgers."""
    faults: list[str] = []
    for shard, final in enumerate(finals):
        sent = sum(report.sent_tokens.get(shard, 0) for report in reports)
        found = ledger_faults(final.ledger, sent_tokens=sent, trained_tokens=count.trained_by_shard[shard])
        faults += [f"shard {shard}: {fault}" for fault in found]
    return faults
