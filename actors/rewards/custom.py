"""A reward that is a function of the user's own, plain or async: `module:function`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from stillhouse.actors.rewards.base import Answered, Reward, Verdict, unscored


def custom_reward(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Reward:
    """`function(answered, **options)` gives a number, None where there is nothing to judge, or a Verdict. It
    runs on the rollout's own thread, where it may block."""

    async def judged(answered: Answered) -> Verdict:
        given: object = function(answered, **options)
        if inspect.isawaitable(given):
            given = await given
        return _checked(name, given)

    return judged


def _checked(name: str, given: object) -> Verdict:
    """Raises TypeError for a result that is no reward."""
    if given is None:
        return unscored("by_function")
    if isinstance(given, Verdict):
        if given.reward is None:
            return Verdict(None, {"reward_unscored": 1.0, **given.info})
        return given._replace(reward=_number(name, given.reward))
    return Verdict(_number(name, given))


def _number(name: str, value: object) -> float:
    expected = "expected a number, None or a Verdict"
    if isinstance(value, str | bytes):
        raise TypeError(f"reward {name!r} gave {value[:60]!r}, {expected}")
    try:
        return float(cast(Any, value))  # one that is not finite leaves the rollout unscored
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise TypeError(f"reward {name!r} gave a {type(value).__name__}, {expected}") from None
