"""The interface of an engine, or of a server, that takes the weights which a receiver (weights.receiver) gets.

    EmbeddedWeights (engines.torch.weights)    is a rank of the weight group itself, and stages the weights
    ServerWeights (engines.sglang.weights)     has its SGLang server become a rank

One thread makes all calls, in this order for every plan: `check`, `join`, `take` for each round, `leave`. Also
here: the check of a snapshot file before it is loaded. No torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stillhouse.models.safetensors_header import Header, read_header
from stillhouse.protocol.messages import WeightPlan, WeightsRef, WeightVersion
from stillhouse.weights.control_messages import Agreed, Round
from stillhouse.weights.errors import Interrupted, SnapshotRefused
from stillhouse.weights.wire import WireMember


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of one round."""

    n_bytes: int
    receive_s: float
    """Time to receive the bytes."""
    stage_s: float
    """Time until the engine had them: the embedded engine's copy; a server's pause, checks and resume."""
    staged: bool = True
    """False: the engine had this version already."""


class WeightSink(Protocol):
    """See the module. One plan at a time."""

    @property
    def version(self) -> WeightVersion | None:
        """Newest weights, staged ones included. None: not known, so a whole version must come first. Callable from any
        thread."""
        ...

    @property
    def stats(self) -> dict[str, float]:
        """The sink's own figures for the heartbeat. Callable from any thread."""
        ...

    def prepare(self) -> None:
        """Called once, before any plan."""
        ...

    def check(self, plan: WeightPlan) -> None:
        """Raises ValueError for a plan that is not for members of this kind."""
        ...

    def join(self, plan: WeightPlan, index: int, timeout_s: float, interrupted: Interrupted) -> None:
        """Become the member `plan.members[index]` of the plan's process group. Raises GroupBroken, GroupInterrupted,
        and WeightsRefused when the fault is this member's own."""
        ...

    def take(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember | None = None) -> Receipt:
        """Take a version: by `wire`, or else as part of a broadcast. Raises
        GroupBroken, GroupInterrupted or WeightsRefused; any other error means that no round will ever succeed
        here."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """After `join` or `take` failed: wait until everything they started has ended. False: it is still stuck."""
        ...

    def leave(self) -> None:
        """Leave the group in whatever state it is. Idempotent. Raises when no weights can be received any more."""
        ...


def check_snapshot(ref: WeightsRef) -> Path:
    """The snapshot file. Raises SnapshotRefused unless it has the bytes that the learner wrote, and the version."""
    path = Path(ref.path)
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SnapshotRefused(f"{path}: {error}") from error
    if sha256 != ref.sha256:
        raise SnapshotRefused(f"{path}: sha256 {sha256}, expected {ref.sha256}; the file was damaged or replaced")
    found = whole_file(path).metadata.get("version")
    if found != str(ref.version):
        raise SnapshotRefused(f"{path}: holds version {found}, expected {ref.version}")
    return path


def whole_file(path: Path) -> Header:
    """The header of a safetensors file that may be loaded. Raises SnapshotRefused: a server that loads a malformed one
    ends."""
    try:
        return read_header(path)
    except (OSError, ValueError) as error:
        raise SnapshotRefused(f"{path}: {error}; it is not loaded") from error
