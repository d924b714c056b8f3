"""A launcher whose actors, teachers and ranks of the learner join a run that another launcher started. It starts,
watches and ends only them.

join      fork server imports | SGLang servers load | workers start -> the buffer has met all of them
watch     until the buffer says Shutdown, a worker dies too often, the buffer is gone for good, or Ctrl-C
leave     after Shutdown workers leave by themselves; those that do not get SIGTERM, a grace, SIGKILL. A worker that
          leaves says Goodbye, and the buffer hands its rollouts and leases to others at once
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Container
from typing import ClassVar, Final

import msgspec

from stillhouse.launch.buffer_link import BufferLink
from stillhouse.launch.processes.backend import ProcessBackend
from stillhouse.launch.processes.slots import Worker, said
from stillhouse.launch.report.figures import RunView, clock, short
from stillhouse.launch.report.status import StatusView
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.launch.workers.watch import WORD_S, Watch
from stillhouse.protocol.context import ExitCode
from stillhouse.protocol.messages import PeerView, Snapshot

log = logging.getLogger(__name__)
LAST_LOOK_S: Final = 1.0


class JoinStatus(StatusView):
    """One line every `every_s`; None: events only."""

    def __init__(self, every_s: float | None, now_s: float) -> None:
        self._every_s = every_s
        self._shown_s = now_s

    def show(self, view: RunView) -> None:
        if self._every_s is not None and view.now_s - self._shown_s >= self._every_s:
            self._shown_s = view.now_s
            print(join_line(view), flush=True)


def join_line(view: RunView) -> str:
    """The whole status in one line."""
    ours = own_peers(view.snapshot, view.workers)
    running = Counter(name.partition("-")[0] for name, runs in view.workers.items() if runs)
    connected = Counter(peer.role for peer in ours.values() if peer.alive)
    of = Counter(name.partition("-")[0] for name in view.workers)
    step = f"step {view.snapshot.version.step}/{view.steps}" if view.snapshot is not None else "step ?"
    parts = [f"[{clock(view.elapsed_s)}] {step}"]
    for role, did in (("actor", "written"), ("teacher", "scored")):
        if of[role]:
            tokens = short(sum(peer.tokens_total for peer in ours.values() if peer.role == role))
            parts.append(
                f"{role}s {running[role]} of {of[role]} run, {connected[role]} connected, tokens {did} {tokens}"
            )
    versions = Counter(str(peer.version) for peer in ours.values() if peer.role == "actor" and peer.version is not None)
    if versions:
        parts.append("weights " + ", ".join(f"{version} x{n}" for version, n in sorted(versions.items())))
    if view.restarts:
        parts.append(f"restarts {view.restarts}")
    if view.servers_up < view.servers:
        parts.append(f"{view.servers_up} of {view.servers} inference servers answer")
    return " | ".join(parts)


def own_peers(snapshot: Snapshot | None, names: Container[str]) -> dict[str, PeerView]:
    """Those of our workers that the buffer has met."""
    return {peer.name: peer for peer in snapshot.peers if peer.name in names} if snapshot is not None else {}


class JoinedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one worker over all its processes, from the last snapshot."""

    tokens: int
    done: int
    restarts: int
    exit_codes: list[int]


class JoinSummary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json of a joining launcher's folder."""

    run: str
    run_id: str
    ok: bool
    reason: str
    exit_code: int
    broke_off: bool
    """The run failed, was stopped, or could not be reached any more; this launcher was not asked to leave."""
    wall_s: float
    ready_s: float | None
    workers: dict[str, JoinedWorker]


class Joiner(Watch):
    """`run` does everything."""

    LEAVING: ClassVar[str] = "leaving the run"

    def __init__(
        self,
        plan: LaunchPlan,
        folder: WorkFolder,
        status: JoinStatus,
        backend: ProcessBackend,
        link: BufferLink,
        *,
        address: str,
        prefix: str,
        with_ranks: bool = False,
    ) -> None:
        """`link`: connected; closed at the end of `run`. `with_ranks`: a process with ranks of the learner, too."""
        teachers = [Worker("teacher", i, prefix) for i in range(plan.config.teachers)]
        actors = [Worker("actor", i, prefix) for i in range(plan.config.actors)]
        ranks = [Worker("learner", 0, prefix)] if with_ranks else []
        super().__init__(plan, folder, status, backend, teachers + actors + ranks)
        self._crew.address = address
        self._link = link

    def run(self, run_name: str) -> JoinSummary:
        """Start, watch, stop. Errors are not raised; they are in the summary."""
        broke_off = False
        with self._signals:
            try:
                self._start_and_watch()
                broke_off = self._has_broken_off()
            except Exception as error:  # a bug: show it, log it, and fail
                log.exception("the joining launcher failed")
                self._end(f"the joining launcher failed: {error!r}")
            finally:
                self._stop()
        assert self._ending is not None and self._link is not None
        peers = own_peers(self._link.snapshot, self._crew.workers)
        return JoinSummary(
            run=run_name,
            run_id=self._folder.run_id,
            ok=self._ending.ok,
            reason=self._ending.reason,
            exit_code=self._ending.exit_code,
            broke_off=broke_off and not self._signals.count,
            wall_s=time.monotonic() - self._plan.began_s,
            ready_s=self._ready_s,
            workers={
                name: JoinedWorker(
                    tokens=peers[name].tokens_total if name in peers else 0,
                    done=peers[name].done_total if name in peers else 0,
                    restarts=self._budget.totals.get(name, 0),
                    exit_codes=worker.exit_codes,
                )
                for name, worker in self._crew.workers.items()
            },
        )

    def _start_and_watch(self) -> None:
        self._backend.prepare()
        self._servers.start()
        for worker in self._crew.workers.values():
            self._crew.start(worker)
        if self._until_ready():
            self._status.say(f"all {len(self._crew.workers)} have joined after {self._ready_s:.1f} s")
            self._say_features()
            self._until_over()

    def _may_restart(self, worker: Worker, code: int) -> bool:
        return code not in (ExitCode.OK, ExitCode.USELESS, ExitCode.RUN_LOST, ExitCode.SPENT)

    def _has_broken_off(self) -> bool:
        """Whether the run itself ended badly. Call it once there is an ending, before our link is closed."""
        assert self._ending is not None and self._link is not None
        run_ended = self._link.shutdown is not None or self._link.lost is not None
        run_lost = any(ExitCode.RUN_LOST in worker.exit_codes for worker in self._crew.workers.values())
        return not self._ending.ok and (run_ended or run_lost)

    def _end_without_word(self, now_s: float) -> None:
        """A worker left because the run ended, but our own link has not heard of it."""
        if self._left is not None and now_s - self._left[1] > WORD_S:
            self._end_as_worker()

    def _cause(self, worker: Worker, code: int) -> str:
        return said(code)

    def _exited_at_the_end(self, worker: Worker, code: int) -> None:
        """Nothing to do: workers are expected to leave."""

    def _link_lost(self, why: str) -> None:
        if self._left is not None:
            self._end_as_worker()
        else:
            self._end(f"the run's buffer does not answer: {why}")

    def _end_as_worker(self) -> None:
        assert self._left is not None
        name, _, code = self._left
        self._end(f"{name} {said(code)}, because the run is over", code)

    def _stop(self) -> None:
        """End all our processes, however it went, and let the buffer know that they are gone."""
        workers = list(self._crew.workers.values())
        try:
            if self._link is not None and self._link.shutdown is not None:
                for name in self._unwelcomed():  # the buffer never met them, so they got no Shutdown
                    self._backend.stop(name)
                self._last_look()
                self._link.close()  # the buffer waits for its peers to leave
                self._wait_gone(workers)
            self._dismiss(workers)
            self._end_servers()
            self._last_look()
        finally:
            self._close()

    def _last_look(self) -> None:
        """Fetch a fresh snapshot, for our workers' totals after they left or after the run's end."""
        link = self._link
        if link is None or link.lost is not None:
            return
        deadline_s = time.monotonic() + LAST_LOOK_S
        link.ask_anew(time.monotonic())
        while not link.answered and link.lost is None and time.monotonic() < deadline_s and not self._at_once:
            link.take()
            time.sleep(0.02)
