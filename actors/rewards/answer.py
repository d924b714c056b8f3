"""The reward `answer`: the last match of a pattern is compared with the ground truth, or with the last match in it, as
a number where both are numbers, else as text."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Final

from stillhouse.actors.rewards.base import Answered, Reward, Verdict, unscored
from stillhouse.actors.rewards.pattern import BoundedPattern
from stillhouse.actors.row_options import row_may_set

ANSWER_PATTERN = r"#\s*(-?[\d.,]+)"
"""Matches the number after a `#`: `#13051`, or `#### 1,234.` as in GSM8K."""
_FOUND: Final = re.compile(r"-?[\d.,]+")
"""All that this pattern may find."""
TIMEOUT_S: Final = 1.0
"""Longest search for a pattern in one text."""


@row_may_set("answer_pattern")
def answer_reward(answer_pattern: str = ANSWER_PATTERN) -> Reward:
    """`answer_pattern`: a regular expression with one group, the answer."""
    check = AnswerCheck(answer_pattern)

    async def judged(answered: Answered) -> Verdict:
        try:
            return Verdict(check.reward(answered.response, answered.ground_truth))
        except TimeoutError:
            return unscored("pattern_timeout")

    return judged


def why_unreadable(answered: Answered, *, answer_pattern: str = ANSWER_PATTERN) -> str:
    """Why no answer could ever equal the ground truth; empty: one can, or there is none. Of patterns other than the
    default nobody can say it."""
    expected = answered.ground_truth
    if expected is None or answer_pattern != ANSWER_PATTERN or _number(expected) is not None:
        return ""
    if _FOUND.fullmatch(expected.strip()) or _DEFAULT.find(expected) is not None:
        return ""
    return f"ground_truth: got {expected!r:.80}, expected a number, or a text with one behind a '#', as in '#### 72'"


answer_reward.why_unreadable = why_unreadable  # pyright: ignore[reportFunctionMemberAccess]


class AnswerCheck:
    """Compares the last match of a pattern with the ground truth, or with the last match in that.

    `pattern` is a regular expression with exactly one group, the answer. Raises ValueError otherwise. A search of more
    than TIMEOUT_S raises TimeoutError, which fails the rollout of an environment that does not expect it."""

    def __init__(self, pattern: str = ANSWER_PATTERN) -> None:
        self._pattern = BoundedPattern(pattern, TIMEOUT_S, option="answer_pattern", groups=1)

    def find(self, text: str) -> str | None:
        """The last answer written, or None. Raises TimeoutError."""
        return self._pattern.last_group_here(text)

    def reward(self, text: str, ground_truth: str | None) -> float | None:
        """1.0 if right, 0.0 if wrong or missing, None without ground truth. Raises TimeoutError."""
        if ground_truth is None:
            return None
        answer = self.find(text)
        if answer is None or same_answer(answer, ground_truth):
            return float(answer is not None)
        expected = self.find(ground_truth)
        return float(expected is not None and same_answer(answer, expected))


_DEFAULT: Final = AnswerCheck()


def same_answer(left: str, right: str) -> bool:
    """Equal as numbers (`1,234.` = `1234`), or else as text without surrounding space."""
    left_number, right_number = _number(left), _number(right)
    if left_number is not None and right_number is not None:
        return left_number == right_number
    return left.strip() == right.strip()


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().rstrip(".").replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
