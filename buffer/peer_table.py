"""Every peer that is there, and the last of those that were: a run of weeks has workers that come for an hour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from buffer.peers import Peer
from protocol.messages import ForgottenPeers, Role


class PeerTable:
    """A peer is entered when it says Hello and is gone when it is lost; under the same name it may come back."""

    remembered: ClassVar[int] = 256
    """Actors and teachers that are gone. Of those that left before them only sums are kept."""

    def __init__(self) -> None:
        self._peers: dict[tuple[Role, str], Peer] = {}
        self._gone: dict[tuple[Role, str], None] = {}
        """In the order in which they went."""
        self.forgotten: dict[Role, ForgottenPeers] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def find(self, role: Role, name: str) -> Peer | None:
        return self._peers.get((role, name))

    def enter(self, peer: Peer) -> None:
        """It is there, in place of any other of its name."""
        key = peer.role, peer.name
        self._peers[key] = peer
        self._gone.pop(key, None)

    def remove(self, peer: Peer) -> None:
        """Nothing of it shall be left."""
        del self._peers[peer.role, peer.name]

    def gone(self, peer: Peer) -> Peer | None:
        """An actor or teacher that holds nothing any more. Returns a peer that is forgotten in its stead. (A learner is
        never told here: another that knows its batches must find it.)"""
        self._gone[peer.role, peer.name] = None
        if len(self._gone) <= self.remembered:
            return None
        oldest = next(iter(self._gone))
        del self._gone[oldest]
        forgotten = self._peers.pop(oldest)
        sums = self.forgotten.get(forgotten.role, ForgottenPeers())
        self.forgotten[forgotten.role] = ForgottenPeers(
            sums.n + 1, sums.done_total + forgotten.done_total, sums.tokens_total + forgotten.tokens_total
        )
        return forgotten
