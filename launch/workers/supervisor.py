"""Starts the workers, watches them, starts dead ones again, and stops all of it, leaving no process behind.

    start     fork server imports | SGLang servers load | buffer spawned at once -> it listens -> learner, teachers,
              actors, those with a server of their own when it answers -> all welcomed
    watch     until the buffer says Shutdown, the learner or the buffer dies, a worker dies too often, or Ctrl-C
    stop      told by the buffer: each worker leaves by itself; then, or else: SIGTERM to the learner (which writes a
              checkpoint, while it is heard of), to actors and teachers, to their servers and the buffer (which writes
              the ledger), each stage with a grace, then SIGKILL

How processes are watched in between is in launch.workers.watch.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Collection
from typing import Final

from launch.buffer_link import BufferLink, read_address, read_incarnation
from launch.processes.activity import LOOK_S, Activity, MemoryGauge
from launch.processes.backend import ProcessBackend
from launch.processes.slots import Ending, Outcome, Worker, said
from launch.report.figures import News, RunView, failures_text
from launch.report.status import StatusView
from launch.workers.crew import ROLES
from launch.workers.launch_plan import LaunchPlan
from launch.workers.start_role import WorkFolder
from launch.workers.watch import STARTING_PUMP_S, WORD_S, Watch
from protocol.context import ExitCode, WorkerRole
from protocol.errors import ProtocolError
from protocol.keys import run_client_keys

BUFFER: Final = "buffer-0"
log = logging.getLogger(__name__)
LMDB_SOURCE: Final = "mdb.c:"
"""What LMDB writes before it aborts has the place in its source."""
BUFFER_ANSWER_S: Final = 5.0
"""A buffer that owes an answer for so long is looked at: is it stopped, does it compute?"""
BUFFER_IDLE_S: Final = 15.0
"""It hangs when it has done nothing for so long, and owed an answer all the while."""
BUFFER_ALONE_S: Final = 2.0
"""How long the buffer may take to leave by itself when all others have left; it may wait for a peer that is dead."""
FAILED_WORD_S: Final = 1.0
"""The same as WORD_S, after a learner or buffer that failed."""
RESTARTABLE: Final[frozenset[WorkerRole]] = frozenset(ROLES)
"""Roles that are started again when they die: actors and teachers however they died; the buffer when it was killed (it
goes on from its journal, where what broke it once would break it again); the learner, from its last checkpoint, when it
was killed, or failed after all were ready. Else their death ends the run."""


class Supervisor(Watch):
    """One run's processes, from the first to the last. `run` is the whole of it."""

    def __init__(
        self,
        plan: LaunchPlan,
        folder: WorkFolder,
        status: StatusView,
        backend: ProcessBackend,
        *,
        restartable: Collection[WorkerRole] = RESTARTABLE,
    ) -> None:
        config = plan.config
        counts = (1, 1, config.teachers, config.actors)
        workers = [Worker(role, index) for role, n in zip(ROLES, counts, strict=True) for index in range(n)]
        super().__init__(plan, folder, status, backend, workers)
        self._restartable = restartable
        self._news = News(self._crew.workers)
        self._memory = MemoryGauge()
        self._activity = Activity()
        self._buffer_looked_s = self._buffer_moved_s = 0.0

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
            wall_s=time.monotonic() - self._plan.began_s,
            peak_memory_bytes=self._memory.peak_bytes,
            snapshot=self._link.snapshot if self._link is not None else None,
            restarts=dict(self._budget.totals),
            exit_codes={name: worker.exit_codes for name, worker in self._crew.workers.items()},
            servers=self._server_ends(),
        )

    # ------------------------------------------------------------------------------------------------- starting

    def _start_and_watch(self) -> None:
        self._backend.prepare()
        self._servers.start()
        self._crew.start(self._crew.workers[BUFFER])
        if not self._until_there(
            self._buffer_listens,
            self._config.launch.ready_timeout_s,
            lambda: [BUFFER],
            lambda: f"the buffer to listen; the last lines of {BUFFER}.log:\n{self._folder.log_tail(BUFFER)}",
        ):
            return
        try:
            keys = run_client_keys(self._folder.path, "launcher", "launcher")
            self._link = BufferLink(
                self._crew.address,
                self._folder.run_id,
                secrets.token_hex(8),
                keys,
                # Whether a buffer that runs hangs is seen from its process, and one that died may take long to be back.
                reconnect_timeout_s=self._config.launch.ready_timeout_s,
            )
        except ProtocolError as error:
            self._end(False, f"no connection to the buffer: {error}", ExitCode.FAILED, tail_of=(BUFFER,))
            return
        for role in ("learner", "teacher", "actor"):
            for worker in self._crew.of(role):
                self._crew.start(worker)
        if self._until_ready():
            self._status.say(f"all {len(self._crew.workers) - 1} workers are ready after {self._ready_s:.1f} s")
            self._say_features()
            self._memory.sample()
            self._until_over()

    def _buffer_listens(self) -> bool:
        self._crew.address = read_address(self._folder.path / "buffer.json", self._folder.run_id) or ""
        return bool(self._crew.address)

    # ------------------------------------------------------------------------------------------------- watching

    def _may_restart(self, worker: Worker, code: int) -> bool:
        if worker.role not in self._restartable or code in (ExitCode.USELESS, ExitCode.RUN_LOST):
            return False
        match worker.role:
            case "buffer":
                may = self._config.buffer.journal and self._link is not None
                return code < 0 and may and not self._journal_broke(worker, code)
            case "learner":
                return code < 0 and self._link is not None
            case _:
                return True

    def _cause(self, worker: Worker, code: int) -> str:
        if not self._journal_broke(worker, code):
            return said(code)
        return (
            f"{said(code)} in LMDB: its journal {self._folder.path / 'journal'} is damaged (a disk that lost what was "
            "written?). Go on by --resume: from the newest checkpoint, with a new journal"
        )

    def _journal_broke(self, worker: Worker, code: int) -> bool:
        """LMDB ends the process when it meets a page that cannot be; another one would meet it again."""
        return (
            worker.name == BUFFER and code == -signal.SIGABRT and LMDB_SOURCE in self._folder.log_tail(BUFFER, lines=60)
        )

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

    def _link_lost(self, why: str) -> None:
        if self._crew.workers[BUFFER].running:
            self._end(False, f"the buffer does not answer: {why}", ExitCode.FAILED, tail_of=(BUFFER,))

    def _read_link(self, now_s: float) -> None:
        super()._read_link(now_s)
        if self._link is not None and self._ending is None and now_s - self._buffer_looked_s > LOOK_S:
            self._buffer_looked_s = now_s
            self._kill_hanging_buffer(self._link, now_s)

    def _kill_hanging_buffer(self, link: BufferLink, now_s: float) -> None:
        """Its exit is then treated like any other: with a journal it is started again. One that is merely slow is let
        be."""
        buffer = self._crew.workers[BUFFER]
        if not buffer.where or min(link.unanswered_s(now_s), now_s - buffer.started_s) < BUFFER_ANSWER_S:
            self._buffer_moved_s = now_s
            return
        vitals = self._backend.vitals([BUFFER])
        stopped = any(process.stopped for process in vitals.values())
        if self._activity.moved(vitals) and not stopped:
            self._buffer_moved_s = now_s
        elif stopped or now_s - self._buffer_moved_s > BUFFER_IDLE_S:
            why = "is stopped (SIGSTOP)" if stopped else "does nothing"
            self._status.say(f"{BUFFER} has not answered for {link.unanswered_s(now_s):.0f} s and {why}; it is killed")
            self._buffer_moved_s = buffer.started_s = now_s  # once is enough
            self._dump_stacks([buffer])
            self._backend.kill(BUFFER)

    def _show(self, now_s: float) -> None:
        if self._link is not None and self._link.snapshot is not None:
            for text in self._news.take(self._link.snapshot):
                self._status.say(text)
        super()._show(now_s)
        self._memory.sample_when_due()

    def _view(self, now_s: float) -> RunView:
        return super()._view(now_s)._replace(memory_bytes=self._memory.peak_bytes)

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
                        self._backend.stop(name)
                self._wait_gone([w for w in self._crew.workers.values() if w.role != "buffer"])
                self._wait_gone(self._crew.of("buffer"), BUFFER_ALONE_S)
            orderly = self._crew.workers[BUFFER].running and not self._at_once
            if orderly:
                self._wait_for_checkpoint()
            for stage in (("learner",), ("teacher", "actor"), ("buffer",)) if orderly else (ROLES,):
                if "buffer" in stage:
                    self._wait_for_restarted_buffer()
                    self._servers.stop()  # they drain while the buffer writes
                    if self._link is not None:
                        self._link.close()  # the buffer waits for its peers to leave, and the launcher is one of them
                self._dismiss([worker for role in stage for worker in self._crew.of(role)])
            self._finish_ledger()
            self._end_servers()
        finally:
            self._close()

    def _exited_at_the_end(self, worker: Worker, code: int) -> None:
        """A buffer that was killed while the end was being told is needed again: for those who have not heard of it,
        and for the ledger."""
        if worker.name == BUFFER and code < 0 and not worker.given_up:
            self._restart_for_ledger(worker)

    def _restart_for_ledger(self, buffer: Worker) -> bool:
        """A buffer goes on from its journal: if it is over, it tells who comes, and writes the ledger."""
        if self._at_once or not self._config.buffer.journal or (self._folder.path / "ledger.json").exists():
            return False
        if self._link is None or self._budget.died(BUFFER, time.monotonic()) is None:
            return False
        self._status.say(f"{BUFFER} died before the ledger was written; it is started again to write it")
        self._crew.start(buffer)
        return True

    def _finish_ledger(self) -> None:
        """Everybody has gone, and the buffer, which hung or was killed, has not written its ledger."""
        buffer = self._crew.workers[BUFFER]
        killed = bool(buffer.exit_codes) and buffer.exit_codes[-1] < 0
        if killed and not buffer.running and self._restart_for_ledger(buffer):
            self._wait_for_restarted_buffer()
            self._dismiss([buffer])

    def _wait_for_restarted_buffer(self) -> None:
        """Until it listens: before, SIGTERM would end it without a ledger."""
        buffer = self._crew.workers[BUFFER]
        deadline_s = time.monotonic() + self._config.launch.ready_timeout_s
        file = self._folder.path / "buffer.json"
        while buffer.running and buffer.exit_codes and not self._at_once and time.monotonic() < deadline_s:
            if buffer.where and read_incarnation(file) == buffer.incarnation:
                return
            self._pump(STARTING_PUMP_S)

    def _wait_for_checkpoint(self) -> None:
        """The learner finishes its step and writes a checkpoint: for as long as the buffer hears of it, however slow
        step and disk are. One that is not heard of gets the grace of all others."""
        learners = self._crew.running(self._crew.of("learner"))
        if not learners or self._silent(learners):
            return
        for learner in learners:
            self._backend.stop(learner.name)
        self._status.say("the learner finishes its step and writes a checkpoint (Ctrl-C again: stop at once, without)")
        deadline_s = time.monotonic() + self._config.learner.stall_timeout_s
        while self._crew.running(learners) and not (self._at_once or self._silent(learners)):
            if time.monotonic() > deadline_s:
                return
            self._pump(STARTING_PUMP_S)

    def _silent(self, workers: Collection[Worker]) -> bool:
        """The buffer does not count them among those that are there, or is not there itself."""
        snapshot = self._link.snapshot if self._link is not None and self._link.lost is None else None
        alive = {peer.name for peer in snapshot.peers if peer.alive} if snapshot is not None else set[str]()
        return all(worker.name not in alive for worker in workers)

    def _after_all(self, ending: Ending) -> Ending:
        """A run that was said to be over is a failed one still, if learner or buffer broke after that. One that failed
        says which rollouts did: they may be why."""
        failed = failures_text(self._link.snapshot if self._link is not None else None)
        if failed and ending.exit_code == ExitCode.FAILED:
            ending = ending._replace(reason=f"{ending.reason}; failed rollouts: {failed}")
        for worker in (*self._crew.of("learner"), *self._crew.of("buffer")):
            code = worker.exit_codes[-1] if worker.exit_codes else 0
            if ending.ok and code not in (ExitCode.OK, ExitCode.TERMINATED):
                return Ending(False, f"{worker.name} {said(code)} when the run was over", int(ExitCode.FAILED))
        return ending
