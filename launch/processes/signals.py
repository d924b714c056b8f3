"""Ctrl-C and its relatives, as something to look at instead of something that interrupts.

SIGHUP asks for nothing: who closes a terminal, or loses the connection to it, has not asked for the end of a run.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

ASKED: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """While entered, SIGINT and SIGTERM are counted, not obeyed. The first asks for an orderly end, the second for an
    end at once. SIGHUP does nothing; where it was ignored before (nohup) it stays so. The main thread only."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self.hung_up = False
        """SIGHUP came."""
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for signum in ASKED:
            self._former[signum] = signal.signal(signum, self._note)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self._former[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hung_up)
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

    def _hung_up(self, _signum: int, _frame: FrameType | None) -> None:
        self.hung_up = True


def said_of(signum: signal.Signals) -> str:
    """A signal as the user knows it."""
    return "Ctrl-C (SIGINT)" if signum == signal.SIGINT else signum.name
