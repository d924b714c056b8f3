"""Checkpoints that are complete or absent: `checkpoints/step_000040/`.

    config.json, model.safetensors, generation_config.json, tokenizer ...   a Hugging Face folder, loadable as it is
    model.safetensors.index.json                                            says that only the former are the model
    optimizer.safetensors                                                   the optimizer's state by parameter name
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

With several ranks each writes its rows of weights and moments into the same two files, rank 0 the rest
(learner.checkpoints.tensor_file). In a run this happens in the background (learner.checkpoints.writer).

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
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stillhouse.learner.checkpoints.files import (
    EMA,
    FORMAT,
    OPTIMIZER,
    TRAINER,
    VALUE_HEAD,
    WEIGHTS,
    CheckpointError,
    add,
    prune,
    verify,
    write_manifest,
)
from stillhouse.learner.checkpoints.tensor_file import layout_of, write_share
from stillhouse.learner.config import ADAPTER_WEIGHTS
from stillhouse.learner.step.optimizer import OptimizerState
from stillhouse.models.loading import describe_hf
from stillhouse.models.safetensors_header import INDEX_FILE
from stillhouse.models.transfer import Shares
from stillhouse.protocol.atomic_file import usual_permissions
from stillhouse.protocol.messages import Ledger, WeightVersion


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
    from stillhouse.learner.step.lora import Adapters  # loads peft

_RUST_ERRNO = re.compile(r"os error (\d+)|Os \{ code: (\d+)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerState:
    """The state of a learner, except its weights."""

    version: WeightVersion
    optimizer: OptimizerState
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


@dataclass(frozen=True)
class Contents:
    """What goes into a checkpoint, as of one step. Made of copies, it can be written while training goes on."""

    version: WeightVersion
    record: bytes
    """trainer.json."""
    weights: Shares
    """The student's, by the names of a checkpoint, or the adapters' by peft's."""
    moments: Shares
    ema: Mapping[str, Tensor]
    value_head: Mapping[str, Tensor]

    @classmethod
    def of(cls, state: LearnerState, weights: Shares) -> Self:
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
        moments = state.optimizer.shares
        return cls(state.version, msgspec.json.encode(record), weights, moments, state.ema, state.value_head)


def write_checkpoint(
    draft: Path,
    contents: Contents,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    keep: int,
    adapters: Adapters | None = None,
    others: Callable[[], Iterable[int]] = tuple,
) -> Path:
    """Write a checkpoint into `draft`, then give it its name, and delete all but the `keep` newest. Returns its folder.
    An existing complete checkpoint of this version is kept as it is. Of `model` and `adapters` it reads the
    configuration only. `others`: waits for the other ranks, and gives the bytes that each has written with
    `write_shares`.

    Raises OSError (disk full, no permission); earlier checkpoints are untouched, and nothing of this one remains."""
    root = draft.parent
    try:
        try:
            shares = (contents.weights, contents.moments)
            written = write_shares(draft, *shares, adapters=adapters is not None, leads=True)
            describe_hf(model if adapters is None else None, tokenizer, draft)
            if adapters is not None:
                adapters.describe(draft)
            else:  # without an index SGLang and vLLM read every safetensors file as weights
                placed = dict.fromkeys(sorted(contents.weights.tensors), WEIGHTS)
                (draft / INDEX_FILE).write_bytes(msgspec.json.encode({"metadata": {}, "weight_map": placed}))
            if contents.ema:
                save_file(dict(contents.ema), draft / EMA)
            if contents.value_head:
                save_file(dict(contents.value_head), draft / VALUE_HEAD)
            usual_permissions(draft)
            (draft / TRAINER).write_bytes(contents.record)
        finally:
            of_others = list(others())  # whatever happened here, none of them may write any more when this returns
        _expect_all(shares, written + sum(of_others))
        write_manifest(draft, contents.version)
        target = add(draft, contents.version)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if (number := _system_error(error)) is not None:
            raise OSError(number, os.strerror(number), str(draft)) from error
        raise
    try:
        prune(root, keep=keep)
    except OSError as error:  # this checkpoint is complete; failing to delete an old one must not lose it
        _log.error("checkpoints older than the %d newest could not be deleted: %s", keep, error)
    return target


def write_shares(draft: Path, weights: Shares, moments: Shares, *, adapters: bool, leads: bool) -> int:
    """Write what this process holds of both into the files of `draft`. Returns the number of bytes. Raises OSError."""
    files = {ADAPTER_WEIGHTS if adapters else WEIGHTS: weights, OPTIMIZER: moments}
    return sum(write_share(draft / name, shares, leads=leads) for name, shares in files.items())


def _expect_all(files: Iterable[Shares], written: int) -> None:
    """What no rank has written would read as zeros. Raises RuntimeError."""
    expected = sum(layout_of(shares).total_bytes for shares in files)
    if written != expected:
        raise RuntimeError(f"the ranks have written {written} bytes of weights and moments, expected {expected}")


def load_checkpoint(path: Path, *, verified: bool = False) -> LearnerState:
    """Verify a checkpoint and read its state. Its weights are loaded with `load_causal_lm(path, ...)`, adapters with
    `Adapters.load(path)`. The tensors are the files, mapped into memory: only what is used of them is read.
    `verified`: another rank has done that.

    Raises CheckpointError: files missing, changed or of another format."""
    if not verified:
        verify(path)
    try:
        record = msgspec.json.decode((path / TRAINER).read_bytes(), type=_TrainerFile)
        tensors = load_file(path / OPTIMIZER)
        ema, value_head = (load_file(path / name) if (path / name).exists() else {} for name in (EMA, VALUE_HEAD))
    except (OSError, msgspec.MsgspecError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return LearnerState(
        version=record.version,
        optimizer=OptimizerState(tensors, record.never_stepped, record.steps_done),
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
