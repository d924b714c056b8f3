"""Ctrl-C and its relatives, as something to look at instead of something that interrupts."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

ASKED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """While entered, SIGINT, SIGTERM and SIGHUP are counted, not obeyed. The first asks for an orderly end, the
    second for an end at once. The main thread only."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for signum in ASKED:
            self._former[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)

    @property
    def exit_code(self) -> int:
        """128 + the signal, as shells report it."""
        return 128 + (self.first or signal.SIGINT)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(signum)
