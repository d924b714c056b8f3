"""The hosts of a run on Ray over its life: placed, heard, placed again when they die, and ended with the run.

One thread looks at each of them twice a second. What the user must see goes into `notices`, which the launcher's
backend passes on (launch.ray.backend).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.config.run import AUTO_THREADS, RunConfig
from stillhouse.launch.join.target import TRY_AGAIN_EXIT_CODE
from stillhouse.launch.processes.backend import Notice
from stillhouse.launch.processes.slots import RestartBudget, said
from stillhouse.launch.ray.host import JOIN_LOG, HostAnswer
from stillhouse.launch.report.figures import plural
from stillhouse.launch.topology import REJOIN_S, HostGroup, said_of
from stillhouse.protocol.atomic_file import not_a_link

TICK_S: Final = 0.5
END_S: Final = 10.0
"""How long a host may take to leave after SIGTERM, at the end of the run."""
SAY_WAITS_S: Final = 15.0
"""A host for which there is no room for this long is reported."""
CLEAN_S: Final = 10.0
TAIL_BYTES: Final = 2000
UNFIT_EXIT_CODE: Final = 2
"""A join ends with it if it does not fit the run (launch.join.command): it would not fit again."""
log = logging.getLogger(__name__)


class Cluster(Protocol):
    """launch.ray.cluster.RayCluster, as far as it is used here."""

    ray: Any

    def place(self, host: HostConfig, files: Mapping[str, bytes], words: list[str]) -> Any: ...
    def free(self) -> str: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class RayHost:
    """One host, over all its processes."""

    group: HostGroup
    name: str
    """Also the --name-prefix of its workers."""
    workers: int
    handle: Any = None
    placing: Any = None
    """The answer that says where it is, until it comes."""
    asked: Any = None
    """The question that is not answered yet."""
    offsets: dict[str, int] = field(default_factory=dict[str, int])
    due_s: float = 0.0
    asked_s: float = 0.0
    was_placed: bool = False
    said_waits: bool = False
    said_logs: bool = False
    stopped: bool = False
    done: bool = False
    """Its join has ended because the run has."""

    def __str__(self) -> str:
        return f"{self.name} ({plural(self.workers, self.group.name.removesuffix('s'))})"


class RayHosts:
    """`start` and `close` are called by the launcher, everything else happens in the thread."""

    def __init__(
        self,
        cluster: Cluster,
        config: RunConfig,
        run_dir: Path,
        groups: Sequence[HostGroup],
        find_files: Callable[[], Mapping[str, bytes]],
    ) -> None:
        """`find_files`: waits for the run to listen, and returns the folder to join."""
        self.notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._cluster, self._config, self._run_dir = cluster, config, run_dir
        self._find_files = find_files
        self._files: Mapping[str, bytes] = {}
        self._hosts = [
            RayHost(group, f"{group.label}-{index}", workers)
            for group in groups
            for index, workers in enumerate(group.workers)
        ]
        self._budget = RestartBudget(config.launch)
        self._ending, self._close_by_s = threading.Event(), float("inf")
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def said_of_all(self) -> str:
        """`4 actors, 1 teacher on 3 hosts of Ray`, for the headline."""
        nouns = {"actors": "actor", "teachers": "teacher", "ranks": "further rank"}
        sums = {noun: sum(h.workers for h in self._hosts if h.group.name == name) for name, noun in nouns.items()}
        workers = ", ".join(plural(n, noun) for noun, n in sums.items() if n)
        return f"{workers} on {plural(len(self._hosts), 'host')} of Ray"

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """The run ends: hosts that leave are not placed again."""
        self._ending.set()

    def close(self) -> None:
        """Wait until all hosts have left, ask those that have not, and end the rest. Idempotent."""
        self.end()
        if self._thread.is_alive():
            grace_s = self._config.launch.shutdown_grace_s
            self._close_by_s = time.monotonic() + grace_s
            self._thread.join(grace_s + 2 * END_S + CLEAN_S * (1 + len(self._hosts)))
        for host in self._hosts:
            self._dismiss(host)
        self._cluster.close()

    def _run(self) -> None:
        try:
            self._files = self._find_files()
            while not self._over(time.monotonic()):
                for host in self._hosts:
                    self._look(host, time.monotonic())
                time.sleep(TICK_S)
        except Exception as error:  # a bug, or Ray is gone: end the run, which writes a checkpoint
            log.exception("the watch of Ray's hosts failed")
            if not self._ending.is_set():
                self._say(f"Ray: {error!r}", fatal=True)

    def _over(self, now_s: float) -> bool:
        if not self._ending.is_set():
            return False
        there = [host for host in self._hosts if host.handle is not None]
        for host in there if now_s > self._close_by_s else ():
            if host.placing is not None:
                self._dismiss(host)
            elif not host.stopped:
                host.stopped = True
                host.handle.stop.remote()
        if now_s > self._close_by_s + END_S:
            for host in there:
                self._say(f"Ray: {host} did not leave at the end of the run and is still there; Ray kills it")
                self._dismiss(host)
            return True
        return not there

    def _look(self, host: RayHost, now_s: float) -> None:
        """Take what it has answered, and ask again; or start it where it has room."""
        if host.handle is None:
            if not host.done and not self._ending.is_set() and now_s >= host.due_s:
                self._place(host, now_s)
            return
        try:
            if host.placing is not None:
                self._hear_place(host, now_s)
            elif host.asked is None:
                host.asked = host.handle.look.remote(host.offsets)
            elif (answer := self._answer(host.asked)) is not None:
                host.asked = None
                self._take(host, HostAnswer(*answer), now_s)
        except self._cluster.ray.exceptions.ActorUnavailableError:  # a link is down: Ray goes on trying, and so do we
            host.asked, host.stopped = None, False
            if host.placing is not None:
                host.placing = host.handle.node.remote()
        except self._cluster.ray.exceptions.RayError as error:
            host.handle = host.placing = host.asked = None
            if not self._ending.is_set():
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._again(host, f"is lost ({why})", now_s)

    def _place(self, host: RayHost, now_s: float) -> None:
        words = [*host.group.flag.split(), str(host.workers), "--name-prefix", host.name, "--launch.status", "plain"]
        files = self._files
        if host.group.name == "ranks":  # they write checkpoints into the run's folder
            files, words = {}, [str(self._run_dir), *words]
        words += ["--launch.threads_per_worker", str(self._threads(host))]
        host.handle = self._cluster.place(host.group.host, files, words)
        host.placing, host.asked, host.offsets = host.handle.node.remote(), None, {}
        host.asked_s, host.said_waits = now_s, False

    def _threads(self, host: RayHost) -> int:
        """Hosts on one machine share its cores, so that none may plan with all of them (launch.checks.threads)."""
        chosen, each = self._config.launch.threads_per_worker, host.group.host
        if chosen != AUTO_THREADS:
            return chosen
        return 1 if each.gpus else max(1, int(each.cpus) // max(1, host.workers))

    def _answer(self, reference: Any) -> Any:
        """The value, or None while there is none. Raises RayError when the host is lost."""
        ready, _ = self._cluster.ray.wait([reference], timeout=0)
        return self._cluster.ray.get(reference) if ready else None

    def _hear_place(self, host: RayHost, now_s: float) -> None:
        limit_s = self._config.launch.ready_timeout_s
        if (node := self._answer(host.placing)) is not None:
            host.placing, host.was_placed = None, True
            self._say(f"Ray: {host} on {node}")
            return
        waits_s = now_s - host.asked_s
        lacks = f"a node with {said_of(host.group.host)}; free are {self._cluster.free()}"
        if waits_s > limit_s and not host.was_placed:
            self._dismiss(host)
            host.done = True
            self._say(f"Ray: {host} waited {limit_s:.0f} s (launch.ready_timeout_s) for {lacks}", fatal=True)
        elif waits_s > SAY_WAITS_S and not host.said_waits:
            host.said_waits = True
            self._say(f"Ray: {host} waits for {lacks}")

    def _take(self, host: RayHost, answer: HostAnswer, now_s: float) -> None:
        written = self._write_logs(host, answer.pieces)
        if answer.code is not None and not (answer.pieces and written):
            self._ended(host, answer.code, now_s)

    def _write_logs(self, host: RayHost, pieces: Mapping[str, bytes]) -> bool:
        """Returns False where they cannot be written, e.g. on a full disk: they are asked for again as long as the host
        is there. No run ends for its logs."""
        try:
            for name, piece in pieces.items():
                self._logs(host).mkdir(parents=True, exist_ok=True)
                with open(self._logs(host) / name, "ab", opener=not_a_link) as file:
                    file.write(piece)
                host.offsets[name] = host.offsets.get(name, 0) + len(piece)
        except OSError as error:
            if not host.said_logs:
                self._say(f"Ray: the logs of {host} cannot be written: {error}")
            host.said_logs = True
            return False
        return True

    def _logs(self, host: RayHost) -> Path:
        return self._run_dir / "joined" / host.name / "logs"

    def _ended(self, host: RayHost, code: int, now_s: float) -> None:
        self._dismiss(host)
        if code == 0 or self._ending.is_set():
            host.done = True
        elif code == TRY_AGAIN_EXIT_CODE:  # the former workers of its name are not counted as lost yet
            host.due_s = now_s + REJOIN_S
        elif code == UNFIT_EXIT_CODE:
            self._say(f"Ray: {host} {said(code)}; its output ends with:\n{self._tail(host)}", fatal=True)
        else:  # also killed, by a node that has no memory left
            self._again(host, f"broke off ({said(code)})", now_s)

    def _again(self, host: RayHost, why: str, now_s: float) -> None:
        wait_s = self._budget.died(host.name, now_s)
        if wait_s is None:
            host.done = True
            restarts = plural(self._config.launch.max_restarts, "restart")
            self._say(f"Ray: {host} {why}, after {restarts} (launch.max_restarts); {self._tail(host)}", fatal=True)
            return
        host.due_s = now_s + wait_s
        self._say(f"Ray: {host} {why}; it is placed again")

    def _dismiss(self, host: RayHost) -> None:
        """End its actor of Ray, with what it left. The buffer gives the work of its workers to others."""
        if host.handle is None:
            return
        handle, host.handle, waits = host.handle, None, host.placing is not None
        host.placing = host.asked = None
        try:
            if not waits:
                self._cluster.ray.wait([handle.clean.remote()], timeout=CLEAN_S)
            self._cluster.ray.kill(handle)
        except Exception as error:  # it is gone already
            log.info("%s: %s", host, error)

    def _tail(self, host: RayHost) -> str:
        file = self._logs(host) / JOIN_LOG
        return file.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if file.is_file() else "(no output)"

    def _say(self, text: str, *, fatal: bool = False) -> None:
        log.info("%s", text)
        self.notices.put(Notice(text, fatal))
