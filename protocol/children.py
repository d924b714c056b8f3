"""Child processes that end with their parent, and with all that they started. Standard library only: it is also
imported by the interpreter of SGLang servers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
_FORKABLE: Final = frozenset({"jemalloc_bg_thd"})
"""Names of threads whose library handles forks itself. jemalloc stops its thread before a fork and starts it again on
both sides. It comes with pyarrow, which transformers imports where scikit-learn and pandas are installed."""


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent `parent_pid` (the thread that started it) dies; exit now if that is dead
    already. Only on Linux; elsewhere a pipe has to do (launch.processes.lifeline). Call it after fork or exec."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os._exit(1)


def fork_with_defaults(signums: Collection[signal.Signals]) -> int:
    """As os.fork. The child has the default handlers of these signals, and one that is sent to it at once waits until
    they are in place: the handlers of this process would swallow it."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    try:
        pid = os.fork()
        for signum in signums if pid == 0 else ():
            signal.signal(signum, signal.SIG_DFL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    return pid


def kill_group(pid: int) -> None:
    """SIGKILL the process group that the child `pid` leads, if anything is left of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
        os.killpg(pid, signal.SIGKILL)


def reap(pid: int) -> int | None:
    """Exit code of the direct child `pid` (negative: the signal that killed it), or None while it runs.

    The rest of its process group is killed first: until the child is reaped, its pid cannot be reused."""
    if sys.platform == "linux":
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_group(pid)
        _, status = os.waitpid(pid, 0)
    else:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped == 0:
            return None
        kill_group(pid)
    return os.waitstatus_to_exitcode(status)


def threads_lost_by_fork() -> int:
    """Threads of this process, including native ones on Linux, that a forked child would miss, and this one."""
    if sys.platform != "linux":
        return threading.active_count()
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text(encoding="utf-8").strip())
    return sum(name not in _FORKABLE for name in names)
