"""Which faults there are, how one is drawn, and what is done to the run when it strikes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from tests.chaos.commands import Break, Meddle, Proxy, Weather
from tests.chaos.disk import SmallDisk
from tests.chaos.harness import Run
from tests.chaos.meddling import Meddling
from tests.chaos.stranger import knock

Kind: TypeAlias = Literal[
    "kill", "stop", "hang", "cut", "reset", "blackhole", "delay", "throttle",
    "duplicate", "corrupt", "truncate", "garbage", "version", "tear", "noise", "stranger", "disk", "relaunch",
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
DEADLY: Final[frozenset[Kind]] = frozenset(
    {"kill", "hang", "duplicate", "corrupt", "truncate", "garbage", "version", "noise"}
)
"""The target may die of it, by the signal or because it is told that it talks nonsense; so only roles that are started
again are hit. The others heal by themselves."""
UNUSUAL: Final[frozenset[Kind]] = frozenset({"disk", "version", "relaunch"})
"""Not among the kinds that are drawn unless asked for. disk: the run folder needs a file system of its own. version: a
Hello of another version in the middle of a link; its peer takes the refusal for its own, and the run ends.
relaunch: half a minute each."""
LINKS: Final[tuple[str, ...]] = ("actor", "teacher", "learner", "launcher")
"""Who has a link to the buffer."""
PROCESSES: Final[tuple[str, ...]] = ("actor", "teacher", "learner", "buffer")
"""Whose process may be killed or stopped."""
HUGE_DELAY_S: Final = 0.3
SLOW_BYTES_PER_S: Final = 4000.0
WATCHED: Final[tuple[str, ...]] = ("actor", "teacher", "learner")
"""Of whom the launcher notices, through the buffer, that they hang (launch.silent_kill_s)."""


class Fault(msgspec.Struct, frozen=True):
    """One drawn fault."""

    kind: Kind
    target: str
    """A worker; `run` for its disk and its launcher."""
    seconds: float = 0.0
    """How long it lasts; 0: a moment."""
    direction: Literal["up", "down"] = "up"
    seed: int = 0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        way = f" {self.direction}" if self.kind in get_args(Meddling) else ""
        return f"{self.kind}{way} {self.target}{lasting}"


def draw(rng: Random, kinds: Sequence[Kind], names: Mapping[str, Sequence[str]], restartable: frozenset[str]) -> Fault:
    """Kind first, then role, then worker: each kind and each role has its share."""
    kind = rng.choice(list(kinds))
    if kind == "relaunch":
        return Fault(kind, "run")
    if kind == "disk":
        return Fault(kind, "run", rng.uniform(1.0, 4.0))
    if kind == "stranger":
        return Fault(kind, "buffer-0", seed=rng.randrange(1 << 30))
    roles = [role for role in names if names[role] and (role in restartable or kind not in DEADLY)]
    able = {"kill": PROCESSES, "stop": PROCESSES, "hang": WATCHED}.get(kind, LINKS)
    roles = [role for role in roles if role in able]
    if not roles:
        raise ValueError(f"no role may be hit by {kind}; started again are {sorted(restartable)}")
    target = rng.choice(list(names[rng.choice(roles)]))
    lasting = {"stop": (0.5, 7.0), "blackhole": (0.5, 7.0), "delay": (1.0, 4.0), "throttle": (1.0, 4.0)}
    seconds = rng.uniform(*lasting[kind]) if kind in lasting else 0.0
    return Fault(kind, target, seconds, rng.choice(("up", "up", "down")), rng.randrange(1 << 30))


class Striker:
    """Makes faults happen to one run."""

    def __init__(self, run: Run, proxy: Proxy, disk: SmallDisk | None) -> None:
        self._run = run
        self._proxy = proxy
        self._disk = disk
        self._timers: list[threading.Timer] = []

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
            case "relaunch":
                if self._disk is not None:
                    self._disk.free()  # a launcher that finds no room at its start refuses to, and rightly
                self._run.relaunch(self._proxy)
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
