"""Reverse KL of the checkpoints of a context distillation (examples/smollm2), by plain `model.generate` and forward
passes of transformers.

    python -m bench.race.evaluate_context FOLDER [--questions 32] [--seed 1000]

FOLDER holds step_000006 and so on, whoever wrote them. The student answers the held-out questions at temperature 1. At
each token that it wrote, its distribution is compared with that of the teacher: the model that training began with,
which reads an instruction in front of the question. Writes FOLDER/scores.json: step -> reverse_kl (nats per token,
whole vocabulary), mean_tokens per answer. Step 0 is the student as it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.race.evaluate_checkpoints import checkpoints

SMOLLM2: Final = Path(__file__).resolve().parents[2] / "examples" / "smollm2"
PRIVILEGED: Final = "Answer in at most five words. "
MAX_NEW_TOKENS: Final = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    rows = (SMOLLM2 / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[: args.questions]
    questions = [json.loads(row)["prompt"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2 / "model")
    teacher = AutoModelForCausalLM.from_pretrained(SMOLLM2 / "model", dtype=torch.float32).eval()
    found: dict[int, dict[str, float]] = {}
    for step, folder in checkpoints(args.folder, SMOLLM2 / "model").items():
        student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found[step] = scores(student, teacher, tokenizer, questions, MAX_NEW_TOKENS, args.seed)
    (args.folder / "scores.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


@torch.no_grad()
def scores(
    student: Any, teacher: Any, tokenizer: Any, questions: Sequence[str], max_new_tokens: int, seed: int
) -> dict[str, float]:
    torch.manual_seed(seed)
    prompts = [prompt_ids(tokenizer, question) for question in questions]
    total, tokens = 0.0, 0
    answers = write(student, tokenizer, prompts, max_new_tokens)
    for question, prompt, answer in zip(questions, prompts, answers, strict=True):
        ours = log_probs(student, prompt, answer)
        theirs = log_probs(teacher, prompt_ids(tokenizer, PRIVILEGED + question), answer)
        total += float((ours.exp() * (ours - theirs)).sum())
        tokens += len(answer)
    return {"reverse_kl": total / tokens, "mean_tokens": tokens / len(questions)}


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)


def write(student: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Answers with their end token, at temperature 1. Prompts are padded on the left."""
    end: int = tokenizer.eos_token_id
    longest = max(map(len, prompts))
    out = student.generate(
        input_ids=torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=end,
        pad_token_id=end,
    )
    rows: list[list[int]] = out[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def log_probs(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probs of the whole vocabulary at each position of the answer, T x V."""
    logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


if __name__ == "__main__":
    main()
