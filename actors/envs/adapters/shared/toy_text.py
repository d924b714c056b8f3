"""Gymnasium's toy_text games in words: rules, names of the actions, and what an observation means."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_COLOURED: Final = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE: Final = re.compile(r"\x1b\[[\d;]*m")


MARK: Final = "x"
"""Where the student is, in pictures of these games."""


class Game(NamedTuple):
    """What a student needs to know."""

    rules: str
    actions: tuple[str, ...]
    """Names, by number."""
    in_words: Callable[[Any, Any], str]
    """The game (unwrapped) and an observation -> what is to be seen."""


def picture(drawn: str, *, mark: str = "") -> str:
    """A drawing for terminals as plain text. `mark`: a character that replaces what is marked by its background."""

    def plain(match: re.Match[str]) -> str:
        marked = any(code.startswith("4") and len(code) == 2 for code in match[1].split(";"))
        return mark * len(match[2]) if marked and mark else match[2]

    return _ESCAPE.sub("", _COLOURED.sub(plain, drawn)).strip("\n")


def _on_grid(columns: int, observation: Any) -> str:
    row, column = divmod(int(observation), columns)
    return f"You are in row {row}, column {column}."


def _frozen_lake(game: Any, observation: Any) -> str:
    return _on_grid(int(game.ncol), observation)


def _cliff(game: Any, observation: Any) -> str:
    return _on_grid(int(game.shape[1]), observation)


_STOPS: Final = ("R", "G", "Y", "B")


def _taxi(game: Any, observation: Any) -> str:
    row, column, passenger, destination = (int(part) for part in game.decode(int(observation)))
    where = "in the taxi" if passenger == len(_STOPS) else f"at {_STOPS[passenger]}"
    return f"Taxi: row {row}, column {column}. Passenger: {where}. Destination: {_STOPS[destination]}."


def _blackjack(_game: Any, observation: Any) -> str:
    own, dealers, ace = (int(part) for part in observation)
    usable = " with an ace that counts 11" if ace else ""
    return f"Your cards: {own}{usable}. The dealer shows {dealers}."


_LAKE = Game(
    "Cross the frozen lake from S to G. F is ice; a hole H ends the game, and so does G, which alone gives a reward. "
    "x is where you are. Rows and columns count from 0, from the top left. The ice may be slippery.",
    ("left", "down", "right", "up"),
    _frozen_lake,
)
GAMES: Final = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": Game(
        "Walk from the bottom left to T at the bottom right; x is where you are. Each step costs 1; the cliff C costs "
        "100 and sends you back to the start. Rows and columns count from 0, from the top left.",
        ("up", "right", "down", "left"),
        _cliff,
    ),
    "Taxi": Game(
        "Drive to the passenger, pick them up, drive to the destination and drop them off. Stops: R in row 0, column "
        "0; G in row 0, column 4; Y in row 4, column 0; B in row 4, column 3. A wall | cannot be crossed, : can. "
        "x is the taxi. A step costs 1, a wrong pickup or dropoff 10; the right dropoff gives 20.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _taxi,
    ),
    "Blackjack": Game(
        "Get closer to 21 than the dealer without going over. An ace counts 1 or 11; pictures count 10.",
        ("stick", "hit"),
        _blackjack,
    ),
}
"""By the name in the id, without version."""
