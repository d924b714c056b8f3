"""The tally: every line of a solution is true by itself, and the answer is the last four sums."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from stillhouse.builtin.tally import tallies
from stillhouse.builtin.tokenizer import build_tokenizer


def test_each_line_continues_the_one_before_and_the_answer_is_their_end() -> None:
    for task in islice(tallies(3), 50):
        lines, answer = task.solution.split(" #")
        found = re.findall(r"([a-z])(\d)\+(\d)=(\d);", lines)
        assert "".join(f"{label}{digit}" for label, _, digit, _ in found) == task.prompt
        before = 0
        for _, old, digit, new in found:
            assert int(old) == before and (before + int(digit)) % 10 == int(new)
            before = int(new)
        assert answer == task.answer == "".join(new for *_, new in found[-4:])


def test_solutions_have_as_many_tokens_as_the_docs_say() -> None:
    tokenizer = build_tokenizer()
    lengths = {len(tokenizer.encode(task.solution, add_special_tokens=False)) for task in islice(tallies(3), 200)}
    assert (min(lengths), max(lengths)) == (7 * 12 + 5, 7 * 18 + 5)


def test_a_range_that_no_prompt_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="expected \\(lo, hi\\) with 4 <= lo"):
        next(tallies(0, terms=(3, 5)))
