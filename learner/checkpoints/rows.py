"""Rows of ranks on other hosts, where hosts share no folder. Each rank puts its own into the run's store (`store`), as
parts of the checkpoint there (learner.checkpoints.stored). Rank 0 fetches a copy into its draft, so that the run's
folder has the checkpoint that a single process writes, and puts only what is left over into the store."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from stillhouse.learner.checkpoints.packed_rows import pack, unpack
from stillhouse.learner.checkpoints.stored import StoredRows, file_of_rows, name_of_rows
from stillhouse.learner.checkpoints.tensor_file import placed
from stillhouse.learner.ranks.shares import Shares
from stillhouse.protocol.object_store import Store, StoreError


def put_rows(store: Store, draft: str, rank: int, files: Mapping[str, Shares]) -> tuple[int, dict[str, int]]:
    """Put this rank's rows of these files of the draft into the store. Returns the number of their bytes, and the size
    of each object by its name. Raises OSError."""
    written, sizes = 0, dict[str, int]()
    with tempfile.TemporaryDirectory(prefix="stillhouse-rows-") as folder:
        for file, shares in files.items():
            packed, name = Path(folder) / file, name_of_rows(draft, file, rank)
            written += pack(packed, placed(shares, leads=False))
            sizes[name] = packed.stat().st_size
            store.put(packed, name)
            packed.unlink()
    return written, sizes


def fetch_rows(store: Store, draft: Path, sizes: Mapping[str, int], rows: StoredRows) -> None:
    """Copy what a rank has put into the store, objects by their sizes, into the draft, and note it in `rows`. Raises
    OSError."""
    for name, n_bytes in sizes.items():
        file = file_of_rows(name)
        packed = draft / f"{file}.rows"
        store.get(name, packed)
        try:
            spans = unpack(packed, draft / file)
        except ValueError as error:
            raise StoreError(f"{store.url_of(name)} is damaged: {error}") from error
        packed.unlink()
        rows.add(name, n_bytes, spans)
