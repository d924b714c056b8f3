"""How long a run over hosts waits for somebody who is silent, and partitions that heal before or after that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stillhouse.launch.buffer_link import CONNECT_TIMEOUT_S
from stillhouse.launch.workers.hosts import SILENT_S
from tests.sim.chaos.traps import Side

HOME: Final = "home"
"""Host of the launcher, the buffer and the learner."""
LIMITS: Final[Mapping[str, float]] = {
    "weights.join_timeout_s": 5.0,
    "weights.broadcast_timeout_s": 6.0,
    "buffer.lease_s": 7.0,
    "buffer.peer_timeout_s": 8.5,
    "launch.silent_kill_s": 16.0,
}
"""Keys that such a run gets. The limits of weights and leases come before that of peers, which would hide them."""
BUFFER_SILENT: Final = "stillhouse.launch.buffer_link.CONNECT_TIMEOUT_S"
FIXED_LIMITS: Final[Mapping[str, float]] = {BUFFER_SILENT: CONNECT_TIMEOUT_S}
"""What no key says: how long workers and joins wait for the buffer. Hosts with ranks wait as long for each other."""
assert CONNECT_TIMEOUT_S == SILENT_S, "the latter would need partitions of its own"
ALL_LIMITS: Final[Mapping[str, float]] = {**LIMITS, **FIXED_LIMITS}
PARTITION_SHARE: Final[Mapping[Side, float]] = {"before": 0.9, "after": 1.1}
"""A partition heals at this share of a limit."""
