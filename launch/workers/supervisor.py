"""Starts the workers of a run, watches them, restarts dead ones and stops everything, leaving no process behind.

    start     fork server imports | SGLang servers load | buffer spawned at once -> it listens -> learner,
              teachers, actors (those with a server when it answers) -> all connected
    watch     until the buffer says Shutdown, the learner or the buffer dies, a worker dies too often, or Ctrl-C
    stop      after Shutdown workers leave by themselves. Otherwise SIGTERM goes to the learner (it writes a checkpoint
              while the buffer hears of it), then to teachers and actors, then to servers and the buffer (it writes the
              ledger). Each stage has a grace, then SIGKILL

launch.workers.watch has the part that is the same for a joining launcher.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from stillhouse.buffer.server import JOURNAL
from stillhouse.launch.buffer_link import BufferLink, read_address, read_listening
from stillhouse.launch.processes.activity import LOOK_S, Activity, MemoryGauge
from stillhouse.launch.processes.backend import ProcessBackend
from stillhouse.launch.processes.slots import Ending, RunOutcome, ServerAccount, Worker, said
from stillhouse.launch.report.figures import Announcements, RunView, failures_text, learner_stats
from stillhouse.launch.report.status import StatusView
from stillhouse.launch.report.summary import Saved, save_error
from stillhouse.launch.workers.crew import ROLES
from stillhouse.launch.workers.hosts import read_card
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.launch.workers.watch import STARTING_PUMP_S, WORD_S, Watch
from stillhouse.protocol.context import ExitCode
from stillhouse.protocol.errors import ProtocolError
from stillhouse.protocol.keys import run_client_keys
from stillhouse.protocol.messages import Snapshot

log = logging.getLogger(__name__)
LMDB_SOURCE: Final = "mdb.c:"
"""LMDB's message before it aborts names this source file."""
BUFFER_ANSWER_S: Final = 5.0
"""A buffer that owes an answer for this long is inspected: is it stopped, does it compute?"""
BUFFER_IDLE_S: Final = 15.0
"""A buffer that owed an answer and did nothing for this long hangs."""
BUFFER_ALONE_S: Final = 2.0
"""Time for the buffer to leave by itself after all others; it may be waiting for a dead peer."""
FAILED_WORD_S: Final = 1.0
"""Like WORD_S, for a learner or buffer that failed."""
UNSAVED: Final[dict[Saved, str]] = {"checkpoint": "checkpoints_failed_total", "average": "ema_failures_total"}
"""What a learner could not save, by its figure of how many."""


class RunSupervisor(Watch):
    """All processes of one run. `run` does everything."""

    def __init__(self, plan: LaunchPlan, folder: WorkFolder, status: StatusView, backend: ProcessBackend) -> None:
        config = plan.config
        counts = (1, 1, config.teachers, config.actors)
        workers = [Worker(role, index) for role, n in zip(ROLES, counts, strict=True) for index in range(n)]
        super().__init__(plan, folder, status, backend, workers)
        self._news = Announcements(self._crew.workers)
        self._memory = MemoryGauge()
        (self._buffer,) = self._crew.of("buffer")
        self._activity = Activity()
        self._buffer_looked_s = self._hosts_looked_s = self._buffer_moved_s = 0.0
        self._hosts_said = ("", 0)
        self._unsaved: dict[Saved, float] = dict.fromkeys(UNSAVED, 0.0)

    def run(self) -> RunOutcome:
        """Start, watch, stop. Errors are not raised; they are in the outcome."""
        with self._signals, self._status:
            try:
                self._start_and_watch()
            except Exception as error:  # a bug: show it, log it, and fail the run
                log.exception("the launcher failed")
                self._end(f"the launcher failed: {error!r}")
            finally:
                self._stop()
        assert self._ending is not None
        return RunOutcome(
            ending=self._after_all(self._ending),
            ready_s=self._ready_s,
            wall_s=time.monotonic() - self._plan.began_s,
            peak_memory_bytes=self._memory.peak_bytes,
            snapshot=self._link.snapshot if self._link is not None else None,
            restarts=dict(self._budget.totals),
            exit_codes={name: worker.exit_codes for name, worker in self._crew.workers.items()},
            servers={
                name: ServerAccount(
                    worker=slot.plan.worker,
                    place=slot.plan.place,
                    restarts=self._budget.totals.get(name, 0),
                    exit_codes=slot.exit_codes,
                )
                for name, slot in self._servers.slots.items()
            },
        )

    # ------------------------------------------------------------------------------------------------- starting

    def _start_and_watch(self) -> None:
        self._backend.prepare()
        self._servers.start()
        self._crew.start(self._buffer)
        if not self._until_it_listens():
            return
        self._crew.address = read_address(self._listing, self._folder.run_id) or ""
        try:
            keys = run_client_keys(self._folder.path, "launcher", "launcher")
            self._link = BufferLink(
                self._crew.address,
                self._folder.run_id,
                secrets.token_hex(8),
                keys,
                # Long, because a buffer that died may take a while to be back; a hanging one is noticed otherwise.
                reconnect_timeout_s=self._config.launch.ready_timeout_s,
            )
        except ProtocolError as error:
            self._end(f"no connection to the buffer: {error}", log=self._buffer.name)
            return
        for role in ("learner", "teacher", "actor"):
            for worker in self._crew.of(role):
                self._crew.start(worker)
        if self._until_ready():
            n_workers = len(self._crew.workers) - 1
            ready = "the learner is" if n_workers == 1 else f"all {n_workers} workers are"
            self._status.say(f"{ready} ready after {self._ready_s:.1f} s")
            self._say_features()
            self._memory.sample()
            self._until_over()

    @property
    def _listing(self) -> Path:
        return self._folder.path / "buffer.json"

    def _until_it_listens(self) -> bool:
        """Pump until the buffer does; False if the run ends first."""
        run_id, name = self._folder.run_id, self._buffer.name

        def silent() -> list[str]:
            return [] if read_address(self._listing, run_id) else [name]

        def what() -> str:
            return f"the buffer to listen; the last lines of {name}.log:\n{self._folder.log_tail(name)}"

        return self._until_there(lambda: not silent(), self._config.launch.ready_timeout_s, silent, what)

    # ------------------------------------------------------------------------------------------------- watching

    def _may_restart(self, worker: Worker, code: int) -> bool:
        """Actors and teachers: in any case. The buffer: when it was killed, but not when it failed, because its journal
        would bring it to the same failure again. The learner: from its last checkpoint, when it was killed or failed
        after all workers were ready. Any other death ends the run."""
        if code in (ExitCode.USELESS, ExitCode.RUN_LOST, ExitCode.SPENT):
            return False
        match worker.role:
            case "buffer":
                return code < 0 and self._link is not None and not self._journal_broke(worker, code)
            case "learner":
                return code < 0 and self._link is not None
            case _:
                return True

    def _cause(self, worker: Worker, code: int) -> str:
        if not self._journal_broke(worker, code):
            return said(code)
        journal = self._folder.path / JOURNAL
        return (
            f"{said(code)} in LMDB: its journal {journal} is damaged (did the disk lose "
            "writes?). Use --resume: it starts from the newest checkpoint with a new journal"
        )

    def _journal_broke(self, worker: Worker, code: int) -> bool:
        """LMDB aborts the process when it meets an impossible page; a restarted buffer would meet it again."""
        return (
            worker.role == "buffer"
            and code == -signal.SIGABRT
            and LMDB_SOURCE in self._folder.log_tail(worker.name, lines=60)
        )

    def _end_without_word(self, now_s: float) -> None:
        """The learner or buffer left, and no reason has arrived. A learner that failed may be restarted."""
        if self._left is None:
            return
        name, left_s, code = self._left
        if code != ExitCode.OK and now_s - left_s > FAILED_WORD_S:
            worker = self._crew.workers[name]
            if worker.role == "learner" and self._ready_s is not None:
                self._left = None
                self._restart(worker, code)
                return
            self._end(f"{name} {said(code)}", log=name)
        elif now_s - left_s > WORD_S:
            reason = f"{name} left {WORD_S:.0f} s ago, but the buffer did not say that the run is over"
            self._end(reason, log=name)

    def _link_lost(self, why: str) -> None:
        if self._buffer.running:
            self._end(f"the buffer does not answer: {why}", log=self._buffer.name)

    def _read_link(self, now_s: float) -> None:
        super()._read_link(now_s)
        if self._link is not None and self._ending is None and now_s - self._buffer_looked_s > LOOK_S:
            self._buffer_looked_s = now_s
            self._kill_hanging_buffer(self._link, now_s)

    def _say_unsaved(self, snapshot: Snapshot) -> None:
        """Say why a checkpoint, or an average for teachers, could not be written, for each that could not."""
        stats = learner_stats(snapshot) or {}
        for what, figure in UNSAVED.items():
            failed = stats.get(figure, 0.0)
            if failed > self._unsaved[what] and (why := save_error(self._folder.path, what)):
                self._status.say(f"{why}; training goes on, and the next {what} tries again ({failed:.0f} failed)")
            self._unsaved[what] = failed

    def _kill_hanging_buffer(self, link: BufferLink, now_s: float) -> None:
        """Kill a buffer that owes an answer and does nothing. Its exit is then treated like any other. A buffer that is
        merely slow is left alone."""
        buffer, name = self._buffer, self._buffer.name
        if not buffer.where or min(link.unanswered_s(now_s), now_s - buffer.started_s) < BUFFER_ANSWER_S:
            self._buffer_moved_s = now_s
            return
        vitals = self._backend.vitals([name])
        stopped = any(process.stopped for process in vitals.values())
        if self._activity.moved(vitals) and not stopped:
            self._buffer_moved_s = now_s
        elif stopped or now_s - self._buffer_moved_s > BUFFER_IDLE_S:
            why = "is stopped (SIGSTOP)" if stopped else "does nothing"
            self._status.say(f"{name} has not answered for {link.unanswered_s(now_s):.0f} s and {why}; it is killed")
            self._buffer_moved_s = buffer.started_s = now_s  # once is enough
            self._dump_stacks([buffer])
            self._backend.kill(name)

    def _waits_for_others(self, worker: Worker) -> bool:
        return worker.role == "learner" and self._hosts_left(worker) > 0

    def _hosts_left(self, learner: Worker) -> int:
        """Hosts whose ranks this start of the learner still waits for."""
        card = read_card(self._folder.path) if self._config.learner.hosts > 1 else None
        return card.hosts - card.here if card is not None and card.incarnation == learner.incarnation else 0

    def _say_hosts(self) -> None:
        """Say how many hosts the learner waits for, when that changes."""
        learner, each = self._crew.of("learner")[0], self._config.learner.ranks_each
        if (news := (learner.incarnation, self._hosts_left(learner))) == self._hosts_said:
            return
        before, self._hosts_said = self._hosts_said, news
        if news[1]:
            self._status.say(
                f"the learner waits for {news[1]} of {self._config.learner.hosts} hosts: `stillhouse join "
                f"{self._folder.path} --learner-ranks {each}` on each"
            )
        elif before[1]:
            self._status.say(f"all {self._config.learner.hosts} hosts of the learner are here")

    def _show(self, now_s: float) -> None:
        if self._config.learner.hosts > 1 and now_s - self._hosts_looked_s > LOOK_S:
            self._hosts_looked_s = now_s
            self._say_hosts()
        if self._link is not None and self._link.snapshot is not None:
            for text in self._news.take(self._link.snapshot):
                self._status.say(text)
            self._say_unsaved(self._link.snapshot)
        super()._show(now_s)
        self._memory.sample_when_due()

    def _view(self, now_s: float) -> RunView:
        return super()._view(now_s)._replace(memory_bytes=self._memory.peak_bytes)

    # ------------------------------------------------------------------------------------------------- stopping

    def _stop(self) -> None:
        if self._memory.peak_bytes == 0:
            self._memory.sample()
        try:
            if self._link is not None and self._link.shutdown is not None:
                self._link.close()
                if self._buffer.restart_at_s is not None:  # it was killed before all workers heard it
                    self._restart_for_ledger()
                for name in self._unwelcomed():  # they got no Shutdown, and never will
                    if self._crew.workers[name].role in ("actor", "teacher"):
                        self._backend.stop(name)
                self._wait_gone([w for w in self._crew.workers.values() if w.role != "buffer"])
                self._wait_gone(self._crew.of("buffer"), BUFFER_ALONE_S)
            orderly = self._buffer.running and not self._at_once
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
        """A buffer that was killed while it sent Shutdown is needed again: for workers that have not received it, and
        for the ledger. If it does not come back, they are told to leave here: they would wait for it."""
        if worker.role != "buffer" or code >= 0 or worker.given_up or self._restart_for_ledger():
            return
        if waiting := self._crew.running([one for one in self._crew.workers.values() if one.role != "buffer"]):
            names = ", ".join(one.name for one in waiting)
            self._status.say(
                f"{worker.name} {said(code)} at the end and is not started again; {names} are told to leave"
            )
            for one in waiting:
                self._backend.stop(one.name)

    def _restart_for_ledger(self) -> bool:
        """Start the buffer once more: from its journal it knows that the run is over, sends Shutdown to workers that
        connect, and writes the ledger. False if that is impossible or not needed."""
        buffer = self._buffer
        if self._at_once or (self._folder.path / "ledger.json").exists():
            return False
        if self._link is None or self._budget.died(buffer.name, time.monotonic()) is None:
            return False
        self._status.say(f"{buffer.name} died before the ledger was written; it is started again to write it")
        self._crew.start(buffer)
        return True

    def _finish_ledger(self) -> None:
        """All workers are gone. If the buffer was killed before it wrote its ledger, start it again for that."""
        buffer = self._buffer
        killed = bool(buffer.exit_codes) and buffer.exit_codes[-1] < 0 and not buffer.running
        if killed and self._restart_for_ledger():
            self._wait_for_restarted_buffer()
            self._dismiss([buffer])

    def _wait_for_restarted_buffer(self) -> None:
        """Wait until it listens; before that, SIGTERM would end it without a ledger."""
        deadline_s = time.monotonic() + self._config.launch.ready_timeout_s
        while self._is_starting(self._buffer) and not self._at_once and time.monotonic() < deadline_s:
            self._pump(STARTING_PUMP_S)

    def _is_starting(self, buffer: Worker) -> bool:
        if not buffer.running or not buffer.exit_codes:
            return False
        listening = read_listening(self._listing)
        return not buffer.where or listening is None or listening.incarnation != buffer.incarnation

    def _wait_for_checkpoint(self) -> None:
        """Let the learner finish its step and write a checkpoint, for as long as the buffer hears from it, however slow
        the step and the disk are. A silent learner gets the normal grace."""
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
        """Whether none of them is connected to the buffer, or the buffer itself is gone."""
        snapshot = self._link.snapshot if self._link is not None and self._link.lost is None else None
        alive = {peer.name for peer in snapshot.peers if peer.alive} if snapshot is not None else set[str]()
        return all(worker.name not in alive for worker in workers)

    def _after_all(self, ending: Ending) -> Ending:
        """A run that ended well still fails if the learner or buffer broke after that. A failed run mentions its failed
        rollouts, which may be the cause."""
        failed = failures_text(self._link.snapshot if self._link is not None else None)
        if failed and ending.exit_code == ExitCode.FAILED:
            ending = ending._replace(reason=f"{ending.reason}; failed rollouts: {failed}")
        for worker in (*self._crew.of("learner"), *self._crew.of("buffer")):
            code = worker.exit_codes[-1] if worker.exit_codes else 0
            if ending.ok and code not in (ExitCode.OK, ExitCode.TERMINATED):
                return Ending(False, f"{worker.name} {said(code)} when the run was over", int(ExitCode.FAILED))
        return ending
