"""A small file system that a test can fill, and make room on again; skips the test where none can be mounted."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.sim.chaos import disk


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Generator[Path]:
    """`folder` as a mount point of a file system of this size."""
    with ExitStack() as stack:
        try:
            stack.enter_context(disk.small_disk(folder, size_bytes))
        except OSError as error:
            pytest.skip(str(error))
        yield folder


def fill(folder: Path) -> Path:
    """Take all the room that is left; delete the file to give it back."""
    disk.SmallDisk(folder).fill()
    return folder / disk.BALLAST
