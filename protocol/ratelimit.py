"""Bounds on the rate of log lines and answers that peers cause, so that a flood of bad messages causes no other
flood."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 10.0


class RateLimitedLog:
    """Logs at most `lines` per INTERVAL_S; the next line after that counts those left out."""

    def __init__(self, log: logging.Logger, *, lines: int = 5) -> None:
        self._log = log
        self._lines = lines
        self._started_s = time.monotonic()
        self._written = 0
        self._left_out = 0

    def info(self, text: str) -> None:
        self._line(logging.INFO, text)

    def warning(self, text: str) -> None:
        self._line(logging.WARNING, text)

    def _line(self, level: int, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._started_s >= INTERVAL_S:
            self._started_s = now_s
            self._written = 0
        if self._written >= self._lines:
            self._left_out += 1
            return
        self._written += 1
        if self._left_out:
            text += f" (and {self._left_out} lines left out before)"
            self._left_out = 0
        self._log.log(level, "%s", text)


class OncePerInterval:
    """Says yes once per interval for each key. Remembers at most `at_most` keys, of the last interval only."""

    def __init__(self, interval_s: float, *, at_most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._at_most = at_most
        self._clock = clock
        self._said_s: OrderedDict[bytes, float] = OrderedDict()
        """When the answer was yes; the oldest is first."""

    def __len__(self) -> int:
        """Number of keys remembered."""
        return len(self._said_s)

    def due(self, key: bytes) -> bool:
        now_s = self._clock()
        while self._said_s and now_s - next(iter(self._said_s.values())) >= self._interval_s:
            self._said_s.popitem(last=False)
        if key in self._said_s:
            return False
        self._said_s[key] = now_s
        if len(self._said_s) > self._at_most:
            self._said_s.popitem(last=False)
        return True
