"""The one interface between the publisher and whatever carries a version to the members: a transport.

    form       membership in and out: these are the members now, and this snapshot is where they catch up from
    publish    one version to all of them -> Result: who has it, who is left out and why, bytes, seconds
    disband    nobody is a member

A transport is one file in weights/transports/, or `module:attribute` of another package, or the name of an entry point
in the group `stillhouse.weights`: a callable that makes one of a Setup. `weights.group_host.GroupHost` is a base for
those whose members answer on the learner's control channel, as all of ours do; then a transport says only where
members meet, and how the bytes leave. What members can receive, without a change to them (weights.sink): broadcasts of
a process group (`gloo`, `nccl`), and files (`folder`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, cast

import torch

from protocol.keys import ServerKeys
from protocol.messages import WeightPlan, WeightsRef, WeightVersion
from protocol.plugins import installed
from weights.config import BUILT_IN, ENTRY_POINTS, WeightsConfig
from weights.control_messages import Check
from weights.group_operations import BackendName
from weights.limits import Limits
from weights.members import EMBEDDED, Members
from weights.roster import Seat
from weights.snapshot import SnapshotKeeper
from weights.staged_weights import StagedWeights

DropReason: TypeAlias = Literal["no_join", "no_ready", "no_answer", "stuck", "refused", "wrong_weights", "disconnected"]
"""Why a member is left out: it did not take up the plan in time; joined but hung, or failed by its own fault, while the
group was made; did not confirm a version in time; its server did not come out of a failed broadcast; it got a version
that it could not use; its server took all of a version and does not have it; the buffer lost it (or it restarted)."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of making a group, or of publishing to it. It worked exactly if there is no error."""

    error: str | None = None
    lost: dict[Seat, DropReason] = field(default_factory=dict[Seat, DropReason])
    """Members to leave out of the next group. Empty with an error: nobody's fault that could be told."""
    behind: bool = False
    """After making a group: some member lacks the newest version."""
    has: tuple[Seat, ...] = ()
    """Members that have proved to have the version."""
    n_bytes: int = 0
    """Sent to each of them."""
    seconds: float = 0.0


class Transport(Protocol):
    """Used by one thread, the publisher's; but `seats`, `group_epoch` and `control_unreadable_total` by any."""

    limits: Limits

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Present members; empty when there is no group."""
        ...

    @property
    def group_epoch(self) -> int:
        """Number of the newest group, or attempt at one."""
        ...

    @property
    def control_unreadable_total(self) -> int:
        """Messages that were not a member's."""
        ...

    def form(
        self,
        seats: tuple[Seat, ...],
        weights: WeightsRef | None,
        newest: WeightVersion | None,
        post_plan: Callable[[WeightPlan], None],
    ) -> Result:
        """Replace the members by `seats`. They catch up from `weights`; `newest` is what they should have then."""
        ...

    def publish(self, weights: StagedWeights, check: Check | None = None) -> Result:
        """Give every member this version, and wait until each has it, within a deadline. With an error the group is
        gone. `check`: how members prove that they have it."""
        ...

    def disband(self, reason: str) -> None:
        """Nobody is a member any more; they wait for the next plan."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """What a transport is made of."""

    config: WeightsConfig
    backend: BackendName
    """Of process groups, if it makes any."""
    device: torch.device | str
    """From where process groups send."""
    gone: Callable[[Iterable[Seat]], frozenset[Seat]]
    """Those of these seats that the buffer has lost. Asked in every wait."""
    closing: Callable[[], bool]
    """Whether the publisher wants to end. Asked in every wait."""
    snapshots: SnapshotKeeper
    members: Members = EMBEDDED
    control_keys: ServerKeys | None = None


def make_transport(setup: Setup) -> Transport:
    """The one that `weights.transport` names. Raises ValueError when there is none."""
    name = "collective" if setup.config.transport == "auto" else setup.config.transport
    target = BUILT_IN.get(name, name)
    if ":" not in target:
        found = installed(ENTRY_POINTS)
        if name not in found:
            known = ", ".join(["auto", *BUILT_IN, *found])
            raise ValueError(f"weights.transport = {name}; expected one of {known}, or module:attribute of your own")
        target = found[name]
    module, _, attribute = target.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"weights.transport = {name}: {target} cannot be imported: {error}") from error
    return cast(Transport, make(setup))
