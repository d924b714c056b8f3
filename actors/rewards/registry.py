"""Finds rewards by name, checks their options and makes them."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from stillhouse.actors.rewards.base import Answered, Reward
from stillhouse.actors.rewards.custom import custom_reward
from stillhouse.actors.row_options import RowRefused, declared_by, given_by_row, refuse_undeclared
from stillhouse.protocol.plugins import CannotLoad, load

BUILT_IN: Final = {
    "answer": "stillhouse.actors.rewards.answer:answer_reward",
    "math": "stillhouse.actors.rewards.checked:math_reward",
    "pattern": "stillhouse.actors.rewards.pattern:pattern_reward",
    "json_schema": "stillhouse.actors.rewards.checked:json_schema_reward",
    "ifeval": "stillhouse.actors.rewards.checked:ifeval_reward",
    "code": "stillhouse.actors.rewards.code:code_reward",
    "judge": "stillhouse.actors.rewards.judge:judge_reward",
}
ROWS_MAY_NAME: Final = frozenset({"answer", "math", "pattern", "json_schema", "ifeval"})
"""Rewards that a row may ask for where another one is configured: they run no program and ask no server."""


class UnknownReward(ValueError):
    """There is no reward of this name, or it cannot be loaded."""


def known_rewards() -> tuple[str, ...]:
    return tuple(sorted(BUILT_IN))


def make_reward(name: str, **options: Any) -> Reward:
    """The reward behind a name, or behind the `module:function` of a function of one's own, with these options.

    Raises UnknownReward, and ValueError for an unknown option (naming the nearest known one), a missing one, or a value
    that the reward refuses."""
    try:
        key = json.dumps(options, sort_keys=True)
    except TypeError:
        return _make(name, options)  # an object that no configuration can hold
    return _shared(name, key)


@functools.lru_cache(maxsize=256)
def _shared(name: str, options: str) -> Reward:
    """Cached, because each rollout asks for its reward, and compiling a schema takes longer than judging by it."""
    return _make(name, json.loads(options))


def why_unreadable(name: str, options: Mapping[str, Any]) -> Callable[[Answered], str] | None:
    """A function that says why this reward can never judge a row, by its ground truth and columns (of an empty
    response); None: it depends on nothing that could be wrong. Raises UnknownReward."""
    reads = getattr(_loaded(name, BUILT_IN.get(name, name)), "why_unreadable", None)
    return None if reads is None else functools.partial(reads, **options)


def reward_of_row(configured: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`reward` and `reward_options` for a row that gives these options, over what is configured.

    A row's options come over the configured ones of the same reward. Raises RowRefused for a reward or an option that
    is the configuration's alone, and ValueError for what is none."""
    own = configured.get("reward", "answer")
    name = given.get("reward", own)
    if not isinstance(name, str) or name not in {own, *ROWS_MAY_NAME}:
        expected = ", ".join(sorted(ROWS_MAY_NAME))
        raise RowRefused(f"reward: a row may not name {name!r:.80}; expected the configured {own!r}, or {expected}")
    options = given.get("reward_options", {})
    if not isinstance(options, Mapping):
        raise ValueError(f"reward_options: got {options!r:.60}, expected a table of options")
    function = _loaded(name, BUILT_IN.get(name, name))
    if "answer_pattern" in given:
        refuse_undeclared(("answer_pattern",), declared_by(function), f"reward {name!r}")
    of_row = given_by_row(cast("Mapping[str, Any]", options), function, f"reward {name!r}")
    before = configured.get("reward_options") or {} if name == own else {}
    mine = {"reward": name, "reward_options": {**before, **of_row}}
    return {**mine, "rewards": {}} if "reward" in given and configured.get("rewards") else mine


def _make(name: str, options: Mapping[str, Any]) -> Reward:
    if ":" in name:
        function = _loaded(name, name)
        _check_names(name, list(inspect.signature(function).parameters.values())[1:], options)
        return custom_reward(name, function, options)
    if name not in BUILT_IN:
        close = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.4)
        nearest = f"; did you mean {close[0]!r}?" if close else "."
        known = ", ".join(known_rewards())
        raise UnknownReward(f"unknown reward {name!r}{nearest} Known: {known}. Others are named module:function")
    maker = _loaded(name, BUILT_IN[name])
    _check_names(name, list(inspect.signature(maker).parameters.values()), options)
    try:
        return maker(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward {name!r}: {error}") from error


def _loaded(name: str, path: str) -> Callable[..., Any]:
    try:
        found = load(path)
    except CannotLoad as error:
        raise UnknownReward(f"reward {name!r}: {error}") from error
    if not inspect.isfunction(found):
        raise UnknownReward(f"reward {name!r}: {path!r} is a {type(found).__name__}, expected a function")
    return found


def _check_names(name: str, parameters: list[inspect.Parameter], options: Mapping[str, Any]) -> None:
    """Check that a function takes these keyword arguments, and is given all that it needs."""
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    allowed = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    for option in options:
        if option not in allowed and not takes_any:
            close = difflib.get_close_matches(option, allowed, n=1, cutoff=0.4)
            nearest = f"; did you mean {close[0]!r}?" if close else "."
            known = ", ".join(allowed) or "none"
            raise ValueError(f"reward {name!r} has no option {option!r}{nearest} It has: {known}")
    missing = [key for key, p in allowed.items() if p.default is inspect.Parameter.empty and key not in options]
    if missing:
        raise ValueError(f"reward {name!r} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}")
