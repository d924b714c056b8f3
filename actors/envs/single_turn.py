"""One prompt, one turn: the answer in the student's text is right (1) or wrong (0), or there is nothing to compare."""

from __future__ import annotations

from actors.envs.answers import ANSWER_PATTERN, AnswerCheck
from actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer


class SingleTurn(Environment):
    """`answer_pattern`: a regular expression with one group; its last match is compared with the ground truth."""

    def __init__(self, tokenizer: TextTokenizer, *, answer_pattern: str = ANSWER_PATTERN) -> None:
        self._check = AnswerCheck(answer_pattern)
        self._ground_truth: str | None = None

    async def reset(self, task: EnvTask) -> Observation:
        self._ground_truth = task.ground_truth
        return Observation()

    async def step(self, action: Action) -> StepResult:
        return StepResult(done=True, reward=self._check.reward(action.text, self._ground_truth))
