"""Episodes in a pool of processes beside the actor: an environment that crashes, leaks, or keeps Python's lock costs
the rollouts of its process, and no decoding time.

A process that dies fails the episodes that it ran and is replaced. Each death is counted by its cause:

    crash     it ended by itself, or by a signal
    stuck     too many of its threads do not return (actors.env_runner)
    hang      it said nothing for a while: it ended itself, or the pool killed it
"""

from __future__ import annotations

import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from stillhouse.actors.episode_process import BEAT_S, STOOD_STILL
from stillhouse.actors.episode_wire import Command, Deliver, Finish, Gauges, GaveUp, Link, Ready, Refuse, Setup, Stop
from stillhouse.actors.episodes import EpisodeEnded, EpisodeEvent, EpisodeStart
from stillhouse.actors.failures import Failure
from stillhouse.actors.running_episode import Ask, GiveUp, Response
from stillhouse.protocol.printable import in_one_line

log = logging.getLogger(__name__)
READY_TIMEOUT_S: Final = 120.0
"""Longest time for a process to import its environments."""
GRACE_S: Final = 5.0
"""A process that has said nothing for this much longer than `Setup.silence_s` has not ended itself: it is killed."""
CLOSE_S: Final = 7.0
"""Longest time for all processes together to close their episodes at the end. More than a process gives itself."""
MAX_DEATHS: Final = 10
DEATHS_WITHIN_S: Final = 600.0
"""More than MAX_DEATHS in this time end the actor."""

Cause: TypeAlias = Literal["crash", "stuck", "hang"]


class ProcessesKeepDying(RuntimeError):
    """The processes of the environments die again and again; the message has the last cause."""


class EnvironmentsUnusable(RuntimeError):
    """The processes cannot run the configured environments; the message says why."""


class _Process:
    """One process and the two threads that carry its messages. Neither may block the actor's loop."""

    def __init__(self, number: int, setup: Setup, wake: Callable[[], None]) -> None:
        self.number = number
        self.open: set[str] = set()
        """Its rollouts."""
        self.ready: Ready | None = None
        self.gauges: dict[str, float] = {}
        self.gave_up = ""
        self.gone = False
        """Its end of the sockets is closed."""
        self.started_s = self.heard_s = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", "stillhouse.actors.episode_process", str(theirs.fileno())]
            self._popen = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._link = Link(ours)
        self._news: queue.SimpleQueue[EpisodeEvent] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._wake = wake
        self._threads = [
            threading.Thread(target=target, name=f"environments {number}", daemon=True)
            for target in (self._receive, self._send_all)
        ]
        for thread in self._threads:
            thread.start()
        self.send(setup)

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def take(self) -> list[EpisodeEvent]:
        news: list[EpisodeEvent] = []
        while not self._news.empty():
            news.append(self._news.get())
        return news

    def kill(self) -> None:
        self._popen.kill()

    def wait(self, timeout_s: float) -> int:
        """The exit code. Kills a process that is still there after `timeout_s`."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._popen.wait()
        self._commands.put(Stop())
        for thread in self._threads:
            thread.join(1.0)
        self._link.close()
        return code

    def _receive(self) -> None:
        try:
            while True:
                message = self._link.receive()
                self.heard_s = time.monotonic()
                match message:
                    case Ready():
                        self.ready = message
                    case Gauges():
                        self.gauges = message.values
                    case GaveUp():
                        self.gave_up = message.reason
                    case Ask() | GiveUp() | EpisodeEnded():
                        self._news.put(message)
                    case _:
                        raise ValueError(f"a process for environments says no {type(message).__name__}")
                self._wake()
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("process %d of the environments said something that cannot be read", self.number)
        self.gone = True
        self._wake()

    def _send_all(self) -> None:
        try:
            while True:
                command = self._commands.get()
                self._link.send(command)
                if isinstance(command, Stop):
                    return
        except OSError:
            return  # the process is gone, which the other thread notices


class EpisodePool:
    """Each episode in one of several processes. Same use as EpisodeThreads."""

    def __init__(self, n: int, setup: Setup, wake: Callable[[], None] = lambda: None) -> None:
        """Starts `n` processes and waits until their environments are imported. Raises EnvironmentsUnusable."""
        self._setup = setup
        self._wake = wake
        self._where: dict[str, _Process] = {}
        self._deaths: deque[float] = deque()
        self._counts = {f"environment_process_{cause}_total": 0.0 for cause in ("crash", "stuck", "hang")}
        self._started = 0
        self._processes = [self._start_process() for _ in range(n)]
        self.agents: frozenset[str] = frozenset()
        try:
            self._until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def has_room(self) -> bool:
        return any(process.ready and not process.gone for process in self._processes)

    @property
    def gauges(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for process in self._processes:
            for name, value in process.gauges.items():
                total[name] = total.get(name, 0.0) + value
        return {**total, **self._counts}

    def start(self, episode: EpisodeStart) -> None:
        ready = [process for process in self._processes if process.ready and not process.gone]
        if not ready:
            raise RuntimeError("no process for environments is there; look at `has_room` first")
        process = min(ready, key=lambda each: len(each.open))
        process.open.add(episode.rollout_id)
        self._where[episode.rollout_id] = process
        process.send(episode)

    def deliver(self, rollout_id: str, number: int, response: Response) -> None:
        self._where[rollout_id].send(Deliver(rollout_id, number, response))

    def refuse(self, rollout_id: str, number: int, reason: str) -> None:
        self._where[rollout_id].send(Refuse(rollout_id, number, reason))

    def finish(self, rollout_id: str) -> None:
        process = self._where.pop(rollout_id)
        process.open.discard(rollout_id)
        process.send(Finish(rollout_id))

    def take(self) -> list[EpisodeEvent]:
        """Raises ProcessesKeepDying."""
        news: list[EpisodeEvent] = []
        for i, process in enumerate(self._processes):
            dead = process.gone  # read before `take`: what it said last is not lost
            news += process.take()
            silent_s = time.monotonic() - process.heard_s
            if silent_s > (self._setup.silence_s + GRACE_S if process.ready else READY_TIMEOUT_S):
                process.kill()
                news += self._bury(i, hangs=True)
            elif dead:
                news += self._bury(i, hangs=silent_s > self._setup.silence_s - 2 * BEAT_S)
        return news

    def close(self) -> None:
        """End the processes; what their episodes hold is closed, except by those that do not end in time."""
        deadline_s = time.monotonic() + CLOSE_S
        for process in self._processes:
            process.send(Stop())
        for process in self._processes:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        self._processes = []

    def _start_process(self) -> _Process:
        self._started += 1
        return _Process(self._started - 1, self._setup, self._wake)

    def _until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not all(process.ready for process in self._processes):
            for process in self._processes:
                if process.gone:
                    why = process.gave_up or f"it ended with {_shown(process.wait(1.0))}"
                    raise EnvironmentsUnusable(f"a process for environments did not start: {in_one_line(why)}")
            if time.monotonic() > deadline_s:
                raise EnvironmentsUnusable(
                    f"a process for environments has not imported them after {READY_TIMEOUT_S:g} s"
                )
            time.sleep(0.01)
        first = self._processes[0].ready
        self.agents = frozenset() if first is None else first.agents

    def _bury(self, i: int, *, hangs: bool) -> list[EpisodeEvent]:
        """Replace a dead process, and say that its episodes have ended. `hangs`: it had said nothing for a while."""
        process = self._processes[i]
        code = process.wait(1.0)
        cause: Cause = "stuck" if process.gave_up else "hang" if hangs and code in (STOOD_STILL, -9) else "crash"
        self._counts[f"environment_process_{cause}_total"] += 1
        match cause:
            case "stuck":
                what = f"gave up: {process.gave_up}"
            case "hang":
                what = (
                    f"stood still for {self._setup.silence_s:g} s: an environment kept Python's lock; the actor's log "
                    "says where"
                )
            case "crash":
                what = f"ended with {_shown(code)}"
        detail = in_one_line(f"process {process.number} of the environments {what}")
        log.warning("%s; it ran %d episodes", detail, len(process.open))
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - DEATHS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) > MAX_DEATHS:
            raise ProcessesKeepDying(
                f"{len(self._deaths)} processes of environments died within {DEATHS_WITHIN_S:g} s, expected at most "
                f"{MAX_DEATHS}; the last one: {detail}"
            )
        self._processes[i] = self._start_process()
        failure = Failure("env_error", detail, "EnvironmentProcessDied")
        return [EpisodeEnded(rollout_id, failure) for rollout_id in sorted(process.open)]


def _shown(code: int) -> str:
    """`exit code 3`, `signal SIGSEGV`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
