"""A small file system of its own for a run folder, that can be full for a while. Linux, root."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

BALLAST: Final = ".ballast"
LAZY: Final = 2
"""MNT_DETACH: gone from the tree at once, whoever still holds a file."""
_libc = ctypes.CDLL(None, use_errno=True)


class SmallDisk:
    """Mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def free_bytes(self) -> int:
        figures = os.statvfs(self.path)
        return figures.f_bavail * figures.f_frsize

    def fill(self) -> None:
        """Take all space that is left."""
        with (self.path / BALLAST).open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
            while (left := self.free_bytes) > 0:
                ballast.write(bytes(min(left, 1 << 20)))

    def free(self) -> None:
        (self.path / BALLAST).unlink(missing_ok=True)


def mounted_at(path: Path) -> bool:
    return any(line.split()[1] == str(path) for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Generator[SmallDisk]:
    """A tmpfs at `path`, which is made if it is not there. Raises OSError where that is not permitted."""
    path.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes}".encode()
    if _libc.mount(b"chaos", str(path).encode(), b"tmpfs", 0, options) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot mount a tmpfs at {path}: {os.strerror(error)}")
    try:
        yield SmallDisk(path)
    finally:
        if _libc.umount2(str(path).encode(), LAZY) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot unmount {path}: {os.strerror(error)}")
