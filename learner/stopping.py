"""SIGTERM to the learner: it finishes the step under way, writes a checkpoint and leaves."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopAsked(Exception):
    """The learner was asked to leave. Raised between two steps only."""


class StopRequest:
    """While entered, SIGTERM is noted instead of obeyed, and stays so once it came: the process is on its way out, and
    who cannot wait sends SIGKILL. Outside the main thread signals cannot be handled, and nothing is noted."""

    def __init__(self) -> None:
        self.asked = False
        self._former: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._former is not None and not self.asked:
            signal.signal(signal.SIGTERM, self._former)

    def check(self) -> None:
        """Raises StopAsked if it is time to leave."""
        if self.asked:
            raise StopAsked("asked to leave by SIGTERM")

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.asked = True
