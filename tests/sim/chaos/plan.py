"""The settings of a campaign, and the arguments of its launcher and joins."""

from __future__ import annotations

from typing import Final

import msgspec

from stillhouse.launch.workers.crew import ROLES
from tests.sim.chaos.faults import Fault, Kind
from tests.sim.chaos.harness import PATIENT, TASK
from tests.sim.chaos.limits import LIMITS

HOST_SETTINGS: Final = ("--weights.dtype=bfloat16", "--launch.ready_timeout_s=120")
"""Half the bytes and more time, for links on which a megabyte takes some seconds."""
RANK_SETTINGS: Final = (
    *("--weights.allow_plain_network=true", "--weights.transport=wire"),
    *("--learner.rank_timeout_s=20", "--launch.shutdown_grace_s=3"),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a campaign."""

    faults: int
    seed: int
    kinds: tuple[Kind, ...]
    roles: frozenset[str] = frozenset(ROLES)
    """Those whose death the run must survive."""
    actors: int = 3
    teachers: int = 2
    hosts: int = 1
    """Above 1: the workers are spread over so many network namespaces (tests.sim.chaos.hosts)."""
    rank_hosts: int = 1
    """Above 1: so many of the hosts have a rank of the learner each."""
    delay_ms: float = 0.0
    """Of each frame between two hosts, a quarter more or less."""
    loss: float = 0.0
    """Share of the frames between hosts that are lost."""
    steps: int
    max_staleness: int = 2
    surely: tuple[Fault, ...] = ()
    """Among the faults, evenly over the run, whatever is drawn."""
    gap_s: tuple[float, float] = (0.5, 2.5)
    """Between two faults, evenly drawn; less where the run would be over before the last of them."""
    end_timeout_s: float = 120.0
    """Seconds that the run may take without a step once the faults are over."""
    disk_mib: int = 0
    """Above 0: the run folder is a file system of this size."""
    arguments: tuple[str, ...] = ()

    def sure_fault(self, n_struck: int) -> Fault | None:
        """The sure fault whose turn is next, if it is one's turn. One that finds nothing to hit is tried again."""
        turns = {self.faults * (n + 1) // (len(self.surely) + 1): fault for n, fault in enumerate(self.surely)}
        return turns.get(n_struck)

    @property
    def guests(self) -> list[str]:
        """The hosts besides that of the launcher."""
        return [f"far{number}" for number in range(1, self.hosts)]

    def arguments_of_run(self) -> list[str]:
        """Of the launcher, with the workers of its own host."""
        actors, teachers = self._workers(0)
        over_hosts = [*HOST_SETTINGS, *(f"--{key}={value:g}" for key, value in LIMITS.items())]
        ranks = [f"--learner.ranks={self.rank_hosts}", f"--learner.hosts={self.rank_hosts}", *RANK_SETTINGS]
        return [
            *TASK,
            *PATIENT,
            *(over_hosts if self.hosts > 1 else []),
            *(ranks if self.rank_hosts > 1 else []),
            f"--actors={actors}",
            f"--teachers={teachers}",
            f"--steps={self.steps}",
            f"--seed={self.seed}",
            f"--max-staleness={self.max_staleness}",
            f"--learner.eval_every={self.steps}",
            *self.arguments,
        ]

    def arguments_of_join(self, guest: str) -> list[str]:
        host = 1 + self.guests.index(guest)
        actors, teachers = self._workers(host)
        ranks = ["--learner-ranks=1"] if host < self.rank_hosts else []
        return [f"--actors={actors}", f"--teachers={teachers}", "--launch.threads_per_worker=1", *ranks]

    def alone(self) -> Plan:
        """The same on one host."""
        return msgspec.structs.replace(self, hosts=1, rank_hosts=1)

    def _workers(self, host: int) -> tuple[int, int]:
        """Actors and teachers of a host: dealt out in turn, actors from the launcher's host on, teachers from the last
        one on."""
        return (
            len(range(host, self.actors, self.hosts)),
            len(range(self.hosts - 1 - host, self.teachers, self.hosts)),
        )
