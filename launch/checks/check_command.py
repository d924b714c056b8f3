"""`--check`: shows what a run would do with its models and prompts, with the code that the run itself uses.

Beyond launch.checks.preflight, this reads prompt rows and renders them to token ids as the learner will. It imports
torch, but loads no model and starts nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.envs.single_turn import reward_for
from stillhouse.actors.rewards.answer import AnswerCheck
from stillhouse.launch.checks.finding import Case, Finding, Status
from stillhouse.launch.checks.model_files import check_weights, has_no_weights
from stillhouse.launch.config.consistency import teacher_window
from stillhouse.launch.config.known_sets import describe_known_sets
from stillhouse.launch.config.pools import teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.machine.devices import torch_devices
from stillhouse.learner.prompts.config import TaskConfig, n_held_out
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.order import row_tags
from stillhouse.learner.prompts.records import DataError
from stillhouse.learner.prompts.tasks import Rendered, RenderedPrompts
from stillhouse.models.files import TokenizerError
from stillhouse.models.tokenizer import load_tokenizer

ROWS_READ: Final = 20_000
"""Rows to read of a longer file, at equal distances."""


class PromptRows(NamedTuple):
    """The rows of one prompt file, as the learner would use them."""

    path: str
    rows: int
    read: int
    """Number of rows that were read."""
    lengths: list[int]
    """Tokens of each usable prompt."""
    teacher_lengths: list[int]
    """Tokens that teachers read for each usable prompt."""
    dropped: Counter[str]
    """Dropped rows by reason, as the learner counts them."""
    details: dict[str, str]
    """Reason -> the first row that was dropped for it."""
    first: Rendered | None
    """The first usable prompt."""
    ground_truths: list[str | None]
    """Those of the usable prompts that are in the run's environment."""


def prompts(case: Case) -> Iterator[Finding]:
    """For the doctor."""
    return check_run(case.checked.config)


def check_run(config: RunConfig, *, devices: bool = True) -> Iterator[Finding]:
    """`config`: as preflight resolved it. `devices`: check that torch finds the devices on this machine. Raises
    ConfigError with all mistakes, after all findings."""
    mistakes = [*_devices(config)] if devices else []
    yield from _models(config)
    yield from _taught_by_itself(config)
    yield from _apis(config)
    try:
        tokenizer = load_tokenizer(config.models.student)
    except TokenizerError as error:
        raise ConfigError(*mistakes, f"models.student: {error}") from error
    yield from (_found(key, said) for key, said in describe_known_sets(config))
    tasks = config.learner.tasks
    for key, path in config.learner.prompt_files.items():
        training = key == "learner.tasks.prompts"
        if not training and not config.learner.eval_every:
            continue
        try:
            rows = read_rows(path, tokenizer, tasks if training else replace(tasks, mix={}), config.environments)
        except (DataError, TokenizerError, OSError) as error:
            mistakes.append(f"{key}: {error}")
            continue
        if not rows.lengths:
            dropped = ", ".join(f"{n} {reason} ({rows.details[reason]})" for reason, n in rows.dropped.items())
            mistakes.append(f"{key}: none of the {rows.read:,} rows that were read is usable: {dropped}")
            continue
        yield from _describe(key, rows, tokenizer)
        yield from _passes(key, rows, config) if training else ()
        yield from _reward(key, rows, config)
        if training and not tasks.eval_prompts and config.learner.eval_every:
            yield from _held_out(key, rows.rows, tasks)
        mistakes += _too_long_for_teachers(key, rows, config)
    if mistakes:
        raise ConfigError(*mistakes)


def _found(subject: str, measured: str, status: Status = "ok", advice: str = "") -> Finding:
    return Finding(check="prompts", subject=subject, status=status, measured=measured, advice=advice)


def read_rows(
    path: str, tokenizer: PreTrainedTokenizerBase, tasks: TaskConfig, environments: Collection[str] | None = None
) -> PromptRows:
    """Render the rows of a file as the learner does. `environments`: those that rows may name; None: any. Raises
    DataError and TokenizerError for what would end the run."""
    source = open_prompts(path, environments, tasks.columns)
    rendered = RenderedPrompts(source, tokenizer, tasks)
    rendered.probe(row_tags(source) if tasks.tags_named else [])
    chosen = np.unique(np.linspace(0, len(source) - 1, min(len(source), ROWS_READ), dtype=np.int64)).tolist()
    found = PromptRows(source.path, len(source), len(chosen), [], [], Counter(), {}, None, [])
    for row in chosen:
        prompt = rendered[row]
        if prompt.ids is not None and prompt.record is not None and tasks.mix and prompt.record.tag not in tasks.mix:
            detail = f"{source.where(row)}: learner.tasks.mix lacks the tag {prompt.record.tag!r}"
            prompt = Rendered(None, None, "tag_not_in_mix", detail)
        if prompt.ids is None:
            found.dropped[prompt.drop_reason] += 1
            found.details.setdefault(prompt.drop_reason, prompt.detail)
            continue
        found.lengths.append(len(prompt.ids))
        found.teacher_lengths.append(len(prompt.teacher_ids) or len(prompt.ids))
        if prompt.record is not None and prompt.record.env in ("", tasks.env):
            found.ground_truths.append(prompt.record.ground_truth)
        if found.first is None:
            found = found._replace(first=prompt)
    return found


def _describe(key: str, rows: PromptRows, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    of = "" if rows.read == rows.rows else f" of {rows.rows:,}, at equal distances"
    yield _found(key, f"{rows.path}: {rows.read:,} rows read{of}, {len(rows.lengths):,} of them can be used")
    for reason, n in rows.dropped.items():
        advice = "correct the rows, or the limit that is named"
        yield _found(key, f"dropped: {n:,} {reason}, the first: {rows.details[reason]}", "warning", advice)
    yield _found(key, f"tokens per prompt: {_spread(rows.lengths)}")
    if rows.teacher_lengths != rows.lengths:
        yield _found(key, f"what teachers read: {_spread(rows.teacher_lengths)}")
    assert rows.first is not None and rows.first.ids is not None
    yield from _shown(key, "the first prompt", rows.first.ids.tolist(), tokenizer)
    if len(rows.first.teacher_ids):
        yield from _shown(key, "what teachers read of it", rows.first.teacher_ids.tolist(), tokenizer)


def _passes(key: str, rows: PromptRows, config: RunConfig) -> Iterator[Finding]:
    """How often the run comes to each row, and a warning where one batch has them more than once."""
    usable = len(rows.lengths) * rows.rows / rows.read
    per_step = config.buffer.batch_rollouts / config.learner.tasks.group_size
    times = config.steps * per_step / usable
    said = f"a step takes {per_step:g} prompts (buffer.batch_rollouts / learner.tasks.group_size), "
    if per_step > usable:
        said += f"and there are about {usable:.0f}: each batch has them {per_step / usable:.2g} times"
        yield _found(key, said, "warning", "more rows, a smaller batch or larger groups")
    else:
        yield _found(key, said + f"so {config.steps:,} steps go over the rows about {times:.2g} times")


def _reward(key: str, rows: PromptRows, config: RunConfig) -> Iterator[Finding]:
    """What judges the rows, and how many of their ground truths it can read."""
    name, all_rows = config.learner.tasks.env, len(rows.ground_truths)
    if not all_rows:
        return
    n_there = sum(truth is not None for truth in rows.ground_truths)
    there = f"{n_there:,} of {all_rows:,} rows have a ground_truth"
    environment = config.environments.get(name)
    options = environment.options if environment is not None else {}
    if environment is None or environment.name != "single_turn":
        yield _found(key, f"reward: that of the environment {name}; {there}")
        return
    assert rows.first is not None and rows.first.record is not None
    reward, own = reward_for(options, rows.first.record.tag)
    if reward != "answer" or own:
        yield _found(key, f"reward: {reward} of single_turn; {there}")
        return
    check = AnswerCheck()
    readable = sum(check.reward(f"#{truth}", truth) == 1.0 for truth in rows.ground_truths)
    yield _found(
        key,
        "reward: answer of single_turn, 1 for the right number behind the last #; it can read the ground_truth of "
        f"{readable:,} of {all_rows:,} rows",
    )


def _held_out(key: str, n_rows: int, tasks: TaskConfig) -> Iterator[Finding]:
    """How many rows an evaluation has, and a warning where it was to have more."""
    n, asked = n_held_out(n_rows, tasks.eval_share, tasks.eval_prompts_needed), tasks.eval_prompts_needed
    yield _found(
        key, f"held out for evaluation: {n:,} of {n_rows:,} rows (learner.tasks.eval_share = {tasks.eval_share:g})"
    )
    if n < asked:
        yield _found(
            key,
            f"{asked:,} evaluation prompts were asked for (greedy {tasks.eval_greedy}, sampled "
            f"{tasks.eval_sampled}), {n:,} are held out",
            "warning",
            f"eval_share = {min(0.5, asked / n_rows):.2g} gives more",
        )


def _shown(key: str, name: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    yield _found(key, f"{name}, as rendered: {tokenizer.decode(ids)!r}")
    yield _found(key, f"its {len(ids)} token ids: {' '.join(map(str, ids))}")


def _spread(lengths: list[int]) -> str:
    return f"min {min(lengths)}, median {statistics.median(lengths):.0f}, max {max(lengths)}"


def _too_long_for_teachers(key: str, rows: PromptRows, config: RunConfig) -> Iterator[str]:
    for pool in teacher_pools(config):
        window = teacher_window(pool)
        if window is None:
            continue
        if without_room := sum(length >= window for length in rows.teacher_lengths):
            yield (
                f"{pool.model_key}: its context of {window} tokens has no room for an answer behind {without_room:,} "
                f"of {len(rows.lengths):,} prompts of {key}, as teachers read them; expected a longer context, or a "
                "lower learner.tasks.max_prompt_tokens or max_teacher_prompt_tokens"
            )


def _models(config: RunConfig) -> Iterator[Finding]:
    named = {"models.student": config.models.student}
    named |= {pool.model_key: pool.config.models.teacher for pool in teacher_pools(config)}
    for key, name in named.items():
        size = check_weights(key, Path(name)).parameters
        yield _found(key, f"{name}, {size / 1e6:,.1f} million parameters" if size else name)
        if not size and has_no_weights(Path(name)):
            yield _found(key, "it has no weights: this plan is from config.json alone, and a run needs them", "warning")


def _taught_by_itself(config: RunConfig) -> Iterator[Finding]:
    """A warning for each teacher that knows what the student knows."""
    learner, objective = config.learner, config.learner.objective
    alone = objective.has_divergence and objective.divergence.name != "null" and objective.advantage.name == "none"
    if not alone or learner.tasks.has_privileged or learner.ema.decay:
        return
    for pool in teacher_pools(config):
        if pool.config.models.teacher == config.models.student and not pool.config.teacher.api.url:
            said = "it is the student, and reads the same prompts: their divergence begins at 0, so it teaches nothing"
            yield _found(pool.model_key, said, "warning", "another teacher, learner.tasks.privileged, or rewards")


def _apis(config: RunConfig) -> Iterator[Finding]:
    for pool in teacher_pools(config):
        if api := pool.config.teacher.api.url:
            yield _found(f"{pool.key}.api", f"{api}; its tokens and log-probs are probed when its teacher starts")


def _devices(config: RunConfig) -> Iterator[str]:
    for key, device in torch_devices(config):
        if device.startswith("cuda") and not torch.cuda.is_available():
            yield f"{key}: got {device}, but torch {torch.__version__} finds no CUDA device here; use auto or cpu"
