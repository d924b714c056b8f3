"""Checks, before the run folder is touched, whether a run can resume, and from which checkpoint.

A run resumes from the newest intact checkpoint in its folder. If it has checkpoints but none is intact, it is refused:
starting anew would throw away what was trained. A checkpoint is a position in one stream of tasks, identified by the
prompts, the rows held out of them, the order and the seed; and it has a value head if the advantage needed one. The
learner refuses another stream, or a missing head. It is checked here first, so that the run's former configuration
stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.learner.checkpoints.files import (
    CHECKPOINTS,
    TRAINER,
    VALUE_HEAD,
    FoundCheckpoint,
    NoneUsable,
    go_on_from,
    set_aside,
)
from stillhouse.learner.config import OPTIMIZERS
from stillhouse.learner.objectives.options import TokenAdvantage
from stillhouse.learner.prompts.config import n_held_out
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.records import DataError


class StreamIdentity(msgspec.Struct, frozen=True):
    """Identity of a stream, as `learner.prompts.tasks` writes it into the checkpoint."""

    prompts: str
    """Fingerprint."""
    rows: int
    held_out: int
    shuffle: bool
    seed: int
    mix: dict[str, float] = {}


class _Stream(msgspec.Struct, frozen=True):
    identity: StreamIdentity


class _Checkpoint(msgspec.Struct, frozen=True):
    tasks: _Stream


def check_resumed(config: RunConfig, folder: Path, *, read_prompts: bool = False) -> FoundCheckpoint:
    """Find the checkpoint to resume from; without any, the run starts anew and nothing has to fit. `config`: with paths
    resolved. `read_prompts`: open the prompts even if their path is unchanged, to see whether the file has changed (the
    learner does so in any case). Raises ConfigError, naming files or keys, when no checkpoint is intact, or when the
    newest intact one belongs to another stream of tasks or lacks the value head."""
    try:
        found = go_on_from(folder / CHECKPOINTS)
    except NoneUsable as error:
        raise ConfigError(*str(error).splitlines()) from error
    checkpoint = found.path
    if checkpoint is None:
        return found
    identity = msgspec.json.decode((checkpoint / TRAINER).read_bytes(), type=_Checkpoint).tasks.identity
    former = _former(folder)
    mistakes = list(_differences(config, former, identity, read_prompts=read_prompts))
    if mistakes:
        mistakes.append(f"--resume: {folder} must continue with the same tasks in the same order")
    mistakes += _other_state(config, former) if former is not None else ()
    advantage = config.learner.objective.advantage
    has_head = (checkpoint / VALUE_HEAD).is_file()
    if isinstance(advantage, TokenAdvantage) and not has_head:
        mistakes.append(
            f"learner.objective.advantage: got {advantage.name!r}, which needs a value head, and {checkpoint} has "
            "none; to begin with one, start a new run with that checkpoint as --student"
        )
    if mistakes:
        end = "resume with the settings that the run was started with, or start a new run; nothing was changed"
        raise ConfigError(*mistakes[:-1], f"{mistakes[-1]}; {end}")
    return found


def describe_resumed(found: FoundCheckpoint, steps: int) -> list[str]:
    """Lines for the user: damaged checkpoints first, then where the run resumes, to make `steps` in all."""
    lines = [f"{skipped}; an older one is used" for skipped in found.damaged]
    if found.path is None or found.version is None:
        return [*lines, "there is no checkpoint yet: the run begins anew, at step 0"]
    done = f"; steps = {steps}, so nothing is left to train" if found.version.step >= steps else ""
    return [*lines, f"going on from step {found.version.step} ({found.path}){done}"]


def not_as_before(config: RunConfig, folder: Path) -> Iterator[str]:
    """Lines for the user: another number of steps, for which the cosine was made, and a student that is not read."""
    former = _former(folder) or config
    if former.steps != config.steps and config.learner.schedule == "cosine":
        yield (
            f"steps: got {config.steps}, and the run had {former.steps}: the learning rate goes on as in a run of "
            f"{config.steps} steps, not from where it was (learner.schedule)"
        )
    now, then = config.models.student, former.models.student
    if now != then and not config.learner.lora.rank:
        yield f"models.student: got {now}, and the run had {then}: the weights are the checkpoint's"


def _former(folder: Path) -> RunConfig | None:
    """The run's own settings."""
    file = folder / "config.yaml"
    return read_config(file) if file.is_file() else None


def set_damaged_aside(found: FoundCheckpoint) -> list[str]:
    """Rename damaged checkpoints, so that nothing overwrites them. Returns a line for each."""
    return [f"{skipped.path} is kept as {set_aside(skipped.path)}" for skipped in found.damaged]


def _other_state(config: RunConfig, former: RunConfig) -> Iterator[str]:
    """What the weights and the optimizer's state in the checkpoint are of no use for."""
    now, then = config.learner, former.learner
    if now.lora.rank != then.lora.rank:
        yield f"learner.lora.rank: got {now.lora.rank}, expected {then.lora.rank}, as in the checkpoint"
    names = [now.optimizer.name, then.optimizer.name]
    if names[0] != names[1] and all(name in OPTIMIZERS.built_in for name in names):  # others may share their state
        yield f"learner.optimizer: got {names[0]}, expected {names[1]}, as in the checkpoint"


def _differences(
    config: RunConfig, former: RunConfig | None, identity: StreamIdentity, *, read_prompts: bool
) -> Iterator[str]:
    tasks = config.learner.tasks
    if config.seed != identity.seed:
        yield f"seed: got {config.seed}, expected {identity.seed}, as in the checkpoint"
    if tasks.shuffle != identity.shuffle:
        got, expected = str(tasks.shuffle).lower(), str(identity.shuffle).lower()
        yield f"learner.tasks.shuffle: got {got}, expected {expected}, as in the checkpoint"
    if tasks.mix != identity.mix:
        yield f"learner.tasks.mix: got {tasks.mix}, expected {identity.mix}, as in the checkpoint"
    former_tasks = former.learner.tasks if former is not None else None
    if read_prompts or former_tasks is None or tasks.prompts != former_tasks.prompts:
        try:
            source = open_prompts(tasks.prompts, columns=tasks.columns)
        except (DataError, OSError) as error:
            raise ConfigError(f"learner.tasks.prompts: {error}") from error
        if source.fingerprint != identity.prompts:
            was = former_tasks.prompts if former_tasks is not None else "those of the checkpoint"
            yield (
                f"learner.tasks.prompts: got {tasks.prompts} ({len(source)} rows), expected {was} "
                f"({identity.rows} rows) or a copy of it"
            )
            return  # other prompts: the number of held-out rows cannot be compared
    held_out = 0 if tasks.eval_prompts else n_held_out(identity.rows, tasks.eval_share, tasks.eval_prompts_needed)
    if held_out != identity.held_out:
        names = ("eval_prompts", "eval_share", "eval_greedy", "eval_sampled")
        changed = [n for n in names if former_tasks is None or getattr(tasks, n) != getattr(former_tasks, n)]
        yield (
            f"{', '.join(f'learner.tasks.{name}' for name in changed or names)}: got values that hold {held_out} "
            f"prompts out of training, expected {identity.held_out}, as in the checkpoint"
        )
