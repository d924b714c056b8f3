"""A safe evaluator for the arithmetic that a model writes: numbers, + - * / // % and parentheses, nothing else.

Exact (fractions), and bounded in length, depth and size, so that no text can make it slow.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DIGITS = 60
"""Of a result's numerator or denominator, intermediate ones too."""
DECIMALS = 6
"""Results that are not whole are rounded to so many."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class ExpressionError(ValueError):
    """Not an expression that can be worked out; the message is short enough to show to a model."""


def evaluate(expression: str) -> str:
    """The value as text: `46`, `-3`, `0.333333`. Raises ExpressionError."""
    if len(expression) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError("not an expression") from error
    return _as_text(_value(tree.body, expression.strip()))


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, source), _value(node.right, source)
        try:
            return _bounded(_BINARY[type(node.op)](left, right))
        except ZeroDivisionError as error:
            raise ExpressionError("division by zero") from error
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, source)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # From the text, not from the float: 0.1 is exactly 1/10 then.
        literal = (ast.get_source_segment(source, node) or "").replace("_", "")
        if set(literal) <= set("0123456789."):
            return _bounded(Fraction(literal))
    raise ExpressionError("only numbers, + - * / // % and parentheses")


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ExpressionError(f"more than {MAX_DIGITS} digits")
    return value


def _as_text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**DECIMALS)
    whole, decimals = divmod(abs(scaled), 10**DECIMALS)
    text = f"{whole}.{decimals:0{DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text
