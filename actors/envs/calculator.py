"""A calculator the student can call, as often as its turns last.

The student writes `<calc>12+34</calc>`; the environment answers `<result>46</result>`. When the student ends its turn
without a call, the episode is over and its answer is judged as in single_turn.

Where `</calc>` is one token of the tokenizer (as in the built-in one), generation stops right after it and the turn
continues after the result. Otherwise the student has to end its turn after the call, and the result comes as a turn
of the chat.

Expressions are evaluated exactly (fractions), and bounded in length, depth and size, so that no text can make it slow.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.actors.rewards.answer import ANSWER_PATTERN, AnswerCheck

OPEN, CLOSE = "<calc>", "</calc>"
_CALL = re.compile(re.escape(OPEN) + r"((?:(?!" + re.escape(OPEN) + r").)*?)" + re.escape(CLOSE) + r"\s*\Z", re.DOTALL)


class Calculator(Environment):
    """`answer_pattern`: as in single_turn, applied to the student's last turn. `result_role`: the chat role of results
    where `</calc>` is not one token."""

    row_options = ("answer_pattern", "result_role")

    def __init__(
        self, tokenizer: TextTokenizer, *, answer_pattern: str = ANSWER_PATTERN, result_role: str = "user"
    ) -> None:
        self._tokenizer = tokenizer
        self._check = AnswerCheck(answer_pattern)
        self._result_role = result_role
        self._close_id = tokenizer.single_token(CLOSE)
        self._ground_truth: str | None = None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return () if self._close_id is None else (self._close_id,)

    async def reset(self, task: EnvTask) -> Observation:
        self._ground_truth = task.ground_truth
        return Observation()

    async def step(self, action: Action) -> StepResult:
        call = _CALL.search(action.text)
        if call is None or action.last:
            return StepResult(done=True, reward=self._check.reward(action.text, self._ground_truth))
        try:
            result, failed = evaluate(call.group(1)), 0.0
        except ExpressionError as error:
            result, failed = f"error: {error}", 1.0
        reply = f"<result>{result}</result>"
        in_turn = self._close_id is not None and int(action.token_ids[-1]) == self._close_id
        if in_turn:
            token_ids = self._tokenizer.encode(reply, behind=action.token_ids)
        else:
            token_ids = self._tokenizer.chat_turn(reply, self._result_role)
        return StepResult(token_ids=token_ids, info={"calculator_calls": 1.0, "calculator_errors": failed})


MAX_CHARACTERS = 200
MAX_DIGITS = 60
"""Most digits of a numerator or denominator, also in intermediate results."""
DECIMALS = 6
"""Decimal places to which results are rounded."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class ExpressionError(ValueError):
    """The expression cannot be evaluated; the message is short enough to show to a model."""


def evaluate(expression: str) -> str:
    """The value of an expression as text: `46`, `-3`, `0.333333`. Raises ExpressionError."""
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
        # From the text, not from the float, so that 0.1 is exactly 1/10.
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
