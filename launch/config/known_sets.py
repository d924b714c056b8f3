"""Writes what is known about data sets of the hub (learner.prompts.known_sets) into a run's configuration, where the
user has not said otherwise: the text around prompts, and the reward that judges answers, each by the tag of the
rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from stillhouse.actors.envs.single_turn import reward_for
from stillhouse.launch.config.run import RunConfig
from stillhouse.learner.prompts.known_sets import KnownSet, named_set

replace = msgspec.structs.replace


def with_known_sets(config: RunConfig) -> RunConfig:
    """`learner.tasks.templates.TAG`, unless there is one or a system prompt; and `rewards.TAG` of the environment
    `single_turn`, unless there is one. A reward that is configured for all rows keeps the training prompts, and rows
    that it would judge anyway."""
    tasks, name = config.learner.tasks, config.learner.tasks.env
    environment = config.environments[name]
    options: Mapping[str, Any] = environment.options
    own: Mapping[str, Any] = options.get("rewards") or {}
    everywhere = options.get("reward") or ("answer" if "answer_pattern" in options else None)
    templates, rewards, training = dict[str, str](), dict[str, Any](), ""
    for key, known in _known(config):
        if known.template and tasks.system_prompt is None:
            templates[known.tag] = known.template
        training = known.tag if key == "learner.tasks.prompts" else training
        if everywhere is None or (everywhere != known.reward and known.tag != training):
            rewards[known.tag] = {"reward": known.reward}
    if templates:
        tasks = replace(tasks, templates={**templates, **tasks.templates})
        config = replace(config, learner=replace(config.learner, tasks=tasks))
    if environment.name != "single_turn" or not rewards:
        return config
    environment = replace(environment, options={**options, "rewards": {**rewards, **own}})
    environments = {**config.actor.environments, name: environment}
    return replace(config, actor=replace(config.actor, environments=environments))


def describe_known_sets(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, how the rows of its data set are read and judged), by a configuration that has all."""
    environment = config.environments[config.learner.tasks.env]
    for key, known in _known(config):
        columns = ", ".join(f"{field} from {column!r}" for field, column in known.columns.items())
        template = config.learner.tasks.templates.get(known.tag)
        text = f"prompts in {template!r}" if template else "prompts as they are"
        judged = f"the environment {environment.name}"
        if environment.name == "single_turn":
            judged = f"the reward {reward_for(environment.options, known.tag)[0]}"
        yield key, f"a known data set: {columns + ', ' if columns else ''}tag {known.tag!r}, {text}, judged by {judged}"


def _known(config: RunConfig) -> Iterator[tuple[str, KnownSet]]:
    for key, path in config.learner.prompt_files.items():
        named = named_set(path)
        if named is not None and named.known is not None:
            yield key, named.known
