"""Around the main function of a worker, or of a rank of the learner: its log, its signals, and its exit code.

SIGINT is ignored (the launcher handles Ctrl-C), SIGTERM becomes SystemExit in the main thread, SIGUSR1 dumps all
stacks.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final, NoReturn

from stillhouse.protocol.context import ExitCode
from stillhouse.protocol.errors import HandshakeRefused
from stillhouse.protocol.printable import LineFormatter

LEAVE_AGAIN_S: Final = 0.25
"""Time between SIGTERM and the check whether its exception was lost."""

log = logging.getLogger(__name__)


def prepare(name: str) -> None:
    """Before the main function: signals, and a log whose lines begin with `name`."""
    faulthandler.enable()
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    for stream in (sys.stdout, sys.stderr):
        # Both are TextIOWrappers. A log is UTF-8, whatever the locale.
        stream.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    to_log = logging.StreamHandler()
    to_log.setFormatter(LineFormatter(name))
    logging.basicConfig(level=logging.INFO, force=True, handlers=[to_log])
    logging.captureWarnings(True)


def outcome_of(name: str, main: Callable[[], int]) -> int:
    """Run `main`; returns the exit code, also of what it raises. Nothing is to follow but the end of the process."""
    code = int(ExitCode.FAILED)
    try:
        code = int(main())
        log.info("%s ends with exit code %d", name, code)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else ExitCode.FAILED
        log.info("%s was asked to leave, exit code %d", name, code)
    except HandshakeRefused as error:
        code = ExitCode.RUN_LOST if error.refused.code in ("run_id", "peer_ahead") else ExitCode.USELESS
        log.exception("the buffer refused %s; starting it again would not help", name)
    except BaseException:
        log.exception("%s failed", name)
    finally:
        _leave_undisturbed()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return code


class _Leave(SystemExit):
    """Raised by SIGTERM."""


def _leave(_signum: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM handler: unwind the main thread. A second SIGTERM must not interrupt the unwinding.

    The exception appears in whatever Python code happens to run, and some code loses it (a weakref callback, a
    `__del__`, C code that clears errors). So a timer checks whether it is still being handled, and raises it again if
    it is not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _leave_again)
    signal.setitimer(signal.ITIMER_REAL, LEAVE_AGAIN_S, LEAVE_AGAIN_S)
    raise _Leave(int(ExitCode.TERMINATED))


def _leave_again(_signum: int, _frame: FrameType | None) -> None:
    """SIGALRM handler: raise _Leave again, unless the main thread is handling one, that is, cleaning up."""
    handled = sys.exception()
    while handled is not None:
        if isinstance(handled, _Leave):
            return
        handled = handled.__context__
    raise _Leave(int(ExitCode.TERMINATED))


def _leave_undisturbed() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
