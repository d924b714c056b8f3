"""The kinds of faults, how one is drawn, and what it does to the run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from tests.hosts.network import Network
from tests.sim.chaos.commands import Break, Meddle, Proxy, Weather
from tests.sim.chaos.disk import SmallDisk
from tests.sim.chaos.harness import Run
from tests.sim.chaos.joins import Guest
from tests.sim.chaos.limits import ALL_LIMITS, HOME, PARTITION_SHARE
from tests.sim.chaos.meddling import Meddling
from tests.sim.chaos.stranger import knock
from tests.sim.chaos.traps import AT_A_NEW_LEARNER, POINTS, Side

Kind: TypeAlias = Literal[
    "kill", "stop", "hang", "cut", "reset", "blackhole", "delay", "throttle",
    "duplicate", "corrupt", "truncate", "garbage", "version", "tear", "noise", "stranger", "disk",
    "together", "trap", "relaunch", "interrupt", "partition",
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
DEADLY: Final[frozenset[Kind]] = frozenset(
    {"kill", "hang", "duplicate", "corrupt", "truncate", "garbage", "version", "noise", "together", "trap"}
)
"""The target may die of these, by the signal or because its messages are refused, so they strike only roles that are
restarted. The other kinds heal by themselves."""
UNUSUAL: Final[frozenset[Kind]] = frozenset({"disk", "version", "partition"})
"""Not among the kinds that are drawn unless asked for. disk: the run folder needs a file system of its own. version: a
Hello of another version in the middle of a link; its peer takes the refusal for its own, and the run ends. partition:
the run needs hosts."""
LINKS: Final[tuple[str, ...]] = ("actor", "teacher", "learner", "launcher", "joiner")
"""Processes that have a link to the buffer."""
PROCESSES: Final[tuple[str, ...]] = ("actor", "teacher", "learner", "buffer")
"""Roles whose process may be killed or stopped."""
LAUNCHER: Final = "launcher"
"""A target as well: all workers die with it, and the run goes on by --resume."""
LAUNCHER_SHARE: Final = 0.25
"""Share of the simultaneous kills and the traps in which the launcher dies too."""
STOPPED_EXIT_CODE: Final = 128 + signal.SIGINT
TRAP_S: Final = 20.0
"""Seconds in which a process must reach the function at which it is to die."""
HUGE_DELAY_S: Final = 0.3
SLOW_BYTES_PER_S: Final = 4000.0
WATCHED: Final[tuple[str, ...]] = ("actor", "teacher", "learner")
"""Roles that the launcher kills when they hang (launch.silent_kill_s)."""


class Fault(msgspec.Struct, frozen=True):
    """One drawn fault."""

    kind: Kind
    target: str
    """A worker; `run` for its disk and its launcher; a host for its network and its join."""
    seconds: float = 0.0
    """Duration in seconds; 0: instantaneous."""
    direction: Literal["up", "down"] = "up"
    seed: int = 0
    others: tuple[str, ...] = ()
    """Other targets that die at the same moment."""
    point: str = ""
    """trap: the function (tests.sim.chaos.traps). partition: the limit."""
    side: Side = "before"

    @property
    def restarts_run(self) -> bool:
        """The launcher ends, and --resume follows."""
        dies = self.kind in ("together", "trap") and LAUNCHER in (self.target, *self.others)
        return dies or (self.kind in ("relaunch", "interrupt") and self.target == "run")

    @property
    def role(self) -> str:
        """Of the target."""
        role, _, rest = self.target.partition("-")
        if self.kind in ("partition", "relaunch", "interrupt"):
            return "run" if self.target == "run" else "host"
        return f"joined {role}" if role in PROCESSES and "-" in rest else role

    def concerns(self, worker: str) -> bool:
        """Whether this worker's work shows that the fault is over."""
        if self.restarts_run or self.target == "run" or self.target.startswith("buffer-"):
            return True
        if self.target == HOME:
            return worker.count("-") > 1  # those on other hosts
        return f"-{self.target}-" in worker if self.role == "host" else worker == self.target

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        way = f" {self.direction}" if self.kind in get_args(Meddling) else ""
        place = f" {self.side} {self.point}" if self.point else ""
        return f"{self.kind}{way} {' + '.join((self.target, *self.others))}{place}{lasting}"


def draw(rng: Random, kinds: Sequence[Kind], names: Mapping[str, Sequence[str]], restartable: frozenset[str]) -> Fault:
    """Kind first, then role, then worker: each kind and each role has its share."""
    kind = rng.choice(list(kinds))
    hosts = list(names.get("host", ()))
    if kind in ("relaunch", "interrupt"):
        return Fault(kind, rng.choice(["run", *hosts[1:]]) if hosts else "run")
    if kind == "partition":
        limit = rng.choice(list(ALL_LIMITS))
        side: Side = rng.choice(("before", "after"))
        return partition(rng.choice(hosts), limit, side)
    if kind == "disk":
        return Fault(kind, "run", rng.uniform(1.0, 4.0))
    if kind == "stranger":
        return Fault(kind, "buffer-0", seed=rng.randrange(1 << 30))
    roles = [role for role in names if names[role] and (role in restartable or kind not in DEADLY)]
    if kind == "together":
        return _together(rng, [name for role in roles if role in PROCESSES for name in names[role]])
    if kind == "trap":
        return _trap(rng, {role: names[role] for role in (*roles, LAUNCHER) if role in POINTS})
    able = {"kill": PROCESSES, "stop": PROCESSES, "hang": WATCHED}.get(kind, LINKS)
    roles = [role for role in roles if role in able]
    if not roles:
        raise ValueError(f"no role may be hit by {kind}; started again are {sorted(restartable)}")
    target = rng.choice(list(names[rng.choice(roles)]))
    lasting = {"stop": (0.5, 7.0), "blackhole": (0.5, 7.0), "delay": (1.0, 4.0), "throttle": (1.0, 4.0)}
    seconds = rng.uniform(*lasting[kind]) if kind in lasting else 0.0
    return Fault(kind, target, seconds, rng.choice(("up", "up", "down")), rng.randrange(1 << 30))


def partition(host: str, limit: str, side: Side) -> Fault:
    seconds = PARTITION_SHARE[side] * ALL_LIMITS[limit]
    return Fault("partition", host, seconds, point=limit, side=side)


def partitions(hosts: Sequence[str]) -> tuple[Fault, ...]:
    """One that heals before and one that heals after each limit, the hosts taking turns."""
    found: list[Fault] = []
    for side in PARTITION_SHARE:
        for limit in ALL_LIMITS:
            found.append(partition(hosts[len(found) % len(hosts)], limit, side))
    return tuple(found)


def _together(rng: Random, names: Sequence[str]) -> Fault:
    dying = rng.sample(list(names), rng.randint(min(2, len(names)), len(names)))
    dying += [LAUNCHER] if rng.random() < LAUNCHER_SHARE else []
    return Fault("together", dying[0], others=tuple(dying[1:]))


def _trap(rng: Random, names: Mapping[str, Sequence[str]]) -> Fault:
    role = rng.choice(list(names))
    others = (LAUNCHER,) if role != LAUNCHER and rng.random() < LAUNCHER_SHARE else ()
    side: Side = rng.choice(("before", "after"))
    target = rng.choice(list(names[role]))
    return Fault("trap", target, others=others, point=rng.choice(list(POINTS[role])), side=side)


class Striker:
    """Makes faults happen to one run."""

    def __init__(
        self,
        run: Run,
        proxy: Proxy,
        disk: SmallDisk | None,
        network: Network | None = None,
        guests: Mapping[str, Guest] | None = None,
    ) -> None:
        """`guests`: the other hosts of the network, by name."""
        self._run = run
        self._proxy = proxy
        self._disk = disk
        self._network = network
        self._guests = guests or {}
        self._timers: list[threading.Timer] = []
        self.complaints: list[str] = []
        """Errors while a fault struck."""

    def strike(self, fault: Fault) -> bool:
        """False when there was nothing to hit (a worker that is being started again)."""
        name = fault.target
        match fault.kind:
            case "kill":
                return self._run.signal_worker(name, signal.SIGKILL)
            case "stop":
                return self._stop_for(name, fault.seconds)
            case "hang":
                return self._run.signal_worker(name, signal.SIGSTOP)
            case "cut" | "reset":
                return self._connected(name) and bool(self._proxy.tell(Break(name, reset=fault.kind == "reset")))
            case "blackhole":
                self._proxy.tell(Weather(fault.seconds, name, blackhole=True))
            case "delay":
                self._proxy.tell(Weather(fault.seconds, name, delay_s=HUGE_DELAY_S))
            case "throttle":
                self._proxy.tell(Weather(fault.seconds, name, bytes_per_s=SLOW_BYTES_PER_S))
            case "stranger":
                assert knock(self._proxy.address, Random(fault.seed)), "strangers were not answered"
            case "together" | "trap":
                return self._kill_all(fault)
            case "partition":
                assert self._network is not None, "a partition needs hosts"
                self._network.cut_off(name)
                self._later(fault.seconds, partial(self._network.connect, name))
            case "relaunch" | "interrupt" if name in self._guests:
                return self._guests[name].signal(signal.SIGKILL if fault.kind == "relaunch" else signal.SIGINT)
            case "relaunch":
                self._relaunch()
            case "interrupt":
                self._make_room()
                code = self._run.interrupt(self._proxy)
                if code not in (STOPPED_EXIT_CODE, 0):
                    self.complaints.append(f"a run stopped by Ctrl-C ended with exit code {code}")
            case "disk":
                assert self._disk is not None, "a full disk needs a disk of its own"
                self._disk.fill()
                self._later(fault.seconds, self._disk.free)
            case _:
                if not self._connected(name):
                    return False
                self._proxy.tell(Meddle(fault.kind, name, fault.direction, seed=fault.seed))
        return True

    def heal(self) -> None:
        """Undo what still lasts."""
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for role in PROCESSES:
            for name in self._run.names(role):
                self._run.signal_worker(name, signal.SIGCONT)
        if self._network is not None:
            for host in (HOME, *self._guests):
                self._network.connect(host)
        if self._disk is not None:
            self._disk.free()

    def _kill_all(self, fault: Fault) -> bool:
        """Those of them that are there, at once, or when the first one passes the point. False when the first is not
        there or did not pass."""
        launcher = self._run.process.pid
        pids = {name: launcher if name == LAUNCHER else self._run.pid(name) for name in (fault.target, *fault.others)}
        first, *others = (pids[name] for name in pids)
        if first is None:
            return False
        others = [pid for pid in others if pid is not None]
        if fault.kind == "trap":
            if fault.point in AT_A_NEW_LEARNER:
                self._run.signal_worker("learner-0", signal.SIGKILL)
            there = self._run.running if fault.target == LAUNCHER else self._run.pid(fault.target) == first
            struck = there and self._run.traps.catch(
                fault.point, fault.side, first, others=others, timeout_s=TRAP_S, alive=lambda: self._run.running
            )
        else:
            struck = True
            for name, pid in pids.items():
                if pid is not None and name != LAUNCHER:
                    self._run.signal_pid(name, pid, signal.SIGKILL)
        if struck and fault.restarts_run:
            self._relaunch()
        return struck

    def _relaunch(self) -> None:
        self._make_room()
        self._run.relaunch(self._proxy)

    def _make_room(self) -> None:
        """A launcher that finds no room at its start refuses to, and rightly."""
        if self._disk is not None:
            self._disk.free()

    def _connected(self, name: str) -> bool:
        return bool(self._proxy.look().connections.get(name))

    def _stop_for(self, name: str, seconds: float) -> bool:
        pid = self._run.pid(name)
        if pid is None or not self._run.signal_worker(name, signal.SIGSTOP):
            return False
        self._later(seconds, lambda: self._run.signal_pid(name, pid, signal.SIGCONT))
        return True

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()
        self._timers = [other for other in self._timers if other.is_alive()] + [timer]
