"""Real processes with a real WeightReceiver and an engine that only records: what weights are sent to in the tests and
measurements of weight transport.

    fleet = ActorFleet(); fleet.start(["actor-0", ...]); Publisher(..., post_plan=fleet.post_plan)
    publisher.membership(fleet.membership())
    fleet.wait_for(version, timeout_s)          -> what each actor staged last

Processes come from a fork server that has torch loaded (tens of milliseconds each). Times are of the system-wide
monotonic clock, so that those of different processes can be compared.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.context
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from stillhouse.engines.base import EngineStats, GenerationDelta, GenerationRequest
from stillhouse.engines.torch.weights import EmbeddedWeights
from stillhouse.protocol.messages import Membership, WeightPlan, WeightVersion
from stillhouse.weights.buckets import EqualBuckets
from stillhouse.weights.group_operations import connect_store
from stillhouse.weights.receiver import WeightReceiver
from stillhouse.weights.transports.collective import WeightGroup


@dataclass(frozen=True, slots=True)
class Staged:
    """actor -> fleet: the engine was given these weights."""

    version: WeightVersion
    at_s: float
    digest: str
    """Empty when digests are off."""


@dataclass(frozen=True, slots=True)
class Fault:
    """fleet -> actor: do this to yourself."""

    signum: int
    at_operation: int | None
    """Just before the so-many-th wait for an operation of a group (0 = the next one); None = now."""


@dataclass(frozen=True, slots=True)
class Report:
    """actor -> fleet, when asked."""

    stats: dict[str, float]
    failure: str | None


def fork_server() -> multiprocessing.context.ForkServerContext:
    """The fork server of these processes, with torch and this module loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sim.weights.weight_actors"])
    return context


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class RecordingEngine:
    """Takes weights like an engine and reports them; generates nothing."""

    def __init__(self, connection: Connection, *, digests: bool) -> None:
        self._connection = connection
        self._version = WeightVersion(0, 0)
        self._digests = digests
        self.refuses: str | None = None

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0.0, 0, self._version)

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        named = [(name, tensor.clone()) for name, tensor in tensors]
        if self.refuses is not None:
            raise ValueError(self.refuses)
        digest = digest_of(named) if self._digests else ""
        self._version = version
        self._connection.send(Staged(version, time.monotonic(), digest))

    def submit(self, request: GenerationRequest) -> None:
        raise ValueError(f"{request.request_id}: this engine does not generate")

    def abort(self, request_id: str) -> None: ...

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        return []

    def close(self) -> None: ...


def actor_main(name: str, connection: Connection, digests: bool) -> None:
    """The process: obeys the fleet's orders until its end of the pipe closes."""
    torch.set_num_threads(1)
    engine = RecordingEngine(connection, digests=digests)
    receiver = WeightReceiver(EmbeddedWeights(engine), name=name)
    receiver.start()
    while True:
        try:
            order = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        match order:
            case WeightPlan():
                receiver.handle_plan(order)
            case Fault():
                _arm(order)
            case str():
                engine.refuses = order
            case None:
                connection.send(Report(receiver.stats, _failure_of(receiver)))
            case _:
                raise TypeError(f"no such order: {order!r}")
    receiver.close()


def doomed_rank(host: str, port: int, rank: int, world_size: int, layout: EqualBuckets, fault: Fault) -> None:
    """A process that takes part in one broadcast of a bare group, until its fault strikes."""
    _arm(fault)
    group = WeightGroup(connect_store(host, port, 60.0), group_epoch=1, rank=rank, world_size=world_size)
    group.join(60.0)
    group.receive(1, layout, 60.0)


def _arm(fault: Fault) -> None:
    if fault.at_operation is None:
        os.kill(os.getpid(), fault.signum)
        return
    left = fault.at_operation
    finish = WeightGroup._finish_oldest  # pyright: ignore[reportPrivateUsage]

    def finish_or_fail(self: WeightGroup, deadline_s: float) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), fault.signum)
        left -= 1
        finish(self, deadline_s)

    WeightGroup._finish_oldest = finish_or_fail  # pyright: ignore[reportPrivateUsage]


def _failure_of(receiver: WeightReceiver) -> str | None:
    try:
        receiver.raise_if_failed()
    except RuntimeError as error:
        return str(error)
    return None


@dataclass(slots=True)
class Actor:
    """One process as the fleet sees it."""

    name: str
    incarnation: str
    process: BaseProcess
    connection: Connection
    staged: list[Staged] = field(default_factory=list[Staged])
    reports: list[Report] = field(default_factory=list[Report])

    def pump(self) -> None:
        try:
            while self.connection.poll():
                message: Staged | Report = self.connection.recv()
                if isinstance(message, Staged):
                    self.staged.append(message)
                else:
                    self.reports.append(message)
        except (EOFError, ConnectionResetError):
            return


class ActorFleet:
    """Starts, feeds and ends the processes. Also stands for the buffer: it passes plans on."""

    def __init__(self, *, digests: bool = True) -> None:
        self._digests = digests
        self._context = fork_server()
        self._incarnations = 0
        self.actors: dict[str, Actor] = {}
        self.plans: list[WeightPlan] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self, names: Iterable[str]) -> None:
        """Start these actors, or start them again."""
        for name in names:
            ours, theirs = self._context.Pipe()
            self._incarnations += 1
            args = (name, theirs, self._digests)
            process = self._context.Process(target=actor_main, args=args, name=name, daemon=True)
            process.start()
            theirs.close()
            self.actors[name] = Actor(name, f"i{self._incarnations}", process, ours)

    def membership(self, *, without: Sequence[str] = ()) -> Membership:
        present = [actor for actor in self.actors.values() if actor.name not in without]
        return Membership(tuple(actor.name for actor in present), tuple(actor.incarnation for actor in present))

    def post_plan(
        self, plan: WeightPlan, change: Callable[[str, WeightPlan], WeightPlan] = lambda _name, plan: plan
    ) -> None:
        """`change`: what this actor gets in its place."""
        self.plans.append(plan)
        for name in plan.members:
            self.order(name, change(name, plan))

    def order(self, name: str, order: object) -> None:
        """A dead actor does not hear it."""
        try:
            self.actors[name].connection.send(order)
        except (BrokenPipeError, ConnectionResetError):
            return

    def signal(self, name: str, signum: int) -> None:
        """A dead actor does not feel it."""
        process = self.actors[name].process
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):  # the fork server, its parent, may have reaped it just now
                os.kill(process.pid, signum)

    def wait_for(
        self, version: WeightVersion, timeout_s: float, names: Iterable[str] | None = None
    ) -> dict[str, Staged]:
        """Wait until these actors (default: all) have staged `version` or newer, and return it. Raises TimeoutError."""
        wanted = [self.actors[name] for name in (self.actors if names is None else names)]
        deadline_s = time.monotonic() + timeout_s
        while True:
            for actor in wanted:
                actor.pump()
            late = [actor.name for actor in wanted if not actor.staged or actor.staged[-1].version < version]
            if not late:
                return {actor.name: actor.staged[-1] for actor in wanted}
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"after {timeout_s} s {late} have not staged {version}")
            time.sleep(0.002)

    def report(self, name: str, timeout_s: float = 10.0) -> Report:
        """Ask an actor for its figures."""
        actor = self.actors[name]
        actor.reports.clear()
        self.order(name, None)
        deadline_s = time.monotonic() + timeout_s
        while not actor.reports:
            actor.pump()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{name} does not answer")
            time.sleep(0.002)
        return actor.reports[-1]

    def close(self) -> None:
        """End all processes: those that can by themselves, the others by SIGKILL."""
        for actor in self.actors.values():
            actor.connection.close()
            self.signal(actor.name, signal.SIGCONT)  # it may have been stopped
        deadline_s = time.monotonic() + 10.0
        for actor in self.actors.values():
            actor.process.join(max(0.0, deadline_s - time.monotonic()))
            if actor.process.is_alive():
                self.signal(actor.name, signal.SIGKILL)
                actor.process.join()
            actor.process.close()
        self.actors.clear()
