"""One host of a run on Ray over its life: placed, heard, placed again when it dies, asked to leave, and ended.

launch.ray.hosts decides which hosts there are. Its one thread calls this for each of them, twice a second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.config.run import AUTO_THREADS, RunConfig
from stillhouse.launch.join.target import TRY_AGAIN_EXIT_CODE
from stillhouse.launch.processes.slots import RestartBudget, said
from stillhouse.launch.ray.host import JOIN_LOG, News
from stillhouse.launch.report.figures import plural
from stillhouse.launch.stored_run import groups_with_store
from stillhouse.launch.topology import REJOIN_S, HostGroup, said_of
from stillhouse.learner.reports.scaling import ScalingCounts
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.object_store import variables

SAY_WAITS_S: Final = 15.0
"""A host for which there is no room for this long is reported."""
LEAVE_S: Final = 30.0
"""What a host that leaves may take besides the time that its workers have: its servers end after them."""
CLEAN_S: Final = 10.0
TAIL_BYTES: Final = 2000
UNFIT_EXIT_CODE: Final = 2
"""A join ends with it if it does not fit the run (launch.join.command): it would not fit again."""
log = logging.getLogger(__name__)


class Cluster(Protocol):
    """launch.ray.cluster.RayCluster, as far as it is used here."""

    ray: Any

    def place(
        self, name: str, host: HostConfig, files: Mapping[str, bytes], words: list[str], variables: Mapping[str, str]
    ) -> Any: ...
    def release(self, name: str) -> None: ...
    def free(self) -> str: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Slot:
    """One host, over all its processes."""

    group: HostGroup
    name: str
    """Also the --name-prefix of its workers."""
    workers: int
    handle: Any = None
    placing: Any = None
    """The answer that says where it is, until it comes."""
    asked: Any = None
    """The question for news that is not answered yet."""
    stopping: Any = None
    """The request to leave that is not answered yet."""
    offsets: dict[str, int] = field(default_factory=dict[str, int])
    due_s: float = 0.0
    asked_s: float = 0.0
    said_waits: bool = False
    said_logs: bool = False
    leaving: bool = False
    leave_by_s: float = float("inf")
    """When a host that leaves is killed."""
    done: bool = False
    """Its join has ended because the run has."""

    def __str__(self) -> str:
        return f"{self.name} ({plural(self.workers, self.group.name.removesuffix('s'))})"


class HostKeeper:
    """Does what is to be done for each host; it is used from one thread."""

    def __init__(
        self,
        cluster: Cluster,
        config: RunConfig,
        run_dir: Path,
        counts: ScalingCounts,
        ending: threading.Event,
        say: Callable[[str, bool], None],
    ) -> None:
        """`ending`: the run ends, and no host is placed again. `say`: a text for the user, and whether it ends the
        run."""
        self.files: Mapping[str, bytes] = {}
        """The folder that the hosts join, once the run listens."""
        self._cluster, self._config, self._run_dir = cluster, config, run_dir
        self._counts, self._ending, self._to_user = counts, ending, say
        self._budget = RestartBudget(config.launch)
        self._leave_limit_s = max(config.launch.shutdown_grace_s, config.teacher.drain_s) + LEAVE_S

    def place(self, slot: Slot, now_s: float) -> None:
        """Start it where it has room."""
        words = [*slot.group.flag.split(), str(slot.workers), "--name-prefix", slot.name, "--launch.status", "plain"]
        files = self.files
        if slot.group.name == "ranks" and not self._config.store:  # they write checkpoints into the run's folder
            files, words = {}, [str(self._run_dir), *words]
        words += ["--launch.threads_per_worker", str(self._threads(slot))]
        access = variables() if slot.group.name in groups_with_store(self._config, [slot.group]) else {}
        slot.handle = self._cluster.place(slot.name, slot.group.host, files, words, access)
        slot.placing, slot.asked, slot.offsets = slot.handle.node.remote(), None, {}
        slot.asked_s, slot.said_waits = now_s, False

    def hear(self, slot: Slot, now_s: float) -> None:
        """Take what it has answered, and ask again."""
        if now_s > slot.leave_by_s:
            self.kill(slot, f"was asked to leave {self._leave_limit_s:.0f} s ago")
            return
        try:
            self._hear_stop(slot)
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

    def leave(self, slot: Slot, now_s: float) -> None:
        """Ask it to leave. It has a time for that (`hear`)."""
        if not slot.leaving:
            slot.leaving, slot.leave_by_s = True, now_s + self._leave_limit_s
            if slot.handle is not None and slot.placing is None:
                slot.stopping = slot.handle.stop.remote()

    def kill(self, slot: Slot, why: str) -> None:
        """End a host that does not leave. Its workers die with it, and the buffer gives their work to others."""
        self._say(f"Ray: {slot} {why} and is still there; Ray kills it")
        self._counts.add("hosts_killed")
        self.dismiss(slot)

    def dismiss(self, slot: Slot) -> None:
        """End its actor of Ray, with what it left."""
        if slot.handle is None:
            return
        handle, slot.handle, waits = slot.handle, None, slot.placing is not None
        slot.placing = slot.asked = slot.stopping = None
        try:
            if not waits:
                self._cluster.ray.wait([handle.clean.remote()], timeout=CLEAN_S)
            self._cluster.ray.kill(handle)
        except Exception as error:  # it is gone already
            log.info("%s: %s", slot, error)

    def _threads(self, slot: Slot) -> int:
        """Hosts on one machine share its cores, so that none may plan with all of them (launch.checks.threads)."""
        chosen, host = self._config.launch.threads_per_worker, slot.group.host
        if chosen != AUTO_THREADS:
            return chosen
        return 1 if host.gpus else max(1, int(host.cpus) // max(1, slot.workers))

    def _answer(self, reference: Any) -> Any:
        """The value, or None while there is none. Raises RayError when the host is lost."""
        ready, _ = self._cluster.ray.wait([reference], timeout=0)
        return self._cluster.ray.get(reference) if ready else None

    def _hear_stop(self, slot: Slot) -> None:
        """Ask it to leave again, if the request was lost with a link."""
        if slot.stopping is None or not self._cluster.ray.wait([slot.stopping], timeout=0)[0]:
            return
        answer, slot.stopping = slot.stopping, None
        try:
            self._cluster.ray.get(answer)
        except self._cluster.ray.exceptions.ActorUnavailableError:
            slot.stopping = slot.handle.stop.remote()

    def _hear_place(self, slot: Slot, now_s: float) -> None:
        if (node := self._answer(slot.placing)) is not None:
            slot.placing = None
            self._say(f"Ray: {slot} on {node}")
            if slot.leaving:
                slot.stopping = slot.handle.stop.remote()
        elif slot.leaving:
            self.dismiss(slot)
        elif now_s - slot.asked_s > SAY_WAITS_S and not slot.said_waits:
            slot.said_waits = True
            self._say(f"Ray: {slot} waits for a node with {said_of(slot.group.host)}; free are {self._cluster.free()}")

    def _take(self, slot: Slot, news: News, now_s: float) -> None:
        written = self._write_logs(slot, news.pieces)
        if news.code is not None and not (news.pieces and written):
            self._ended(slot, news.code, now_s)

    def _write_logs(self, slot: Slot, pieces: Mapping[str, bytes]) -> bool:
        """Returns False where they cannot be written, e.g. on a full disk: they are asked for again as long as the host
        is there. No run ends for its logs."""
        try:
            for name, piece in pieces.items():
                self._logs(slot).mkdir(parents=True, exist_ok=True)
                with open(self._logs(slot) / name, "ab", opener=not_a_link) as file:
                    file.write(piece)
                slot.offsets[name] = slot.offsets.get(name, 0) + len(piece)
        except OSError as error:
            if not slot.said_logs:
                self._say(f"Ray: the logs of {slot} cannot be written: {error}")
            slot.said_logs = True
            return False
        return True

    def _logs(self, slot: Slot) -> Path:
        return self._run_dir / "joined" / slot.name / "logs"

    def _ended(self, slot: Slot, code: int, now_s: float) -> None:
        self.dismiss(slot)
        if code == 0 or self._ending.is_set():
            slot.done = True
        elif slot.leaving:
            self._say(f"Ray: {slot} has left")
            self._counts.add("hosts_left")
        elif code == TRY_AGAIN_EXIT_CODE:  # the former workers of its name are not counted as lost yet
            slot.due_s = now_s + REJOIN_S
        elif code == UNFIT_EXIT_CODE:
            self._say(f"Ray: {slot} {said(code)}; its output ends with:\n{self._tail(slot)}", fatal=True)
        else:  # also killed, by a node that has no memory left
            self._again(slot, f"broke off ({said(code)})", now_s)

    def _lost(self, slot: Slot, error: Exception, now_s: float) -> None:
        slot.handle = slot.placing = slot.asked = slot.stopping = None
        if self._ending.is_set():
            return
        why = f"is lost ({(str(error).strip() or type(error).__name__).splitlines()[0]})"
        if slot.leaving:
            self._counts.add("hosts_lost")
            self._say(f"Ray: {slot} {why} while it was leaving")
        else:
            self._again(slot, why, now_s)

    def _again(self, slot: Slot, why: str, now_s: float) -> None:
        self._counts.add("hosts_lost")
        wait_s = self._budget.died(slot.name, now_s)
        if wait_s is None:
            restarts = plural(self._config.launch.max_restarts, "restart")
            self._say(f"Ray: {slot} {why}, after {restarts} (launch.max_restarts); {self._tail(slot)}", fatal=True)
            return
        slot.due_s = now_s + wait_s
        self._say(f"Ray: {slot} {why}; it is placed again")

    def _tail(self, slot: Slot) -> str:
        file = self._logs(slot) / JOIN_LOG
        return file.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if file.is_file() else "(no output)"

    def _say(self, text: str, *, fatal: bool = False) -> None:
        self._to_user(text, fatal)
