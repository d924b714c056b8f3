"""Reads all rows of the prompts as the rewards will: a value that a reward can never judge is an error before the run
starts, not a rollout without a reward. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs.registry import UnknownEnvironment, find_environment, options_of_row
from stillhouse.actors.envs.single_turn import reward_for
from stillhouse.actors.rewards import Answered, make_reward
from stillhouse.actors.rewards.checkers import CHECKERS
from stillhouse.actors.rewards.registry import why_unreadable
from stillhouse.actors.row_options import declared_by
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.records import DataError, PromptRecord, RowError


class Unreadable(NamedTuple):
    mistakes: list[str]
    """By a reward that somebody asked for."""
    warnings: list[str]
    """By the reward that judges where none is named: who only distils may not want it."""


def unreadable_rows(
    key: str, given: str, environments: Mapping[str, EnvConfig], columns: Mapping[str, str]
) -> Unreadable:
    """What rewards cannot read. Rows that cannot be used at all are the learner's to count. `environments`: those of
    the run; the first one is that of rows that name none."""
    found, unasked = list[str](), list[str]()
    judging = {name: config for name, config in environments.items() if _has_rewards(config)}
    if not judging:
        return Unreadable([], [])
    try:
        source = open_prompts(given, environments, columns)
    except (DataError, OSError):
        return Unreadable([], [])  # said by others
    default = next(iter(environments))
    try:
        for record in source.read_all():
            if isinstance(record, RowError):
                continue
            config = judging.get(record.env or default)
            if config is not None:
                asked, why = _why(config, record)
                if why:
                    (found if asked else unasked).append(f"{source.where(record.row)}: {why}")
    except DataError:
        pass  # said by others
    finally:
        CHECKERS.close()  # the launcher asks nothing more of them

    def said(rows: list[str], what_to_do: str) -> list[str]:
        return [
            f"{key}: {len(rows):,} of {len(source):,} rows have values that their reward cannot read, the "
            f"first: {rows[0]}; {what_to_do}"
        ]

    by_default = "their reward is always 0; another one reads them (docs/rewards.md), if you want rewards"
    return Unreadable(
        said(found, "correct them, or leave them out") if found else [], said(unasked, by_default) if unasked else []
    )


def _has_rewards(config: EnvConfig) -> bool:
    try:
        return "reward" in declared_by(find_environment(config.name))
    except (UnknownEnvironment, ValueError):
        return False  # launch.config.consistency says what is wrong


def _why(config: EnvConfig, record: PromptRecord) -> tuple[bool, str]:
    """Whether the configuration or the row names the reward, and why it cannot read the row."""
    row = msgspec.json.decode(record.columns or b"{}", type=dict[str, Any])
    of_row: Mapping[str, Any] = row.get("env_options") or {}
    try:
        options = options_of_row(config.options, of_row, config.name) if of_row else config.options
        name, own = reward_for(options, record.tag)
        reads = _reader(str(name), json.dumps(own, sort_keys=True))
    except (ValueError, TypeError, AttributeError):
        return True, ""  # launch.checks.prompt_files, or launch.config.consistency, says it
    by_tag = options.get("rewards") or {}
    asked = record.tag in by_tag or bool({"reward", "reward_options", "answer_pattern"} & options.keys())
    if any(option in of_row for option in ("reward", "reward_options", "answer_pattern")):
        try:
            make_reward(str(name), **own)
        except ValueError as error:
            return True, f"env_options: {error}"
    return asked, "" if reads is None else reads(Answered("", record.ground_truth, row=row))


@functools.lru_cache
def _reader(name: str, options: str) -> Callable[[Answered], str] | None:
    return why_unreadable(name, json.loads(options))
