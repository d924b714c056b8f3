"""The process backend of a run on Ray: the run's own workers are local, and its hosts are watched beside them."""

from __future__ import annotations

import queue
import sys
from collections.abc import Collection

from stillhouse.launch.processes.backend import Event, ProcessBackend, Vitals, WorkerExited
from stillhouse.launch.ray.hosts import RayHosts
from stillhouse.launch.workers.start_role import StartRole

OF_THE_RUN = ("buffer", "learner")


class RayBackend(ProcessBackend):
    """Passes everything on to the local backend. What the hosts report comes with its events."""

    def __init__(self, local: ProcessBackend, hosts: RayHosts) -> None:
        self._local, self._hosts = local, hosts

    @property
    def elsewhere(self) -> str:
        return self._hosts.said_of_all()

    def prepare(self) -> None:
        self._local.prepare()
        self._hosts.start()

    def start(self, start: StartRole, *, preloaded: bool) -> None:
        self._local.start(start, preloaded=preloaded)

    def stop(self, name: str) -> None:
        if name.startswith(OF_THE_RUN):
            self._hosts.end()
        self._local.stop(name)

    def kill(self, name: str) -> None:
        self._local.kill(name)

    def dump_stacks(self, name: str) -> None:
        self._local.dump_stacks(name)

    def vitals(self, names: Collection[str]) -> dict[str, Vitals]:
        return self._local.vitals(names)

    def poll(self, timeout_s: float) -> list[Event]:
        events = self._local.poll(timeout_s)
        if any(
            isinstance(event, WorkerExited) and event.name.startswith("learner") and not event.code for event in events
        ):
            self._hosts.end()
        while True:
            try:
                events.append(self._hosts.notices.get_nowait())
            except queue.Empty:
                return events

    def close(self) -> None:
        self._hosts.close()
        while not self._hosts.notices.empty():  # nobody polls any more
            print(f"stillhouse: {self._hosts.notices.get().text}", file=sys.stderr, flush=True)
        self._local.close()
