"""The teacher writes with the solution before its eyes; the student is trained on that after the bare problem."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.builtin import TEACHER_DIR, TRAIN_JSONL
from stillhouse.recording.reader import Recording
from stillhouse.replay import command as replay
from tests.integration.conftest import SMALL
from tests.integration.test_replay import write

TEXT = "The answer is {ground_truth}. "


def test_answers_written_with_a_text_are_recorded_after_the_prompt_without_it(tmp_path: Path) -> None:
    """The log-probs are those of the teacher after the text, by a forward pass of its own."""
    file = tmp_path / "teacher.record"
    words = [*SMALL, "--learner.tasks.group_size=1", "--actors=1", "--launch.status=off", "--steps=2"]
    words.append(f"--learner.tasks.privileged={TEXT}")
    write(str(file), f"--run-dir={tmp_path / 'writing'}", *words)
    model = AutoModelForCausalLM.from_pretrained(str(TEACHER_DIR), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(TEACHER_DIR))
    rows = [json.loads(line) for line in TRAIN_JSONL.read_text().splitlines()]
    solutions = {row["prompt"]: row["ground_truth"] for row in rows}
    with Recording(file) as recording:
        rollouts = [one for kept in recording.batches for one in recording.rollouts(kept)]
        assert recording.header.writer == "teacher" and len(rollouts) == 32
    prompts, n_sampled = set[str](), 0
    for one in rollouts:
        ids, mu, mask, q = one.arrays
        n_prompt = int(mask.argmax())
        prompt = str(tokenizer.decode(ids[:n_prompt].tolist()))
        question = prompt.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        asked = tokenizer.encode(
            prompt.replace(question, TEXT.replace("{ground_truth}", solutions[question]) + question),
            add_special_tokens=False,
        )
        prompts.add(question)
        assert one.item.end == len(ids)
        answer = ids[n_prompt:].tolist()
        read = torch.tensor([[*asked, *answer]])
        with torch.no_grad():
            logprobs_V = torch.log_softmax(model(read).logits[0, len(asked) - 1 : -1].float(), -1)
        expected = logprobs_V[torch.arange(len(answer)), torch.tensor(answer)]
        for got in (mu[n_prompt:], q[0, n_prompt:]):
            torch.testing.assert_close(torch.tensor(got.copy()), expected, atol=2e-3, rtol=0)
        n_sampled += len(answer)
    assert len(prompts) == 32 and n_sampled > 32

    trained = tmp_path / "trained"
    flags = [f"--run-dir={trained}", "--learner.eval_every=0", "--epochs=2"]
    assert replay.main([str(file), *flags]) == 0
    account = json.loads((trained / "replay.json").read_text())
    assert (account["exit_code"], account["steps"], account["tokens_trained"]) == (0, 4, 2 * n_sampled)
