"""SIGTERM as something to count, for processes that finish what they are doing first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class SigtermCount:
    """Context in which SIGTERMs are counted instead of obeyed. Does nothing outside the main thread, where signals
    cannot be handled."""

    def __init__(self) -> None:
        self.count = 0
        self._former: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.count += 1
