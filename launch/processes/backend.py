"""How worker processes are started and ended: the interface between a launcher's watch and what runs its workers.

    start(), stop(), kill(), dump_stacks()      from launch.workers.watch, by the worker's name
    poll() -> Started | Exited | Notice         the only call that waits, at most its timeout
    vitals()                                    does it do anything?

A backend decides nothing: when a worker is started again, and what its death means, is the watch's. A worker has one
process at a time; its name and incarnation are how both sides speak of it. Process ids, descriptors, hosts and job
numbers are the backend's own. One thread uses it.

A backend starts `python -m launch.workers.roles RUN_DIR` where the worker is to be, and writes the StartRole to its
stdin (or does the same in a process that it has forked). It has to see to three things:

    environment     what it was given for the workers (LaunchPlan.environment), a secret among it, is set there
    log             the worker's output is in logs/<name>.log of the run folder that the launcher sees
    end             no worker outlives the launcher, however the launcher ends; what a worker left behind goes with it

launch.processes.local is the one for this machine; docs/decisions/process-backends.md says what one for Ray or Slurm
needs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol, TypeAlias

from launch.workers.start_role import StartRole


class Started(NamedTuple):
    """The worker's process exists."""

    name: str
    incarnation: str
    where: str
    """For people: a process id, a host, a job step."""


class Exited(NamedTuple):
    """The worker's process is gone, or could not be made; nothing is left of it. A negative code is the signal that
    killed it."""

    name: str
    incarnation: str
    code: int


class Notice(NamedTuple):
    """Something the user should see; `fatal` ends the run."""

    text: str
    fatal: bool


Event: TypeAlias = Started | Exited | Notice


class Vitals(NamedTuple):
    """Signs of life of one process. They rise or change while it works (launch.processes.activity)."""

    cpu_s: float
    """Computed since it started."""
    wants_cpu: bool
    """It runs, could run, or waits for a disk."""
    stopped: bool = False
    """It is held (SIGSTOP) and will do nothing until it is told to go on."""


class ProcessBackend(Protocol):
    """All worker processes of one launcher."""

    def prepare(self) -> None:
        """What can be done before the first worker is asked for; returns at once."""
        ...

    def start(self, start: StartRole, *, preloaded: bool) -> None:
        """Start a process for the worker; returns at once. Started follows, or Exited when it could not be started.
        `preloaded`: it needs the modules that the launcher said to preload, and may wait for them; else it needs few
        and must be there soon."""
        ...

    def stop(self, name: str) -> None:
        """Ask the worker to leave (SIGTERM in its main thread). One that was not started yet never is. No effect on one
        that is gone, here as below."""
        ...

    def kill(self, name: str) -> None:
        """End it now, with all that it started."""
        ...

    def dump_stacks(self, name: str) -> None:
        """Have it write to its log where its threads are, soon, and go on. May do nothing."""
        ...

    def vitals(self, names: Collection[str]) -> dict[str, Vitals]:
        """Signs of life of these workers, and of whatever one of them waits for in order to start. Those that cannot
        be looked at are missing: they are then waited for by the clock alone."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened since; waits up to `timeout_s` for something to happen, or for a signal to the launcher."""
        ...

    def close(self) -> None:
        """End whatever still runs, at once, and wait for it. Idempotent."""
        ...
