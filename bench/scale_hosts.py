"""The peers of bench/scale.py over real links: a few processes, each with many simulated workers and their clients.

    host process   for each of its workers: client.recv -> take, then advance -> client.send; every POLL_S
    learner's own  the same for one worker; new versions reach the hosts by shared memory, as a broadcast would

The buffer is the real one, in a process of its own, with its journal on disk.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

import buffer.server
from bench.scale_count import Figures
from bench.scale_peers import Actor, Array, Learner, Teacher
from bench.scale_settings import Scenario
from protocol import messages as m
from protocol.client import Client
from protocol.messages import Message, WeightVersion

RUN: Final = "scale"
VOCABULARY: Final = "ab" * 32
POLL_S: Final = 0.005
START_S: Final = 60.0
END_S: Final = 30.0
PEERS_PER_HOST: Final = 96
"""A client has threads and descriptors of its own, of which a process has about 1,000."""

Shared: TypeAlias = "SynchronizedArray[float]"
"""[0] real time at which simulated time begins (monotonic; 0: not yet), [1] newest published step, [2] from when on it
is sampled with (simulated), [3] 1 when the learner has ended."""


class Link:
    """One worker's client, and what was sent and received by it."""

    def __init__(self, address: str, role: m.Role, name: str) -> None:
        hello = m.Hello(role, name, f"{name}-first", RUN, VOCABULARY, "default" if role == "teacher" else "")
        self.client = Client(address, hello, connect_timeout_s=START_S)
        self.messages = 0

    def send(self, message: Message, arrays: Sequence[Array]) -> None:
        self.messages += 1
        self.client.send(message, arrays)

    def deliver(self, peer: Actor | Teacher | Learner, clock: Clock) -> bool:
        """Give the worker everything that came. False: the run is over."""
        while (received := self.client.recv(0.0)) is not None:
            self.messages += 1
            if isinstance(received.message, m.Shutdown):
                return False
            peer.take(clock.now_s(), received.message, received.arrays)
        return True


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
    busy_slot_s: float = 0.0
    busy_teacher_s: float = 0.0
    late_s: float = 0.0
    """Longest time, simulated, by which something was done too late."""
    cpu_s: float = 0.0


def host(address: str, scenario: Scenario, names: Sequence[str], shared: Shared, report: Connection) -> None:
    """A process of actors and teachers."""
    clock = Clock(shared, scenario.time_scale)
    with ExitStack() as stack:
        peers: list[tuple[Actor | Teacher, Link]] = []
        for name in names:
            role: m.Role = "actor" if name.startswith("actor") else "teacher"
            link = Link(address, role, name)
            peers.append(((Actor if role == "actor" else Teacher)(scenario, link.send), link))
            stack.enter_context(link.client)
            link.client.connect()
        report.send("ready")
        clock.wait_for_start()
        for peer, _ in peers:
            peer.start(0.0)
        newest = 0
        while not shared[3]:
            newest = _take_weights(shared, clock, newest, [peer for peer, _ in peers if isinstance(peer, Actor)])
            for peer, link in peers:
                if not link.deliver(peer, clock):
                    break
                peer.advance(clock.now_s())
            time.sleep(POLL_S)
        report.send(_report([peer for peer, _ in peers], sum(link.messages for _, link in peers), clock.now_s()))


def _take_weights(shared: Shared, clock: Clock, newest: int, actors: Sequence[Actor]) -> int:
    with shared.get_lock():
        step, from_s = int(shared[1]), shared[2]
    if step == newest or clock.now_s() < from_s:
        return newest
    for actor in actors:
        actor.weights(clock.now_s(), WeightVersion(0, step))
    return step


def _report(peers: Sequence[Actor | Teacher], messages: int, now_s: float) -> HostReport:
    report = HostReport(messages, cpu_s=time.process_time())
    for peer in peers:
        report.late_s = max(report.late_s, peer.late_s)
        if isinstance(peer, Actor):
            peer.settle_clock(now_s)
            report.busy_slot_s += peer.busy_slot_s
        else:
            report.busy_teacher_s += peer.busy_s
    return report


def learn(address: str, scenario: Scenario, shared: Shared, report: Connection) -> None:
    """The learner's process."""

    def publish(at_s: float, version: WeightVersion) -> None:
        with shared.get_lock():
            shared[1], shared[2] = version.step, at_s

    clock = Clock(shared, scenario.time_scale)
    link = Link(address, "learner", "learner-0")
    learner = Learner(scenario, link.send, publish)
    with link.client as client:
        client.connect()
        report.send("ready")
        clock.wait_for_start()
        learner.start(0.0)
        while not learner.done:
            if not link.deliver(learner, clock):
                raise RuntimeError("the buffer ended the run before the learner")
            learner.advance(clock.now_s())
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
    report.send((learner.count, ended_s, learner.late_s, link.messages, time.process_time()))


def serve(scenario: Scenario, run_dir: str, report: Connection) -> None:
    """The buffer's process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    code = buffer.server.main(
        config=scenario.buffer_config(), run_id=RUN, run_dir=Path(run_dir), vocab_fingerprint=VOCABULARY
    )
    report.send(_peak_mb())
    sys.exit(code)


def _peak_mb() -> float:
    """Largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


class Processes:
    """Starts processes that report over pipes, and ends those that are left."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.shared: Shared = self._context.Array("d", 4)
        self._all: list[Any] = []

    def start(self, target: Any, *args: Any) -> Connection:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        theirs.close()
        self._all.append(process)
        return ours

    def close(self) -> None:
        for process in self._all:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()


def heard(connection: Connection, timeout_s: float, what: str) -> Any:
    """What a process reports. Raises TimeoutError, and EOFError if it died."""
    if not connection.poll(timeout_s):
        raise TimeoutError(f"{what} said nothing for {timeout_s:.0f} s")
    return connection.recv()


def wire_run(scenario: Scenario, run_dir: Path, limit_s: float) -> Figures:
    """One row of the table. Raises TimeoutError after `limit_s`."""
    processes = Processes()
    try:
        run_dir.mkdir(parents=True)
        served = processes.start(serve, scenario, str(run_dir))
        listens = _address(run_dir)
        address = listens.address
        names = [f"actor-{i}" for i in range(scenario.actors)] + [f"teacher-{i}" for i in range(scenario.teachers)]
        n_hosts = max(1, math.ceil(len(names) / PEERS_PER_HOST))
        hosts = [processes.start(host, address, scenario, names[i::n_hosts], processes.shared) for i in range(n_hosts)]
        learner = processes.start(learn, address, scenario, processes.shared)
        for connection in (*hosts, learner):
            heard(connection, START_S, "a process of simulated peers")
        idle_before_s, began_s, cpu_before_s = idle_s(), time.monotonic(), process_cpu_s(listens.pid)
        processes.shared[0] = time.monotonic()
        count, ended_s, late_s, messages, learner_cpu_s = heard(learner, limit_s, "the learner")
        wall_s, cpu_s = time.monotonic() - began_s, process_cpu_s(listens.pid) - cpu_before_s
        idle = (idle_s() - idle_before_s) / (wall_s * (os.cpu_count() or 1))
        reports: list[HostReport] = [heard(connection, END_S, "a host") for connection in hosts]
        peak_mb = heard(served, END_S + START_S, "the buffer")
    finally:
        processes.close()
    final = msgspec.json.decode((run_dir / "ledger.json").read_bytes(), type=m.Snapshot)
    return Figures(
        count=count,
        seconds=ended_s,
        busy_slot_s=sum(one.busy_slot_s for one in reports),
        busy_teacher_s=sum(one.busy_teacher_s for one in reports),
        masked_tokens=sum(final.ledger.tokens.masked.values()),
        accepted_tokens=final.ledger.tokens.accepted,
        balanced=final.ledger.balanced and set(final.ledger.rejected) <= {"run_over"},
        messages=messages + sum(one.messages for one in reports),
        buffer_cpu_s=cpu_s,
        buffer_peak_mb=peak_mb,
        peers_cpu_s=learner_cpu_s + sum(one.cpu_s for one in reports),
        wall_s=wall_s,
        idle_share=max(0.0, min(1.0, idle)),
        late_s=max(late_s, *(one.late_s for one in reports)),
    )


def _address(run_dir: Path) -> buffer.server.BufferAddress:
    deadline_s = time.monotonic() + START_S
    while not (file := run_dir / "buffer.json").exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the buffer did not listen after {START_S:.0f} s")
        time.sleep(0.02)
    return msgspec.json.decode(file.read_bytes(), type=buffer.server.BufferAddress)


def idle_s() -> float:
    """Seconds that the machine's cores were idle since it started, summed over cores."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[4]) / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
