"""Watches worker processes and their servers: starts them, restarts dead ones, ends them in stages.

One thread, one loop: `_pump` waits a moment for processes (launch.processes.backend), reads the buffer's messages
(buffer_link), looks at signals and starts what is due. Everything that ends the watch goes through `_end`, which sets
`_ending` once. The second Ctrl-C leads straight to SIGKILL. The subclasses decide what the end of a worker means:
launch.workers.supervisor (for a whole run) and launch.join.joiner (for workers that join a run).
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Final

from stillhouse.launch.buffer_link import BufferLink
from stillhouse.launch.processes.activity import Patience
from stillhouse.launch.processes.backend import Notice, ProcessBackend, WorkerExited, WorkerStarted
from stillhouse.launch.processes.lifeline import sweep
from stillhouse.launch.processes.slots import RESTART_WINDOW_S, Ending, RestartBudget, Worker, said
from stillhouse.launch.report.figures import RunView
from stillhouse.launch.report.status import StatusView
from stillhouse.launch.report.summary import read_sample
from stillhouse.launch.servers.attached import features_of_run
from stillhouse.launch.servers.watch import ServerChange, ServerWatch
from stillhouse.launch.terminal import StopRequests, said_of
from stillhouse.launch.workers.crew import Crew
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.protocol.context import ExitCode
from stillhouse.protocol.messages import Snapshot
from stillhouse.protocol.turns import FILE, Turn

log = logging.getLogger(__name__)
STARTING_PUMP_S: Final = 0.1
PUMP_S: Final = 0.25
SNAPSHOT_EVERY_S: Final = 1.0
SAMPLE_S: Final = 2.0
SERVER_GRACE_S: Final = 5.0
"""Time for inference servers to leave after SIGTERM, when no worker uses them any more."""
WORD_S: Final = 3.0
"""Time within which Shutdown may still arrive after a worker left in good order: it is sent to all at once."""
KILLED_WAIT_S: Final = 5.0
"""Time for a process to vanish after SIGKILL; after that it is stuck in the kernel."""


class Watch(ABC):
    """Owner of the worker slots. Subclasses start workers and decide what their deaths mean."""

    LEAVING: ClassVar[str] = "the run ends"
    """Beginning of the message about a bad end."""

    def __init__(
        self,
        plan: LaunchPlan,
        folder: WorkFolder,
        status: StatusView,
        backend: ProcessBackend,
        workers: Sequence[Worker],
    ) -> None:
        """`backend`: made for this plan and folder; it is closed here."""
        self._plan = plan
        self._config = plan.config
        self._folder = folder
        self._status = status
        self._backend = backend
        self._budget = RestartBudget(plan.config.launch)
        shared = plan.placement.weights.shared
        turns = plan.config.launch.share == "turns" and plan.servers
        self._servers = ServerWatch(
            plan.servers,
            plan.config,
            folder.logs,
            self._budget,
            plan.api_key,
            shared=shared,
            turn=Turn(folder.path / FILE, "the start of a server") if turns else None,
        )
        self._crew = Crew(plan, folder.run_id, backend, self._servers, workers)
        self._link: BufferLink | None = None
        self._signals = StopRequests()
        self._ending: Ending | None = None
        self._left: tuple[str, float, int] | None = None
        """(name, time, exit code) of a worker that left before the launcher heard that the run is over."""
        self._leavers: dict[str, float] = {}
        """Name -> time, for restartable workers that left in good order. They seem to know that the run is over, and we
        should hear of it soon; if not, they are restarted."""
        self._ready_s: float | None = None
        self._sample_text, self._sampled_s = "", 0.0

    # ------------------------------------------------------------------------------------- decided by subclasses

    @abstractmethod
    def _may_restart(self, worker: Worker, code: int) -> bool:
        """Whether to restart a worker that ended with this code, if the budget allows."""

    @abstractmethod
    def _cause(self, worker: Worker, code: int) -> str:
        """Describe the end of a worker that is not restarted."""

    @abstractmethod
    def _exited_at_the_end(self, worker: Worker, code: int) -> None:
        """A worker exited after the end of the run."""

    @abstractmethod
    def _end_without_word(self, now_s: float) -> None:
        """Act on `_left` when the reason for the end does not arrive."""

    @abstractmethod
    def _link_lost(self, why: str) -> None:
        """The connection to the buffer is lost for good."""

    def _waits_for_others(self, worker: Worker) -> bool:
        """Whether a worker that runs has a reason to be silent."""
        return False

    # ------------------------------------------------------------------------------------------------- starting

    def _unwelcomed(self) -> list[str]:
        return self._crew.unwelcomed(self._link.snapshot if self._link is not None else None)

    def _until_ready(self) -> bool:
        """Pump until the buffer has met every worker; False if the run ends first."""
        timeout_s = self._config.launch.ready_timeout_s + self._servers.start_timeout_s
        if not self._until_there(lambda: not self._unwelcomed(), timeout_s, self._unwelcomed, self._who_is_missing):
            return False
        self._ready_s = time.monotonic() - self._plan.began_s
        return True

    def _who_is_missing(self) -> str:
        missing = self._unwelcomed()
        if not missing:
            return "no worker"
        source = self._servers.log_name(missing[0]) if self._crew.workers[missing[0]].awaits_server else missing[0]
        tail = self._folder.log_tail(source)
        return f"{', '.join(missing)} to be ready; the last lines of {source}.log:\n{tail}"

    def _until_over(self) -> None:
        while self._ending is None:
            self._pump(PUMP_S)

    def _until_there(
        self, there: Callable[[], bool], timeout_s: float, missing: Callable[[], list[str]], what: Callable[[], str]
    ) -> bool:
        """Pump until `there()`; False if the run ends first, or if the processes that are `missing` take too long
        (launch.processes.activity.Patience). `what` describes them."""
        patience = Patience(timeout_s)
        while self._ending is None:
            if there():
                return True
            if patience.over(lambda: self._backend.vitals(missing())):
                self._end(f"waited {patience.waited_s:.0f} s for {what()}")
                break
            self._pump(STARTING_PUMP_S)
        return False

    # ------------------------------------------------------------------------------------------------- watching

    def _pump(self, timeout_s: float) -> None:
        for event in self._backend.poll(timeout_s):
            match event:
                case WorkerStarted(name, incarnation, where):
                    if (worker := self._crew.workers[name]).incarnation == incarnation:
                        worker.where, worker.started_s = where, time.monotonic()
                case WorkerExited():
                    self._exited(event)
                case Notice(text, fatal):
                    self._status.say(text)
                    if fatal:
                        self._end(text)
        for change in self._servers.pump(restart=self._ending is None):
            self._take_change(change)
        now_s = time.monotonic()
        if self._signals.hung_up:
            self._signals.hung_up = False
            self._status.say(f"the terminal is gone (SIGHUP); this continues, end it with: kill {os.getpid()}")
        if self._signals.count and self._ending is None:
            assert self._signals.first is not None
            self._end(f"stopped by {said_of(self._signals.first)}", self._signals.exit_code)
        self._read_link(now_s)
        if self._ending is None:
            self._restart_leavers(now_s)
            self._start_due(now_s)
            self._end_without_word(now_s)
        self._show(now_s)

    def _exited(self, event: WorkerExited) -> None:
        worker = self._crew.workers[event.name]
        if worker.incarnation != event.incarnation:
            return
        worker.running, worker.where, worker.kill_at_s = False, "", None
        worker.exit_codes.append(event.code)
        if self._ending is None and self._link is not None:
            self._link.take()  # Shutdown may have arrived before the exit; _read_link acts on it
        if self._ending is not None or (self._link is not None and self._link.shutdown is not None):
            self._exited_at_the_end(worker, event.code)
            return
        lost = event.code == ExitCode.SERVER_LOST and worker.name in self._servers
        if lost and not worker.excused:
            self._status.say(f"{worker.name} reports that its server is lost; both are started again")
            self._servers.replace(worker.name)
        elif worker.name in self._servers and self._plan.takes_turns(worker.role, worker.index):
            self._servers.replace(worker.name)  # whose turn is over, and nobody knows what it has on the device
        if lost or worker.excused:
            worker.excused = False
            self._budget.excused(worker.name)
            self._crew.start(worker)
        elif self._may_restart(worker, event.code):
            if event.code == ExitCode.OK:
                self._leavers[worker.name] = time.monotonic()
            else:
                self._restart(worker, event.code)
        elif event.code in (ExitCode.OK, ExitCode.FAILED) and self._link is not None:
            # Shutdown may be on its way to us: the buffer sends it to all at once.
            self._left = self._left or (worker.name, time.monotonic(), event.code)
        else:
            code = ExitCode.SPENT if event.code == ExitCode.SPENT else ExitCode.FAILED
            self._end(f"{worker.name} {self._cause(worker, event.code)}", code, log=worker.name)

    def _restart(self, worker: Worker, code: int) -> None:
        now_s = time.monotonic()
        wait_s = self._budget.died(worker.name, now_s)
        if wait_s is None:
            launch = self._config.launch
            spent = f"more than {launch.max_restarts} times in {RESTART_WINDOW_S:.0f} s"
            self._end(f"{worker.name} died {spent}; it {said(code)}", log=worker.name)
            return
        worker.restart_at_s = now_s + wait_s
        self._status.say(f"{worker.name} {said(code)}; it is started again in {wait_s:.1f} s")

    def _restart_leavers(self, now_s: float) -> None:
        for name in [name for name, left_s in self._leavers.items() if now_s - left_s > WORD_S]:
            del self._leavers[name]
            self._restart(self._crew.workers[name], ExitCode.OK)

    def _take_change(self, change: ServerChange) -> None:
        """Act on a change of a server. The worker of a dead server is asked to leave, and comes back with the new
        server."""
        worker = self._crew.workers[change.worker]
        if self._ending is not None:
            return
        if change.kind == "up":
            for waiting in self._crew.workers.values():
                if waiting.awaits_server:
                    self._crew.start(waiting)
            return
        if change.kind == "given_up":
            self._end(change.text, log=self._servers.log_name(change.worker))
            return
        log_name = self._servers.log_name(change.worker)
        self._status.say(
            f"{change.text}; the last lines of {log_name}.log:\n{self._folder.log_tail(log_name, lines=5)}"
        )
        if worker.running:
            worker.excused = True
            worker.kill_at_s = time.monotonic() + self._crew.grace_s(worker)
            self._backend.stop(worker.name)

    def _start_due(self, now_s: float) -> None:
        for worker in self._crew.workers.values():
            if worker.kill_at_s is not None and now_s >= worker.kill_at_s:
                worker.kill_at_s = None
                self._backend.kill(worker.name)
            if worker.restart_at_s is not None and now_s >= worker.restart_at_s:
                self._crew.start(worker)

    def _read_link(self, now_s: float) -> None:
        if self._link is None:
            return
        self._link.ask(now_s, SNAPSHOT_EVERY_S if self._ready_s is not None else STARTING_PUMP_S)
        if self._link.take() and self._link.snapshot is not None:
            self._kill_silent(self._link.snapshot, now_s)
        if self._ending is None and self._link.shutdown is not None:
            shutdown = self._link.shutdown
            self._end(shutdown.reason, ExitCode.OK if shutdown.ok else ExitCode.FAILED)
        elif self._ending is None and self._link.lost is not None:
            self._link_lost(self._link.lost)

    def _kill_silent(self, snapshot: Snapshot, now_s: float) -> None:
        """Kill workers whose process runs but has been silent for long (deadlocked, stopped). Their exit is then
        treated like any other. One that has not connected since its start may still be loading a model: it has as long
        as workers have at the start of the run."""
        launch = self._config.launch
        for peer in snapshot.peers:
            worker = self._crew.workers.get(peer.name)
            if worker is None or not worker.where or self._ending is not None:
                continue
            if self._waits_for_others(worker):
                worker.started_s = now_s
                continue
            runs_s = now_s - worker.started_s
            # The snapshot may be that old, so the former process can seem to be heard after the new one's start.
            connected = peer.silent_s + SNAPSHOT_EVERY_S < runs_s
            limit_s = launch.silent_kill_s if connected else launch.ready_timeout_s
            if not peer.alive and min(peer.silent_s, runs_s) > limit_s:
                self._status.say(f"{peer.name} runs but was silent for {peer.silent_s:.0f} s; it is killed")
                worker.started_s = now_s  # once is enough
                self._dump_stacks([worker])
                self._backend.kill(worker.name)

    def _end(self, reason: str, exit_code: int = ExitCode.FAILED, *, log: str = "") -> None:
        """End the watch for this reason; the first one counts. `log`: show the end of this worker's log."""
        if self._ending is not None:
            return
        if log:
            error = self._folder.last_error(log)
            reason = f"{reason}: {error}" if error else reason
            self._status.say(f"the last lines of {self._folder.log_path(log)}:\n{self._folder.log_tail(log)}")
        ok = exit_code == ExitCode.OK
        self._ending = Ending(ok, reason, int(exit_code))
        self._status.say(f"the run is over: {reason}" if ok else f"{self.LEAVING}: {reason}")

    def _show(self, now_s: float) -> None:
        self._status.show(self._view(now_s))

    def _view(self, now_s: float) -> RunView:
        return RunView(
            now_s=now_s,
            elapsed_s=now_s - self._plan.began_s,
            steps=self._config.steps,
            snapshot=self._link.snapshot if self._link is not None else None,
            workers={name: worker.running for name, worker in self._crew.workers.items()},
            restarts=sum(self._budget.totals.values()),
            ending=self._ending.reason if self._ending is not None else None,
            servers_up=sum(slot.state == "up" for slot in self._servers.slots.values()),
            servers=len(self._servers.slots),
            sample=self._sample(now_s),
        )

    def _sample(self, now_s: float) -> str:
        """Read from the learner's account, at most every SAMPLE_S."""
        if now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s = now_s
            sample = read_sample(self._folder.path)
            self._sample_text = str(sample) if sample is not None else self._sample_text
        return self._sample_text

    def _say_features(self) -> None:
        """Show once what the servers can do, as measured by their workers."""
        if features := features_of_run(self._folder.path):
            self._status.say(features)

    # ------------------------------------------------------------------------------------------------- stopping

    def _dismiss(self, workers: list[Worker]) -> None:
        """SIGTERM, a grace, SIGKILL."""
        if not self._at_once:
            for worker in self._crew.running(workers):
                self._backend.stop(worker.name)
            self._wait_gone(workers)
        left = self._crew.running(workers)
        if left and not self._at_once:
            late = ", ".join(f"{worker.name} did not leave in {self._crew.grace_s(worker):g} s" for worker in left)
            self._status.say(f"{late}: SIGKILL")
            self._dump_stacks(left)
        for worker in left:
            worker.given_up = True
            self._backend.kill(worker.name)
        deadline_s = time.monotonic() + KILLED_WAIT_S
        while self._crew.running(workers) and time.monotonic() < deadline_s:
            self._pump(STARTING_PUMP_S)

    def _end_servers(self) -> None:
        if not self._at_once:
            self._servers.stop()
        deadline_s = time.monotonic() + SERVER_GRACE_S
        while self._servers.running and time.monotonic() < deadline_s and not self._at_once:
            self._pump(STARTING_PUMP_S)

    def _dump_stacks(self, workers: list[Worker]) -> None:
        """Have workers write their stacks to their logs before they are killed, to show where they hang."""
        for worker in workers:
            self._backend.dump_stacks(worker.name)
        time.sleep(STARTING_PUMP_S)

    def _wait_gone(self, workers: Collection[Worker], timeout_s: float | None = None) -> None:
        """Pump until they are gone, for `timeout_s`; None: for the longest grace among those that still run."""
        began_s = time.monotonic()
        while (left := self._crew.running(workers)) and not self._at_once:
            within_s = timeout_s if timeout_s is not None else max(map(self._crew.grace_s, left))
            if time.monotonic() - began_s > within_s:
                return
            self._pump(STARTING_PUMP_S)

    @property
    def _at_once(self) -> bool:
        return self._signals.count > 1

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._backend.close()
        self._servers.close()
        for left in sweep():
            self._status.say(f"a process was left behind and is killed: {left}")
