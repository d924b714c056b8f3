"""Checkpoints in the run's store (protocol.object_store), for hosts that do not see the run's folder.

    <store>/checkpoints/step_000040_epoch_0/...            the files of the folder
                                           /manifest.json  the folder's own, written last
    <store>/owner.json                                     names the complete ones (protocol.store_owner)
    <store>/export/step_000200_epoch_0/...                 what a run with adapters leaves (learner.export)

A checkpoint is made in the run's folder as always, and copied from there, so whoever copies one of these prefixes by
hand has a checkpoint. Ranks on other hosts send rank 0 their rows through the store (learner.checkpoints.rows).

No object is ever renamed. A prefix that owner.json does not name counts as nothing, and the next
writer removes it. Only the launch that owns the store can have one named. What a learner removes is of its own epoch or
an older one: a learner that was displaced, and does not know it yet, harms nothing of its successor's.
"""

from __future__ import annotations

import fcntl
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stillhouse.learner.checkpoints.files import (
    CHECKPOINTS,
    FORMAT,
    MANIFEST,
    TEMPORARY,
    CheckpointError,
    FoundCheckpoint,
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
    write_manifest,
)
from stillhouse.protocol.atomic_file import not_a_link, sync
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.object_store import Store, StoreError
from stillhouse.protocol.store_owner import Owner, StoreOwner, read_owner

EXPORT: Final = "export"
"""Merged weights and adapters of a run with LoRA (learner.export), in the run's folder and in its store."""
_EPOCH: Final = re.compile(r"step_\d+_epoch_(\d+)")

_log = logging.getLogger(__name__)


class Stored(NamedTuple):
    version: WeightVersion
    name: str
    """The name of its prefix in the store."""


class StoredCheckpoints:
    """Those of a store, to read. Raises StoreError from every method."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def complete(self) -> list[Stored]:
        """Oldest first. The sizes of all objects have been compared."""
        owner = read_owner(self.store)
        return sorted(self._whole(owner, self.store.sizes(CHECKPOINTS))) if owner is not None else []

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

    def fetch_newest(self, root: Path, *, newer_than: WeightVersion | None) -> FoundCheckpoint:
        """Copy the newest checkpoint that is intact into `root`, if it is newer. `path` is None if there is none."""
        skipped: list[Skipped] = []
        for stored in reversed(self.complete()):
            if newer_than is not None and stored.version <= newer_than:
                break
            try:
                return FoundCheckpoint(self.fetch(stored, root), stored.version, tuple(skipped))
            except CheckpointError as error:
                skipped.append(Skipped(Path(stored.name), str(error), in_store=True))
                _log.error("a checkpoint of the store is damaged: %s", error)
        return FoundCheckpoint(None, None, tuple(skipped))

    def fetch_version(self, root: Path, version: WeightVersion) -> Path:
        """The folder of this very version below `root`, copied if it is not there. Several processes may ask for it at
        once. Raises CheckpointError, OSError."""
        root.mkdir(parents=True, exist_ok=True)
        with open(root / ".lock", "ab", opener=not_a_link) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (here := find_version(root, version)) is not None:
                return here
            for stored in self.complete():
                if stored.version == version:
                    return self.fetch(stored, root)
        raise CheckpointError(f"checkpoint {version} is neither in {root} nor in {self.store.url}")

    def _whole(self, owner: Owner, sizes: dict[str, int]) -> Iterator[Stored]:
        """Those that are named and there."""
        for name in owner.checkpoints:
            version = self._version_of(name, sizes) if f"{name}/{MANIFEST}" in sizes else None
            if version is None:
                _log.error("%s was complete, and lacks objects now: it counts as nothing", self.store.url_of(name))
            else:
                yield Stored(version, name)

    def _version_of(self, name: str, sizes: dict[str, int]) -> WeightVersion | None:
        """None for what is no whole checkpoint."""
        try:
            manifest = msgspec.json.decode(self.store.read(f"{name}/{MANIFEST}"), type=Manifest)
        except msgspec.MsgspecError:
            return None
        whole = not _lacking(manifest, name, sizes)
        return manifest.version if whole and manifest.format == FORMAT else None


class OwnedCheckpoints(StoredCheckpoints):
    """The same, to write, too, as the owner of the store. Raises Displaced, a StoreError, once another launch has taken
    it."""

    def __init__(self, owner: StoreOwner) -> None:
        super().__init__(owner.store)
        self._owner = owner

    def add(self, folder: Path, *, keep: int, former: bool = False) -> None:
        """Copy a complete checkpoint of the run's folder, if it is not there. Delete whatever is incomplete, and all
        but the `keep` newest. `former`: it is of an epoch before this launch."""
        version, owner = read_manifest(folder).version, self._owner.confirm()
        epoch = owner.epoch + 1 if former else version.epoch
        there = sorted(self._whole(owner, sizes := self.store.sizes(CHECKPOINTS)))
        self._sweep(sizes, [one.name for one in there], epoch)
        if version not in (one.version for one in there):
            new = Stored(version, f"{CHECKPOINTS}/{_name_of(version.step, epoch)}")
            self._put_folder(folder, new.name)
            kept = sorted([*there, new])[-keep:]
        else:
            kept = there[-keep:]
        names = tuple(one.name for one in kept)
        self._owner.update(lambda owner: msgspec.structs.replace(owner, checkpoints=names))
        for old in there:
            if old not in kept:
                self.store.delete(self._objects(old.name))

    def add_export(self, folder: Path, version: WeightVersion) -> None:
        """Copy what a run leaves at its end, in place of what is there. `manifest.json` comes last."""
        write_manifest(folder, version)
        self._owner.confirm()
        before, name = self.store.sizes(EXPORT), f"{EXPORT}/{_name_of(version.step, version.epoch)}"
        self._put_folder(folder, name)
        self._sweep(before, [name], version.epoch)

    def _put_folder(self, folder: Path, name: str) -> None:
        """The manifest last."""
        manifest = read_manifest(folder)
        for file in manifest.files:
            self.store.put(folder / file, f"{name}/{file}")
        there = self.store.sizes(name)
        for one, expected in _lacking(manifest, name, there).items():
            raise StoreError(
                f"{self.store.url_of(one)} has {there.get(one, 0)} bytes in the store, expected {expected}: its server "
                "lost some"
            )
        self.store.put_bytes(f"{name}/{MANIFEST}", (folder / MANIFEST).read_bytes())

    def _sweep(self, sizes: Iterable[str], whole: list[str], epoch: int) -> None:
        """Remove what learners left that died, or failed, in the middle, rows of ranks, and what was replaced."""
        prefixes = dict.fromkeys("/".join(name.split("/")[:2]) for name in sizes)
        for prefix in prefixes:
            if prefix not in whole and _epoch_of(prefix) <= epoch:
                self.store.delete(self._objects(prefix))

    def _objects(self, name: str) -> Iterator[str]:
        """The names of its objects, the manifest first: then half of a deleted folder is incomplete."""
        names = self.store.sizes(name)
        return iter(sorted(names, key=lambda one: (one != f"{name}/{MANIFEST}", one)))


def go_on_from_store(root: Path, url: str) -> FoundCheckpoint:
    """As `files.go_on_from`; a newer checkpoint in the store at `url` is copied into `root` first. Raises StoreError,
    too."""
    found = latest(root)
    newer = StoredCheckpoints(Store(url)).fetch_newest(root, newer_than=found.version)
    skipped = (*newer.skipped, *found.skipped)
    return refuse_loss(root, FoundCheckpoint(newer.path or found.path, newer.version or found.version, skipped))


def have_newest(root: Path, url: str) -> None:
    """On a host that does not see the run's folder: have the newest checkpoint of the store in `root`, and no older
    one. Raises OSError."""
    here = newest(root)
    version = None if here is None else read_manifest(here).version
    StoredCheckpoints(Store(url)).fetch_newest(root, newer_than=version)
    if root.is_dir():
        prune(root, keep=1)


def prefix_of_draft(draft: str) -> str:
    """The prefix that the checkpoint of this draft will have."""
    checkpoint = draft.removeprefix(TEMPORARY).split("-")[0]
    return f"{CHECKPOINTS}/{checkpoint}"


def _lacking(manifest: Manifest, name: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The objects of a checkpoint that are not there in full: by their names, the bytes that they should have."""
    wanted = {f"{name}/{file}": entry.bytes for file, entry in manifest.files.items()}
    return {one: n for one, n in wanted.items() if sizes.get(one) != n}


def _name_of(step: int, epoch: int) -> str:
    return f"step_{step:06d}_epoch_{epoch}"


def _epoch_of(name: str) -> int:
    """The epoch of the learner that has put this there; that of a foreign object is below all."""
    found = _EPOCH.search(name)
    return int(found[1]) if found else -1
