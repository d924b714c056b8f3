"""Which hosts a run on Ray has: as many as are wanted, until the run ends.

One thread looks twice a second at the numbers of workers in hosts.json of the run's folder, which `stillhouse scale`
and the autoscaler change while the run goes on, and at each host (launch.ray.keeper). What the user must see goes into
`notices`, which the launcher's backend passes on (launch.ray.backend).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import LaunchError
from stillhouse.launch.processes.backend import Notice
from stillhouse.launch.ray.autoscale import Decision
from stillhouse.launch.ray.keeper import CLEAN_S, Cluster, HostKeeper, Slot
from stillhouse.launch.ray.reservation import host_names
from stillhouse.launch.ray.wanted import HOSTS_FILE, Wanted, change_wanted, read_wanted, write_wanted
from stillhouse.launch.report.figures import plural
from stillhouse.launch.topology import HostGroup, groups_of
from stillhouse.learner.reports.scaling import Outcome, ScalingCounts
from stillhouse.protocol.object_store import StoreError
from stillhouse.protocol.store_owner import StoreOwner

TICK_S: Final = 0.5
END_S: Final = 10.0
"""How long a host may take to leave after SIGTERM, at the end of the run."""
log = logging.getLogger(__name__)


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
        decide: Callable[[Wanted, float], Decision | None] = lambda _wanted, _now_s: None,
    ) -> None:
        """`find_files`: waits for the run to listen, and returns the folder to join. `decide`: a decision of the
        autoscaler, or None (launch.ray.autoscale)."""
        self.notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._cluster, self._config, self._run_dir = cluster, config, run_dir
        self._find_files = find_files
        self._wanted = wanted
        self._slots: dict[str, Slot] = {}
        self._said_numbers = False
        """That the numbers cannot be read or written."""
        self._decide, self._refused = decide, ""
        self._ending, self._close_by_s = threading.Event(), float("inf")
        self._counts = ScalingCounts(run_dir)
        self._keeper = HostKeeper(cluster, config, run_dir, self._counts, self._ending, self._say)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def said_of_all(self) -> str:
        """`4 actors, 1 teacher on 3 hosts of Ray`: what is wanted, for the headline."""
        hosts = [(group.name, workers) for _, group, workers in self._targets()]
        nouns = {"actors": "actor", "teachers": "teacher", "ranks": "further rank"}
        sums = {noun: sum(workers for name, workers in hosts if name == group) for group, noun in nouns.items()}
        workers = ", ".join(plural(n, noun) for noun, n in sums.items() if n)
        return f"{workers} on {plural(len(hosts), 'host')} of Ray" if hosts else ""

    def start(self) -> None:
        write_wanted(self._run_dir, self._wanted)
        self._store_wanted()
        self._thread.start()

    def _store_wanted(self) -> None:
        """Put the numbers into the run's store, so that it goes on with them on another machine. In the background: a
        store that fails may take minutes to say so."""
        if not self._config.store:
            return

        def put() -> None:
            try:
                owner = StoreOwner.of_folder(self._run_dir, self._config.store)
                owner.confirm()
                owner.store.put(self._run_dir / HOSTS_FILE, HOSTS_FILE)
            except StoreError as error:
                self._say(f"the numbers of workers are not in the store: {error}")

        threading.Thread(target=put, name="hosts-stored", daemon=True).start()

    def end(self) -> None:
        """The run ends: hosts that leave are not placed again."""
        self._ending.set()

    def close(self) -> None:
        """Wait until all hosts have left, ask those that have not, and end the rest. Idempotent."""
        self.end()
        if self._thread.is_alive():
            grace_s = self._config.launch.shutdown_grace_s
            self._close_by_s = time.monotonic() + grace_s
            self._thread.join(grace_s + 2 * END_S + CLEAN_S * (1 + len(self._slots)))
        for slot in self._slots.values():
            self._keeper.dismiss(slot)
        self._cluster.close()

    def _run(self) -> None:
        try:
            self._keeper.files = self._find_files()
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
        there = [slot for slot in self._slots.values() if slot.handle is not None]
        if now_s > self._close_by_s:
            for slot in there:
                self._keeper.leave(slot, now_s)
        if now_s > self._close_by_s + END_S:
            for slot in there:
                self._keeper.kill(slot, "did not leave at the end of the run")
            return True
        return not there

    def _tick(self, now_s: float) -> None:
        if not self._ending.is_set():
            self._reconcile(now_s)  # first, so that no decision undoes what the user has just written
            if (decision := self._decide(self._wanted, now_s)) is not None:
                self._counts.add(self._obey(decision))
        for name, slot in list(self._slots.items()):
            if slot.handle is not None:
                self._keeper.hear(slot, now_s)
            elif slot.leaving:
                del self._slots[name]
                self._cluster.release(name)
            elif not slot.done and not self._ending.is_set() and now_s >= slot.due_s:
                self._keeper.place(slot, now_s)

    # ---------------------------------------------------------------------------------------------- how many

    def _obey(self, decision: Decision) -> Outcome:
        """Do what the autoscaler decided; returns what came of it. A refusal that is repeated is said once."""
        before, self._refused = self._refused, ""
        if decision.wanted != self._wanted:
            if not self._changed(decision.wanted):
                return "overtaken"
        elif decision.outcome.startswith("refused"):
            self._refused = decision.outcome
        if decision.wanted != self._wanted or (self._refused and self._refused != before):
            self._say(f"Ray: autoscaling: {decision.outcome.replace('_', ' ')}: {decision.why}")
        return decision.outcome

    def _changed(self, wanted: Wanted) -> bool:
        """Write the numbers, unless they are not those any more from which was decided, or cannot be written."""
        former = self._wanted
        try:
            return change_wanted(self._run_dir, lambda now: wanted if now == former else now) == wanted
        except (LaunchError, OSError) as error:
            self._say_numbers(error)
            return False

    def _reconcile(self, now_s: float) -> None:
        """Make the slots those that are wanted."""
        if (wanted := self._read_wanted()) is not None and wanted != self._wanted:
            self._say(f"Ray: {wanted} wanted, before {self._wanted}")
            self._wanted = wanted
            self._store_wanted()
        target = {name: (group, workers) for name, group, workers in self._targets()}
        for name, slot in self._slots.items():
            if name not in target or target[name][1] != slot.workers:
                self._keeper.leave(slot, now_s)
        for name, (group, workers) in target.items():
            if name not in self._slots:
                self._slots[name] = Slot(group, name, workers)

    def _read_wanted(self) -> Wanted | None:
        """None while the file cannot be read, e.g. because somebody is editing it."""
        try:
            wanted, self._said_numbers = read_wanted(self._run_dir), False
        except (LaunchError, OSError) as error:
            self._say_numbers(error)
            return None
        return wanted

    def _say_numbers(self, error: Exception) -> None:
        if not self._said_numbers:
            self._say(f"Ray: {error}; the numbers of workers stay as they are until that is mended")
        self._said_numbers = True

    def _targets(self) -> Iterator[tuple[str, HostGroup, int]]:
        """Name, group and number of workers of each host that is wanted."""
        wanted = self._wanted
        for group in groups_of(self._config, actors=wanted.actors, teachers=wanted.teachers_by_pool):
            if group.name != "run":
                for name, workers in zip(host_names(group), group.workers, strict=True):
                    yield name, group, workers

    def _say(self, text: str, fatal: bool = False) -> None:
        log.info("%s", text)
        self.notices.put(Notice(text, fatal))
