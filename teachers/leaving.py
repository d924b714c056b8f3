"""SIGTERM as a request to finish first; a second one, or a deadline, as what it was before."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_sigterm(ask: Callable[[], None], deadline_s: float) -> Generator[None]:
    """While entered, the first SIGTERM calls `ask`. The next one, or `deadline_s` after the first, whatever the process
    is doing then, the former handler is called. Does nothing outside the main thread."""
    former = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return

    def too_late(_signum: int, frame: FrameType | None) -> None:
        former(signal.SIGTERM, frame)

    def asked(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, former)
        signal.signal(signal.SIGALRM, too_late)
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        ask()

    signal.signal(signal.SIGTERM, asked)
    yield
    # Not after an exception: it may be the former handler's, which sets signals as it needs them.
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGTERM, former)
