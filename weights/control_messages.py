"""Messages between rank 0 and the members of a weight group, on a ZeroMQ channel separate from the weights.

    member               rank 0
    Joined  ------------->             plan taken up and caught up; "I have version v"
            <-------------  Go         all members are here: make the process group
    Ready   ------------->             the group is made (or why not)
            <-------------  Round      a version follows as a broadcast
    Want    ------------->             without a broadcast: these pieces of the version, please
            <-------------  Piece      one of them, and its bytes as a second frame
    Answer  ------------->             I have it (or why not)
            <-------------  Leave      the group is over; a plan may follow

`weights.control` has both ends of the channel. Want and Piece have a connection of their own (`weights.wire`), so that
a Leave does not wait behind weights. No torch, no socket.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.checks import Canary
from stillhouse.weights.manifest import WeightManifest

AnswerStatus: TypeAlias = Literal["staged", "broken", "stuck", "refused", "wrong_weights"]


class MemberJoined(msgspec.Struct, frozen=True, tag=True):
    """member -> rank 0."""

    group_epoch: int
    rank: int
    """The member's rank: 1 for the first in the plan, and so on."""
    version: WeightVersion | None
    """Newest weights of this member's engine, staged ones included; None: unknown, it needs a whole version."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> member."""

    group_epoch: int
    timeout_s: float


class MemberReady(msgspec.Struct, frozen=True, tag=True):
    """member -> rank 0."""

    group_epoch: int
    rank: int
    error: str | None = None
    at_fault: bool = False
    """With an error: it would happen in any group, so this member must be left out."""


class Agreed(msgspec.Struct, frozen=True):
    """The meaning of the bytes; sent with the first round of a group."""

    manifest: WeightManifest
    bucket_bytes: int
    adapter_config: bytes = b""
    """Where versions are adapters: adapter_config.json of peft, without which they cannot be loaded from a file."""


class WeightCheck(msgspec.Struct, frozen=True):
    """The proof that a server must give before it samples with a version."""

    weights: WeightsRef | None = None
    """The same version as a file. The server loads it, and its checksums must not change."""
    required: bool = False
    """Whether it is an error if the server has no checksums or cannot read the file; if not, the canary is enough."""
    canary: Canary | None = None

    def is_whole(self, checksums: bool) -> bool:
        """True if nothing that was due is missing. `checksums`: a check by checksums was due."""
        return not checksums or self.weights is not None


class CpuHandle(msgspec.Struct, frozen=True, tag="cpu"):
    """A segment of shared memory, as torch names it (UntypedStorage._share_filename_cpu_)."""

    manager: bytes
    """Socket of the process that removes it when nobody uses it any more."""
    name: bytes
    n_bytes: int


class CudaHandle(msgspec.Struct, frozen=True, tag="cuda"):
    """Memory on a GPU, as torch names it for one receiver (UntypedStorage._share_cuda_)."""

    uuid: str
    """The GPU's."""
    handle: bytes
    n_bytes: int
    offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync: bool


MemoryHandle: TypeAlias = CpuHandle | CudaHandle


class SharedBucket(msgspec.Struct, frozen=True):
    """The bytes of a WirePiece where `Round.shared`: a bucket in memory that the member opens."""

    handles: tuple[MemoryHandle, ...]
    """For each rank of the member, one that only this rank may open, once."""
    sum: int
    """Its checksum (weights.buckets.checksum), up to a multiple of 64 bytes."""


class Round(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> member: a version follows."""

    group_epoch: int
    number: int
    version: WeightVersion
    manifest_digest: str
    agreed: Agreed | None
    timeout_s: float
    grace_s: float = 3.0
    """After a failure every member answers within this time."""
    check: WeightCheck | None = None
    shared: bool = False
    """Pieces are not the bytes of the version but its buckets in memory of the learner (SharedBucket)."""


class MemberAnswer(msgspec.Struct, frozen=True, tag=True):
    """member -> rank 0. `staged`: the engine has it. `broken`: the collective failed, perhaps by another member's
    fault. `stuck`: it failed and the server is still in it; a server that hangs looks the same as one that waits for
    another. `refused`: this member's own fault (wrong checksum, the engine does not accept these tensors, the server is
    gone). `wrong_weights`: the server accepted all tensors but does not have them."""

    group_epoch: int
    rank: int
    number: int
    status: AnswerStatus
    reason: str = ""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> member."""

    group_epoch: int
    reason: str


class Want(msgspec.Struct, frozen=True, tag=True):
    """member -> rank 0: send these pieces of the present round's version."""

    group_epoch: int
    rank: int
    number: int
    """The round's."""
    first: int
    """Index of the first piece."""
    count: int = 1


class WirePiece(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> member; its bytes follow as the next frame."""

    group_epoch: int
    number: int
    index: int


FromMember: TypeAlias = MemberJoined | MemberReady | MemberAnswer
FromRankZero: TypeAlias = Go | Round | Leave
