"""No process outlives its launcher, and no process leaves children behind.

Downwards: a process asks the kernel for SIGKILL at its parent's death (protocol.children, Linux), and one of its
threads waits for the end of a pipe whose only writer is the launcher (everywhere). Upwards: before a worker is reaped,
the rest of its process group is killed, while its pid cannot be reused yet.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

import psutil

LEAVE_WAIT_S: Final = 1.0
KILLED_WAIT_S: Final = 5.0


def watch_launcher(lifeline_fd: int) -> None:
    """Start a thread that ends this process when the launcher's end of the pipe is closed."""

    def wait_for_the_end() -> None:
        while os.read(lifeline_fd, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()


def sweep() -> list[str]:
    """Kill remaining descendants of this process. There should be none; returns a description of each."""
    found: list[str] = []
    left = psutil.Process().children(recursive=True)
    _, left = psutil.wait_procs(left, timeout=LEAVE_WAIT_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(f"{process.pid} {process.name()}")
            process.kill()
    psutil.wait_procs(left, timeout=KILLED_WAIT_S)
    return found
