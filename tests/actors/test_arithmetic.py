"""The calculator's evaluator: exact, and safe with any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.actors.envs.calculator import ExpressionError, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34", "46"),
        (" 2 * (3 - 5) ", "-4"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("-1/8", "-0.125"),
        ("6/3", "2"),
        ("-1/10000000", "0"),
        ("99999999999999999999+1", "100000000000000000000"),
    ],
)
def test_values_are_exact(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "2**9", "9" * 300, "(" * 150 + "1" + ")" * 150, "1e999", "abs(1)", "x", "1,2", "True", "1j", "'a'*9",
     "*".join(["9" * 20] * 9), "1%0", "\x00", "[1][0]"],
)  # fmt: skip
def test_anything_else_is_an_expression_error(expression: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/%(). \n", max_size=40))
def test_any_text_gives_a_number_or_an_expression_error(text: str) -> None:
    try:
        value = evaluate(text)
    except ExpressionError:
        return
    assert value.lstrip("-").replace(".", "", 1).isdigit()


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_sums_agree_with_python(left: int, right: int) -> None:
    assert evaluate(f"{left}+{right}") == str(left + right)
