"""Starts the workers, watches them, starts dead ones again, and stops all of it, leaving no process behind.

    start     fork server imports | SGLang servers load | buffer spawned at once -> it listens -> learner, teachers,
              actors, those with a server of their own when it answers -> all welcomed
    watch     until the buffer says Shutdown, the learner or the buffer dies, a worker dies too often, or Ctrl-C
    stop      told by the buffer: each worker leaves by itself; then, or else: SIGTERM to the learner, to actors and
              teachers, to their servers and the buffer (which writes the ledger), each stage with a grace, then SIGKILL

One thread, one loop: `_pump` waits a moment for processes (launch.processes), reads the buffer's word (buffer_link),
looks at signals, starts what is due. Everything that ends a run sets `_ending`, once; nothing else does.
The second Ctrl-C goes straight to SIGKILL.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from engines.sglang_http import API_KEY_VARIABLE
from launch.buffer_link import BufferLink, read_address
from launch.config import RunConfig
from launch.crew import ROLES, Crew
from launch.figures import RunView
from launch.lifeline import sweep
from launch.memory import MemoryGauge
from launch.processes import Exited, Notice, Processes, Started
from launch.restarts import RestartBudget
from launch.roles import ENTRIES
from launch.runfolder import RunFolder
from launch.server_features import features_of_run
from launch.server_plan import ServerPlan
from launch.server_watch import ServerNews, ServerWatch
from launch.signals import StopRequests
from launch.slots import Ending, Outcome, ServerEnd, Worker, said
from launch.status import StatusView
from protocol.context import ExitCode, WorkerRole
from protocol.errors import ProtocolError
from protocol.keys import run_client_keys
from protocol.messages import Snapshot

BUFFER: Final = "buffer-0"
BUFFER_START_S: Final = 120.0
log = logging.getLogger(__name__)
STARTING_PUMP_S: Final = 0.1
PUMP_S: Final = 0.25
SNAPSHOT_EVERY_S: Final = 1.0
BUFFER_ALONE_S: Final = 2.0
"""How long the buffer may take to leave by itself when all others have left; it may wait for a peer that is dead."""
FAILED_WORD_S: Final = 1.0
WORD_S: Final = 3.0
"""How long after the learner's or the buffer's exit the Shutdown message may still come."""
SERVER_GRACE_S: Final = 5.0
"""How long SGLang servers may take to leave after SIGTERM; nobody uses them any more."""
KILLED_WAIT_S: Final = 5.0
"""How long a process may take to vanish after SIGKILL; more means that the kernel holds it."""
RESTARTABLE: Final[frozenset[WorkerRole]] = frozenset(ROLES)
"""Roles that are started again when they die: actors and teachers however they died; the buffer when it was killed (it
goes on from its journal, where what broke it once would break it again); the learner, from its last checkpoint, when it
was killed, or failed after all were ready. Else their death ends the run."""


class Supervisor:
    """One run's processes, from the first to the last. `run` is the whole of it."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        status: StatusView,
        *,
        resume: bool,
        began_s: float,
        preload: tuple[str, ...] = (),
        entries: Mapping[WorkerRole, str] = ENTRIES,
        restartable: Collection[WorkerRole] = RESTARTABLE,
        servers: Sequence[ServerPlan] = (),
    ) -> None:
        """`began_s`: monotonic time at which the user's command started. `servers`: to be started with the run."""
        self._config = config
        self._folder = folder
        self._status = status
        self._began_s = began_s
        self._restartable = restartable
        self._budget = RestartBudget(config.launch)
        api_key = secrets.token_hex(32)  # of letters and digits: a key that began with - would be taken for an argument
        self._processes = Processes(
            method=config.launch.start_method,
            log_dir=folder.logs,
            config_path=folder.config_path,
            preload=preload,
            threads=config.launch.threads_per_worker,
            environment={API_KEY_VARIABLE: api_key} if servers else None,
        )
        self._servers = ServerWatch(servers, config, folder.logs, self._budget, api_key)
        self._crew = Crew(
            config,
            folder,
            self._processes,
            self._servers,
            entries,
            resume=resume,
            preload=preload,
        )
        self._link: BufferLink | None = None
        self._signals = StopRequests()
        self._ending: Ending | None = None
        self._left: tuple[str, float, int] | None = None
        """Learner or buffer, when it left well before the launcher heard that the run is over."""
        self._ready_s: float | None = None
        self._memory = MemoryGauge(config.launch.memory_every_s)

    def run(self) -> Outcome:
        """Start, watch, stop. Does not raise for what goes wrong in the run: the outcome says it."""
        with self._signals, self._status:
            try:
                self._start_and_watch()
            except Exception as error:  # ours: said, logged, and the run is a failed one
                log.exception("the launcher failed")
                self._end(False, f"the launcher failed: {error!r}", ExitCode.FAILED)
            finally:
                self._stop()
        assert self._ending is not None
        return Outcome(
            ending=self._after_all(self._ending),
            ready_s=self._ready_s,
            wall_s=time.monotonic() - self._began_s,
            peak_memory_bytes=self._memory.peak_bytes,
            snapshot=self._link.snapshot if self._link is not None else None,
            restarts=dict(self._budget.totals),
            exit_codes={name: worker.exit_codes for name, worker in self._crew.workers.items()},
            servers={
                name: ServerEnd(slot.plan.worker, slot.plan.place, slot.exit_codes)
                for name, slot in self._servers.slots.items()
            },
        )

    # ------------------------------------------------------------------------------------------------- starting

    def _start_and_watch(self) -> None:
        self._processes.warm_up()
        self._servers.start()
        self._crew.start(self._crew.workers[BUFFER])
        if not self._until(self._buffer_listens, BUFFER_START_S, lambda: f"the buffer to listen; see {BUFFER}.log"):
            return
        try:
            keys = run_client_keys(self._folder.path, "launcher")
            self._link = BufferLink(self._crew.address, self._folder.record.run_id, secrets.token_hex(8), keys)
        except ProtocolError as error:
            self._end(False, f"no connection to the buffer: {error}", ExitCode.FAILED, tail_of=(BUFFER,))
            return
        for role in ("learner", "teacher", "actor"):
            for worker in self._crew.of(role):
                self._crew.start(worker)
        timeout_s = self._config.launch.ready_timeout_s + self._servers.start_timeout_s
        if self._until(lambda: not self._unwelcomed(), timeout_s, self._who_is_missing):
            self._ready_s = time.monotonic() - self._began_s
            self._status.say(f"all {len(self._crew.workers) - 1} workers are ready after {self._ready_s:.1f} s")
            self._say_features()
            self._memory.sample()
            self._until(lambda: False, None, str)

    def _buffer_listens(self) -> bool:
        self._crew.address = read_address(self._folder.path / "buffer.json", self._folder.record.run_id) or ""
        return bool(self._crew.address)

    def _unwelcomed(self) -> list[str]:
        return self._crew.unwelcomed(self._link.snapshot if self._link is not None else None)

    def _who_is_missing(self) -> str:
        missing = self._unwelcomed()
        if not missing:
            return "nobody"
        telling = self._servers.log_name(missing[0]) if self._crew.workers[missing[0]].awaits_server else missing[0]
        tail = self._folder.log_tail(telling)
        return f"{', '.join(missing)} to be ready; the last lines of {telling}.log:\n{tail}"

    def _until(self, reached: Callable[[], bool], timeout_s: float | None, what: Callable[[], str]) -> bool:
        """Pump until `reached`; False if the run ends before. A timeout ends it."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._ending is None:
            if reached():
                return True
            if deadline_s is not None and time.monotonic() > deadline_s:
                self._end(False, f"waited {timeout_s:.0f} s for {what()}", ExitCode.FAILED)
                break
            self._pump(PUMP_S if timeout_s is None else STARTING_PUMP_S)
        return False

    # ------------------------------------------------------------------------------------------------- watching

    def _pump(self, timeout_s: float) -> None:
        """One turn of the loop."""
        for event in self._processes.poll(timeout_s):
            match event:
                case Started(name, incarnation, pid):
                    if self._crew.workers[name].incarnation == incarnation:
                        self._crew.workers[name].pid = pid
                case Exited():
                    self._exited(event)
                case Notice(text, fatal):
                    self._status.say(text)
                    if fatal:
                        self._end(False, text, ExitCode.FAILED)
        for news in self._servers.pump(restart=self._ending is None):
            self._take_news(news)
        now_s = time.monotonic()
        if self._signals.count and self._ending is None:
            assert self._signals.first is not None
            self._end(False, f"stopped by {self._signals.first.name}", self._signals.exit_code)
        self._read_link(now_s)
        if self._ending is None:
            self._start_due(now_s)
            self._end_without_word(now_s)
        self._status.show(self._view(now_s))
        self._memory.sample_when_due()

    def _exited(self, event: Exited) -> None:
        worker = self._crew.workers[event.name]
        if worker.incarnation != event.incarnation:
            return
        worker.running, worker.pid, worker.kill_at_s = False, None, None
        worker.exit_codes.append(event.code)
        if self._ending is not None:
            return
        if self._link is not None:
            self._link.take()  # Shutdown may have come before the exit; _read_link acts on it
        if self._link is not None and self._link.shutdown is not None:
            return
        lost = event.code == ExitCode.SERVER_LOST and worker.name in self._servers
        if lost and not worker.excused:
            self._status.say(f"{worker.name} says that its server is lost; both are started again")
            self._servers.replace(worker.name)
        if lost or worker.excused:
            worker.excused = False
            self._budget.excused(worker.name)
            self._crew.start(worker)
        elif self._may_restart(worker, event.code):
            self._restart(worker, event.code)
        elif event.code in (ExitCode.OK, ExitCode.FAILED) and self._link is not None:
            # The buffer's word may be on its way: it tells everybody at once.
            self._left = self._left or (worker.name, time.monotonic(), event.code)
        else:
            self._end(False, f"{worker.name} {said(event.code)}", ExitCode.FAILED, tail_of=(worker.name,))

    def _may_restart(self, worker: Worker, code: int) -> bool:
        if worker.role not in self._restartable or code == ExitCode.USELESS:
            return False
        match worker.role:
            case "buffer":
                return code < 0 and self._config.buffer.journal and self._link is not None
            case "learner":
                return code < 0 and self._link is not None
            case _:
                return True

    def _restart(self, worker: Worker, code: int) -> None:
        now_s = time.monotonic()
        wait_s = self._budget.died(worker.name, now_s)
        if wait_s is None:
            launch = self._config.launch
            spent = f"more than {launch.max_restarts} times in {launch.restart_window_s:.0f} s"
            self._end(False, f"{worker.name} died {spent}; it {said(code)}", ExitCode.FAILED, tail_of=(worker.name,))
            return
        worker.restart_at_s = now_s + wait_s
        self._status.say(f"{worker.name} {said(code)}; it is started again in {wait_s:.1f} s")

    def _take_news(self, news: ServerNews) -> None:
        """A server changed: its worker follows. One that runs on a dead server is told to leave, and comes back with
        the new one."""
        worker = self._crew.workers[news.worker]
        if self._ending is not None:
            return
        if news.kind == "up":
            if worker.awaits_server:
                self._crew.start(worker)
            return
        if news.kind == "given_up":
            self._end(False, news.text, ExitCode.FAILED, tail_of=(self._servers.log_name(news.worker),))
            return
        log_name = self._servers.log_name(news.worker)
        self._status.say(f"{news.text}; the last lines of {log_name}.log:\n{self._folder.log_tail(log_name, lines=5)}")
        if worker.running:
            worker.excused = True
            worker.kill_at_s = time.monotonic() + self._config.launch.shutdown_grace_s
            self._processes.signal(worker.name, signal.SIGTERM)

    def _start_due(self, now_s: float) -> None:
        for worker in self._crew.workers.values():
            if worker.kill_at_s is not None and now_s >= worker.kill_at_s:
                worker.kill_at_s = None
                self._processes.signal(worker.name, signal.SIGKILL)
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
            self._end(shutdown.ok, shutdown.reason, ExitCode.OK if shutdown.ok else ExitCode.FAILED)
        elif self._ending is None and self._link.lost is not None and self._crew.workers[BUFFER].running:
            self._end(False, f"the buffer does not answer: {self._link.lost}", ExitCode.FAILED, tail_of=(BUFFER,))

    def _kill_silent(self, snapshot: Snapshot, now_s: float) -> None:
        """A process that runs but has not been heard of for long (deadlocked, stopped) is killed; its exit is then
        treated like any other."""
        limit_s = self._config.launch.silent_kill_s
        for peer in snapshot.peers:
            worker = self._crew.workers.get(peer.name)
            if worker is None or not worker.running or self._ending is not None:
                continue
            if not peer.alive and peer.silent_s > limit_s and now_s - worker.started_s > limit_s:
                self._status.say(f"{peer.name} runs but was silent for {peer.silent_s:.0f} s; it is killed")
                worker.started_s = now_s  # once is enough
                self._dump_stacks([worker])
                self._processes.signal(worker.name, signal.SIGKILL)

    def _end_without_word(self, now_s: float) -> None:
        """Learner or buffer left, and nobody has said why the run is over. A learner that failed may try again."""
        if self._left is None:
            return
        name, left_s, code = self._left
        if code != ExitCode.OK and now_s - left_s > FAILED_WORD_S:
            worker = self._crew.workers[name]
            if worker.role == "learner" and "learner" in self._restartable and self._ready_s is not None:
                self._left = None
                self._restart(worker, code)
                return
            self._end(False, f"{name} {said(code)}", ExitCode.FAILED, tail_of=(name,))
        elif now_s - left_s > WORD_S:
            reason = f"{name} left {WORD_S:.0f} s ago, and the run was not said to be over"
            self._end(False, reason, ExitCode.FAILED, tail_of=(name,))

    def _end(self, ok: bool, reason: str, exit_code: int, *, tail_of: Iterable[str] = ()) -> None:
        """The run ends, for this reason; the first one counts."""
        if self._ending is not None:
            return
        for name in tail_of:
            reason = f"{reason}: {self._folder.last_words(name)}"
            self._status.say(f"the last lines of {self._folder.log_path(name)}:\n{self._folder.log_tail(name)}")
        self._ending = Ending(ok, reason, int(exit_code))
        self._status.say(f"the run is over: {reason}" if ok else f"the run ends: {reason}")

    def _view(self, now_s: float) -> RunView:
        return RunView(
            now_s=now_s,
            elapsed_s=now_s - self._began_s,
            steps=self._config.steps,
            snapshot=self._link.snapshot if self._link is not None else None,
            workers={name: worker.running for name, worker in self._crew.workers.items()},
            restarts=sum(self._budget.totals.values()),
            memory_bytes=self._memory.peak_bytes,
            ending=self._ending.reason if self._ending is not None else None,
            servers_up=sum(slot.state == "up" for slot in self._servers.slots.values()),
            servers=len(self._servers.slots),
        )

    def _say_features(self) -> None:
        """What the servers can do, once, as their workers have found out."""
        if told := features_of_run(self._folder.path):
            self._status.say(told)

    # ------------------------------------------------------------------------------------------------- stopping

    def _stop(self) -> None:
        """However the run went: afterwards no process of it is left."""
        if self._memory.peak_bytes == 0:
            self._memory.sample()
        try:
            if self._link is not None and self._link.shutdown is not None:
                self._link.close()
                for name in self._unwelcomed():  # nobody told them, and the buffer will not be there to
                    if self._crew.workers[name].role in ("actor", "teacher"):
                        self._processes.signal(name, signal.SIGTERM)
                grace_s = self._config.launch.shutdown_grace_s
                self._wait_gone([w for w in self._crew.workers.values() if w.role != "buffer"], grace_s)
                self._wait_gone(self._crew.of("buffer"), BUFFER_ALONE_S)
            orderly = self._crew.workers[BUFFER].running and not self._at_once
            for stage in (("learner",), ("teacher", "actor"), ("buffer",)) if orderly else (ROLES,):
                if "buffer" in stage:
                    self._servers.stop()  # they drain while the buffer writes
                    if self._link is not None:
                        self._link.close()  # the buffer waits for its peers to leave, and the launcher is one of them
                self._dismiss([worker for role in stage for worker in self._crew.of(role)])
            self._end_servers()
        finally:
            if self._link is not None:
                self._link.close()
            self._processes.close()
            self._servers.close()
            for left in sweep():
                self._status.say(f"a process was left behind and is killed: {left}")

    def _dismiss(self, workers: list[Worker]) -> None:
        """SIGTERM, a grace, SIGKILL."""
        if not self._at_once:
            for worker in self._crew.running(workers):
                self._processes.signal(worker.name, signal.SIGTERM)
            self._wait_gone(workers, self._config.launch.shutdown_grace_s)
        left = self._crew.running(workers)
        if left and not self._at_once:
            names = ", ".join(worker.name for worker in left)
            self._status.say(f"{names} did not leave in {self._config.launch.shutdown_grace_s:.0f} s: SIGKILL")
            self._dump_stacks(left)
        for worker in left:
            self._processes.signal(worker.name, signal.SIGKILL)
        deadline_s = time.monotonic() + KILLED_WAIT_S
        while self._crew.running(workers) and time.monotonic() < deadline_s:
            self._pump(STARTING_PUMP_S)

    def _end_servers(self) -> None:
        """No worker is left that uses them."""
        if not self._at_once:
            self._servers.stop()
        deadline_s = time.monotonic() + SERVER_GRACE_S
        while self._servers.running and time.monotonic() < deadline_s and not self._at_once:
            self._pump(STARTING_PUMP_S)

    def _dump_stacks(self, workers: list[Worker]) -> None:
        """Where a worker hangs goes to its log (faulthandler answers SIGUSR1), for whoever asks why it was killed."""
        for worker in workers:
            self._processes.signal(worker.name, signal.SIGUSR1)
        time.sleep(STARTING_PUMP_S)

    def _wait_gone(self, workers: Collection[Worker], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self._crew.running(workers) and time.monotonic() < deadline_s and not self._at_once:
            self._pump(STARTING_PUMP_S)

    @property
    def _at_once(self) -> bool:
        """The user pressed Ctrl-C twice."""
        return self._signals.count > 1

    def _after_all(self, ending: Ending) -> Ending:
        """A run that was said to be over is a failed one still, if learner or buffer broke after that."""
        for worker in (*self._crew.of("learner"), *self._crew.of("buffer")):
            code = worker.exit_codes[-1] if worker.exit_codes else 0
            if ending.ok and code not in (ExitCode.OK, ExitCode.TERMINATED):
                return Ending(False, f"{worker.name} {said(code)} when the run was over", int(ExitCode.FAILED))
        return ending
