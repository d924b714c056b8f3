"""A program that puts a checkpoint into a store again and again, each time killed a little later.

    python -m tests.learner.checkpoints.killed_writer FOLDER

FOLDER/store is a store with a checkpoint, and FOLDER/here has another one. For n = 0, 1, ... a child process adds it to
a copy FOLDER/store-n, and is killed before its n-th change there; the last child, which comes to its end, leaves
FOLDER/done. Children that are killed in the middle of a file, at so many bytes of it, leave FOLDER/cut-<bytes>. Rows
that a rank on another host has put there before are gone when the checkpoint has its name.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stillhouse.learner.checkpoints.stored import OwnedCheckpoints, prefix_of_draft
from stillhouse.protocol.object_store import Store
from stillhouse.protocol.store_owner import StoreOwner

CHANGES: Final = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")
CUTS: Final = (60, 3_000, 25_000)
"""Bytes in the middle of small files, of none, and of the largest."""


def die_before_change(n: int, store: Path) -> None:
    """Python reports each call that changes a folder or opens a file for writing, before it is made."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        opened = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (opened or event in CHANGES) and str(store) in str(args[0]):
            if seen == n:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)


def die_in_a_file(n_bytes: int) -> None:
    """The system ends a process that makes a file larger than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def add(folder: Path, name: str, doom: Callable[[Path], None]) -> bool:
    """Add the checkpoint to a copy of this name. Whether the process that did it came to its end."""
    store = folder / name
    shutil.copytree(folder / "store", store)
    child = os.fork()
    if child == 0:
        try:
            stored = OwnedCheckpoints(StoreOwner(Store(f"file://{store}"), "mine"))
            rows = f"{prefix_of_draft('.tmp-step_000020_epoch_0-7-abcd')}/rows-1/model.safetensors"
            stored.store.put_bytes(rows, bytes(5_000))  # as rank 1 does
            doom(store)
            stored.add(folder / "here/step_000020", keep=1)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0, "it failed by itself"
    return True


def main(folder: Path) -> None:
    for n_bytes in CUTS:
        add(folder, f"cut-{n_bytes}", lambda _, n_bytes=n_bytes: die_in_a_file(n_bytes))
    n = 0
    while not add(folder, f"store-{n}", lambda store, n=n: die_before_change(n, store)):
        n += 1
    (folder / f"store-{n}").rename(folder / "done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
