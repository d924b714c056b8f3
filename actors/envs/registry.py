"""Environments by name: the built-in ones, those that installed packages name, and `module:Class`.

A package adds its own in its pyproject.toml:

    [project.entry-points."stillhouse.environments"]
    guess = "my_package.guess:Guess"
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, cast

from actors.envs.base import Environment, EnvironmentFactory, TextTokenizer

ENTRY_POINT_GROUP = "stillhouse.environments"
BUILT_IN = {
    "single_turn": "actors.envs.single_turn:SingleTurn",
    "calculator": "actors.envs.calculator:Calculator",
}


class UnknownEnvironment(ValueError):
    """No environment of this name, or it cannot be loaded."""


def known_environments() -> dict[str, str]:
    """Name -> `module:Class`. A package cannot take a built-in name."""
    installed = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return installed | BUILT_IN


def find_environment(name: str) -> EnvironmentFactory:
    """The class behind a name or a `module:Class` path. Raises UnknownEnvironment, naming the nearest known name."""
    known = known_environments()
    path = name if ":" in name else known.get(name)
    if path is None:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        nearest = f"; did you mean {close[0]!r}?" if close else "."
        raise UnknownEnvironment(
            f"unknown environment {name!r}{nearest} Known: {', '.join(sorted(known))}. Others are named module:Class, "
            f"or by an entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownEnvironment(f"environment {name!r}: cannot load {path!r}: {error}") from error
    if not callable(factory):
        raise UnknownEnvironment(f"environment {name!r}: {path!r} is a {type(factory).__name__}, expected a class")
    return cast(EnvironmentFactory, factory)


def make_environment(name: str, tokenizer: TextTokenizer, options: Mapping[str, Any]) -> Environment:
    """A new environment for one rollout.

    Raises UnknownEnvironment, and ValueError for an option that the environment does not take, naming the nearest, or
    refuses. Try it once at start-up: a wrong configuration should fail before the first rollout."""
    factory = find_environment(name)
    parameters = inspect.signature(factory).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        allowed = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        allowed = [n for n in allowed if n != "tokenizer"]
        for option in options:
            if option not in allowed:
                close = difflib.get_close_matches(option, allowed, n=1, cutoff=0.4)
                nearest = f"; did you mean {close[0]!r}?" if close else "."
                raise ValueError(
                    f"environment {name!r} has no option {option!r}{nearest} It has: {', '.join(allowed) or 'none'}"
                )
    return factory(tokenizer, **options)
