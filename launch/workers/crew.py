"""The workers of a launcher, and how a process of each is started. When, and what follows: launch.workers.watch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from launch.checks.placement import NOWHERE, Placement
from launch.config.pools import config_of, pool_of
from launch.config.run import RunConfig
from launch.processes.processes import Processes
from launch.processes.slots import Worker
from launch.servers.plan import urls_of
from launch.servers.watch import ServerWatch
from launch.workers.roles import StartRole
from launch.workers.work_folder import WorkFolder
from protocol.context import WorkerRole
from protocol.messages import Snapshot

ROLES: Final[tuple[WorkerRole, ...]] = ("buffer", "learner", "teacher", "actor")
CLOSING_S: Final = 2.0
"""What a teacher needs to close its link and its engine, when it has drained, and the buffer for its ledger."""


class Crew:
    """All worker slots. `address`: where the buffer listens, once it does."""

    def __init__(
        self,
        config: RunConfig,
        folder: WorkFolder,
        processes: Processes,
        servers: ServerWatch,
        entries: Mapping[WorkerRole, str],
        workers: Sequence[Worker],
        *,
        resume: bool,
        preload: Collection[str],
        placement: Placement = NOWHERE,
    ) -> None:
        """`preload`: modules that the fork server has imported. `placement`: of embedded workers."""
        self._config = config
        self._folder = folder
        self._processes = processes
        self._servers = servers
        self._entries = entries
        self._resume = resume
        self._placement = placement
        self._learner_preloaded = entries["learner"].partition(":")[0] in preload
        self.workers = {worker.name: worker for worker in workers}
        self.address = ""

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role == role]

    def running(self, workers: Iterable[Worker]) -> list[Worker]:
        return [worker for worker in workers if worker.running]

    def grace_s(self, worker: Worker) -> float:
        """How long it may take to leave when it is asked to."""
        grace_s = self._config.launch.shutdown_grace_s
        if worker.role == "buffer":  # it notices only then that a learner which was killed is not there any more
            return max(grace_s, self._config.buffer.peer_timeout_s + CLOSING_S)
        if worker.role != "teacher":
            return grace_s
        return max(grace_s, config_of(self._config, "teacher", worker.index).teacher.leaving_s + CLOSING_S)

    def unwelcomed(self, snapshot: Snapshot | None) -> list[str]:
        """Workers that the buffer has not met yet."""
        met = {peer.name for peer in snapshot.peers if peer.alive} if snapshot is not None else set[str]()
        return [name for name, worker in self.workers.items() if worker.role != "buffer" and name not in met]

    def start(self, worker: Worker) -> None:
        """A new process for the worker, when its server answers, if it has one. The buffer is spawned: it needs no
        torch, nor to wait for it. The learner is spawned where nobody else needs torch."""
        worker.awaits_server = worker.name in self._servers and not self._servers.is_up(worker.name)
        if worker.awaits_server:
            worker.restart_at_s = None
            return
        worker.incarnation = secrets.token_hex(8)
        worker.running, worker.pid, worker.restart_at_s = True, None, None
        worker.started_s = time.monotonic()
        start = StartRole(
            entry=self._entries[worker.role],
            role=worker.role,
            index=worker.index,
            name=worker.name,
            incarnation=worker.incarnation,
            run_id=self._folder.run_id,
            run_dir=str(self._folder.path),
            buffer_address=self.address,
            # A buffer that is started again has its journal.
            resume=self._resume or (bool(worker.exit_codes) and worker.role != "buffer"),
            log_path=str(self._folder.log_path(worker.name)),
            config_path=str(self._folder.config_path),
            parent_pid=0,
            lifeline_fd=-1,
            server_url=self._server_url(worker),
            device=self._placement.device(worker.role, worker.index),
        )
        self._processes.start(
            start, fork=self._learner_preloaded if worker.role == "learner" else worker.role != "buffer"
        )

    def _server_url(self, worker: Worker) -> str:
        """Of the server that was started for this worker, or that the user named for it; empty: it has none."""
        if worker.name in self._servers:
            return self._servers.url(worker.name)
        if worker.role not in ("actor", "teacher"):
            return ""
        pool = pool_of(self._config, worker.index) if worker.role == "teacher" else None
        urls = urls_of(pool.config if pool is not None else self._config, worker.role)
        return urls[worker.index - (pool.first if pool is not None else 0)] if urls else ""
