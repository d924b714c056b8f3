"""A calculator the student can call, as often as its turns last.

The student writes `<calc>12+34</calc>`; the environment answers `<result>46</result>`; when the student ends its turn
without a call, the episode is over and its answer is judged as in single_turn.

Where `</calc>` is one token of the tokenizer (as in the built-in one) generation stops right behind it and the turn
goes on behind the result. Otherwise the student has to end its turn behind the call, and the result comes as a turn
of the chat.
"""

from __future__ import annotations

import re

from actors.envs.answers import ANSWER_PATTERN, AnswerCheck
from actors.envs.arithmetic import ExpressionError, evaluate
from actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer

OPEN, CLOSE = "<calc>", "</calc>"
_CALL = re.compile(re.escape(OPEN) + r"((?:(?!" + re.escape(OPEN) + r").)*?)" + re.escape(CLOSE) + r"\s*\Z", re.DOTALL)


class Calculator(Environment):
    """`answer_pattern`: as in single_turn, applied to the student's last turn. `result_role`: the chat role that gives
    results where `</calc>` is not one token."""

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
        token_ids = self._tokenizer.encode(reply) if in_turn else self._tokenizer.chat_turn(reply, self._result_role)
        return StepResult(token_ids=token_ids, info={"calculator_calls": 1.0, "calculator_errors": failed})
