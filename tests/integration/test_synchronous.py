"""`max_staleness = 0` is the synchronous schedule: the whole system, with its five kinds of processes, has the losses
of the plain loop below, which samples, grades and trains one step after the other in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.buffer.rollouts import ticket_seed
from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR, TRAIN_JSONL
from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.tasks import TaskOffer, TaskStream, load_prompts
from stillhouse.protocol.messages import Sampling, WeightVersion
from tests.integration.conftest import Launched

STEPS, GROUP, PROMPTS_PER_STEP, SEED, WARMUP, LR, NORM = 4, 4, 4, 3, 10, 2e-4, 0.3


def sample(engine: TorchEngine, offers: Sequence[TaskOffer], stops: tuple[int, ...]) -> list[tuple[np.ndarray, int]]:
    """(tokens of prompt and completion, prompt length) of each rollout of a step, in ticket order."""
    done: dict[str, list[int]] = {}
    prompts: dict[str, np.ndarray] = {}
    for offer in offers:
        for index in range(GROUP):
            name = f"{offer.task.task_id}-{index}"
            prompts[name], done[name] = offer.prompt_ids, []
            sampling = Sampling(max_new_tokens=96, seed=ticket_seed(offer.task.sampling.seed, index, 0))
            engine.submit(GenerationRequest(name, offer.prompt_ids, sampling, 96, stops))
    left = len(done)
    while left:
        for delta in engine.poll(0.0):
            done[delta.request_id].extend(delta.token_ids.tolist())
            left -= delta.finish_reason is not None
    return [(np.concatenate([prompts[n], np.array(done[n], np.int32)]), len(prompts[n])) for n in done]


def token_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[n - 1] log-prob of each token but the first: one sequence, no padding, no packing."""
    logits = model(input_ids=ids[None]).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]


def plain_loop() -> tuple[list[tuple[float, float, int]], dict[str, torch.Tensor]]:
    """Loss, norm of the gradient and trained tokens of each step of the plain synchronous loop; and the mean gradient
    as AdamW has it after them, by parameter."""
    student = AutoModelForCausalLM.from_pretrained(STUDENT_DIR, dtype=torch.float32)
    sampler = AutoModelForCausalLM.from_pretrained(STUDENT_DIR, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(TEACHER_DIR, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(STUDENT_DIR)
    stops = tuple(np.atleast_1d(student.generation_config.eos_token_id).tolist())
    config = TaskConfig(prompts=str(TRAIN_JSONL), group_size=GROUP, eval_share=0.0)
    stream = TaskStream(config, tokenizer, load_prompts(config), seed=SEED)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.0)
    engine = TorchEngine(sampler, EngineConfig())
    steps: list[tuple[float, float, int]] = []
    for step in range(STEPS):
        rollouts = sample(engine, stream.next(PROMPTS_PER_STEP), stops)
        n_trained = sum(len(ids) - n_prompt for ids, n_prompt in rollouts)
        total = torch.zeros(())
        for ids, n_prompt in rollouts:
            ids_T = torch.from_numpy(ids.astype(np.int64))
            s = token_logprobs(student, ids_T)[n_prompt - 1 :]
            with torch.no_grad():
                q = token_logprobs(teacher, ids_T)[n_prompt - 1 :]
            total = total + ((s.detach() - q) * s).sum()  # on policy: every importance ratio is 1
        loss = total / n_trained
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), NORM)
        for group in optimizer.param_groups:
            group["lr"] = LR * (step + 1) / WARMUP
        optimizer.step()
        steps.append((loss.item(), norm.item(), n_trained))
        engine.stage_weights(WeightVersion(0, step + 1), [(n, p.detach()) for n, p in student.named_parameters()])
    engine.close()
    return steps, {name: optimizer.state[p]["exp_avg"] for name, p in student.named_parameters()}


@pytest.mark.parametrize("way", ["weights.transport=collective", "weights.transport=wire", "launch.share=turns"])
def test_no_staleness_gives_the_losses_of_a_plain_synchronous_loop(launch: Callable[..., Launched], way: str) -> None:
    """With "wire" by two ranks in many microbatches. AdamW hardly sees the scale of a gradient, but its moments do."""
    run = launch(
        f"--{way}",
        *(("--learner.ranks=2", "--learner.pack_tokens=80") if "wire" in way else ()),
        f"--learner.max_grad_norm={NORM}",
        "--actors=2",
        "--teachers=2",
        f"--steps={STEPS}",
        f"--seed={SEED}",
        "--max-staleness=0",
        f"--learner.lr={LR}",
        f"--learner.warmup_steps={WARMUP}",
        "--learner.weight_decay=0.0",
        f"--learner.tasks.group_size={GROUP}",
        f"--buffer.batch_rollouts={GROUP * PROMPTS_PER_STEP}",
        "--learner.tasks.eval_share=0.0",
        "--learner.eval_every=0",
    )
    expected, moments = plain_loop()
    assert run.wait() == 0, run.text()
    rows = run.steps()
    assert [row["train/tokens"] for row in rows] == [tokens for *_, tokens in expected]
    for row, (loss, norm, _) in zip(rows, expected, strict=True):
        assert math.isclose(row["train/loss"], loss, abs_tol=1e-5), (row["step"], row["train/loss"], loss)
        assert norm > NORM and math.isclose(row["train/grad_norm"], norm, rel_tol=1e-3), (row["step"], norm)
    saved = load_file(run.run_dir / "checkpoints" / f"step_{STEPS:06}" / "optimizer.safetensors")
    for name, moment in moments.items():
        torch.testing.assert_close(saved[f"exp_avg/{name}"], moment, atol=1e-3 * float(moment.abs().max()), rtol=0.0)
    summary = run.summary()
    assert summary["staleness"]["max"] == 0 and summary["state"] == "finished"
    last = rows[-1]
    assert last["weights/skipped_versions_total"] == 0, "a version was skipped"
    assert ("over encrypted connections to the learner" in run.text()) == (way == "weights.transport=wire")
