"""Checkpoints that are complete or absent: `checkpoints/step_000040/`.

    config.json, model.safetensors, generation_config.json, tokenizer ...   a Hugging Face folder, loadable as it is
    optimizer.safetensors                                                   AdamW state by parameter name
    ema.safetensors                                                         the student's average, with learner.ema
    value_head.safetensors                                                  with a value function: head and its AdamW
    trainer.json                                                            clock, task stream, ledger, RNG, metrics
    manifest.json                                                           written last: sha256 and size of the others

With adapters (`learner.lora`) the first line is: adapter_config.json, adapter_model.safetensors, base.json, tokenizer,
a folder that peft loads onto the student named in base.json.

A checkpoint is written into a temporary folder beside it, every file and the folder are flushed to disk, and then it is
renamed. So whenever the process or the machine dies, each `step_*` folder is complete, and the previous checkpoint is
untouched until the new one has its name. A folder is deleted by renaming it first, for the same reason. There is no
pickle anywhere. learner.checkpoints.files finds and verifies checkpoints.

If an abandoned branch has saved the same step before (the learner resumed from an earlier checkpoint), the new one is
saved beside it as `step_000040_epoch_1`. The newest version is the one with the highest (epoch, step).
"""

from __future__ import annotations

import base64
import logging
import math
import os
import random
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from learner.checkpoints.files import (
    EMA,
    FORMAT,
    OPTIMIZER,
    TEMPORARY,
    TRAINER,
    VALUE_HEAD,
    CheckpointError,
    defect,
    prune,
    set_aside,
    sweep,
    target_folder,
    verify,
    write_manifest,
)
from learner.step.optimizer import AdamWState
from models.loading import save_hf
from protocol.atomic_file import sync
from protocol.messages import Ledger, WeightVersion


class RngState(msgspec.Struct, frozen=True):
    """Global random states of this process as JSON values. Binary states are base64."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, int, int, float]
    """MT19937 keys (little-endian uint32), position, has_gauss, cached_gaussian."""
    torch_cpu: str
    torch_cuda: tuple[str, ...]
    """One per visible device."""


def capture_rng() -> RngState:
    keys: Any
    _, keys, position, has_gauss, cached = np.random.get_state()  # pyright: ignore[reportAssignmentType]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return RngState(
        python=random.getstate(),
        numpy=(_encode(np.asarray(keys, "<u4").tobytes()), int(position), int(has_gauss), float(cached)),
        torch_cpu=_encode(torch.get_rng_state().numpy().tobytes()),
        torch_cuda=tuple(_encode(state.cpu().numpy().tobytes()) for state in cuda),
    )


def restore_rng(state: RngState) -> None:
    """CUDA states are restored in order, for as many devices as there are now."""
    random.setstate(state.python)
    keys, position, has_gauss, cached = state.numpy
    np.random.set_state(("MT19937", np.frombuffer(base64.b64decode(keys), "<u4"), position, has_gauss, cached))
    torch.set_rng_state(_bytes_tensor(state.torch_cpu))
    if torch.cuda.is_available():
        for device, encoded in enumerate(state.torch_cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_bytes_tensor(encoded), device)


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes_tensor(encoded: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)


if TYPE_CHECKING:
    from learner.step.lora import Adapters  # loads peft

_RUST_ERRNO = re.compile(r"os error (\d+)|Os \{ code: (\d+)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerState:
    """The state of a learner, except its weights."""

    version: WeightVersion
    optimizer: AdamWState
    tasks: dict[str, Any]
    """`TaskStream.state()`; JSON values only."""
    ledger: Ledger | None
    rng: RngState
    metrics: dict[str, float | None]
    """Figures of the last step; non-finite ones are saved as None."""
    ema: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """`StudentEma.state_dict()`; empty without one."""
    value_head: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """`Critic.state_dict()`; empty without a value function."""
    offline: dict[str, Any] | None = None
    """`OfflineMixer.state()`; None without a mixer."""


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
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint of `state.version` under `root`, with `adapters` instead of the model if given. Then delete
    all but the `keep` newest and those of the `pinned` steps. Returns its folder. An existing complete checkpoint of
    this version is kept as it is. `tensors`: `Trainer.tensors`.

    Raises OSError (disk full, no permission); earlier checkpoints are untouched, and nothing of this one remains.
    """
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    target = target_folder(root, state.version)
    if target.exists():
        if not (reason := defect(target)):
            return target
        _log.error("checkpoint %s is damaged, and kept as %s: %s", target, set_aside(target), reason)
    temporary = root / f"{TEMPORARY}{target.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if adapters is None:
            save_hf(model, tokenizer, temporary, tensors)
        else:
            adapters.save(temporary, tensors)
            tokenizer.save_pretrained(temporary)
        save_file(state.optimizer.tensors, temporary / OPTIMIZER)
        if state.ema:
            save_file(state.ema, temporary / EMA)
        if state.value_head:
            save_file(state.value_head, temporary / VALUE_HEAD)
        record = _TrainerFile(
            format=FORMAT,
            version=state.version,
            steps_done=state.optimizer.steps_done,
            never_stepped=state.optimizer.never_stepped,
            tasks=state.tasks,
            ledger=state.ledger,
            rng=state.rng,
            metrics={name: x if x is not None and math.isfinite(x) else None for name, x in state.metrics.items()},
            offline=state.offline,
        )
        (temporary / TRAINER).write_bytes(msgspec.json.encode(record))
        write_manifest(temporary, state.version)
        temporary.rename(target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if (number := _system_error(error)) is not None:
            raise OSError(number, os.strerror(number), str(temporary)) from error
        raise
    sync(root)
    try:
        prune(root, keep=keep, pinned=pinned)
    except OSError as error:  # this checkpoint is complete; failing to delete an old one must not lose it
        _log.error("checkpoints older than the %d newest could not be deleted: %s", keep, error)
    return target


def load_checkpoint(path: Path) -> LearnerState:
    """Verify a checkpoint and read its state. Its weights are loaded with `load_causal_lm(path, ...)`, adapters with
    `Adapters.load(path)`.

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


def _system_error(error: BaseException) -> int | None:
    """The errno of a failed write by safetensors or tokenizers. They are written in Rust and raise SafetensorError, or
    Exception itself, with the number only in the text."""
    if not isinstance(error, SafetensorError) and type(error) is not Exception:
        return None
    found = _RUST_ERRNO.search(str(error))
    return int(found[1] or found[2]) if found else None
