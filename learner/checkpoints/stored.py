"""Checkpoints in the run's store (protocol.object_store), for hosts that do not see the run's folder.

    <store>/checkpoints/step_000040_epoch_0/...            the files of the folder
                                           /manifest.json  the folder's own, written last: from then on it is complete
    <store>/rows/<draft>/...                               of learner.checkpoints.rows, until rank 0 has fetched them

A checkpoint is made in the run's folder as always, and copied from there. Whoever copies one of these prefixes by hand
has a checkpoint. No object is ever renamed. Without its manifest a prefix counts as nothing, and the next writer
removes it. A manifest is deleted first, so half of a deleted checkpoint is incomplete, too. One learner at a time
writes here.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from learner.checkpoints.files import (
    CHECKPOINTS,
    FORMAT,
    MANIFEST,
    CheckpointError,
    Found,
    Manifest,
    Skipped,
    add,
    find_version,
    latest,
    new_draft,
    newest,
    prune,
    read_manifest,
    refuse_loss,
    verify,
)
from protocol.atomic_file import sync
from protocol.messages import WeightVersion
from protocol.object_store import Store

ROWS: Final = "rows"

_log = logging.getLogger(__name__)


class Stored(NamedTuple):
    version: WeightVersion
    name: str
    """The name of its prefix in the store."""


@dataclass(frozen=True)
class StoredCheckpoints:
    """Raises StoreError from every method."""

    store: Store

    def complete(self) -> list[Stored]:
        """Oldest first. The sizes of all objects have been compared."""
        return self._sorted(self.store.sizes(CHECKPOINTS))[0]

    def add(self, folder: Path, *, keep: int) -> None:
        """Copy a complete checkpoint of the run's folder, if it is not there. Delete whatever is incomplete, and all
        but the `keep` newest."""
        manifest = read_manifest(folder)
        there, incomplete = self._sorted(self.store.sizes(CHECKPOINTS))
        self.store.delete(name for prefix in incomplete for name in self._objects(prefix))
        self.store.delete(self.store.sizes(ROWS))
        if manifest.version not in [one.version for one in there]:
            name = _name_of(manifest.version)
            for file in manifest.files:
                self.store.put(folder / file, f"{name}/{file}")
            self.store.put_bytes(f"{name}/{MANIFEST}", (folder / MANIFEST).read_bytes())
            there = sorted([*there, Stored(manifest.version, name)])
        for old in there[:-keep]:
            self.store.delete(self._objects(old.name))

    def fetch(self, wanted: Stored, root: Path) -> Path:
        """Copy a checkpoint into the folder `root`, and compare it with its checksums. Returns its folder. Raises
        CheckpointError if it is damaged, and OSError."""
        text = self.store.read(f"{wanted.name}/{MANIFEST}")
        manifest = msgspec.json.decode(text, type=Manifest)
        draft = new_draft(root, wanted.version)
        try:
            for file in manifest.files:
                (draft / file).parent.mkdir(parents=True, exist_ok=True)
                self.store.get(f"{wanted.name}/{file}", draft / file)
                sync(draft / file)
            (draft / MANIFEST).write_bytes(text)
            try:
                verify(draft)
            except CheckpointError as error:
                raise CheckpointError(f"{self.store.url_of(wanted.name)}: {error}") from error
            sync(draft / MANIFEST)
            sync(draft)
            return add(draft, wanted.version)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def fetch_newest(self, root: Path, *, newer_than: WeightVersion | None) -> Found:
        """Copy the newest checkpoint that is intact into `root`, if it is newer. `path` is None if there is none."""
        skipped: list[Skipped] = []
        for stored in reversed(self.complete()):
            if newer_than is not None and stored.version <= newer_than:
                break
            try:
                return Found(self.fetch(stored, root), stored.version, tuple(skipped))
            except CheckpointError as error:
                skipped.append(Skipped(Path(stored.name), str(error), in_store=True))
                _log.error("a checkpoint of the store is damaged: %s", error)
        return Found(None, None, tuple(skipped))

    def fetch_version(self, root: Path, version: WeightVersion) -> Path:
        """The folder of this very version below `root`, copied if it is not there. Several processes may ask for it at
        once. Raises CheckpointError, OSError."""
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (here := find_version(root, version)) is not None:
                return here
            for stored in self.complete():
                if stored.version == version:
                    return self.fetch(stored, root)
        raise CheckpointError(f"checkpoint {version} is neither in {root} nor in {self.store.url}")

    def _sorted(self, sizes: dict[str, int]) -> tuple[list[Stored], list[str]]:
        """Complete ones, oldest first, and the names of the others."""
        found, others = list[Stored](), list[str]()
        names = dict.fromkeys("/".join(name.split("/")[:2]) for name in sizes)
        for name in names:
            version = self._version_of(name, sizes) if f"{name}/{MANIFEST}" in sizes else None
            if version is None:
                others.append(name)
            else:
                found.append(Stored(version, name))
        return sorted(found), others

    def _version_of(self, name: str, sizes: dict[str, int]) -> WeightVersion | None:
        """None for what is no whole checkpoint."""
        try:
            manifest = msgspec.json.decode(self.store.read(f"{name}/{MANIFEST}"), type=Manifest)
        except msgspec.MsgspecError:
            return None
        whole = all(sizes.get(f"{name}/{file}") == entry.bytes for file, entry in manifest.files.items())
        return manifest.version if whole and manifest.format == FORMAT else None

    def _objects(self, name: str) -> Iterator[str]:
        """The names of its objects, the manifest first."""
        names = self.store.sizes(name)
        return iter(sorted(names, key=lambda one: (one != f"{name}/{MANIFEST}", one)))


def go_on_from_store(root: Path, url: str) -> Found:
    """As `files.go_on_from`; a newer checkpoint in the store at `url` is copied into `root` first. Raises StoreError,
    too."""
    found = latest(root)
    newer = StoredCheckpoints(Store(url)).fetch_newest(root, newer_than=found.version)
    skipped = (*newer.skipped, *found.skipped)
    return refuse_loss(Found(newer.path or found.path, newer.version or found.version, skipped))


def have_newest(root: Path, url: str) -> None:
    """On a host that does not see the run's folder: have the newest checkpoint of the store in `root`, and no older
    one. Raises OSError."""
    here = newest(root)
    version = None if here is None else read_manifest(here).version
    StoredCheckpoints(Store(url)).fetch_newest(root, newer_than=version)
    if root.is_dir():
        prune(root, keep=1)


def _name_of(version: WeightVersion) -> str:
    return f"{CHECKPOINTS}/step_{version.step:06d}_epoch_{version.epoch}"
