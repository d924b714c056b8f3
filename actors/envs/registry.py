"""Environments by name: the built-in ones, those that installed packages name, and `module:Class`.

A package adds its own in its pyproject.toml:

    [project.entry-points."stillhouse.environments"]
    guess = "my_package.guess:Guess"
"""

from __future__ import annotations

import difflib
import functools
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


@functools.cache
def find_environment(name: str) -> EnvironmentFactory:
    """The class behind a name or a `module:Class` path. Raises UnknownEnvironment, naming the nearest known name.

    Remembered: an environment is made for every rollout, and reading the entry points of all installed packages takes
    longer than a short rollout."""
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


def check_options(name: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    """The class behind `name`, once it is sure that it can be called with a tokenizer and these options.

    Raises UnknownEnvironment, and ValueError for an option that the environment does not take, naming the nearest, or
    one that it needs and did not get."""
    factory = find_environment(name)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C, without a signature
        return factory
    parameters = signature.parameters.values()
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
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ValueError(f"environment {name!r} cannot be made with the options {dict(options)}: {error}") from error
    return factory


def make_environment(name: str, tokenizer: TextTokenizer, options: Mapping[str, Any]) -> Environment:
    """A new environment for one rollout.

    Raises UnknownEnvironment, and ValueError for options that the environment does not take (see `check_options`) or
    refuses."""
    return check_options(name, options)(tokenizer, **options)
