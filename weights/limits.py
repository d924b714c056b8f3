"""How long a version may take to reach its members: a floor in seconds, and the time of the passes over its bytes.

    limit = patience * (floor_s + passes * bytes / slowest_bytes_per_s)

    join       an actor reads and hashes the snapshot, and its engine or server loads it
    plain      a broadcast is received and copied into the engine
    file       a snapshot is read, hashed and loaded, by an engine or a server
    reload     received, hashed, the snapshot file hashed, read by the server, and hashed again

patience, of each kind of its own, begins with 1. A limit that was missed is doubled for the next time, so that nothing
is asked for over and over again that cannot be done in time; one of which not a quarter was needed is halved again. A
member that hangs is thus waited for longer when it hangs again, by a bounded factor.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from weights.config import WeightsConfig
from weights.control_messages import Check

LimitKind: TypeAlias = Literal["join", "plain", "file", "reload"]

PASSES: Final[dict[LimitKind, int]] = {"join": 3, "plain": 2, "file": 3, "reload": 6}
"""Over all bytes."""
MOST_PATIENCE: Final = 16.0


def kind_of(check: Check | None) -> LimitKind:
    """Of a round."""
    return "plain" if check is None or check.weights is None else "reload"


class Limits:
    """Of one publisher."""

    def __init__(self, config: WeightsConfig) -> None:
        self._config = config
        self._patience: dict[LimitKind, float] = dict.fromkeys(PASSES, 1.0)

    def limit_s(self, kind: LimitKind, n_bytes: int) -> float:
        floor_s = self._config.join_timeout_s if kind == "join" else self._config.broadcast_timeout_s
        return self._patience[kind] * (floor_s + PASSES[kind] * n_bytes / self._config.slowest_bytes_per_s)

    def took(self, kind: LimitKind, limit_s: float, took_s: float) -> None:
        """It came to its end, good or bad, after this time."""
        if took_s >= limit_s:
            self._patience[kind] = min(2 * self._patience[kind], MOST_PATIENCE)
        elif took_s < limit_s / 4:
            self._patience[kind] = max(self._patience[kind] / 2, 1.0)

    def publish_wait_s(self, n_bytes: int) -> float:
        """For `publish`, with every_version: a group may be made and a version checked meanwhile."""
        return self._config.publish_wait_s + self.limit_s("join", n_bytes) + self.limit_s("reload", n_bytes)
