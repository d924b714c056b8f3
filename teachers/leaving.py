"""Makes the first SIGTERM a request to finish; a second one, or a deadline, ends the process as before."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_sigterm(ask: Callable[[], None], deadline_s: float) -> Generator[None]:
    """Inside the context the first SIGTERM calls `ask`. The next one, or `deadline_s` after the first, calls the former
    handler, whatever the process is doing. Has no effect outside the main thread."""
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
    # No `finally`: an exception may come from the former handler, which sets signals as it needs them.
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGTERM, former)
