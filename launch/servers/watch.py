"""Watches the inference servers of a run: starts them, sees when they answer, restarts dead ones within the budget.

    idle -> starting -> up -> (dead) -> waiting -> starting ...         given up: the budget is spent, the run ends
                        up -> lost, when its worker reports it, and it is killed -> (dead)

Servers that share a GPU start in turn: each measures what is free there while it loads. The embedded roles on that GPU
wait until all of them have been up (`loading_on`). Servers that take turns on their device (launch.share) start in a
turn of the launcher, one at a time, and their memory is released before they are up and the turn is over.

The loop of launch.workers.watch calls `pump`, which returns what concerns its workers. A server that never answered and
died twice is given up at once: its arguments or its model are wrong, and another start would not help.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.processes.slots import RESTART_WINDOW_S, RestartBudget, said
from stillhouse.launch.servers.plan import ServerPlan, reachable_host, server_environment, url_of
from stillhouse.launch.servers.processes import ZYGOTE_LOG, ServerExited, ServerProcesses, ServerStarted
from stillhouse.protocol.addresses import free_port
from stillhouse.protocol.turns import Turn, TurnTimeout
from stillhouse.weights.deadlines import in_thread

PROBE_EVERY_S: Final = 0.2
PROBE_TIMEOUT_S: Final = 0.5
TURN_WAIT_S: Final = 0.05
"""How long one look waits for the turn: the other roles ask for it every few milliseconds."""
FAILED_STARTS: Final = 2


@dataclass
class ServerSlot:
    """One server. Its process changes with every restart."""

    plan: ServerPlan
    state: Literal["idle", "starting", "up", "lost", "waiting", "given_up"] = "idle"
    port: int = 0
    pid: int | None = None
    started_s: float = 0.0
    restart_at_s: float = 0.0
    running: bool = False
    ever_up: bool = False
    late: bool = False
    """Killed because it did not answer in time, or did not release its memory."""
    released: Future[None] | None = None
    """In turns: its memory is being released."""
    failed_release: str = ""
    exit_codes: list[int] = field(default_factory=list[int])

    @property
    def url(self) -> str:
        return url_of(self.plan.host, self.port, "https" if self.plan.launch.certificate else "http")


class ServerChange(NamedTuple):
    """A change of a worker's server."""

    kind: Literal["up", "died", "given_up"]
    worker: str
    text: str
    """For the user; empty for `up`."""


class ServerWatch:
    """The servers that the launcher started. `worker` is always the name of the worker that uses the server."""

    def __init__(
        self,
        plans: Sequence[ServerPlan],
        config: RunConfig,
        log_dir: Path,
        budget: RestartBudget,
        api_key: str,
        *,
        shared: bool = False,
        turn: Turn | None = None,
    ) -> None:
        """`shared`: of the weight group's GPUs (`server_environment`). `turn`: in which servers start; None: whenever
        they can."""
        self._turn = turn
        self._starts: ServerSlot | None = None
        """It starts in the turn."""
        self._slots = {plan.worker: ServerSlot(plan) for plan in plans}
        self._by_name = {slot.plan.name: slot for slot in self._slots.values()}
        self._budget = budget
        self._window = f"{config.launch.max_restarts} times in {RESTART_WINDOW_S:.0f} s"
        self._api_key = api_key
        self._log_dir = log_dir
        self._probed_s = 0.0
        self._stopping = False
        self._processes = (
            ServerProcesses(log_dir, lambda temporary: server_environment(config, temporary, shared=shared))
            if plans
            else None
        )

    def __contains__(self, worker: str) -> bool:
        return worker in self._slots

    @property
    def slots(self) -> dict[str, ServerSlot]:
        """Server name -> slot."""
        return self._by_name

    @property
    def start_timeout_s(self) -> float:
        """Longest start: of one server, or of those on one GPU together."""
        plans = [slot.plan for slot in self._slots.values()]
        each = [plan.start_timeout_s for plan in plans]
        if self._turn is not None:
            return sum(each)
        gpus = {gpu for plan in plans for gpu in plan.devices}
        return max(
            [*each, *(sum(plan.start_timeout_s for plan in plans if gpu in plan.devices) for gpu in gpus)], default=0.0
        )

    def loading_on(self, gpu: int | None, before: str = "") -> bool:
        """Whether a server on this GPU has never been up. `before`: only among those in front of this worker's."""
        for worker, slot in self._slots.items():
            if worker == before:
                return False
            if gpu in slot.plan.devices and not slot.ever_up and slot.state != "given_up":
                return True
        return False

    def is_up(self, worker: str) -> bool:
        return self._slots[worker].state == "up"

    def url(self, worker: str) -> str:
        return self._slots[worker].url

    def log_name(self, worker: str) -> str:
        """Name of the most informative log about this worker's server."""
        loading = next((slot for slot in self._slots.values() if not slot.ever_up), None)
        name = (self._slots.get(worker) or loading or next(iter(self._slots.values()))).plan.name
        return name if (self._log_dir / f"{name}.log").is_file() else ZYGOTE_LOG

    def start(self) -> None:
        """Start all servers that need not wait for others; returns at once. Raises OSError when `host` is not an
        address of this machine."""
        for slot in self._slots.values():
            self._start_if_free(slot)

    def replace(self, worker: str) -> None:
        """Kill a server that its worker reports as dead or stuck, unless it is being restarted already."""
        slot = self._slots[worker]
        if slot.state == "up" and self._processes is not None:
            slot.state = "lost"
            self._processes.kill(slot.plan.name)

    def pump(self, *, restart: bool) -> list[ServerChange]:
        """Look once at processes and addresses. `restart=False`: the run is ending, nothing is started again."""
        if self._processes is None:
            return []
        changes: list[ServerChange] = []
        for event in self._processes.poll():
            slot = self._by_name[event.name]
            match event:
                case ServerStarted(_, pid):
                    slot.pid = pid
                case ServerExited(_, code):
                    changes += self._exited(slot, code, restart=restart)
        now_s = time.monotonic()
        if restart and now_s - self._probed_s >= PROBE_EVERY_S:
            for slot in self._slots.values():
                changes += self._look(slot, now_s)
            self._probed_s = time.monotonic()
        return changes

    def stop(self) -> None:
        """Send SIGTERM to servers that are up and SIGKILL to others, once."""
        if self._processes is not None and not self._stopping:
            self._stopping = True
            for slot in self._slots.values():
                if slot.running:
                    (self._processes.stop if slot.state == "up" else self._processes.kill)(slot.plan.name)

    @property
    def running(self) -> bool:
        """Whether a process exists that could still leave by itself."""
        return any(slot.running and slot.pid is not None for slot in self._slots.values())

    def close(self) -> None:
        """End everything that still runs. Idempotent."""
        if self._processes is not None:
            self._processes.close()
            self.pump(restart=False)
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    def _start(self, slot: ServerSlot) -> None:
        assert self._processes is not None
        slot.port = slot.plan.port or free_port(slot.plan.host)
        slot.state, slot.running, slot.late, slot.started_s = "starting", True, False, time.monotonic()
        slot.failed_release = ""
        self._processes.start(slot.plan, slot.port, self._api_key)

    def _start_if_free(self, slot: ServerSlot) -> None:
        if any(self.loading_on(gpu, before=slot.plan.worker) for gpu in slot.plan.devices):
            return
        if self._turn is not None:
            if self._starts is not None:
                return
            try:
                self._turn.take(TURN_WAIT_S)
            except TurnTimeout:
                return
            self._starts = slot
        self._start(slot)

    def _end_turn(self, slot: ServerSlot) -> None:
        if self._starts is slot and self._turn is not None:
            self._starts = slot.released = None
            self._turn.give_back()

    def _look(self, slot: ServerSlot, now_s: float) -> list[ServerChange]:
        plan = slot.plan
        if slot.state == "idle" or (slot.state == "waiting" and now_s >= slot.restart_at_s):
            self._start_if_free(slot)
        elif slot.state == "starting" and slot.pid is not None:
            if self._answers(slot) and self._is_away(slot):
                slot.state, slot.ever_up = "up", True
                self._end_turn(slot)
                return [ServerChange("up", plan.worker, "")]
            if now_s - slot.started_s > plan.start_timeout_s and not slot.late and self._processes is not None:
                slot.late = True
                self._processes.kill(plan.name)
        return []

    def _answers(self, slot: ServerSlot) -> bool:
        plan = slot.plan
        where = reachable_host(plan.host), slot.port
        return plan.engine.answers(*where, self._api_key, PROBE_TIMEOUT_S, plan.launch.certificate)

    def _is_away(self, slot: ServerSlot) -> bool:
        """Whether the memory of a server that takes turns is released. One that does not release it is killed."""
        if self._turn is None:
            return True
        if slot.released is None:
            plan = slot.plan
            give_back = partial(plan.engine.give_back, slot.url, self._api_key, plan.launch.certificate)
            slot.released = in_thread(give_back, name=f"release {plan.name}", daemon=True)
        if slot.released.done() and (error := slot.released.exception()) is not None and not slot.late:
            slot.late, slot.failed_release = True, str(error)
            if self._processes is not None:
                self._processes.kill(slot.plan.name)
        return slot.released.done() and not slot.late

    def _exited(self, slot: ServerSlot, code: int, *, restart: bool) -> list[ServerChange]:
        self._end_turn(slot)
        answered = slot.state in ("up", "lost")
        slot.running, slot.pid = False, None
        slot.exit_codes.append(code)
        if not restart:
            return []
        plan, what = slot.plan, said(code)
        if slot.late and slot.failed_release:
            what = f"did not release its memory: {slot.failed_release}"
        elif slot.late:
            what = f"did not answer within {plan.start_timeout_s:.0f} s (server.start_timeout_s)"
        wait_s = self._budget.died(plan.name, time.monotonic())
        hopeless = not slot.ever_up and len(slot.exit_codes) >= FAILED_STARTS
        if wait_s is None or hopeless:
            slot.state = "given_up"
            why = f"died more than {self._window}" if not hopeless else f"never answered, {FAILED_STARTS} times"
            return [ServerChange("given_up", plan.worker, f"{plan.name} {why}; it {what}")]
        slot.state, slot.restart_at_s = "waiting", time.monotonic() + wait_s
        when = "" if answered else " before it answered"
        text = f"{plan.name} {what}{'' if slot.late else when}; it is started again in {wait_s:.1f} s"
        return [ServerChange("died", plan.worker, text)]
