"""Rows of ranks on other hosts, where hosts share no folder. Each rank puts its own into the run's store, below the
prefix that the checkpoint will have, and rank 0 fetches them into its draft. The checkpoint is then copied into the
store as that of a single process is; whatever else is below its prefix is removed before
(learner.checkpoints.stored)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from stillhouse.learner.checkpoints.packed_rows import pack, unpack
from stillhouse.learner.checkpoints.stored import prefix_of_draft
from stillhouse.learner.checkpoints.tensor_file import placed
from stillhouse.learner.ranks.shares import Shares
from stillhouse.protocol.object_store import Store, StoreError


def put_rows(store: Store, draft: str, rank: int, files: Mapping[str, Shares]) -> tuple[int, tuple[str, ...]]:
    """Put this rank's rows of these files of the draft into the store. Returns the number of their bytes, and the names
    of the objects. Raises OSError."""
    written, names = 0, list[str]()
    with tempfile.TemporaryDirectory(prefix="stillhouse-rows-") as folder:
        for file, shares in files.items():
            packed, name = Path(folder) / file, f"{prefix_of_draft(draft)}/rows-{rank}/{file}"
            written += pack(packed, placed(shares, leads=False))
            store.put(packed, name)
            packed.unlink()
            names.append(name)
    return written, tuple(names)


def fetch_rows(store: Store, draft: Path, names: Iterable[str]) -> None:
    """Copy what a rank has put into the store into the draft. Raises OSError."""
    for name in names:
        file = name.rpartition("/")[2]
        packed = draft / f"{file}.rows"
        store.get(name, packed)
        try:
            unpack(packed, draft / file)
        except ValueError as error:
            raise StoreError(f"{store.url_of(name)} is damaged: {error}") from error
        packed.unlink()
