"""A program that puts a checkpoint into a store again and again, each time killed a little later.

    python -m tests.learner.checkpoints.killed_writer FOLDER

FOLDER/store is a store with a checkpoint, and FOLDER/here has another one. For n = 0, 1, ... a child process adds it to
a copy FOLDER/store-n, and is killed before its n-th change there; the last child, which comes to its end, leaves
FOLDER/done. Children that are killed in the middle of a file, at so many bytes of it, leave FOLDER/cut-<bytes>. Then
the same once more, with a part of the largest file that a rank on another host has put there: FOLDER/rows-n and
FOLDER/joint.
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

from stillhouse.learner.checkpoints.packed_rows import Span, pack
from stillhouse.learner.checkpoints.stored import OwnedCheckpoints, StoredRows, name_of_rows
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


def put_rows(folder: Path, store: Store) -> StoredRows:
    """As rank 1 does, on another host."""
    file, rows = "model.safetensors", StoredRows()
    whole = (folder / "here/step_000020" / file).read_bytes()
    spans = [Span(at, at + 5_000) for at in (10_000, 30_000)]
    pack(folder / "packed", [(span.first, whole[span.first : span.end]) for span in spans])
    name = name_of_rows(".tmp-step_000020_epoch_0-7-abcd", file, 1)
    store.put(folder / "packed", name)
    rows.add(name, (folder / "packed").stat().st_size, spans)
    return rows


def add(folder: Path, name: str, doom: Callable[[Path], None], *, joint: bool = False) -> bool:
    """Add the checkpoint to a copy of this name. Whether the process that did it came to its end."""
    store = folder / name
    shutil.copytree(folder / "store", store)
    child = os.fork()
    if child == 0:
        try:
            stored = OwnedCheckpoints(StoreOwner(Store(f"file://{store}"), "mine"))
            rows = put_rows(folder, stored.store) if joint else None
            doom(store)
            stored.add(folder / "here/step_000020", keep=1, rows=rows)
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
    for name, last, joint in (("store", "done", False), ("rows", "joint", True)):
        n = 0
        while not add(folder, f"{name}-{n}", lambda store, n=n: die_before_change(n, store), joint=joint):
            n += 1
        (folder / f"{name}-{n}").rename(folder / last)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
