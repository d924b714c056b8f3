"""Hosts of a run on Ray: places them, watches them, places them again when they die, and brings their logs home.

One thread asks each host for news twice a second. What the user must see goes into `notices`, which the launcher's
backend passes on (launch.ray.backend). How many workers are wanted is in hosts.json of the run's folder, which
`cluster.py scale` changes while the run goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from launch.config.cluster import HostConfig
from launch.config.run import AUTO_THREADS, RunConfig
from launch.errors import LaunchError
from launch.join.target import TRY_AGAIN_EXIT_CODE
from launch.processes.backend import Notice
from launch.processes.slots import RestartBudget, said
from launch.ray.cluster import said_of
from launch.ray.host import JOIN_LOG, News
from launch.render.hosts import REJOIN_S
from launch.report.figures import plural
from protocol.atomic_file import write_atomic

HOSTS_FILE: Final = "hosts.json"
TICK_S: Final = 0.5
SAY_WAITS_S: Final = 15.0
"""A host for which there is no room for this long is reported."""
LEAVE_S: Final = 10.0
"""How long a host may take to leave after SIGTERM, at the end of the run."""
CLEAN_S: Final = 10.0
TAIL_BYTES: Final = 2000
RoleName: TypeAlias = Literal["actors", "teachers", "ranks"]
log = logging.getLogger(__name__)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """hosts.json: workers on Ray's nodes. A role whose workers run beside the learner has 0."""

    actors: int = 0
    teachers: int = 0


def read_wanted(run_dir: Path) -> Wanted | None:
    """None without the file. Raises LaunchError when it is damaged."""
    file = run_dir / HOSTS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Wanted)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise LaunchError(f"{file}: {error}; expected {{'actors': N, 'teachers': N}}") from error


def write_wanted(run_dir: Path, wanted: Wanted) -> None:
    write_atomic(run_dir / HOSTS_FILE, msgspec.json.encode(wanted) + b"\n")


def shares(count: int, each: int) -> list[int]:
    """`count` workers on hosts of `each`; the last host has the rest. A change of the count changes the last ones."""
    return [each] * (count // each) + ([count % each] if count % each else [])


class Cluster(Protocol):
    """launch.ray.cluster.RayCluster, as far as it is used here."""

    ray: Any

    def place(self, host: HostConfig, files: Mapping[str, bytes], words: list[str]) -> Any: ...
    def free(self) -> str: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Slot:
    """One host, over all its processes."""

    role: RoleName
    name: str
    """Also the --name-prefix of its workers."""
    workers: int
    handle: Any = None
    placing: Any = None
    """The answer that says where it is, until it comes."""
    asked: Any = None
    """The question for news that is not answered yet."""
    offsets: dict[str, int] = field(default_factory=dict[str, int])
    due_s: float = 0.0
    asked_s: float = 0.0
    said_waits: bool = False
    leaving: bool = False
    done: bool = False
    """Its join has ended because the run has."""

    def __str__(self) -> str:
        what = {"actors": "actor", "teachers": "teacher", "ranks": "rank"}[self.role]
        return f"{self.name} ({plural(self.workers, what)})"


class RayHosts:
    """`start` and `close` are called by the launcher, everything else happens in the thread."""

    def __init__(
        self,
        cluster: Cluster,
        config: RunConfig,
        run_dir: Path,
        wanted: Wanted,
        find_files: Callable[[], Mapping[str, bytes]],
        *,
        ranks: int = 0,
        decide: Callable[[Wanted, float], tuple[Wanted, str] | None] = lambda _wanted, _now_s: None,
    ) -> None:
        """`find_files`: waits for the run to listen, and returns the folder to join. `ranks`: further hosts of the
        learner. `decide`: other numbers of workers and why, or None (launch.ray.autoscale)."""
        self.notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._cluster, self._config, self._run_dir = cluster, config, run_dir
        self._find_files, self._files = find_files, dict[str, bytes]()
        self._ranks, self._wanted = ranks, wanted
        self._slots: dict[str, _Slot] = {}
        self._budget = RestartBudget(config.launch)
        self._decide: Callable[[Wanted, float], tuple[Wanted, str] | None] = decide
        self._ending, self._close_by_s = threading.Event(), float("inf")
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def start(self) -> None:
        write_wanted(self._run_dir, self._wanted)
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
            self._thread.join(grace_s + 2 * LEAVE_S + CLEAN_S * (1 + len(self._slots)))
        for slot in self._slots.values():
            self._dismiss(slot)
        self._cluster.close()

    def _run(self) -> None:
        try:
            self._files = dict(self._find_files())
            while not self._over(time.monotonic()):
                self._tick(time.monotonic())
                time.sleep(TICK_S)
        except Exception as error:  # a bug, or Ray is gone: end the run, which writes a checkpoint
            log.exception("the watch of Ray's hosts failed")
            if not self._ending.is_set():
                self._say(f"Ray: {error!r}", fatal=True)

    def _over(self, now_s: float) -> bool:
        if not self._ending.is_set():
            return False
        if now_s > self._close_by_s:
            for slot in self._slots.values():
                self._leave(slot)
        return not any(slot.handle is not None for slot in self._slots.values()) or now_s > self._close_by_s + LEAVE_S

    def _tick(self, now_s: float) -> None:
        if not self._ending.is_set():
            if (decided := self._decide(self._wanted, now_s)) is not None:
                write_wanted(self._run_dir, decided[0])
                self._say(f"Ray: autoscaling: {decided[1]}")
            self._reconcile()
        for name, slot in list(self._slots.items()):
            if slot.handle is not None:
                self._hear(slot, now_s)
            elif slot.leaving:
                del self._slots[name]
            elif not slot.done and not self._ending.is_set() and now_s >= slot.due_s:
                self._place(slot, now_s)

    # ---------------------------------------------------------------------------------------------- how many

    def _reconcile(self) -> None:
        """Make the slots those that are wanted."""
        if (wanted := read_wanted(self._run_dir)) is not None and wanted != self._wanted:
            self._say(f"Ray: {_counts(wanted)} wanted, before {_counts(self._wanted)}")
            self._wanted = wanted
        target = dict(self._targets())
        for name, slot in self._slots.items():
            if target.get(name, (slot.role, 0))[1] != slot.workers:
                self._leave(slot)
        for name, (role, workers) in target.items():
            if name not in self._slots:
                self._slots[name] = _Slot(role, name, workers)

    def _targets(self) -> Iterator[tuple[str, tuple[RoleName, int]]]:
        cluster = self._config.cluster
        sizes: dict[RoleName, list[int]] = {
            "ranks": [self._config.learner.ranks_each] * self._ranks,
            "teachers": shares(self._wanted.teachers, cluster.teachers.each) if cluster.teachers.each else [],
            "actors": shares(self._wanted.actors, cluster.actors.each) if cluster.actors.each else [],
        }
        for role, counts in sizes.items():
            for index, workers in enumerate(counts):
                yield f"{role}-{index}", (role, workers)

    # ----------------------------------------------------------------------------------------------- one host

    def _place(self, slot: _Slot, now_s: float) -> None:
        flag = "--learner-ranks" if slot.role == "ranks" else f"--{slot.role}"
        words = [flag, str(slot.workers), "--name-prefix", slot.name, "--launch.status", "plain"]
        files: Mapping[str, bytes] = self._files
        if slot.role == "ranks":  # they write checkpoints into the run's folder, which all hosts must see
            files, words = {}, [str(self._run_dir), *words]
        words += ["--launch.threads_per_worker", str(self._threads(slot))]
        slot.handle = self._cluster.place(self._host(slot), files, words)
        slot.placing, slot.asked, slot.offsets = slot.handle.node.remote(), None, {}
        slot.asked_s, slot.said_waits = now_s, False

    def _threads(self, slot: _Slot) -> int:
        """Hosts on one machine share its cores, so that none may plan with all of them (launch.checks.threads)."""
        chosen, host = self._config.launch.threads_per_worker, self._host(slot)
        if chosen != AUTO_THREADS:
            return chosen
        return 1 if host.gpus else max(1, int(host.cpus) // max(1, slot.workers))

    def _host(self, slot: _Slot) -> HostConfig:
        cluster = self._config.cluster
        return {"ranks": cluster.learner, "actors": cluster.actors, "teachers": cluster.teachers}[slot.role]

    def _hear(self, slot: _Slot, now_s: float) -> None:
        try:
            if slot.placing is not None:
                self._hear_place(slot, now_s)
            elif slot.asked is None:
                slot.asked = slot.handle.news.remote(slot.offsets)
            elif (news := self._answer(slot.asked)) is not None:
                slot.asked = None
                self._take(slot, News(*news), now_s)
        except self._cluster.ray.exceptions.ActorUnavailableError:  # a link is down: Ray goes on trying, and so do we
            slot.asked = None
            if slot.placing is not None:
                slot.placing = slot.handle.node.remote()
        except self._cluster.ray.exceptions.RayError as error:
            self._lost(slot, error, now_s)

    def _answer(self, reference: Any) -> Any:
        """The value, or None while there is none. Raises RayError when the host is lost."""
        ready, _ = self._cluster.ray.wait([reference], timeout=0)
        return self._cluster.ray.get(reference) if ready else None

    def _hear_place(self, slot: _Slot, now_s: float) -> None:
        if (node := self._answer(slot.placing)) is not None:
            slot.placing = None
            self._say(f"Ray: {slot} on {node}")
            if slot.leaving:
                slot.handle.stop.remote()
        elif slot.leaving:
            self._dismiss(slot)
        elif now_s - slot.asked_s > SAY_WAITS_S and not slot.said_waits:
            slot.said_waits = True
            self._say(f"Ray: {slot} waits for a node with {said_of(self._host(slot))}; free are {self._cluster.free()}")

    def _take(self, slot: _Slot, news: News, now_s: float) -> None:
        for name, piece in news.pieces.items():
            with (self._logs(slot) / name).open("ab") as file:
                file.write(piece)
            slot.offsets[name] = slot.offsets.get(name, 0) + len(piece)
        if news.code is not None and not news.pieces:
            self._ended(slot, news.code, now_s)

    def _logs(self, slot: _Slot) -> Path:
        folder = self._run_dir / "joined" / slot.name / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _ended(self, slot: _Slot, code: int, now_s: float) -> None:
        self._dismiss(slot)
        if slot.leaving:
            self._say(f"Ray: {slot} has left")
        elif code == 0 or self._ending.is_set():
            slot.done = True
        elif code == TRY_AGAIN_EXIT_CODE:  # the former workers of its name are not counted as lost yet
            slot.due_s = now_s + REJOIN_S
        elif code == 1:
            self._again(slot, f"broke off ({said(code)})", now_s)
        else:
            self._say(f"Ray: {slot} {said(code)}; its output ends with:\n{self._tail(slot)}", fatal=True)

    def _lost(self, slot: _Slot, error: Exception, now_s: float) -> None:
        slot.handle = slot.placing = slot.asked = None
        if not slot.leaving and not self._ending.is_set():
            self._again(slot, f"is lost ({str(error).strip().splitlines()[0]})", now_s)

    def _again(self, slot: _Slot, why: str, now_s: float) -> None:
        wait_s = self._budget.died(slot.name, now_s)
        if wait_s is None:
            restarts = plural(self._config.launch.max_restarts, "restart")
            self._say(f"Ray: {slot} {why}, after {restarts} (launch.max_restarts); {self._tail(slot)}", fatal=True)
            return
        slot.due_s = now_s + wait_s
        self._say(f"Ray: {slot} {why}; it is placed again")

    def _tail(self, slot: _Slot) -> str:
        file = self._logs(slot) / JOIN_LOG
        return file.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if file.is_file() else "(no output)"

    def _leave(self, slot: _Slot) -> None:
        if not slot.leaving:
            slot.leaving = True
            if slot.handle is not None and slot.placing is None:
                slot.handle.stop.remote()

    def _dismiss(self, slot: _Slot) -> None:
        """End its actor, with what it left."""
        if slot.handle is None:
            return
        handle, slot.handle, waits = slot.handle, None, slot.placing is not None
        slot.placing = slot.asked = None
        try:
            if not waits:
                self._cluster.ray.wait([handle.clean.remote()], timeout=CLEAN_S)
            self._cluster.ray.kill(handle)
        except Exception as error:  # it is gone already
            log.info("%s: %s", slot, error)

    def _say(self, text: str, *, fatal: bool = False) -> None:
        log.info("%s", text)
        self.notices.put(Notice(text, fatal))


def _counts(wanted: Wanted) -> str:
    return f"{plural(wanted.actors, 'actor')} and {plural(wanted.teachers, 'teacher')}"
