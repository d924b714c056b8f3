"""A run's configuration as one flat table, for boards that compare runs (TensorBoard's HParams). No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias, cast

import msgspec

Setting: TypeAlias = str | float | bool
MAIN: Final = (
    "models.student",
    "models.teacher",
    "steps",
    "seed",
    "actors",
    "teachers",
    "learner.lr",
    "learner.schedule",
    "learner.updates_per_batch",
    "learner.lora.rank",
    "learner.objective.divergence.name",
    "learner.objective.importance.name",
    "learner.objective.advantage.name",
    "learner.objective.coef",
    "learner.tasks.prompts",
    "learner.tasks.env",
    "learner.tasks.group_size",
    "learner.tasks.max_new_tokens",
    "learner.offline.student_fraction",
    "buffer.max_staleness",
    "buffer.batch_rollouts",
    "buffer.release",
    "teacher.top_k",
    "actor.engine",
    "teacher.engine",
)
"""Keys that are shown for every run, so that runs which differ in them can be compared. TensorBoard shows the columns
of the first run that it finds."""
HIDDEN: Final = "(hidden)"
_SECRET: Final = re.compile(r"api_?key|token$|secret|passw|credential|authorization", re.IGNORECASE)
"""Names of options that may hold a secret."""
_SECRET_VARIABLE: Final = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL")
SECRET_CHARS: Final = 6
"""Shortest value of a variable that is taken for a secret."""
_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+@")
"""`user:password@` of a URL."""


def all_settings(config: object) -> dict[str, Setting]:
    """Every key of a configuration with its value; keys without one are left out, lists are joined by commas. What may
    be a secret in the options of an environment or an engine, or in a URL, is replaced by `(hidden)`."""
    return dict(_flat(config, "", free=False))


def compared_settings(config: object) -> dict[str, Setting]:
    """The keys of MAIN, and those whose value is not the default of `type(config)`."""
    settings, defaults = all_settings(config), all_settings(type(config)())
    nowhere = object()
    return {key: value for key, value in settings.items() if key in MAIN or defaults.get(key, nowhere) != value}


def without_secrets(text: str) -> str:
    """A message for the log, without passwords in URLs and without the values of variables such as WANDB_API_KEY."""
    for name, value in os.environ.items():
        if len(value) >= SECRET_CHARS and _SECRET_VARIABLE.search(name):
            text = text.replace(value, HIDDEN)
    return _shown(text)


def _flat(value: object, key: str, *, free: bool) -> Iterator[tuple[str, Setting]]:
    """`free`: the last part of the key was chosen by the user or by another package."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _flat(getattr(value, name), f"{key}.{name}" if key else name, free=False)
    elif isinstance(value, Mapping):
        for name, one in cast(Mapping[Any, Any], value).items():
            yield from _flat(one, f"{key}.{name}", free=True)
    elif value is not None and free and _SECRET.search(key.rpartition(".")[2]):
        yield key, HIDDEN
    elif isinstance(value, bool | int | float):
        yield key, value
    elif isinstance(value, list | tuple):
        yield key, _shown(", ".join(str(one) for one in cast(tuple[Any, ...], value)))
    elif value is not None:
        yield key, _shown(str(value))


def _shown(text: str) -> str:
    return _IN_URL.sub(f"{HIDDEN}@", text)
