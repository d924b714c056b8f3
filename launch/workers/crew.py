"""The workers of a launcher, and how a process of each is started. When, and what follows: launch.workers.watch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Final

from launch.config.pools import config_of, pool_of
from launch.processes.backend import ProcessBackend
from launch.processes.slots import Worker
from launch.servers.plan import urls_of
from launch.servers.watch import ServerWatch
from launch.workers.launch_plan import LaunchPlan
from launch.workers.start_role import StartRole
from protocol.context import WorkerRole
from protocol.messages import Snapshot

ROLES: Final[tuple[WorkerRole, ...]] = ("buffer", "learner", "teacher", "actor")
CLOSING_S: Final = 2.0
"""What a teacher needs to close its link and its engine, when it has drained, and the buffer for its ledger."""


class Crew:
    """All worker slots. `address`: where the buffer listens, once it does."""

    def __init__(
        self,
        plan: LaunchPlan,
        run_id: str,
        backend: ProcessBackend,
        servers: ServerWatch,
        workers: Sequence[Worker],
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._run_id = run_id
        self._backend = backend
        self._servers = servers
        self._learner_preloaded = plan.entries["learner"].partition(":")[0] in plan.preload
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
        """A new process for the worker, when its server answers, if it has one. The buffer needs no torch, nor to wait
        for it; nor does the learner, where nobody else needs torch."""
        worker.awaits_server = worker.name in self._servers and not self._servers.is_up(worker.name)
        if worker.awaits_server:
            worker.restart_at_s = None
            return
        worker.incarnation = secrets.token_hex(8)
        worker.running, worker.where, worker.restart_at_s = True, "", None
        worker.started_s = time.monotonic()
        start = StartRole(
            entry=self._plan.entries[worker.role],
            role=worker.role,
            index=worker.index,
            name=worker.name,
            incarnation=worker.incarnation,
            run_id=self._run_id,
            buffer_address=self.address,
            # A buffer that is started again has its journal.
            resume=self._plan.resume or (bool(worker.exit_codes) and worker.role != "buffer"),
            server_url=self._server_url(worker),
            device=self._plan.placement.device(worker.role, worker.index),
        )
        self._backend.start(
            start, preloaded=self._learner_preloaded if worker.role == "learner" else worker.role != "buffer"
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
