"""May a run go on, from which checkpoint, and under this configuration? Looked at before its folder is touched.

A run goes on from its newest checkpoint that is whole. One that has checkpoints of which none is, is refused: begun
anew it would throw away what was trained. A checkpoint remembers which stream of tasks it is a position in: the
prompts, the rows held out of them, the order and the seed. It has a value head where the advantage needed one. The
learner refuses to go on in another stream, or without the head; told here, the run's former configuration stays as
it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from launch.config.files import read_config
from launch.config.run import RunConfig
from launch.errors import ConfigError
from learner.checkpoints.files import CHECKPOINTS, TRAINER, VALUE_HEAD, Found, NoneUsable, go_on_from, set_aside
from learner.objectives.options import TokenAdvantage
from learner.prompts.config import n_held_out
from learner.prompts.data import PromptSource, open_prompts
from learner.prompts.records import DataError


class StreamIdentity(msgspec.Struct, frozen=True):
    """As `learner.tasks.TaskStream` writes it into its state."""

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


def check_resumed(config: RunConfig, folder: Path, *, read_prompts: bool = False) -> Found:
    """From what the run goes on. `config`: with paths resolved. Raises ConfigError, naming files or keys, when no
    checkpoint in the run's folder is whole, or the one to go on from belongs to another stream of tasks, or has no
    value head. Without a checkpoint the run begins anew, and nothing has to fit. `read_prompts`: open the prompts even
    where their path is the same, to see whether the file has changed; the learner does so in any case."""
    try:
        found = go_on_from(folder / CHECKPOINTS)
    except NoneUsable as error:
        raise ConfigError(*str(error).splitlines()) from error
    checkpoint = found.path
    if checkpoint is None:
        return found
    identity = msgspec.json.decode((checkpoint / TRAINER).read_bytes(), type=_Checkpoint).tasks.identity
    former = read_config(folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    mistakes = list(_differences(config, former, identity, read_prompts=read_prompts))
    if mistakes:
        mistakes.append(f"--resume: {folder} goes on with the same tasks in the same order")
    advantage = config.learner.objective.advantage
    has_head = (checkpoint / VALUE_HEAD).is_file()
    if isinstance(advantage, TokenAdvantage) and not has_head:
        mistakes.append(
            f"learner.objective.advantage: got {advantage.name!r}, which needs a value head, and {checkpoint} has "
            "none; to begin with one, start a new run with that checkpoint as --student"
        )
    if mistakes:
        end = "resume with what the run was started with, or start a new run; nothing was changed"
        raise ConfigError(*mistakes[:-1], f"{mistakes[-1]}; {end}")
    return found


def describe_resumed(found: Found) -> list[str]:
    """What the user should know of it, beginning with what is wrong."""
    told = [f"{skipped}; an older one is used" for skipped in found.damaged]
    if found.path is None or found.version is None:
        return [*told, "there is no checkpoint yet: the run begins anew, at step 0"]
    return [*told, f"going on from step {found.version.step} ({found.path})"]


def set_damaged_aside(found: Found) -> list[str]:
    """Rename them, so that nobody writes in their place. Returns what was done."""
    return [f"{skipped.path} is kept as {set_aside(skipped.path)}" for skipped in found.damaged]


def _differences(
    config: RunConfig, former: RunConfig | None, identity: StreamIdentity, *, read_prompts: bool
) -> Iterator[str]:
    tasks = config.learner.tasks
    if config.seed != identity.seed:
        yield f"seed: got {config.seed}, expected {identity.seed}, as in the checkpoint"
    if tasks.shuffle != identity.shuffle:
        told = (str(value).lower() for value in (tasks.shuffle, identity.shuffle))
        yield "learner.tasks.shuffle: got {}, expected {}, as in the checkpoint".format(*told)
    if tasks.mix != identity.mix:
        yield f"learner.tasks.mix: got {tasks.mix}, expected {identity.mix}, as in the checkpoint"
    former_tasks = former.learner.tasks if former is not None else None
    if read_prompts or former_tasks is None or tasks.prompts != former_tasks.prompts:
        source = _open(tasks.prompts)
        if source.fingerprint != identity.prompts:
            was = former_tasks.prompts if former_tasks is not None else "those of the checkpoint"
            yield (
                f"learner.tasks.prompts: got {tasks.prompts} ({len(source)} rows), expected {was} "
                f"({identity.rows} rows) or a copy of it"
            )
            return  # of other prompts, other rows are held out
    held_out = 0 if tasks.eval_prompts else n_held_out(identity.rows, tasks.eval_share, tasks.eval_prompts_needed)
    if held_out != identity.held_out:
        names = ("eval_prompts", "eval_share", "eval_greedy", "eval_sampled")
        changed = [n for n in names if former_tasks is None or getattr(tasks, n) != getattr(former_tasks, n)]
        yield (
            f"{', '.join(f'learner.tasks.{name}' for name in changed or names)}: got values that hold {held_out} "
            f"prompts out of training, expected {identity.held_out}, as in the checkpoint"
        )


def _open(prompts: str) -> PromptSource:
    try:
        return open_prompts(prompts)
    except (DataError, OSError) as error:
        raise ConfigError(f"learner.tasks.prompts: {error}") from error
