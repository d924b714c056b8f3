"""The buffer's core: events and a clock reading in, messages out. No socket, thread, sleep or wall clock in here.

Signatures first: the body follows in the next commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from buffer.config import BufferConfig
from protocol.messages import Ledger, Message, Role, Snapshot, WeightsRef, WeightVersion


class Outgoing(NamedTuple):
    """A message to send: to whom, what, and its frames."""

    role: Role
    name: str
    message: Message
    arrays: tuple[npt.NDArray[Any], ...] = ()


class BufferState:
    """Owner of every task, ticket, rollout, lease and batch, and of the ledger. `now_s` is any rising clock."""

    published: WeightVersion
    """Newest version the learner said is out (for Welcome)."""
    weights: WeightsRef | None
    """Newest snapshot to catch up from (for Welcome)."""

    def __init__(
        self,
        config: BufferConfig,
        *,
        version: WeightVersion,
        carried: Ledger | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`version`: weights the run (re)starts from. `carried`: ledger of the run before a restart.
        `vocab_size`: token ids at or above it are rejected; None = only negative ones are."""
        raise NotImplementedError

    def peer_joined(self, now_s: float, role: Role, name: str, incarnation: str, pool: str = "") -> list[Outgoing]:
        """A peer said Hello, for the first time or again after a reconnect. The Welcome is the server's."""
        raise NotImplementedError

    def peer_lost(self, now_s: float, role: Role, name: str) -> list[Outgoing]:
        """A peer was silent for too long."""
        raise NotImplementedError

    def handle(
        self, now_s: float, role: Role, name: str, message: Message, arrays: Sequence[npt.NDArray[Any]] = ()
    ) -> list[Outgoing]:
        """Any message but Hello from a joined peer. Messages a peer of that role cannot send are answered Refused."""
        raise NotImplementedError

    def tick(self, now_s: float) -> list[Outgoing]:
        """Leases, ticket timeouts, idle release."""
        raise NotImplementedError

    def snapshot(self, now_s: float) -> Snapshot:
        """Everything at this moment, frozen."""
        raise NotImplementedError
