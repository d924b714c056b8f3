"""The workers of a launcher, and how a process is started for each. launch.workers.watch decides when."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Final

from stillhouse.launch.config.pools import group_of, pool_of
from stillhouse.launch.processes.backend import ProcessBackend
from stillhouse.launch.processes.slots import Worker
from stillhouse.launch.servers.watch import ServerWatch
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import StartRole
from stillhouse.protocol.context import WorkerRole
from stillhouse.protocol.messages import Snapshot

ROLES: Final[tuple[WorkerRole, ...]] = ("buffer", "learner", "teacher", "actor")
CLOSING_S: Final = 2.0
"""Time for a drained teacher to close its link and engine, and for the buffer to write its ledger."""


class Crew:
    """All worker slots. `address` is the buffer's, once it listens."""

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
        """Longest time the worker may take to leave when asked."""
        grace_s = self._config.launch.shutdown_grace_s
        if worker.role == "buffer":  # only then does it notice that a killed learner is gone
            return max(grace_s, self._config.buffer.peer_timeout_s + CLOSING_S)
        if worker.role != "teacher":
            return grace_s
        return max(grace_s, pool_of(self._config, worker.index).config.teacher.leaving_s + CLOSING_S)

    def unwelcomed(self, snapshot: Snapshot | None) -> list[str]:
        """Workers that are not connected to the buffer yet. Ranks of the learner that join never are."""
        met = {peer.name for peer in snapshot.peers if peer.alive} if snapshot is not None else set[str]()
        expected = (
            w for w in self.workers.values() if w.role in ("actor", "teacher") or (w.role == "learner" and not w.prefix)
        )
        return [worker.name for worker in expected if worker.name not in met]

    def start(self, worker: Worker) -> None:
        """Start a new process for the worker; if it has a server of ours, as soon as that answers, and if servers load
        on its GPU, after them."""
        own = worker.name in self._servers and not self._servers.is_up(worker.name)
        worker.awaits_server = own or self._servers.loading_on(self._plan.placement.gpu(worker.role, worker.index))
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
            # A restarted learner continues from its newest checkpoint; a restarted buffer from its journal.
            resume=self._plan.resume or (bool(worker.exit_codes) and worker.role != "buffer"),
            server_url=self._server_url(worker),
            device=self._plan.placement.device(worker.role, worker.index),
            threads=self._plan.placement.threads_of(worker.role, worker.index),
            in_turns=self._plan.takes_turns(worker.role, worker.index),
            gpus=self._plan.gpus_of(worker.role, worker.index),
        )
        # The buffer needs no torch and must not wait for it; nor must the learner if no other worker needs torch.
        preloaded = self._learner_preloaded if worker.role == "learner" else worker.role != "buffer"
        self._backend.start(start, preloaded=preloaded)

    def _server_url(self, worker: Worker) -> str:
        """URL of the server started for this worker or named by the user; empty if it has none."""
        if worker.name in self._servers:
            return self._servers.url(worker.name)
        if worker.role not in ("actor", "teacher"):
            return ""
        group = group_of(self._config, worker.role, worker.index)
        urls = group.settings.urls
        return urls[worker.index - group.first] if urls else ""
