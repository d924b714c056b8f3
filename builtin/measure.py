"""How often a model is right: plain batched sampling with `model.generate`, no engine of ours.

`python -m builtin.measure [folder ...]` measures the shipped models (or the folders given) on the evaluation problems.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from builtin import EVAL_JSONL, STUDENT_DIR, TEACHER_DIR
from builtin.addition import CALC_CLOSE, CALC_OPEN, RESULT_CLOSE, RESULT_OPEN, Chain, Problem, chains, is_correct
from builtin.problems_file import read_problems
from builtin.tokenizer import END_OF_TURN, prompt_token_ids

CALCULATOR_SEED = 77


class Accuracy(NamedTuple):
    """Fractions right: sampled at temperature 1, and greedy."""

    sampled: float
    greedy: float
    calculator: float
    """Sampled at temperature 1 on calculator episodes, the results given by this program."""


def measure(model: Any, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Problem], *, seed: int = 0) -> Accuracy:
    """Accuracy on `tasks`, and on 128 calculator episodes."""
    return Accuracy(
        sampled=accuracy(model, tokenizer, tasks, temperature=1.0, seed=seed),
        greedy=accuracy(model, tokenizer, tasks, temperature=0.0, seed=seed),
        calculator=calculator_accuracy(model, tokenizer, list(islice(chains(CALCULATOR_SEED), 128)), seed=seed),
    )


def accuracy(
    model: Any, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Problem], *, temperature: float, seed: int = 0
) -> float:
    """Fraction of tasks answered exactly, one completion each."""
    torch.manual_seed(seed)
    prompts = [prompt_token_ids(tokenizer, task.prompt) for task in tasks]
    texts = [tokenizer.decode(ids) for ids in _generate(model, tokenizer, prompts, temperature, (END_OF_TURN,))]
    return sum(is_correct(text, task) for text, task in zip(texts, tasks, strict=True)) / len(tasks)


def calculator_accuracy(
    model: Any, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Chain], *, seed: int = 0, max_turns: int = 4
) -> float:
    """Fraction answered exactly when each `<calc>a+b</calc>` gets its `<result>`; other calls end the episode."""
    torch.manual_seed(seed)
    contexts = [prompt_token_ids(tokenizer, task.prompt) for task in tasks]
    answers: dict[int, str] = {}
    for _ in range(max_turns):
        live = [i for i in range(len(tasks)) if i not in answers]
        if not live:
            break
        turns = _generate(model, tokenizer, [contexts[i] for i in live], 1.0, (END_OF_TURN, CALC_CLOSE))
        for i, ids in zip(live, turns, strict=True):
            text = tokenizer.decode(ids)
            result = _call_result(text)
            if result is None:
                answers[i] = text
            else:
                reply = f"{RESULT_OPEN}{result}{RESULT_CLOSE}"
                contexts[i] = contexts[i] + ids + tokenizer.encode(reply, add_special_tokens=False)
    return sum(is_correct(answers.get(i, ""), task) for i, task in enumerate(tasks)) / len(tasks)


def _call_result(text: str) -> int | None:
    """Value of a turn that is `<calc>a+b</calc>`, else None."""
    if not (text.startswith(CALC_OPEN) and text.endswith(CALC_CLOSE)):
        return None
    terms = text[len(CALC_OPEN) : -len(CALC_CLOSE)].split("+")
    return sum(map(int, terms)) if all(t.isascii() and t.isdigit() for t in terms) else None


@torch.no_grad()
def _generate(
    model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], temperature: float, stops: tuple[str, ...]
) -> list[list[int]]:
    """Completions (stop token included) of at most 96 tokens; prompts are padded on the left."""
    pad_id = tokenizer.convert_tokens_to_ids("<|pad|>")
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    was_training = model.training
    model.eval()
    stop_ids = [tokenizer.convert_tokens_to_ids(s) for s in stops]
    out = model.generate(
        input_ids=ids,
        attention_mask=(torch.arange(longest) >= longest - torch.tensor([len(p) for p in prompts])[:, None]).long(),
        max_new_tokens=96,
        eos_token_id=stop_ids,
        pad_token_id=pad_id,
        **(sampling or {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}),
    )
    model.train(was_training)
    return [[t for t in row if t != pad_id] for row in out[:, longest:].tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=[TEACHER_DIR, STUDENT_DIR])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks = read_problems(EVAL_JSONL)
    for folder in args.folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        print(os.fspath(folder), measure(model, tokenizer, tasks, seed=args.seed))


if __name__ == "__main__":
    main()
