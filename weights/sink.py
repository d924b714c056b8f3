"""What takes the weights that a receiver (weights.receiver) is sent: the engine in its process, or a server.

    EmbeddedWeights (engines.torch.weights)    is a rank of the weight group itself, and stages what comes
    ServerWeights (engines.sglang.weights)        tells its SGLang server to be one

One thread calls all of it, in this order for every plan: `check`, `load` (if there is a newer snapshot), `join`, `take`
for each round, `leave`. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from protocol.messages import WeightPlan, WeightsRef, WeightVersion
from weights.control_messages import Agreed, Round

Interrupted: TypeAlias = Callable[[], str | None]
"""Asked about every 0.1 s in a wait; a reason ends the wait with GroupInterrupted."""


class GroupBroken(Exception):
    """An operation of the group failed or missed its deadline: a member is dead, hung or unreachable. The group is of
    no more use; close it and wait for the next plan."""


class GroupInterrupted(Exception):
    """The owner asked to stop waiting; the message is its reason. Close the group."""


class WeightsRefused(Exception):
    """What arrived is not what was announced, or cannot be used here."""


class WeightsDiffer(WeightsRefused):
    """The server took all that was sent, and computes with something else."""


class SnapshotRefused(Exception):
    """The snapshot is missing, is not what its reference says, or cannot be used."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one round brought."""

    n_bytes: int
    receive_s: float
    """Until the bytes were here."""
    stage_s: float
    """Until the engine had them: the embedded one's copy; a server's pause, checks and resume."""
    staged: bool = True
    """False: the engine had this version already."""


class WeightSink(Protocol):
    """See the module. One plan at a time."""

    @property
    def version(self) -> WeightVersion | None:
        """Newest weights, staged ones included. None: nobody knows what is there, so a whole version has to come
        before anything else. Any thread."""
        ...

    @property
    def stats(self) -> dict[str, float]:
        """Of its own, for the heartbeat. Any thread."""
        ...

    def prepare(self) -> None:
        """Once, before any plan."""
        ...

    def check(self, plan: WeightPlan) -> None:
        """Raises ValueError for a plan that is not for members of this kind."""
        ...

    def load(self, ref: WeightsRef) -> None:
        """Take a snapshot. Raises SnapshotRefused."""
        ...

    def join(self, plan: WeightPlan, index: int, timeout_s: float, interrupted: Interrupted) -> None:
        """Become a member of the plan's process group, `plan.members[index]`. Raises GroupBroken, GroupInterrupted, and
        WeightsRefused when it is nobody else's fault."""
        ...

    def take(self, header: Round, agreed: Agreed, interrupted: Interrupted) -> Taken:
        """Take part in a broadcast. Raises GroupBroken, GroupInterrupted or WeightsRefused; anything else that it
        raises means that no round will ever succeed here."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """After `join` or `take` failed: has everything that they started come to its end, or does it within this
        time? False: still stuck."""
        ...

    def leave(self) -> None:
        """Out of the group, whatever state it is in. Idempotent. Raises when nothing can be received any more."""
        ...
