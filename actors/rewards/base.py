"""What a reward gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class Answered:
    """A response to judge, and what it responds to."""

    response: str
    """The student's text, without special tokens."""
    ground_truth: str | None = None
    prompt: str = ""
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All columns of the prompt's row."""


class Verdict(NamedTuple):
    """What a reward says."""

    reward: float | None
    """None: unscored. That is not 0: nobody says that the response is wrong."""
    info: Mapping[str, float] = {}
    """What is counted about it, by name."""


Reward: TypeAlias = Callable[[Answered], Coroutine[Any, Any, Verdict]]
"""Judges one response. It is shared by all rollouts of an actor, which call it from their threads and event loops."""


def unscored(reason: str) -> Verdict:
    """No reward, counted under this reason."""
    return Verdict(None, {"reward_unscored": 1.0, f"reward_unscored_{reason}": 1.0})
