"""What a server (protocol.server) reports of its peers. Without I/O, for those who handle it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from stillhouse.protocol.codec import Received
from stillhouse.protocol.messages import Role


class PeerUp(NamedTuple):
    role: Role
    name: str
    incarnation: str
    pool: str


class PeerDown(NamedTuple):
    role: Role
    name: str
    reason: str


class FromPeer(NamedTuple):
    role: Role
    name: str
    received: Received


Event: TypeAlias = PeerUp | PeerDown | FromPeer
