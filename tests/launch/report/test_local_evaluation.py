"""Evaluations in one process take prompts of environments as the buffer does: they are scored, or counted as failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stillhouse import builtin
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.report.local_evaluation import LocalEvaluator
from stillhouse.learner.evaluation.evaluation import EvaluationResult, EvaluationRun, render_eval_set
from stillhouse.learner.prompts.tasks import load_prompts
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.messages import WeightVersion

OWN = """
from stillhouse.actors.envs.base import Observation
from stillhouse.actors.envs.single_turn import SingleTurn

class Own(SingleTurn):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self._tokenizer = tokenizer

    async def reset(self, task):
        await super().reset(task)
        return Observation(prompt_ids=self._tokenizer.chat_prompt([{"role": "user", "content": task.row["question"]}]))
"""
ROWS = [
    {"prompt": "-", "env": "own", "question": "31+42=", "ground_truth": "73"},
    {"prompt": "31+42=", "ground_truth": "73"},
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def evaluated(folder: Path, privileged: str) -> EvaluationResult:
    (folder / "local_own.py").write_text(OWN)
    (folder / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    prompts = {"prompts": str(folder / "p.jsonl"), "eval_prompts": str(folder / "p.jsonl"), "privileged": privileged}
    config = build(
        RunConfig,
        {
            "models": {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)},
            "learner": {"tasks": prompts | {"eval_greedy": 0, "eval_sampled": 2}},
            "actor": {"torch": {"max_context": 256}, "environments": {"own": {"name": "local_own:Own"}}},
        },
    )
    tokenizer, tasks = load_tokenizer(config.models.student), config.learner.tasks
    rendered = render_eval_set(load_prompts(tasks, config.environments).evaluation, tokenizer, tasks)
    evaluation = EvaluationRun(tasks, rendered.prompts, tokenizer, version=WeightVersion(0, 0), seed=1)
    evaluator = LocalEvaluator(config, check=lambda: None)
    try:
        return evaluator.run(evaluation, WeightVersion(0, 0), None)
    finally:
        evaluator.close()


def test_a_prompt_that_an_environment_makes_is_read_by_student_and_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    result = evaluated(tmp_path, privileged="")
    own, plain = result.samples
    assert own.prompt == plain.prompt and "31+42=" in own.prompt
    assert (result.failed, result.missing, result.n_sampled) == (0, 0, 2)
    assert all(figures.reverse_kl is not None for figures in result.tags.values())


def test_it_fails_where_teachers_would_read_a_privileged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    result = evaluated(tmp_path, privileged="{ground_truth} ")
    assert (result.failed, result.missing, result.n_sampled) == (1, 0, 1)
    assert [sample.prompt for sample in result.samples] and "31+42=" in result.samples[0].prompt
