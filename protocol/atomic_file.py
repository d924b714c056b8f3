"""Atomic file writes: readers see the former content or the new one, whenever the writer or its machine dies."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """fsync a file, or a folder: its list of names then survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_a_link(path: str | Path, flags: int) -> int:
    """For `open(..., opener=)` of a file at a path that others can foresee: a link there is not followed, because its
    target would be written. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A draft next to `path`, to be written in the `with` block. At its end the draft is synced to disk and renamed to
    `path`; after an error it is deleted and the former file stays.

    A file has one writer at a time, so drafts of writers that were killed are deleted first. The folder is not synced:
    after a power failure the former file may be back, whole."""
    for left in path.parent.glob(f".{path.name}.[0-9]*"):
        left.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file's content. Raises OSError (disk full, no permission); the former file is still there then."""
    with replacing(path) as draft, open(draft, "xb", opener=not_a_link) as stream:
        stream.write(content)


def usual_permissions(folder: Path) -> None:
    """Give the .safetensors files in `folder` the permissions that the umask gives to others: the package safetensors
    makes its files readable by their owner alone."""
    probe = folder / ".permissions"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)
