"""The driver that `make claims` measures with: its losses are those of the plain loop, which tests/integration shows to
be those of a run of the launcher at staleness 0."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bench.claims import student as driver
from bench.claims.arm import Phase, config_of
from bench.claims.facts import documents, facts
from bench.claims.student import TOKENIZER, Student, Teacher, document, item_of
from stillhouse.buffer.rollouts import ticket_seed
from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR, TRAIN_JSONL
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.tasks import TaskStream, load_prompts
from tests.integration.test_stages import finish
from tests.integration.test_synchronous import GROUP, LR, NORM, PROMPTS_PER_STEP, SEED, STEPS, WARMUP, plain_loop


def as_it_is(tokenizer: object, prompt: Any) -> list[int]:
    return prompt.tolist()


def distilled(
    monkeypatch: pytest.MonkeyPatch, student: Student, prompts_per_step: int, steps: int
) -> list[tuple[float, int]]:
    """(loss, tokens written) of each step, on the prompts and with the seeds of a run."""
    monkeypatch.setattr(driver, "MAX_NEW_TOKENS", 96)
    monkeypatch.setattr(driver, "prompt_token_ids", as_it_is)
    config = TaskConfig(prompts=str(TRAIN_JSONL), group_size=GROUP, eval_share=0.0)
    stream = TaskStream(config, AutoTokenizer.from_pretrained(STUDENT_DIR), load_prompts(config), seed=SEED)
    losses: list[tuple[float, int]] = []
    for _ in range(steps):
        offers = stream.next(prompts_per_step)
        seeds = [ticket_seed(one.task.sampling.seed, n, 0) for one in offers for n in range(GROUP)]
        monkeypatch.setattr(student, "_seed", seeds.__getitem__)
        tasks: Any = [SimpleNamespace(prompt=one.prompt_ids, answer=one.task.ground_truth) for one in offers]
        rollouts = student.write(tasks, group_size=GROUP)
        figures = student.train(student.items(rollouts, group_size=GROUP))
        losses.append((figures.loss, sum(one.written for one in rollouts)))
    return losses


def test_the_drivers_losses_are_those_of_the_plain_synchronous_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Teacher(STUDENT_DIR.parent / TEACHER_DIR.name)
    student = Student(
        STUDENT_DIR, LearnerConfig(lr=LR, warmup_steps=WARMUP, max_grad_norm=NORM, device="cpu"), STEPS, teacher
    )
    losses = distilled(monkeypatch, student, PROMPTS_PER_STEP, STEPS)
    plain, _ = plain_loop()
    assert [n for _, n in losses] == [n for *_, n in plain]
    assert [loss for loss, _ in losses] == pytest.approx([loss for loss, *_ in plain], rel=1e-3, abs=1e-6)


RECOVERY = """
actors = 1
seed = {seed}
[buffer]
batch_rollouts = 8
max_staleness = 0
[learner]
eval_every = 0
lr = 2e-3
warmup_steps = 5
schedule = "cosine"
[learner.tasks]
group_size = {group}
eval_share = 0.0
[launch]
status = "plain"
[[stage]]
name = "documents"
text = "{text}"
epochs = 3
learner.tasks.max_new_tokens = 200
[[stage]]
name = "recovery"
steps = 2
models = {{ teacher = "{before}" }}
"""


@pytest.mark.slow
def test_documents_and_the_earlier_self_have_the_losses_of_a_run_of_two_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim 5 as a user would run it."""
    told, run, after = list(islice(documents(facts(0), 0), 8)), tmp_path / "run", tmp_path / "after"
    rows, file = tmp_path / "documents.jsonl", tmp_path / "recovery.toml"
    rows.write_text("".join(json.dumps({"text": one}) + "\n" for one in told))
    file.write_text(RECOVERY.format(seed=SEED, group=GROUP, text=rows, before=STUDENT_DIR))
    finish(run, "--config", str(file))
    lines = [(run / "stages" / one / "metrics.jsonl").read_text().splitlines() for one in ("1-documents", "2-recovery")]
    found = [row["train/loss"] for part in lines for row in map(json.loads, part) if row["kind"] == "step"]

    reader = Student(STUDENT_DIR, config_of(Phase("seq_kd", 3, 2e-3, own=0.0)), 3)
    texts = [document(one, facts(0)[0]) for one in told]
    items = [item_of(one, n, group_size=1, graded=(one.logprobs_L[1:], b"")) for n, one in enumerate(texts)]
    losses = [reader.train(items).loss for _ in range(3)]
    reader.trainer.model.save_pretrained(after)
    TOKENIZER.save_pretrained(after)
    student = Student(after, config_of(Phase("k1", 2, 2e-3)), 2, Teacher(STUDENT_DIR))
    losses += [loss for loss, _ in distilled(monkeypatch, student, 8 // GROUP, 2)]
    assert found == pytest.approx(losses, rel=1e-3, abs=1e-6)
    assert losses[2] < losses[0] and losses[3] != 0.0
