"""Images are written by a fork of the buffer, so that its loop stands still only for the fork.

The fork has the state of the moment at which it was made, whatever the buffer does afterwards: the kernel copies a page
when one of the two changes it. It writes the image to a file, recounts everything that is held on the way, and exits.
It uses nothing that belongs to the buffer's other threads, and it dies with the buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import gc
import os
import signal
import struct
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

PR_SET_PDEATHSIG: Final = 1
NICENESS: Final = 5
"""The fork yields to the loop where there are too few cores for both."""
WRITE_BYTES: Final = 8 << 20
_TRAILER: Final = struct.Struct(">QI")
"""End of an image's file: number of bytes before it, and their CRC."""


class Outcome(enum.IntEnum):
    """Exit code of the fork."""

    WRITTEN = 0
    FAILED = 1
    """Anything that is not listed here, or a signal."""
    DISK = 2
    """The file could not be written."""
    MISCOUNTED = 3
    """The buffer's counts of what it holds differ from what it holds."""


class Finished(NamedTuple):
    """An image's fork that has ended."""

    outcome: Outcome
    n_bytes: int
    seconds: float
    cpu_s: float
    paused_s: float
    """Time for which the loop stood still for the fork."""


class ImageFork:
    """The process that writes one image."""

    def __init__(self, path: Path, make: Callable[[], bytes | None], *, flush: bool) -> None:
        """Fork. `make()` returns the image, in the fork; None: the counts are wrong. `flush`: wait for the disk. Raises
        OSError, e.g. when there is no memory for another process."""
        self.path = path
        self._began_s = time.monotonic()
        parent_pid = os.getpid()
        with warnings.catch_warnings():
            # Python warns where there are threads. Those of ZeroMQ run no Python, and the fork does not use ZeroMQ.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _write_and_exit(path, make, parent_pid, flush=flush)
        self._paused_s = time.monotonic() - self._began_s

    def __repr__(self) -> str:
        return f"ImageFork({self.path.name}, pid={self._pid})"

    def finished(self) -> Finished | None:
        """The outcome, or None while it still writes."""
        pid, status, usage = os.wait4(self._pid, os.WNOHANG)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        outcome = Outcome(code) if code in list(Outcome) else Outcome.FAILED
        n_bytes = self.path.stat().st_size - _TRAILER.size if outcome is Outcome.WRITTEN else 0
        seconds = time.monotonic() - self._began_s
        return Finished(outcome, n_bytes, seconds, usage.ru_utime + usage.ru_stime, self._paused_s)

    def stop(self) -> None:
        """End it before it is finished, and remove what it has written."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self.path.unlink(missing_ok=True)


def write_image(path: Path, body: bytes, *, flush: bool) -> None:
    """Write an image to its file. `flush`: wait until it is on the disk."""
    with path.open("wb") as file:
        for start in range(0, len(body), WRITE_BYTES):
            file.write(memoryview(body)[start : start + WRITE_BYTES])
        file.write(_TRAILER.pack(len(body), zlib.crc32(body)))
        file.flush()
        if flush:
            os.fsync(file.fileno())


def read_image(path: Path) -> bytes | None:
    """The image in a file; None if it is cut off or damaged."""
    content = path.read_bytes()
    if len(content) < _TRAILER.size:
        return None
    body, trailer = content[: -_TRAILER.size], content[-_TRAILER.size :]
    return body if _TRAILER.unpack(trailer) == (len(body), zlib.crc32(body)) else None


def _write_and_exit(path: Path, make: Callable[[], bytes | None], parent_pid: int, *, flush: bool) -> None:
    """What the fork does. It never returns, and runs nothing that is registered for the end of a process."""
    outcome = Outcome.FAILED
    try:
        gc.disable()  # it would touch, and so copy, every page
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _die_with(parent_pid)
        # The buffer's port and the lock of its journal are among them.
        os.closerange(3, 1 + max(int(fd.name) for fd in Path("/dev/fd").iterdir()))
        os.nice(NICENESS)
        body = make()
        if body is None:
            outcome = Outcome.MISCOUNTED
        else:
            write_image(path, body, flush=flush)
            outcome = Outcome.WRITTEN
    except OSError:
        outcome = Outcome.DISK
        _report()
    except Exception:
        _report()
    finally:
        os._exit(outcome)


def _report() -> None:
    """Write the exception in hand to the buffer's log. `sys.stderr` may stand for another descriptor, now closed."""
    with contextlib.suppress(OSError):
        os.write(2, traceback.format_exc().encode())


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(Outcome.FAILED)
