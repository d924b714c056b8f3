"""Reads all rows of the prompts as the rewards will: a value that a reward can never judge is an error before the run
starts, not a rollout without a reward. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs.registry import UnknownEnvironment, find_environment, options_of_row
from stillhouse.actors.envs.single_turn import reward_for
from stillhouse.actors.rewards.registry import UnknownReward, why_unreadable
from stillhouse.actors.row_options import declared_by
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.records import DataError, PromptRecord, RowError

Reads = Callable[[Mapping[str, Any]], str]


def unreadable_rows(
    key: str, given: str, environments: Mapping[str, EnvConfig], columns: Mapping[str, str]
) -> Iterator[str]:
    """One message about all rows that a reward cannot read. Rows that cannot be used at all are the learner's to count.
    `environments`: those of the run; the first one is that of rows that name none."""
    judging = {name: config for name, config in environments.items() if _has_reader(config)}
    if not judging:
        return
    try:
        source = open_prompts(given, environments, columns)
    except (DataError, OSError):
        return  # said by others
    default, found = next(iter(environments)), list[str]()
    for row in range(len(source)):
        try:
            record = source.read(row)
        except (RowError, DataError):
            continue
        config = judging.get(record.env or default)
        if config is not None and (why := _why(config, record)):
            found.append(f"row {row}: {why}")
    if found:
        yield (
            f"{key}: {given}: {len(found):,} of {len(source):,} rows have values that their reward cannot read, the "
            f"first: {found[0]}; correct them, or leave them out"
        )


def _has_reader(config: EnvConfig) -> bool:
    try:
        if "reward" not in declared_by(find_environment(config.name)):
            return False
        tags = ["", *(config.options.get("rewards") or {})]
        return any(_reader(*reward_for(config.options, tag)) is not None for tag in tags)
    except (UnknownEnvironment, ValueError, TypeError, AttributeError):
        return False  # launch.config.consistency says what is wrong


def _why(config: EnvConfig, record: PromptRecord) -> str:
    row = msgspec.json.decode(record.columns or b"{}", type=dict[str, Any])
    try:
        options = options_of_row(config.options, row.get("env_options") or {}, config.name)
    except ValueError:
        return ""  # launch.checks.prompt_files says it
    reads = _reader(*reward_for(options, record.tag))
    return "" if reads is None else reads(row)


def _reader(name: object, options: Mapping[str, Any]) -> Reads | None:
    try:
        return why_unreadable(name, options) if isinstance(name, str) else None
    except UnknownReward:
        return None
