"""Checkpoints that are whole or not there: `checkpoints/step_000040/`.

    config.json, model.safetensors, generation_config.json, tokenizer ...   a Hugging Face folder, loadable as it is
    optimizer.safetensors                                                   AdamW state by parameter name
    ema.safetensors                                                         the student's average, with learner.ema
    value_head.safetensors                                                  with a value function: head and its AdamW
    trainer.json                                                            clock, task stream, ledger, RNG, metrics
    manifest.json                                                           written last: sha256 and size of the others

With adapters (`learner.lora`) the first line is: adapter_config.json, adapter_model.safetensors, base.json, tokenizer,
a folder that peft loads onto the student that base.json names.

Written into a temporary folder beside it, every file and the folder flushed to disk, then renamed: whenever the
process or the machine dies, each `step_*` folder is complete, and the former checkpoint is untouched until the new one
has its name. No pickle anywhere. A folder is deleted by renaming it first, for the same reason.

A step that was saved before by an abandoned branch (the learner went back to an earlier checkpoint) is saved beside it
as `step_000040_epoch_1`; the newest version is the one with the highest (epoch, step).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engines.models import save_hf
from learner.optimizer import AdamWState
from learner.rng import RngState
from protocol.messages import Ledger, WeightVersion

if TYPE_CHECKING:
    from learner.lora import Adapters  # loads peft

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
TRAINER: Final = "trainer.json"
OPTIMIZER: Final = "optimizer.safetensors"
EMA: Final = "ema.safetensors"
VALUE_HEAD: Final = "value_head.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
"""There instead of config.json: only adapters are in this checkpoint."""
_NAME = re.compile(r"step_\d{6,}(_epoch_\d+)?")
_RUST_ERRNO = re.compile(r"os error (\d+)|Os \{ code: (\d+)")
_TEMPORARY, _TRASH = ".tmp-", ".trash-"
_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """This folder is no usable checkpoint; the message says why."""


@dataclass(frozen=True)
class LearnerState:
    """Everything of a learner but its weights."""

    version: WeightVersion
    optimizer: AdamWState
    tasks: dict[str, Any]
    """`TaskStream.state()`, outstanding tasks included; JSON values only."""
    ledger: Ledger | None
    rng: RngState
    metrics: dict[str, float | None]
    """Of the last step; a figure that is not finite is saved as None."""
    ema: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """`StudentEma.state_dict()`; empty without one."""
    value_head: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """`Critic.state_dict()`; empty without a value function."""
    offline: dict[str, Any] | None = None
    """`OfflineMixer.state()`; None where nothing is mixed in."""


class Skipped(NamedTuple):
    path: Path
    reason: str


class Found(NamedTuple):
    """`path` is None when there is no usable checkpoint; `skipped` are newer ones that are not, newest first."""

    path: Path | None
    version: WeightVersion | None
    skipped: tuple[Skipped, ...]


class FileEntry(msgspec.Struct, frozen=True):
    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True):
    format: int
    version: WeightVersion
    files: dict[str, FileEntry]
    """Path within the folder -> content."""


class _TrainerFile(msgspec.Struct, frozen=True):
    """trainer.json."""

    format: int
    version: WeightVersion
    steps_done: int
    never_stepped: tuple[str, ...]
    tasks: dict[str, Any]
    ledger: Ledger | None
    rng: RngState
    metrics: dict[str, float | None]
    offline: dict[str, Any] | None = None


def save_checkpoint(
    root: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: LearnerState,
    *,
    keep: int,
    pinned: Collection[int] = (),
    adapters: Adapters | None = None,
) -> Path:
    """Write a checkpoint of `state.version` under `root`, of the `adapters` instead of the model where there are some;
    then delete all but the `keep` newest and those of the `pinned` steps. Returns its folder. A version that is there
    already, whole, is left as it is.

    Raises OSError (disk full, no permission): the former checkpoints are untouched, and nothing is left of this one.
    """
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    target = _target(root, state.version)
    if target.exists():
        if not (reason := _defect(target)):
            return target
        _log.warning("replacing the unusable checkpoint %s: %s", target, reason)
        _delete(target)
    temporary = root / f"{_TEMPORARY}{target.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if adapters is None:
            save_hf(model, tokenizer, temporary)
        else:
            adapters.save(temporary)
            tokenizer.save_pretrained(temporary)
        save_file(state.optimizer.tensors, temporary / OPTIMIZER)
        if state.ema:
            save_file(state.ema, temporary / EMA)
        if state.value_head:
            save_file(state.value_head, temporary / VALUE_HEAD)
        (temporary / TRAINER).write_bytes(msgspec.json.encode(_trainer_file(state)))
        _write_manifest(temporary, state.version)
        temporary.rename(target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if (number := _system_error(error)) is not None:
            raise OSError(number, os.strerror(number), str(temporary)) from error
        raise
    _flush(root)
    try:
        prune(root, keep=keep, pinned=pinned)
    except OSError as error:  # this checkpoint is there: not for want of deleting another is it lost
        _log.error("checkpoints older than the %d newest could not be deleted: %s", keep, error)
    return target


def latest(root: Path) -> Found:
    """The newest whole checkpoint under `root`. Every file is read and compared with its checksum; what is not usable
    is skipped with the reason, temporary folders of a killed learner included."""
    skipped = [
        Skipped(path, "unfinished: its writer was killed before the rename")
        for path in _folders(root)
        if path.name.startswith(_TEMPORARY)
    ]
    candidates: list[tuple[WeightVersion, Path]] = []
    for path in _checkpoints(root):
        try:
            candidates.append((read_manifest(path).version, path))
        except CheckpointError as error:
            skipped.append(Skipped(path, str(error)))
    for version, path in sorted(candidates, reverse=True):
        if reason := _defect(path):
            skipped.append(Skipped(path, reason))
            continue
        return Found(path, version, tuple(skipped))
    return Found(None, None, tuple(skipped))


def load_checkpoint(path: Path) -> LearnerState:
    """Read a checkpoint's state after checking it; its weights are loaded with `load_causal_lm(path, ...)`, adapters
    with `Adapters.load(path)`.

    Raises CheckpointError: files missing, changed or of another format."""
    verify(path)
    try:
        record = msgspec.json.decode((path / TRAINER).read_bytes(), type=_TrainerFile)
        tensors = load_file(path / OPTIMIZER)
        ema, value_head = (load_file(path / name) if (path / name).exists() else {} for name in (EMA, VALUE_HEAD))
    except (OSError, msgspec.MsgspecError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return LearnerState(
        version=record.version,
        optimizer=AdamWState(tensors, record.never_stepped, record.steps_done),
        tasks=record.tasks,
        ledger=record.ledger,
        rng=record.rng,
        metrics=record.metrics,
        ema=ema,
        value_head=value_head,
        offline=record.offline,
    )


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
        if _sha256(file) != entry.sha256:
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


def prune(root: Path, *, keep: int, pinned: Collection[int] = ()) -> list[Path]:
    """Delete all checkpoints but the `keep` newest and those of the `pinned` steps; returns the deleted ones. Folders
    without a readable manifest are none of ours and stay."""
    if keep < 1:
        raise ValueError(f"keep {keep}; at least the newest checkpoint is kept")
    versions: list[tuple[WeightVersion, Path]] = []
    for path in _checkpoints(root):
        try:
            versions.append((read_manifest(path).version, path))
        except CheckpointError as error:
            _log.warning("left alone: %s", error)
    old = [path for version, path in sorted(versions)[:-keep] if version.step not in pinned]
    for path in old:
        _delete(path)
    return old


def _trainer_file(state: LearnerState) -> _TrainerFile:
    return _TrainerFile(
        format=FORMAT,
        version=state.version,
        steps_done=state.optimizer.steps_done,
        never_stepped=state.optimizer.never_stepped,
        tasks=state.tasks,
        ledger=state.ledger,
        rng=state.rng,
        metrics={name: _finite_or_none(value) for name, value in state.metrics.items()},
        offline=state.offline,
    )


def _system_error(error: BaseException) -> int | None:
    """The errno in what safetensors and tokenizers, written in Rust, raise when they cannot write: SafetensorError, and
    Exception itself."""
    if not isinstance(error, SafetensorError) and type(error) is not Exception:
        return None
    told = _RUST_ERRNO.search(str(error))
    return int(told[1] or told[2]) if told else None


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _target(root: Path, version: WeightVersion) -> Path:
    """The folder's name; another branch's checkpoint of the same step keeps the plain one."""
    plain = root / f"step_{version.step:06d}"
    try:
        taken = plain.exists() and read_manifest(plain).version != version
    except CheckpointError:
        taken = False  # unusable: it will be replaced
    return root / f"{plain.name}_epoch_{version.epoch}" if taken else plain


def _write_manifest(folder: Path, version: WeightVersion) -> None:
    """Flush every file, then the list of them, then the folder."""
    files: dict[str, FileEntry] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        _flush(file)
        files[file.relative_to(folder).as_posix()] = FileEntry(_sha256(file), file.stat().st_size)
    manifest = folder / MANIFEST
    manifest.write_bytes(msgspec.json.encode(Manifest(FORMAT, version, files)))
    _flush(manifest)
    _flush(folder)


def _flush(path: Path) -> None:
    """fsync a file, or a folder (its list of names)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _defect(path: Path) -> str | None:
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
    """A reader sees the folder whole or not at all, whenever this process dies."""
    trash = path.with_name(f"{_TRASH}{path.name}-{secrets.token_hex(4)}")
    path.rename(trash)
    shutil.rmtree(trash)


def _sweep(root: Path) -> None:
    """Remove what a killed learner left behind: nobody else writes here."""
    for path in _folders(root):
        if path.name.startswith((_TEMPORARY, _TRASH)):
            _log.info("removing %s, left behind by a learner that was killed", path)
            shutil.rmtree(path)
