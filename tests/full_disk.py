"""A small file system that a test can fill, and make room on again."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

MOUNT_S = 30.0


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Generator[Path]:
    """`folder` as a mount point of a tmpfs of this size; skips the test where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, timeout=MOUNT_S)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=MOUNT_S)


def fill(folder: Path) -> Path:
    """Take all the room that is left; delete the file to give it back."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        for block in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    stream.write(b"x" * block)
            except OSError:
                continue
    return ballast
