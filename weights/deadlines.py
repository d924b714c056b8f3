"""Time limits for a version to reach its members, and waits for operations that cannot be interrupted.

    limit = patience * (floor_s + passes * bytes / slowest_bytes_per_s) + (copies - 1) * bytes / slowest_bytes_per_s

    join       a server that holds other weights first loads the student from disk
    plain      a broadcast is received and copied into the engine
    reload     received, hashed, the snapshot file hashed, read by the server, and hashed again

`copies` are those that the learner's link carries in a broadcast: one, or one for each member where each fetches its
own (weights.transports.wire).

Each kind has its own patience, which begins with 1. It doubles when a limit is missed, so that members are not asked
again and again for something they cannot do in time, and halves when less than a quarter of the limit was used. A
member that hangs repeatedly is thus waited for longer each time, but by a bounded factor. No torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Final, Literal, TypeAlias, TypeVar

from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.control_messages import WeightCheck
from stillhouse.weights.errors import GroupBroken, GroupInterrupted, Interrupted

T = TypeVar("T")
LimitKind: TypeAlias = Literal["join", "plain", "reload"]

PASSES: Final[dict[LimitKind, int]] = {"join": 3, "plain": 2, "reload": 6}
"""Passes over all bytes."""
MOST_PATIENCE: Final = 16.0
PUBLISH_WAIT_S: Final = 120.0
"""Time that training waits for earlier versions, beyond making a group and checking a version."""
_SLICE_S: Final = 0.05


def kind_of(check: WeightCheck | None) -> LimitKind:
    """The kind of a round."""
    return "plain" if check is None or check.weights is None else "reload"


class RoundLimits:
    """The limits of one publisher."""

    def __init__(self, config: WeightsConfig) -> None:
        self._config = config
        self._patience: dict[LimitKind, float] = dict.fromkeys(PASSES, 1.0)
        self.copies = 1

    def limit_s(self, kind: LimitKind, n_bytes: int) -> float:
        floor_s = self._config.join_timeout_s if kind == "join" else self._config.broadcast_timeout_s
        pass_s = n_bytes / self._config.slowest_bytes_per_s
        own_s = self._patience[kind] * (floor_s + PASSES[kind] * pass_s)
        return own_s if kind == "join" else own_s + self.others_s(n_bytes)

    def others_s(self, n_bytes: int) -> float:
        """The part of a broadcast's limit that is for the copies of other members."""
        return (self.copies - 1) * n_bytes / self._config.slowest_bytes_per_s

    def took(self, kind: LimitKind, limit_s: float, took_s: float) -> None:
        """Record how long an operation took, whether it succeeded or not."""
        if took_s >= limit_s:
            self._patience[kind] = min(2 * self._patience[kind], MOST_PATIENCE)
        elif took_s < limit_s / 4:
            self._patience[kind] = max(self._patience[kind] / 2, 1.0)

    def publish_wait_s(self, n_bytes: int) -> float:
        """Time that `publish` waits with every_version; meanwhile a group may be made and a version checked."""
        return PUBLISH_WAIT_S + self.limit_s("join", n_bytes) + self.limit_s("reload", n_bytes)


def in_thread(act: Callable[[], T], *, name: str, daemon: bool) -> Future[T]:
    """Run one operation in a thread, which may be abandoned. `daemon`: the process may end before the thread does."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return done


def wait_patiently(future: Future[T], deadline_s: float, interrupted: Interrupted, missed: str) -> T:
    """The operation's result, or the error it raised. Raises GroupInterrupted, and past the deadline GroupBroken with
    the text `missed`; the operation then continues in its thread."""
    while not wait_for([future], _SLICE_S).done:
        reason = interrupted()
        if reason is not None:
            raise GroupInterrupted(reason)
        if time.monotonic() > deadline_s:
            raise GroupBroken(missed)
    return future.result()
