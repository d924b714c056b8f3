"""The driver that `make claims` measures with: its losses are those of the plain loop, which tests/integration shows to
be those of a run of the launcher at staleness 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bench.claims import student as driver
from bench.claims.student import Student, Teacher
from stillhouse.buffer.rollouts import ticket_seed
from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR, TRAIN_JSONL
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.tasks import TaskStream, load_prompts
from tests.integration.test_synchronous import GROUP, LR, PROMPTS_PER_STEP, SEED, STEPS, WARMUP, plain_losses


def as_it_is(tokenizer: object, prompt: Any) -> list[int]:
    return prompt.tolist()


def test_the_drivers_losses_are_those_of_the_plain_synchronous_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MAX_NEW_TOKENS", 96)
    monkeypatch.setattr(driver, "prompt_token_ids", as_it_is)
    config = TaskConfig(prompts=str(TRAIN_JSONL), group_size=GROUP, eval_share=0.0)
    stream = TaskStream(config, AutoTokenizer.from_pretrained(STUDENT_DIR), load_prompts(config), seed=SEED)
    teacher = Teacher(STUDENT_DIR.parent / TEACHER_DIR.name)
    student = Student(STUDENT_DIR, LearnerConfig(lr=LR, warmup_steps=WARMUP, device="cpu"), STEPS, teacher)
    losses: list[tuple[float, int]] = []
    for _ in range(STEPS):
        offers = stream.next(PROMPTS_PER_STEP)
        seeds = [ticket_seed(one.task.sampling.seed, n, 0) for one in offers for n in range(GROUP)]
        monkeypatch.setattr(student, "_seed", seeds.__getitem__)
        tasks: Any = [SimpleNamespace(prompt=one.prompt_ids, answer=one.task.ground_truth) for one in offers]
        rollouts = student.write(tasks, group_size=GROUP)
        figures = student.train(student.items(rollouts, group_size=GROUP))
        losses.append((figures.loss, sum(one.written for one in rollouts)))
    plain = plain_losses()
    assert [n for _, n in losses] == [n for _, n in plain]
    assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in plain], rel=1e-3, abs=1e-6)
