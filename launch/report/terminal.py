"""Standard output and error that may go away: a closed terminal, pipe or full disk ends no run.

What cannot be written is left out; the launcher's log, in the run folder, has it all.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LastingOutput(io.RawIOBase):
    """A descriptor. Writing to it never fails: what could not be written counts as written."""

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
    """The same descriptor behind a stream that is never broken."""
    return io.TextIOWrapper(
        io.BufferedWriter(LastingOutput(stream.fileno())),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


@contextlib.contextmanager
def lasting_output() -> Generator[None]:
    """While entered, whatever this process prints is lost at worst, and SIGHUP, the end of the terminal, ends nothing.
    Streams without a descriptor (a test's) stay."""
    former = sys.stdout, sys.stderr
    hangs_up = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    )
    if hangs_up:
        signal.signal(signal.SIGHUP, lambda _signum, _frame: None)
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
        if hangs_up:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
