"""The tally: a task with long answers, to measure methods of distillation on (docs/results/claims.md). No torch.

    prompt      a3b5c4d2
    solution    a0+3=3;b3+5=8;c8+4=2;d2+2=4; #3824

The prompt has labelled digits. The solution has a line per label, in their order: the tally so far, the digit, and
their sum modulo 10, which is the tally from then on. After `#` come the last four tallies, so a mistake in any line is
nearly always one in the answer, too, and a guess is hardly ever right.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from string import ascii_letters
from typing import Final

ANSWER_DIGITS: Final = 4
DIGITS: Final = (1, 5)
"""Smallest and largest digit. Small models learn these 50 sums in minutes; all 100 took several times as long."""
TERMS: Final = (12, 18)
"""Fewest and most digits of a prompt; an answer takes 7 tokens for each, and 6."""
LONG_TERMS: Final = (28, 42)
"""The same of long tallies."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Digits to add up."""

    digits: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "".join(f"{label}{digit}" for label, digit in zip(ascii_letters, self.digits, strict=False))

    @property
    def sums(self) -> list[int]:
        """The tally after each digit."""
        return [total % 10 for total in accumulate(self.digits)]

    @property
    def answer(self) -> str:
        return "".join(map(str, self.sums[-ANSWER_DIGITS:]))

    @property
    def solution(self) -> str:
        before = [0, *self.sums[:-1]]
        rows = zip(ascii_letters, before, self.digits, self.sums, strict=False)
        return "".join(f"{label}{old}+{digit}={new};" for label, old, digit, new in rows) + f" #{self.answer}"


def tallies(seed: int, *, terms: tuple[int, int] = TERMS, exclude: Collection[Tally] = ()) -> Iterator[Tally]:
    """Endless stream of tasks; the number of digits is uniform in `terms`. The same arguments give the same stream.
    Raises ValueError unless ANSWER_DIGITS <= lo <= hi <= 52."""
    lo, hi = terms
    if not ANSWER_DIGITS <= lo <= hi <= len(ascii_letters):
        raise ValueError(f"terms: got {terms}, expected (lo, hi) with {ANSWER_DIGITS} <= lo <= hi <= 52")
    rng = random.Random(seed)
    while True:
        task = Tally(tuple(rng.randint(*DIGITS) for _ in range(rng.randint(lo, hi))))
        if task not in exclude:
            yield task
