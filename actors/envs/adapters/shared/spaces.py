"""Gymnasium's spaces in words: what an observation is, and which action the student names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from stillhouse.actors.envs.adapters.shared.packages import import_package

_spaces = import_package("gymnasium", environment="gymnasium", package="gymnasium", extra="gymnasium").spaces

LISTED: Final = 8
"""Most numbers of a space that are described one by one."""
MAX_CHARACTERS: Final = 4000
"""Length of the end of a turn in which an action is looked for."""
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")


def describe(space: Any) -> str:
    """A space in words, e.g. `a whole number from 0 to 3`."""
    match space:
        case _spaces.Discrete():
            return f"a whole number {_range(space.start, space.start + space.n - 1)}"
        case _spaces.MultiDiscrete():
            lows, highs = space.start.ravel(), space.start.ravel() + space.nvec.ravel() - 1
            return _numbers("whole numbers", lows.tolist(), highs.tolist())
        case _spaces.MultiBinary():
            return f"{int(np.prod(space.shape))} numbers, each 0 or 1"
        case _spaces.Box():
            return _numbers("numbers", space.low.ravel().tolist(), space.high.ravel().tolist())
        case _spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters out of {space.characters!r}"
        case _spaces.Dict():
            parts = (f"{json.dumps(name)}: {describe(part)}" for name, part in space.spaces.items())
            return f"a JSON object with {'; '.join(parts)}"
        case _spaces.Tuple():
            return f"a JSON list of {'; '.join(describe(part) for part in space.spaces)}"
        case _:
            return str(space)


def _range(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return "of any size"
    if math.isinf(low) or math.isinf(high):
        return f"of at most {_short(high)}" if math.isinf(low) else f"of at least {_short(low)}"
    return f"from {_short(low)} to {_short(high)}"


def _numbers(what: str, lows: Sequence[float], highs: Sequence[float]) -> str:
    ranges = [_range(low, high) for low, high in zip(lows, highs, strict=True)]
    if len(ranges) == 1:
        return f"a {what.removesuffix('s')} {ranges[0]}"
    if len(set(ranges)) == 1:
        return f"{len(ranges)} {what}, each {ranges[0]}"
    if len(ranges) <= LISTED:
        return f"{len(ranges)} {what}: {', '.join(ranges)}"
    return f"{len(ranges)} {what} {_range(min(lows), max(highs))}"


def _short(number: float) -> str:
    """At most four decimals, and none for a whole number; exponents only for what would be long."""
    if abs(number) >= 1e12:
        return f"{number:.4g}"
    return f"{round(float(number), 4):.4f}".rstrip("0").rstrip(".")


def show(space: Any, value: Any) -> str:
    """A value of a space as text; numbers with at most four decimals."""
    match space:
        case _spaces.Dict():
            return ", ".join(f"{name}: {show(part, value[name])}" for name, part in space.spaces.items())
        case _spaces.Tuple():
            return ", ".join(show(part, one) for part, one in zip(space.spaces, value, strict=True))
        case _spaces.Discrete():
            return str(int(value))
        case _spaces.Box() | _spaces.MultiDiscrete() | _spaces.MultiBinary():
            return _rows(np.asarray(value))
        case _:
            return str(value)


def _rows(values: Any) -> str:
    if values.ndim == 0:
        return _short(float(values))
    return f"[{', '.join(_rows(row) for row in values)}]"


class Actions:
    """The actions of a space, as the student names them.

    `names`: of the actions of a Discrete space, in order. `find`: what finds an action's text in a turn; None: the last
    name or number for Discrete, the last numbers for lists of them, the last JSON value for Dict and Tuple, the whole
    turn for Text. Raises ValueError for a space that cannot be written, or as many names as do not fit."""

    def __init__(self, space: Any, names: Sequence[str] = (), find: Callable[[str], str | None] | None = None) -> None:
        self._space = space
        self._find = find
        self._names = {name.lower(): i for i, name in enumerate(names)}
        if names and not (isinstance(space, _spaces.Discrete) and len(self._names) == space.n):
            raise ValueError(f"action_names: got {list(names)} for {space}, expected one name for each action")
        if not _writable(space):
            raise ValueError(f"actions of {space} cannot be written: expected {', '.join(WRITABLE)} or parts of these")
        words = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        self._named = re.compile(rf"(?<![\w.-])({words}{'|' if words else ''}-?\d+)(?!\w|\.\d)", re.IGNORECASE)
        self.expected = self._listed(names) if names else describe(space)
        """What the student may write, in words."""

    def _listed(self, names: Sequence[str]) -> str:
        numbered = [f"{name} ({self._space.start + i})" for i, name in enumerate(names)]
        return f"{', '.join(numbered[:-1])} or {numbered[-1]}" if len(numbered) > 1 else numbered[0]

    def read(self, turn: str) -> Any:
        """The action that a turn names last, or None where it names none or an impossible one."""
        text = turn if self._find is None else self._find(turn)
        try:
            action = None if text is None else self._action(text[-MAX_CHARACTERS:])
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        return action if action is not None and self._space.contains(action) else None

    def _action(self, text: str) -> Any:
        match self._space:
            case _spaces.Discrete():
                words = self._named.findall(text)
                if not words:
                    return None
                place = self._names.get(words[-1].lower())
                return np.int64(int(words[-1]) if place is None else self._space.start + place)
            case _spaces.Text():
                return text.strip()
            case _spaces.Dict() | _spaces.Tuple():
                return _from_json(self._space, _last_json(text, "{" if isinstance(self._space, _spaces.Dict) else "["))
            case _:
                wanted = int(np.prod(self._space.shape))
                numbers = _NUMBER.findall(text)[-wanted:]
                return _array(self._space, [float(number) for number in numbers])


WRITABLE: Final = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text", "Dict", "Tuple")


def _writable(space: Any) -> bool:
    parts: list[Any] = []
    if isinstance(space, _spaces.Dict | _spaces.Tuple):
        inner = space.spaces
        parts = list(inner.values() if isinstance(inner, Mapping) else inner)
    return type(space).__name__ in WRITABLE and all(map(_writable, parts))


def _array(space: Any, values: object) -> Any:
    """Numbers in the shape and type of a space. Raises ValueError for others, also for 1.5 where it has whole ones."""
    numbers = np.asarray(values, dtype=np.float64).reshape(space.shape)
    if np.issubdtype(space.dtype, np.integer) and not np.array_equal(numbers, np.round(numbers)):
        raise ValueError("whole numbers are expected")
    return numbers.astype(space.dtype)


def _last_json(text: str, opening: str) -> object:
    """The last JSON value in a text that begins with `opening` and is not part of another. Raises ValueError."""
    decoder, at, found = json.JSONDecoder(), text.find(opening), cast(object, None)
    while at >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find(opening, end)
    if found is None:
        raise ValueError("no JSON value")
    return found


def _from_json(space: Any, value: Any) -> Any:
    match space:
        case _spaces.Dict():
            return {name: _from_json(part, value[name]) for name, part in space.spaces.items()}
        case _spaces.Tuple():
            return tuple(_from_json(part, one) for part, one in zip(space.spaces, value, strict=True))
        case _spaces.Discrete():
            return np.int64(value) if isinstance(value, int) else value
        case _spaces.Text():
            return value
        case _:
            return _array(space, value)
