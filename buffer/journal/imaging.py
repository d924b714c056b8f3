"""Images are written by a fork of the buffer, so that its loop stands still only for the fork.

The fork has the state of the moment at which it was made, whatever the buffer does afterwards: the kernel copies a page
when one of the two changes it. It writes the image to a file, recounts everything that is held on the way, and exits.
It uses nothing that belongs to the buffer's other threads, and it dies with the buffer. One that does not end is
killed, or no image would ever follow it. Where memory runs out, the kernel takes the fork and not the buffer.
"""

from __future__ import annotations

import contextlib
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
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.children import die_with_parent

NICENESS: Final = 5
"""The fork yields to the loop where there are too few cores for both."""
LIMIT_S: Final = 900.0
"""A fork that takes longer is stuck, e.g. in a lock that another thread held when it was made, and is killed. The
longest that was measured took seconds."""
KILLED_FIRST: Final = "1000"
"""The kernel's score of whom to kill when memory runs out: the highest, so that the buffer lives."""
WRITE_BYTES: Final = 8 << 20
_TRAILER: Final = struct.Struct(">QQII")
"""End of an image's file: bytes of the image, number of its blobs, and the CRCs of the image and of the list of blobs
(64-bit numbers, little-endian), which stands between."""


class ImageOutcome(enum.IntEnum):
    """Exit code of the fork."""

    WRITTEN = 0
    FAILED = 1
    """Anything that is not listed here, or a signal."""
    DISK = 2
    """The file could not be written."""
    MISCOUNTED = 3
    """The buffer's counts of what it holds differ from what it holds."""
    OVERDUE = 4
    """It took longer than LIMIT_S, and was killed. No fork says so itself."""


class Finished(NamedTuple):
    """An image's fork that has ended."""

    outcome: ImageOutcome
    n_bytes: int
    seconds: float
    cpu_s: float
    paused_s: float
    """Time for which the loop stood still for the fork."""


class ImageFork:
    """The process that writes one image."""

    def __init__(self, path: Path, make: Callable[[], Frozen | None], *, flush: bool) -> None:
        """Fork. `make()` returns the image, in the fork; None: the counts are wrong. `flush`: wait for the disk. Raises
        OSError, e.g. when there is no memory for another process."""
        self.path = path
        self._began_s = time.monotonic()
        self._overdue = False
        parent_pid = os.getpid()
        with warnings.catch_warnings():
            # Python warns where there are threads. Those of ZeroMQ run no Python, and the fork does not use ZeroMQ.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _write_and_exit(path, make, parent_pid, flush=flush)
        self._paused_s = time.monotonic() - self._began_s

    def finished(self) -> Finished | None:
        """The outcome, or None while it still writes."""
        pid, status, usage = os.wait4(self._pid, os.WNOHANG)
        seconds = time.monotonic() - self._began_s
        if pid == 0:
            if seconds > LIMIT_S and not self._overdue:
                self._overdue = True
                os.kill(self._pid, signal.SIGKILL)  # and wait on: it may be held by a disk that hangs
            return None
        code = os.waitstatus_to_exitcode(status)
        outcome = ImageOutcome(code) if code in list(ImageOutcome) else ImageOutcome.FAILED
        if self._overdue and outcome is not ImageOutcome.WRITTEN:
            outcome = ImageOutcome.OVERDUE
        n_bytes = self.path.stat().st_size - _TRAILER.size if outcome is ImageOutcome.WRITTEN else 0
        return Finished(outcome, n_bytes, seconds, usage.ru_utime + usage.ru_stime, self._paused_s)

    def stop(self) -> None:
        """End it before it is finished, and remove what it has written."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        discard(self.path)


def discard(file: Path) -> bool:
    """Remove a file. Returns False if that is impossible, e.g. on a disk that has become read-only."""
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def write_image(path: Path, image: Frozen, *, flush: bool) -> None:
    """Write an image to its file. `flush`: wait until it is on the disk."""
    numbers = _list_of(image.blobs).tobytes()
    with open(path, "wb", opener=not_a_link) as file:
        for start in range(0, len(image.body), WRITE_BYTES):
            file.write(memoryview(image.body)[start : start + WRITE_BYTES])
        file.write(numbers)
        file.write(_TRAILER.pack(len(image.body), len(image.blobs), zlib.crc32(image.body), zlib.crc32(numbers)))
        file.flush()
        if flush:
            os.fsync(file.fileno())


def read_image(path: Path) -> bytes | None:
    """The image in a file, without its list of blobs; None if it is cut off or damaged."""
    with path.open("rb") as file:
        n_bytes, _, crc, _ = _trailer(file)
        file.seek(0)
        body = file.read(n_bytes)
    return body if len(body) == n_bytes and zlib.crc32(body) == crc else None


def read_blobs(path: Path) -> array[int] | None:
    """The numbers of all blobs to which the image in a file refers, ascending; None if it is cut off or damaged."""
    with path.open("rb") as file:
        n_bytes, n_blobs, _, crc = _trailer(file)
        file.seek(n_bytes)
        content = file.read()[: -_TRAILER.size]
    if len(content) != 8 * n_blobs or zlib.crc32(content) != crc:
        return None
    numbers = array("Q", content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _trailer(file: BinaryIO) -> tuple[int, int, int, int]:
    """All 0, with a CRC that fits nothing, if the file is too short for one."""
    n_bytes = file.seek(0, os.SEEK_END)
    if n_bytes < _TRAILER.size:
        return 0, 0, 1, 1
    file.seek(-_TRAILER.size, os.SEEK_END)
    found = _TRAILER.unpack(file.read())
    return found if found[0] + 8 * found[1] + _TRAILER.size == n_bytes else (0, 0, 1, 1)


def _list_of(blobs: Sequence[int]) -> array[int]:
    numbers = array("Q", blobs)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _write_and_exit(path: Path, make: Callable[[], Frozen | None], parent_pid: int, *, flush: bool) -> None:
    """What the fork does. It never returns, and runs nothing that is registered for the end of a process."""
    outcome = ImageOutcome.FAILED
    try:
        gc.disable()  # it would touch, and so copy, every page
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(parent_pid)
        # The buffer's port and the lock of its journal are among them.
        os.closerange(3, 1 + max(int(fd.name) for fd in Path("/dev/fd").iterdir()))
        os.nice(NICENESS)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(KILLED_FIRST, encoding="utf-8")
        image = make()
        if image is None:
            outcome = ImageOutcome.MISCOUNTED
        else:
            write_image(path, image, flush=flush)
            outcome = ImageOutcome.WRITTEN
    except OSError:
        outcome = ImageOutcome.DISK
        _report()
    except Exception:
        _report()
    finally:
        os._exit(outcome)


def _report() -> None:
    """Write the exception in hand to the buffer's log. `sys.stderr` may stand for another descriptor, now closed."""
    with contextlib.suppress(OSError):
        os.write(2, traceback.format_exc().encode())
