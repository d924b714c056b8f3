"""Finds environments by name: built-in ones, those of installed packages, and `module:Class`.

A module in `actors/envs/adapters` is an environment of its name: `chess.py` has `chess`, an agent or a class. A package
adds its own in its pyproject.toml:

    [project.entry-points."stillhouse.environments"]
    guess = "my_package.guess:Guess"
"""

from __future__ import annotations

import difflib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs import adapters
from stillhouse.actors.envs.adapters.shared.packages import MissingPackage
from stillhouse.actors.envs.base import Environment, EnvironmentFactory, TextTokenizer
from stillhouse.actors.rewards.registry import reward_of_row
from stillhouse.actors.row_options import declared_by, given_by_row
from stillhouse.protocol.plugins import CannotLoad, installed, load

ENTRY_POINT_GROUP = "stillhouse.environments"
_ADAPTERS = {
    module.name: f"{adapters.__name__}.{module.name}:{module.name}"
    for module in pkgutil.iter_modules(adapters.__path__)
    if not module.ispkg
}
BUILT_IN = _ADAPTERS | {
    "single_turn": "stillhouse.actors.envs.single_turn:SingleTurn",
    "calculator": "stillhouse.actors.envs.calculator:Calculator",
    "sandbox": "stillhouse.actors.envs.sandbox:sandbox",
    "openai_agent": "stillhouse.actors.envs.black_box:openai_agent",
    "command": "stillhouse.actors.envs.black_box:command",
}


class UnknownEnvironment(ValueError):
    """There is no environment of this name, or it cannot be loaded."""


def known_environments() -> dict[str, str]:
    """Name -> `module:Class`. A package cannot take a built-in name."""
    return installed(ENTRY_POINT_GROUP) | BUILT_IN


@functools.cache
def find_environment(name: str) -> EnvironmentFactory:
    """The class behind a name or a `module:Class` path. Raises UnknownEnvironment, naming the nearest known name.

    Cached, because an environment is made for every rollout, and reading the entry points of all installed packages
    takes longer than a short rollout."""
    known = known_environments()
    path = name if ":" in name else known.get(name)
    if path is None:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        nearest = f"; did you mean {close[0]!r}?" if close else "."
        raise UnknownEnvironment(
            f"unknown environment {name!r}{nearest} Known: {', '.join(sorted(known))}. Others are named module:Class, "
            f"or by an entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    try:
        factory = load(path)
    except CannotLoad as error:
        missing = isinstance(error.__cause__, MissingPackage)
        raise UnknownEnvironment(str(error.__cause__) if missing else f"environment {name!r}: {error}") from error
    if not callable(factory):
        raise UnknownEnvironment(f"environment {name!r}: {path!r} is a {type(factory).__name__}, expected a class")
    return cast(EnvironmentFactory, factory)


def check_options(name: str, options: Mapping[str, Any], *, more_in_rows: bool = False) -> EnvironmentFactory:
    """The class behind `name`, checked to accept a tokenizer and these options. A class that has a class method
    `check_options(**options)`, or an agent with one (`actors.agent.options_checked_by`), also checks their values with
    it. `more_in_rows`: rows may give what is missing, if it is declared (actors.row_options); values are then not
    checked until all are there.

    Raises UnknownEnvironment, and ValueError for an unknown option (naming the nearest known one), a missing one, or a
    value that the class refuses."""
    missing = lacking_options(name, options) if more_in_rows else ()
    if missing and {*missing} <= {*declared_by(find_environment(name))}:
        return _knowing(name, options)
    factory = _accepting(name, options)
    check_values: Callable[..., None] | None = getattr(factory, "check_options", None)
    if check_values is not None:
        check_values(**options)
    return factory


def lacking_options(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The options that the class behind `name` needs beside these. Raises UnknownEnvironment."""
    factory = find_environment(name)
    try:
        required = [p for p in inspect.signature(factory).parameters.values() if p.default is inspect.Parameter.empty]
    except (TypeError, ValueError):  # implemented in C, without a signature
        return ()
    return tuple(p.name for p in required if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in options)


def _accepting(name: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    factory = _knowing(name, options)
    try:
        inspect.signature(factory).bind(*_given(factory), **options)
    except TypeError as error:
        raise ValueError(f"environment {name!r} cannot be made with the options {dict(options)}: {error}") from error
    except ValueError:  # implemented in C, without a signature
        pass
    return factory


def _knowing(name: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    """The class behind `name`, checked to have the methods and options of these names."""
    factory = find_environment(name)
    _check_methods(name, factory)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # implemented in C, without a signature
        return factory
    parameters = list(signature.parameters.values())[len(_given(factory)) :]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        allowed = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        for option in options:
            if option not in allowed:
                close = difflib.get_close_matches(option, allowed, n=1, cutoff=0.4)
                nearest = f"; did you mean {close[0]!r}?" if close else "."
                raise ValueError(
                    f"environment {name!r} has no option {option!r}{nearest} It has: {', '.join(allowed) or 'none'}"
                )
    return factory


def _check_methods(name: str, factory: EnvironmentFactory) -> None:
    """Check that a class has the three methods as coroutines. What a factory function returns is checked later."""
    if not inspect.isclass(factory):
        return
    for method, signature in (("reset", "(self, task)"), ("step", "(self, action)"), ("close", "(self)")):
        function = inspect.unwrap(getattr(factory, method, _no_method))
        expected = f"expected `async def {method}{signature}`"
        if function is _no_method or (method != "close" and function is getattr(Environment, method)):
            raise UnknownEnvironment(f"environment {name!r} has no {method}: {expected}, see docs/environments.md")
        if inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
            raise UnknownEnvironment(
                f"environment {name!r}: its {method} is a plain function, {expected}; it may block, because "
                "each rollout has its own thread"
            )


def _no_method() -> None:
    """Placeholder for a missing method."""


def _given(factory: object) -> tuple[None, ...]:
    """Stands for the arguments that are no options: a context and a task, or a tokenizer."""
    return (None, None) if is_agent(factory) else (None,)


def is_agent(factory: object) -> bool:
    """True for a coroutine function (actors.agent), False for a class with reset and step."""
    return inspect.iscoroutinefunction(factory)


class LoadedEnvironment(NamedTuple):
    """An environment that tasks may name, imported and checked."""

    config: EnvConfig
    make: Callable[[TextTokenizer, Mapping[str, Any]], Environment]
    """Makes a new environment for one rollout, whose row has these options of its own."""
    agent: Callable[[Mapping[str, Any]], Callable[..., Any]] | None
    """In place of `make`, for an agent: the coroutine function with the options of such a row."""


def load_environments(configs: Mapping[str, EnvConfig]) -> dict[str, LoadedEnvironment]:
    """Import all configured environments, so that no task causes an import. Raises what `check_options` raises, or
    whatever a module raises."""
    for config in configs.values():
        check_options(config.name, config.options, more_in_rows=True)
    return {
        name: LoadedEnvironment(
            config,
            functools.partial(_make, config),
            functools.partial(_agent, config) if is_agent(find_environment(config.name)) else None,
        )
        for name, config in configs.items()
    }


def _make(config: EnvConfig, tokenizer: TextTokenizer, row_options: Mapping[str, Any]) -> Environment:
    return make_environment(config.name, tokenizer, options_of_row(config.options, row_options, config.name))


def _agent(config: EnvConfig, row_options: Mapping[str, Any]) -> Callable[..., Any]:
    options = options_of_row(config.options, row_options, config.name)
    return functools.partial(_accepting(config.name, options), **options)


def options_of_row(configured: Mapping[str, Any], of_row: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """The configured options of the environment `name`, with those of a row over them. None in a row changes nothing.

    Raises RowRefused for an option that the environment, or its reward, does not declare as a row's to set; without a
    name that is any. Raises UnknownEnvironment."""
    if not any(value is not None for value in of_row.values()):
        return dict(configured)
    factory = find_environment(name) if name else None
    given = given_by_row(of_row, factory, f"environment {name!r}" if name else "an environment")
    return {**configured, **given, **(reward_of_row(configured, given) if "reward" in declared_by(factory) else {})}


def make_environment(name: str, tokenizer: TextTokenizer, options: Mapping[str, Any]) -> Environment:
    """A new environment for one rollout.

    Raises what `check_options` raises, and ValueError for options that the environment refuses."""
    return _accepting(name, options)(tokenizer, **options)
