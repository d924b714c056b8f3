"""Reads all rows of the prompts as the rewards will: a value that a reward can never judge is an error before the run
starts, not a rollout without a reward. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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


def unreadable_rows(
    key: str, given: str, environments: Mapping[str, EnvConfig], columns: Mapping[str, str]
) -> Iterator[str]:
    """One message about all rows that a reward cannot read. Rows that cannot be used at all are the learner's to count.
    `environments`: those of the run; the first one is that of rows that name none."""
    judging = {name: config for name, config in environments.items() if _has_rewards(config)}
    if not judging:
        return
    try:
        source = open_prompts(given, environments, columns)
    except (DataError, OSError):
        return  # said by others
    default, found = next(iter(environments)), list[str]()
    try:
        for record in source.read_all():
            if isinstance(record, RowError):
                continue
            config = judging.get(record.env or default)
            if config is not None and (why := _why(config, record)):
                found.append(f"row {record.row}: {why}")
    except DataError:
        pass  # said by others
    finally:
        CHECKERS.close()  # the launcher asks nothing more of them
    if found:
        yield (
            f"{key}: {given}: {len(found):,} of {len(source):,} rows have values that their reward cannot read, the "
            f"first: {found[0]}; correct them, or leave them out"
        )


def _has_rewards(config: EnvConfig) -> bool:
    try:
        return "reward" in declared_by(find_environment(config.name))
    except (UnknownEnvironment, ValueError):
        return False  # launch.config.consistency says what is wrong


def _why(config: EnvConfig, record: PromptRecord) -> str:
    row = msgspec.json.decode(record.columns or b"{}", type=dict[str, Any])
    of_row: Mapping[str, Any] = row.get("env_options") or {}
    try:
        options = options_of_row(config.options, of_row, config.name) if of_row else config.options
        name, own = reward_for(options, record.tag)
        reads = _reader(str(name), json.dumps(own, sort_keys=True))
    except (ValueError, TypeError, AttributeError):
        return ""  # launch.checks.prompt_files, or launch.config.consistency, says it
    if any(option in of_row for option in ("reward", "reward_options", "answer_pattern")):
        try:
            make_reward(str(name), **own)
        except ValueError as error:
            return f"env_options: {error}"
    return "" if reads is None else reads(Answered("", record.ground_truth, row=row))


@functools.lru_cache
def _reader(name: str, options: str) -> Callable[[Answered], str] | None:
    return why_unreadable(name, json.loads(options))
