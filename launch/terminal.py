"""The user's terminal: Ctrl-C and its relatives, and output that may go away.

Signals are counted here and looked at by the launcher's loop; they interrupt nothing. SIGHUP asks for nothing: closing
a terminal, or losing the connection to it, does not end a run. A closed terminal, a closed pipe or a full disk does not
end it either: what cannot be written is left out, and the launcher's log in the run folder has all of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Generator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


ASKED: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """While entered, SIGINT and SIGTERM are counted but not obeyed: the first asks for an orderly end, the second for
    an immediate one. SIGHUP is only noted; where it was ignored before (nohup) it stays ignored. Main thread only."""

    def __init__(self, *, second_ends: bool = False) -> None:
        """`second_ends`: a second signal has its usual effect, for a process without a loop that looks at once."""
        self._second_ends = second_ends
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

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)

    @property
    def exit_code(self) -> int:
        """128 + the signal number, as shells report it."""
        return 128 + (self.first or signal.SIGINT)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(signum)
        if self._second_ends:
            self.__exit__()

    def _hung_up(self, _signum: int, _frame: FrameType | None) -> None:
        self.hung_up = True


def said_of(signum: signal.Signals) -> str:
    """Name of a signal, for the user."""
    return "Ctrl-C (SIGINT)" if signum == signal.SIGINT else signum.name


class LastingOutput(io.RawIOBase):
    """A file descriptor to which writing never fails: what cannot be written counts as written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The stream's descriptor behind a LastingOutput."""
    return io.TextIOWrapper(
        io.BufferedWriter(LastingOutput(stream.fileno())),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


@contextlib.contextmanager
def sure_output() -> Generator[None]:
    """While entered, printing never fails: neither at a reader that has gone (`| head`) nor for a character that the
    locale's encoding lacks. Streams without a descriptor (as in tests) are left alone."""
    former = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), former, strict=True):
        with contextlib.suppress(OSError, ValueError):
            if isinstance(stream, io.TextIOWrapper):
                stream.flush()
                setattr(sys, name, lasting(stream))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = former


@contextlib.contextmanager
def lasting_output() -> Generator[None]:
    """While entered, printing never fails, and SIGHUP does not end this process."""
    hangs_up = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    )
    if hangs_up:
        signal.signal(signal.SIGHUP, lambda _signum, _frame: None)
    try:
        with sure_output():
            yield
    finally:
        if hangs_up:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
