"""What rank 0 and the members of a weight group tell each other beside the bytes: a ZeroMQ channel of its own.

    member               rank 0
    Joined  ------------->             plan taken up and caught up; "I have version v"
            <-------------  Go         everybody is here: make the process group
    Ready   ------------->             it stands (or why not)
            <-------------  Round      a version follows as a broadcast
    Answer  ------------->             have it (or why not)
            <-------------  Leave      the group is over; a plan may follow

`weights.control` has both ends of the channel. No torch, no socket.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from protocol.messages import WeightsRef, WeightVersion
from weights.checks import Canary
from weights.manifest import Manifest

AnswerStatus: TypeAlias = Literal["staged", "broken", "stuck", "refused", "wrong_weights"]


class Joined(msgspec.Struct, frozen=True, tag=True):
    """member -> rank 0."""

    group_epoch: int
    rank: int
    """Of the member: 1 for the plan's first, and so on."""
    version: WeightVersion | None
    """Newest weights that this member's engine has, staged ones included; None: unknown, only a whole version helps."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> member."""

    group_epoch: int
    timeout_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """member -> rank 0."""

    group_epoch: int
    rank: int
    error: str | None = None
    at_fault: bool = False
    """With an error: it would happen in any group, so leave this member out."""


class Agreed(msgspec.Struct, frozen=True):
    """What the bytes mean; sent with the first round of a group."""

    manifest: Manifest
    bucket_bytes: int


class Check(msgspec.Struct, frozen=True):
    """How a server proves that it has what was sent, before a token is sampled with it."""

    weights: WeightsRef | None = None
    """The same version as a file: loaded from there, its checksums must be the same as after the broadcast."""
    required: bool = False
    """A server that has no checksums, or cannot read the file, is an error; else the canary is enough."""
    canary: Canary | None = None

    def is_whole(self, checksums: bool) -> bool:
        """Whether it asks for what was due: perhaps `checksums`."""
        return not checksums or self.weights is not None


class Round(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> member: a version follows."""

    group_epoch: int
    number: int
    version: WeightVersion
    manifest_digest: str
    agreed: Agreed | None
    timeout_s: float
    grace_s: float = 3.0
    """After a failure each member has answered within this."""
    check: Check | None = None
    weights: WeightsRef | None = None
    """The version as a file, to be loaded; None: it comes as a broadcast, which starts at once."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """member -> rank 0. `staged`: the engine has it. `broken`: the collective failed, perhaps through another's fault.
    `stuck`: it failed, and the server has not come out of it, which looks the same for the one that hangs and for one
    that waits for it. `refused`: this member's own fault (checksum, the engine does not take these tensors, the server
    is away). `wrong_weights`: the server took them all, and does not have them."""

    group_epoch: int
    rank: int
    number: int
    status: AnswerStatus
    reason: str = ""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> member."""

    group_epoch: int
    reason: str


FromMember: TypeAlias = Joined | Ready | Answer
FromRankZero: TypeAlias = Go | Round | Leave
