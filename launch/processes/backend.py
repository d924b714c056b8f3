"""The interface between a launcher's watch and a backend, which is whatever runs its worker processes.

    start(), stop(), kill(), dump_stacks()      called by launch.workers.watch with the worker's name
    poll() -> WorkerStarted | WorkerExited | Notice         the only call that waits, up to its timeout
    vitals()                                    whether workers do anything

A backend makes no decisions: the watch decides when a worker is started again and what its death means. A worker has
one process at a time; both sides identify it by name and incarnation. Process ids, descriptors, hosts and job numbers
are internal to the backend. It is used from one thread.

A backend runs `python -m stillhouse.launch.workers.roles RUN_DIR` where the worker is to live, and writes the
StartRole to its stdin (or does the same in a process that it has forked). It is responsible for:

    environment     setting the variables of LaunchPlan.environment, one of which is a secret
    log             getting the worker's output into logs/<name>.log of the run folder that the launcher sees
    end             ending every worker when the launcher ends, however it ends, with all that it started

launch.processes.local is the backend for this machine; docs/decisions/process-backends.md says what one for Ray or
Slurm needs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol, TypeAlias

from stillhouse.launch.workers.start_role import StartRole


class WorkerStarted(NamedTuple):
    """The worker's process exists."""

    name: str
    incarnation: str
    where: str
    """For display: a process id, a host, a job step."""


class WorkerExited(NamedTuple):
    """The worker's process is gone without a trace, or could not be created. A negative code is the signal that killed
    it."""

    name: str
    incarnation: str
    code: int


class Notice(NamedTuple):
    """A message for the user; `fatal` ends the run."""

    text: str
    fatal: bool


Event: TypeAlias = WorkerStarted | WorkerExited | Notice


class Vitals(NamedTuple):
    """Signs of life of one process, which change while it works (launch.processes.activity)."""

    cpu_s: float
    """CPU time since its start."""
    wants_cpu: bool
    """Running, ready to run, or waiting for a disk."""
    stopped: bool = False
    """Held by SIGSTOP; it does nothing until SIGCONT."""


class ProcessBackend(Protocol):
    """All worker processes of one launcher."""

    @property
    def elsewhere(self) -> str:
        """Workers that it starts beside those of the plan, for the headline: `2 actors, 1 teacher on 2 hosts of
        Ray`. Empty: none."""
        return ""

    def prepare(self) -> None:
        """Do what can be done before the first worker is started; returns at once."""
        ...

    def start(self, start: StartRole, *, preloaded: bool) -> None:
        """Start a process for the worker; returns at once. WorkerStarted follows, or WorkerExited when it could not be.
        `preloaded`: the worker needs the modules of LaunchPlan.preload and may wait for them; otherwise it needs few
        modules and must start soon."""
        ...

    def stop(self, name: str) -> None:
        """Ask the worker to leave (SIGTERM in its main thread). A worker that has not been started yet never is. No
        effect on a worker that is gone, as in `kill` and `dump_stacks`."""
        ...

    def kill(self, name: str) -> None:
        """End it now, with every process that it started."""
        ...

    def dump_stacks(self, name: str) -> None:
        """Make it write the stacks of its threads to its log. Optional."""
        ...

    def vitals(self, names: Collection[str]) -> dict[str, Vitals]:
        """Vitals of these workers, and of whatever one of them needs in order to start. Processes that cannot be
        inspected are left out; the launcher then waits for them by the clock alone."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call. Waits up to `timeout_s` for one, or for a signal to the launcher."""
        ...

    def close(self) -> None:
        """End everything that still runs, at once, and wait for it. Idempotent."""
        ...
