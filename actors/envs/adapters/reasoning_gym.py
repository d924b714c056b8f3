"""Tasks of the package reasoning_gym (tried: 0.1.25), which makes and scores them (docs/agents/reasoning_gym.md).

One turn: the prompt holds the question of one entry of a data set, and the data set's own checker scores the answer.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from stillhouse.actors.envs.adapters.shared.chat import own_prompt, whole_number
from stillhouse.actors.envs.adapters.shared.packages import import_package
from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.actors.rewards.answer import AnswerCheck

_package = import_package("reasoning_gym", environment="reasoning_gym", package="reasoning-gym", extra="reasoning-gym")

ANSWER_PATTERN: Final = r"(?s)<answer>((?:(?!<answer>).)*?)</answer>"
INSTRUCTIONS: Final = "Write the final answer between <answer> and </answer>."
QUESTION_PLACE: Final = "{question}"
"""Stands for the question in a row's prompt; without it the question follows the prompt."""
EVALUATES_ANSWERS: Final = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets whose checker runs `eval` on the answer, by itself or in sympy: the student's text is run as Python."""


class ReasoningGym(Environment):
    """`dataset`: a name of the package, e.g. chain_sum. `config`: its settings; `seed` among them is 0 if not given.
    `size`: how many entries it has; None: as many as the package says. `instructions`: follow the question; empty:
    none. `answer_pattern`: a regular expression with one group; its last match is the answer. `rewrite`: pairs of a
    regular expression and what replaces it, applied to the question in this order. `allow_eval`: also data sets whose
    checker runs the student's answer as Python."""

    row_options = ("dataset", "instructions", "answer_pattern")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        dataset: str,
        config: Mapping[str, Any] | None = None,
        size: int | None = None,
        instructions: str = INSTRUCTIONS,
        answer_pattern: str = ANSWER_PATTERN,
        rewrite: Sequence[Sequence[str]] = (),
        allow_eval: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._instructions = instructions
        self._answers = AnswerCheck(answer_pattern)
        self._rewrite = _pairs(rewrite)
        settings = {"seed": 0} | dict(config or {}) | ({} if size is None else {"size": size})
        _check_trusted(dataset, settings, allow_eval)
        self._dataset = _dataset(dataset, json.dumps(settings, sort_keys=True))
        self._entry: dict[str, Any] = {}

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Make the data set, as for a rollout. Raises ValueError for options with which it cannot be made."""
        cls(cast(TextTokenizer, None), **options)

    async def reset(self, task: EnvTask) -> Observation:
        self._entry = self._dataset.entry(self._index(task))
        question = str(self._entry["question"])
        for pattern, replacement in self._rewrite:
            question = pattern.sub(replacement, question)
        text = "\n\n".join(part for part in (question, self._instructions) if part)
        return Observation(prompt_ids=own_prompt(self._tokenizer, task.row, text, place=QUESTION_PLACE))

    def _index(self, task: EnvTask) -> int:
        """The entry that a row names by its index, or else by its seed; without either, the rollout's seed does."""
        index, seed = whole_number(task.row, "index"), whole_number(task.row, "seed")
        if index is None:
            return (task.seed if seed is None else seed) % self._dataset.size
        if index >= self._dataset.size:
            raise ValueError(f"the row has index = {index}, expected one below the size {self._dataset.size}")
        return index

    async def step(self, action: Action) -> StepResult:
        answer = self._answers.find(action.text)
        if answer is None:
            return StepResult(done=True, reward=0.0, info={"reasoning_gym_unanswered": 1.0})
        try:
            reward = float(self._dataset.score(answer.strip(), self._entry))
        except Exception:  # some checkers fail on text that is no answer
            return StepResult(done=True, reward=0.0, info={"reasoning_gym_checker_errors": 1.0})
        return StepResult(done=True, reward=reward)


reasoning_gym = ReasoningGym


class _Dataset:
    """One data set, shared by all rollouts of an actor."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._lock = threading.Lock()
        self.size = len(made)

    def entry(self, index: int) -> dict[str, Any]:
        with self._lock:  # some keep notes while they make an entry
            return self._made[index]

    def score(self, answer: str, entry: dict[str, Any]) -> float:
        return self._made.score_answer(answer=answer, entry=entry)


@functools.lru_cache(maxsize=64)
def _dataset(name: str, settings: str) -> _Dataset:
    """Cached, because some data sets read files when they are made. Raises ValueError."""
    known = _package.factory.DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        nearest = f"; did you mean {close[0]!r}?" if close else f". Known: {', '.join(sorted(known))}"
        raise ValueError(f"dataset: unknown data set {name!r}{nearest}")
    try:
        return _Dataset(_package.create_dataset(name, **json.loads(settings)))
    except Exception as error:
        raise ValueError(f"dataset {name!r} cannot be made with {settings}: {type(error).__name__}: {error}") from error


def _check_trusted(name: str, settings: Mapping[str, Any], allow_eval: bool) -> None:
    """Refuse data sets that run what the student wrote, also as parts of a composite one."""
    parts = settings.get("datasets", ()) if name == "composite" else ()
    names = [name, *(str(part.get("name")) for part in parts)]
    if not allow_eval and (running := sorted(EVALUATES_ANSWERS & set(names))):
        raise ValueError(
            f"the checker of {', '.join(running)} runs the student's answer as Python code (eval); "
            "where that can do no harm, set allow_eval = true"
        )


def _pairs(rewrite: Sequence[Sequence[str]]) -> list[tuple[re.Pattern[str], str]]:
    """Raises ValueError for anything but pairs of a regular expression and a text."""
    pairs: list[tuple[re.Pattern[str], str]] = []
    for pair in rewrite:
        if isinstance(pair, str) or [type(part) for part in pair] != [str, str]:
            raise ValueError(f"rewrite: got {pair!r}, expected pairs of a regular expression and what replaces it")
        try:
            pairs.append((re.compile(pair[0]), pair[1]))
        except re.error as error:
            raise ValueError(f"rewrite: {pair[0]!r} is not a regular expression: {error}") from error
    return pairs
