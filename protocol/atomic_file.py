"""Files that readers see whole: the former content or the new one, whenever the writer or its machine dies.

It stands here because every layer writes such files, and the arrows point down to this one.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A draft beside `path` to be written; on leaving it is synced to disk and takes the name. When an error leaves,
    the draft is deleted and the former file stays.

    A file has one writer at a time, so drafts of writers that were killed are deleted first. The name in the folder is
    not synced: after a loss of power the former file may be back, whole."""
    for left in path.parent.glob(f".{path.name}.[0-9]*"):
        left.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file's content. Raises OSError (disk full, no permission); the former file is still there then."""
    with replacing(path) as draft:
        draft.write_bytes(content)
