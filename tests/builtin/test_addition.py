"""Problems and worked solutions: every line of every scratchpad is true, and the answer is the answer."""

from __future__ import annotations

import re
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.builtin.addition import (
    STYLES,
    Chain,
    Operator,
    Problem,
    calculator_solution,
    chains,
    distinct,
    is_correct,
    parse_prompt,
    problems,
    solution,
)

ANY_PROBLEM = st.one_of(
    st.builds(Problem, st.integers(0, 10**6), st.integers(0, 10**6)),
    st.builds(Problem, st.integers(0, 10**6), st.integers(2, 9), st.just("*")),
)


def test_the_example_of_the_task() -> None:
    problem = Problem(8293, 4758)
    assert problem.prompt == "8293+4758="
    assert solution(problem) == "3+8+0=11;9+5+1=15;2+7+1=10;8+4+1=13 #13051"


@given(ANY_PROBLEM)
def test_every_step_of_the_compact_scratchpad_is_true(problem: Problem) -> None:
    work = solution(problem).split(" #")[0]
    for step in work.split(";"):
        left, operator, right, carry, total = re.fullmatch(r"(\d+)([+*])(\d+)\+(\d+)=(\d+)", step).groups()  # type: ignore[union-attr]
        done = int(left) + int(right) if operator == "+" else int(left) * int(right)
        assert done + int(carry) == int(total)


@given(ANY_PROBLEM, st.sampled_from(sorted(STYLES)))
def test_every_style_ends_with_the_right_answer(problem: Problem, style: str) -> None:
    text = solution(problem, style)
    assert is_correct(text, problem)
    assert not is_correct(text.replace("#", "#1"), problem)
    assert not is_correct(text.replace("#", ""), problem)


@pytest.mark.parametrize("operator", ["+", "*"])
def test_a_stream_follows_its_seed_and_its_digits(operator: Operator) -> None:
    first = list(islice(problems(3, operator=operator, digits=(2, 4)), 300))
    assert first == list(islice(problems(3, operator=operator, digits=(2, 4)), 300))
    assert first != list(islice(problems(4, operator=operator, digits=(2, 4)), 300))
    lengths = [len(str(p.left)) for p in first]
    assert set(lengths) == {2, 3, 4}
    if operator == "+":
        assert lengths == [len(str(p.right)) for p in first]
    else:
        assert {p.right for p in first} == set(range(2, 10))


def test_a_stream_leaves_out_what_is_held_out() -> None:
    held_out = set(islice(problems(0, digits=(2, 2)), 500))
    assert held_out.isdisjoint(islice(problems(1, digits=(2, 2), exclude=held_out), 2_000))
    held_out_chains = set(islice(chains(0, terms=(2, 2), digits=(1, 1)), 40))
    assert held_out_chains.isdisjoint(islice(chains(1, terms=(2, 2), digits=(1, 1), exclude=held_out_chains), 500))


@pytest.mark.parametrize("digits", [(0, 2), (3, 2)])
def test_senseless_digits_are_refused(digits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 <= lo <= hi"):
        next(problems(0, digits=digits))


def test_more_distinct_problems_than_there_are_is_an_error_not_a_hang() -> None:
    assert len(set(distinct(problems(0, digits=(1, 1)), 60))) == 60
    with pytest.raises(ValueError, match="100 are needed"):
        distinct(problems(0, digits=(1, 1)), 100)


def test_a_calculator_episode_asks_reads_and_answers() -> None:
    pieces = calculator_solution(Chain((12, 34, 56)))
    assert [(p.by_model, p.text) for p in pieces] == [
        (True, "<calc>12+34</calc>"),
        (False, "<result>46</result>"),
        (True, "<calc>46+56</calc>"),
        (False, "<result>102</result>"),
        (True, " #102"),
    ]
    assert parse_prompt(Chain((12, 34, 56)).prompt) == Chain((12, 34, 56))


def test_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a prompt like"):
        parse_prompt("what is 1+1?")
