"""Rows of ranks on other hosts, where hosts share no folder. Each puts its rows into the run's store (`store`), and
rank 0 copies them into its draft. So the checkpoint is the one that a single process writes. It lies in the run's
folder, and goes into the store as always."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from learner.checkpoints.stored import ROWS
from learner.checkpoints.tensor_file import Shares, pack_share, unpack_share
from protocol.object_store import Store, StoreError


def put_rows(store: Store, draft: str, rank: int, files: Mapping[str, Shares]) -> int:
    """Put this rank's rows of these files of the draft where rank 0 fetches them. Returns the number of bytes. Raises
    OSError."""
    written = 0
    with tempfile.TemporaryDirectory(prefix="stillhouse-rows-") as folder:
        for file, shares in files.items():
            packed = Path(folder) / file
            written += pack_share(packed, shares)
            store.put(packed, _name(draft, rank, file))
            packed.unlink()
    return written


def fetch_rows(store: Store, draft: Path, rank: int, files: Iterable[str]) -> None:
    """Copy what this rank has put there into the draft. Raises OSError."""
    for file in files:
        name, packed = _name(draft.name, rank, file), draft / f"{file}.rows"
        store.get(name, packed)
        try:
            unpack_share(packed, draft / file)
        except ValueError as error:
            raise StoreError(f"{store.url_of(name)} is damaged: {error}") from error
        packed.unlink()
        store.delete([name])


def _name(draft: str, rank: int, file: str) -> str:
    return f"{ROWS}/{draft}/{rank}/{file}"
