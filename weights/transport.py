"""The interface between the publisher and a transport, which carries versions to the members.

    form       sets the members, and finds out whether all of them have the newest version
    publish    sends one version to all of them -> RoundResult: who has it, who is left out and why, bytes, seconds
    disband    ends the membership of all

A transport is a callable that takes a TransportSetup: a file in weights/transports/, `module:attribute` (also in the
working directory), or an entry point of an installed package in the group `stillhouse.weights`.
`weights.group_host.GroupHost` is a base class for transports whose members answer on the learner's control channel, as
all of ours do; its subclasses only say where members meet, and how the bytes leave. Receivers (weights.sink) need no
change for transports that end in a process group's broadcast (`gloo`, `nccl`), at the control port (`wire`) or in
shared memory (`ipc`).
"""

# Why it is so: docs/decisions/weight-transports.md

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, cast

import torch

from stillhouse.protocol.keys import ServerKeys
from stillhouse.protocol.messages import WeightPlan, WeightVersion
from stillhouse.protocol.plugins import load_callable
from stillhouse.weights.config import WeightsConfig, find_transport
from stillhouse.weights.control_messages import WeightCheck
from stillhouse.weights.deadlines import RoundLimits
from stillhouse.weights.group_operations import BackendName
from stillhouse.weights.roster import EMBEDDED, GroupMembers, GroupSeat
from stillhouse.weights.staged_weights import StagedVersion

DropReason: TypeAlias = Literal["no_join", "no_ready", "no_answer", "stuck", "refused", "wrong_weights", "disconnected"]
"""Why a member is left out. no_join: it did not take up the plan in time; no_ready: it joined but hung, or failed by
its own fault, while the group was made; no_answer: it did not confirm a version in time; stuck: its server is still in
a failed broadcast; refused: it could not use a version; wrong_weights: its server accepted a version but does not have
it; disconnected: the buffer lost it, or it restarted."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The outcome of making a group, or of publishing to it. It succeeded if there is no error."""

    error: str | None = None
    lost: dict[GroupSeat, DropReason] = field(default_factory=dict[GroupSeat, DropReason])
    """Members to leave out of the next group. Empty with an error: the culprit is not known."""
    behind: bool = False
    """After making a group: at least one member lacks the newest version."""
    has: tuple[GroupSeat, ...] = ()
    """Members that have proved to have the version."""
    n_bytes: int = 0
    """Bytes sent to each member."""
    seconds: float = 0.0


@dataclass(slots=True)
class PublisherStats:
    """The publisher's figures: totals since the start; seconds and bytes of the newest broadcast where not a total."""

    published: WeightVersion | None = None
    members: int = 0
    group_epoch: int = 0
    broadcasts_total: int = 0
    broadcast_s: float = 0.0
    broadcast_s_total: float = 0.0
    broadcast_bytes: int = 0
    copy_s: float = 0.0
    """Time that the newest `publish` took from the training thread, without waiting."""
    snapshots_total: int = 0
    snapshot_s: float = 0.0
    snapshot_failures_total: int = 0
    rebuilds_total: int = 0
    failed_groups_total: int = 0
    skipped_versions_total: int = 0
    dropped_total: Counter[DropReason] = field(default_factory=Counter[DropReason])
    """Members left out, by reason."""
    control_unreadable_total: int = 0
    control_refused_total: int = 0
    """Connections to the control port without a key of this run, or cut for what they sent."""
    check_requests_total: int = 0
    """Versions for which SGLang servers were asked for a proof. The actors' `weight_checks_*_total` give the
    results."""


class Transport(Protocol):
    """Only the publisher's thread uses it, except `seats`, `group_epoch` and the totals."""

    limits: RoundLimits

    @property
    def seats(self) -> tuple[GroupSeat, ...]:
        """Present members; empty when there is no group."""
        ...

    @property
    def group_epoch(self) -> int:
        """Number of the newest group, or attempt at one."""
        ...

    @property
    def control_unreadable_total(self) -> int:
        """Messages on the control channel that did not come from a member."""
        ...

    @property
    def control_refused_total(self) -> int:
        """Connections to the control channel that were refused or cut."""
        ...

    def form(
        self,
        seats: tuple[GroupSeat, ...],
        newest: StagedVersion | None,
        post_plan: Callable[[WeightPlan], None],
    ) -> RoundResult:
        """Replace the members by `seats`. `newest`: the version that they should have; None: there is none yet."""
        ...

    def publish(self, weights: StagedVersion, check: WeightCheck | None = None) -> RoundResult:
        """Send this version to every member, and wait until each has it, within a deadline. After an error the group is
        gone. `check`: how members prove that they have the version."""
        ...

    def disband(self, reason: str) -> None:
        """End all membership; the members wait for the next plan."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TransportSetup:
    """Everything a transport is made from."""

    config: WeightsConfig
    backend: BackendName
    """Backend of the process groups that it may make."""
    device: torch.device | str
    """Device from which process groups send, or whose memory is shared."""
    gone: Callable[[Iterable[GroupSeat]], frozenset[GroupSeat]]
    """Which of these seats the buffer has lost. Called during every wait."""
    closing: Callable[[], bool]
    """True when the publisher wants to end. Called during every wait."""
    members: GroupMembers = EMBEDDED
    control_keys: ServerKeys | None = None


def make_transport(setup: TransportSetup) -> Transport:
    """The transport that `weights.transport` names. Raises ValueError when there is none."""
    return cast(Transport, load_callable(find_transport(setup.config.way), "weights.transport")(setup))
