"""Passes tokens from the event loop, where they arrive, to the owner's thread, which polls for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from stillhouse.engines.base import GenerationDelta
from stillhouse.engines.http.stream import FinishReason, NewTokens

_NOTIFY_EVERY_S: Final = 0.01
"""Shortest time between two notifications: tokens of many requests arrive one by one, and one wake-up serves
several."""


@dataclass(slots=True)
class PendingDelta:
    """One request's part of the next poll."""

    tokens: NewTokens = field(default_factory=NewTokens)
    finish_reason: FinishReason | None = None
    error: str | None = None

    def delta(self, request_id: str) -> GenerationDelta:
        known = [row for row in self.tokens.experts if row is not None]
        return GenerationDelta(
            request_id,
            np.array(self.tokens.ids, np.int32),
            np.array(self.tokens.logprobs, np.float32),
            tuple(self.tokens.spans),
            self.finish_reason,
            self.error,
            tuple(self.tokens.top_ids) or None,
            np.stack(known) if known and len(known) == len(self.tokens.ids) else None,
            self.tokens.prompt_experts,
        )


class DeltaBox:
    """`open` and `take` are called from the owner's thread, the others on the event loop."""

    def __init__(self, on_output: Callable[[], None] | None) -> None:
        """`on_output` is called on the event loop when there is something to take, at most once per
        `_NOTIFY_EVERY_S`."""
        self._on_output = on_output
        self._arrived = threading.Condition()
        self._open: set[str] = set()
        """Requests whose last delta has not been taken."""
        self._pending: dict[str, PendingDelta] = {}
        self._notifying = False
        self._notified_s = 0.0

    def __len__(self) -> int:
        """Number of requests whose last delta was not taken."""
        with self._arrived:
            return len(self._open)

    def open(self, request_id: str) -> None:
        """Register a request. Raises ValueError for an id in use."""
        with self._arrived:
            if request_id in self._open:
                raise ValueError(f"request id {request_id!r} is in use; expected a new one")
            self._open.add(request_id)

    def take(self, timeout_s: float) -> list[GenerationDelta]:
        """New output, at most one delta per request; waits up to `timeout_s` for the first."""
        with self._arrived:
            if not self._pending and timeout_s > 0:
                self._arrived.wait(timeout_s)
            taken, self._pending = self._pending, {}
            self._open.difference_update(name for name, pending in taken.items() if pending.finish_reason is not None)
        return [pending.delta(request_id) for request_id, pending in taken.items()]

    def give(self, request_id: str, new: NewTokens) -> None:
        with self._arrived:
            self._pending.setdefault(request_id, PendingDelta()).tokens.extend(new)
            self._arrived.notify()
        self._notify_soon()

    def end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        with self._arrived:
            pending = self._pending.setdefault(request_id, PendingDelta())
            pending.finish_reason, pending.error = reason, error
            self._arrived.notify()
        self._notify_soon()

    def notify(self) -> None:
        """Notify the owner now."""
        self._notifying, self._notified_s = False, time.monotonic()
        if self._on_output is not None:
            self._on_output()

    def _notify_soon(self) -> None:
        """Notify the owner now or, soon after the last time, a little later together with further output."""
        if self._on_output is None or self._notifying:
            return
        self._notifying = True
        wait_s = self._notified_s + _NOTIFY_EVERY_S - time.monotonic()
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self.notify)
        else:
            self.notify()
