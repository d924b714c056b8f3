"""Folders of checkpoints: lists and verifies them, and finds the newest. Without torch, because launcher and buffer use
it, too. learner.checkpoints.checkpoint reads and writes their contents."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stillhouse.learner.config import ADAPTER_CONFIG
from stillhouse.protocol.atomic_file import sync
from stillhouse.protocol.messages import WeightVersion

CHECKPOINTS: Final = "checkpoints"
"""Folder of the checkpoints in a run folder."""
FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
TRAINER: Final = "trainer.json"
WEIGHTS: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
EMA: Final = "ema.safetensors"
VALUE_HEAD: Final = "value_head.safetensors"
ACCOUNTS: Final = ("learner*.json", "replay.json")
"""Accounts of the learner and of replays: of this launch and, with a number, of former ones."""
_NAME = re.compile(r"step_\d{6,}(_epoch_\d+)?")
TEMPORARY, _TRASH, _DAMAGED = ".tmp-", ".trash-", "damaged-"
_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """This folder is not a usable checkpoint; the message says why."""


class Skipped(NamedTuple):
    path: Path
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged: {self.reason}"


class NoneUsable(CheckpointError):
    """All checkpoints are damaged, or are gone."""

    def __init__(self, root: Path, damaged: Sequence[Skipped], last: str = "") -> None:
        """`last`: the newest one that the run says it wrote."""
        gone = f", but the run has written checkpoints, the last of them {last}" if last else ""
        super().__init__(
            "\n".join((*map(str, damaged), f"no checkpoint in {root} can be used{gone}: put one back from a copy. "))
            + "To start from step 0, start a new run (another --run-dir, without --resume)"
        )
        self.damaged = damaged


class FoundCheckpoint(NamedTuple):
    """`path` is None without a usable checkpoint. `skipped` are newer, unusable ones, newest first."""

    path: Path | None
    version: WeightVersion | None
    skipped: tuple[Skipped, ...]

    @property
    def damaged(self) -> tuple[Skipped, ...]:
        """The skipped ones that were complete once. Unfinished folders of a killed learner never were."""
        return tuple(skipped for skipped in self.skipped if not skipped.path.name.startswith(TEMPORARY))


NOTHING_FOUND: Final = FoundCheckpoint(None, None, ())


class _Account(msgspec.Struct):
    checkpoint: str | None = None


class FileEntry(msgspec.Struct, frozen=True):
    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True):
    format: int
    version: WeightVersion
    files: dict[str, FileEntry]
    """Path within the folder -> content."""


def latest(root: Path) -> FoundCheckpoint:
    """The newest complete checkpoint under `root`. Every file is compared with its checksum. Unusable folders are
    skipped with a reason, including temporary ones of a killed learner."""
    skipped = [
        Skipped(path, "unfinished: its writer was killed before the rename")
        for path in _folders(root)
        if path.name.startswith(TEMPORARY)
    ]
    candidates: list[tuple[WeightVersion, Path]] = []
    for path in _checkpoints(root):
        try:
            candidates.append((read_manifest(path).version, path))
        except CheckpointError as error:
            skipped.append(Skipped(path, str(error)))
    for version, path in sorted(candidates, reverse=True):
        if reason := defect(path):
            skipped.append(Skipped(path, reason))
            continue
        return FoundCheckpoint(path, version, tuple(skipped))
    return FoundCheckpoint(None, None, tuple(skipped))


def go_on_from(root: Path) -> FoundCheckpoint:
    """`latest`, for a caller that starts anew without a checkpoint. Raises NoneUsable if that would discard trained
    steps, because there are checkpoints but none is usable, or there were some."""
    return refuse_loss(root, latest(root))


def refuse_loss(root: Path, found: FoundCheckpoint) -> FoundCheckpoint:
    """`found`. Raises NoneUsable if there are checkpoints, but none is usable, and if the accounts in the run's folder,
    which is above `root`, name one that was written."""
    if found.path is not None:
        return found
    accounts = [file for pattern in ACCOUNTS for file in sorted(root.parent.glob(pattern))]
    written = [name for file in accounts if (name := _checkpoint_of(file))]
    if found.damaged or written:
        raise NoneUsable(root, found.damaged, written[-1] if written else "")
    return found


def _checkpoint_of(account: Path) -> str:
    """The checkpoint that learner.json names, which is written with each; empty if there was none."""
    try:
        return Path(msgspec.json.decode(account.read_bytes(), type=_Account).checkpoint or "").name
    except (OSError, msgspec.DecodeError):
        return ""


def newest(root: Path) -> Path | None:
    """Folder of the newest checkpoint, None without any. Checks that all files have their full length, but not their
    checksums."""
    found = [(read_manifest(path).version, path) for path in _checkpoints(root) if _looks_whole(path)]
    return max(found)[1] if found else None


def damaged(root: Path) -> list[Path]:
    """Folders that were set aside."""
    return [path for path in _folders(root) if path.name.startswith(_DAMAGED)]


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not used, deleted or overwritten. Returns its new path."""
    aside, n = path.with_name(f"{_DAMAGED}{path.name}"), 1
    while aside.exists():
        n += 1
        aside = path.with_name(f"{_DAMAGED}{path.name}-{n}")
    return path.rename(aside)


def verify(path: Path) -> Manifest:
    """Compare every file with the manifest. Raises CheckpointError naming the first that differs."""
    manifest = read_manifest(path)
    weights = ADAPTER_CONFIG if ADAPTER_CONFIG in manifest.files else "config.json"
    for name in (TRAINER, OPTIMIZER, weights):
        if name not in manifest.files:
            raise CheckpointError(f"{path / MANIFEST} does not list {name}; not a checkpoint of a learner")
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if (size := file.stat().st_size) != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes, its manifest says {entry.bytes}")
        try:
            digest = _sha256(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if digest != entry.sha256:
            raise CheckpointError(f"{file} has changed: its checksum is not that of its manifest")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Raises CheckpointError."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {MANIFEST}: not written by a learner, or tampered with") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}, this version reads {FORMAT}")
    return manifest


def prune(root: Path, *, keep: int) -> list[Path]:
    """Delete all checkpoints but the `keep` newest; returns the deleted ones. Damaged ones stay and do not count as
    newest: a user may still repair them."""
    if keep < 1:
        raise ValueError(f"keep {keep}; at least the newest checkpoint is kept")
    versions: list[tuple[WeightVersion, Path]] = []
    for path in _checkpoints(root):
        if _looks_whole(path):
            versions.append((read_manifest(path).version, path))
        else:
            _log.warning("%s is damaged and not deleted", path)
    old = [path for _, path in sorted(versions)[:-keep]]
    for path in old:
        _delete(path)
    return old


def target_folder(root: Path, version: WeightVersion) -> Path:
    """Folder for a checkpoint of this version. If another branch has the plain name, the epoch is added."""
    plain = root / f"step_{version.step:06d}"
    try:
        taken = plain.exists() and read_manifest(plain).version != version
    except CheckpointError:
        taken = False  # unusable; it will be set aside
    return root / f"{plain.name}_epoch_{version.epoch}" if taken else plain


def new_draft(root: Path, version: WeightVersion) -> Path:
    """Make the temporary folder of a checkpoint of this version. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    name = f"{TEMPORARY}step_{version.step:06d}_epoch_{version.epoch}-{os.getpid()}-{secrets.token_hex(4)}"
    draft = root / name
    draft.mkdir()
    return draft


def add(draft: Path, version: WeightVersion) -> Path:
    """Give a complete checkpoint its name. An existing complete one of this version is kept instead. Returns its
    folder."""
    target = target_folder(draft.parent, version)
    if target.exists():
        if not (reason := defect(target)):
            shutil.rmtree(draft)
            return target
        _log.error("checkpoint %s is damaged, and kept as %s: %s", target, set_aside(target), reason)
    draft.rename(target)
    sync(draft.parent)
    return target


def write_manifest(folder: Path, version: WeightVersion) -> None:
    """Flush every file, then the list of them, then the folder."""
    files: dict[str, FileEntry] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST):
        sync(file)
        files[file.relative_to(folder).as_posix()] = FileEntry(_sha256(file), file.stat().st_size)
    manifest = folder / MANIFEST
    manifest.write_bytes(msgspec.json.encode(Manifest(FORMAT, version, files)))
    sync(manifest)
    sync(folder)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _looks_whole(path: Path) -> bool:
    """True if the manifest can be read and every file has the length given there."""
    try:
        files = read_manifest(path).files
        return all((path / name).stat().st_size == entry.bytes for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def defect(path: Path) -> str | None:
    """Reason why a checkpoint is unusable; None if it is usable."""
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return None


def _folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from sorted(path for path in root.iterdir() if path.is_dir())


def _checkpoints(root: Path) -> Iterator[Path]:
    return (path for path in _folders(root) if _NAME.fullmatch(path.name))


def _delete(path: Path) -> None:
    """Rename before deleting, so that a reader never sees half a folder."""
    trash = path.with_name(f"{_TRASH}{path.name}-{secrets.token_hex(4)}")
    path.rename(trash)
    shutil.rmtree(trash)


def sweep(root: Path) -> None:
    """Remove what a killed learner left behind. No other process writes here."""
    for path in _folders(root):
        if path.name.startswith((TEMPORARY, _TRASH)):
            _log.info("removing %s, left behind by a learner that was killed", path)
            shutil.rmtree(path)
