"""Measures the accuracy of models by plain batched sampling with `model.generate`, without our engines.

`stillhouse builtin measure [folder ...]` measures the shipped models, or those in the given folders, on the evaluation
problems.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from stillhouse.actors.envs.calculator import ExpressionError, evaluate
from stillhouse.builtin import CALCULATOR_EVAL_JSONL, EVAL_JSONL, STUDENT_DIR, TEACHER_DIR
from stillhouse.builtin.addition import (
    CALC_CLOSE,
    CALC_OPEN,
    RESULT_CLOSE,
    RESULT_OPEN,
    Chain,
    Problem,
    is_correct,
    read_problems,
)
from stillhouse.builtin.tokenizer import END_OF_TURN, PAD, prompt_token_ids

MAX_NEW_TOKENS = 96


AnyTask: TypeAlias = Problem | Chain


class Accuracy(NamedTuple):
    """Fractions of correct answers, sampled at temperature 1 and greedy."""

    sampled: float
    greedy: float
    calculator: float
    """Sampled at temperature 1 on calculator episodes; this program computes the results."""

    def __str__(self) -> str:
        return f"sampled {self.sampled:.3f}, greedy {self.greedy:.3f}; calculator, sampled {self.calculator:.3f}"


def measure(model: Any, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Accuracy:
    """Accuracy on the two evaluation files."""
    tasks = read_problems(EVAL_JSONL)
    return Accuracy(
        sampled=accuracy(model, tokenizer, tasks, temperature=1.0, seed=seed),
        greedy=accuracy(model, tokenizer, tasks, temperature=0.0, seed=seed),
        calculator=calculator_accuracy(model, tokenizer, read_problems(CALCULATOR_EVAL_JSONL), seed=seed),
    )


def accuracy(
    model: Any, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[AnyTask], *, temperature: float, seed: int = 0
) -> float:
    """Fraction of tasks with the exact answer, one completion each."""
    torch.manual_seed(seed)
    prompts = [prompt_token_ids(tokenizer, task.prompt) for task in tasks]
    texts = [_text(tokenizer, ids) for ids in _generate(model, tokenizer, prompts, temperature, (END_OF_TURN,))]
    return sum(is_correct(text, task) for text, task in zip(texts, tasks, strict=True)) / len(tasks)


def calculator_accuracy(
    model: Any, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[AnyTask], *, seed: int = 0, max_turns: int = 8
) -> float:
    """Fraction of exact answers when each `<calc>..</calc>` turn gets its `<result>`. Any other turn, or an expression
    that cannot be evaluated, ends the episode."""
    torch.manual_seed(seed)
    contexts = [prompt_token_ids(tokenizer, task.prompt) for task in tasks]
    last_turns: dict[int, str] = {}
    for _ in range(max_turns):
        live = [i for i in range(len(tasks)) if i not in last_turns]
        if not live:
            break
        turns = _generate(model, tokenizer, [contexts[i] for i in live], 1.0, (END_OF_TURN, CALC_CLOSE))
        for i, ids in zip(live, turns, strict=True):
            text = _text(tokenizer, ids)
            result = _call_result(text)
            if result is None:
                last_turns[i] = text
            else:
                reply = f"{RESULT_OPEN}{result}{RESULT_CLOSE}"
                contexts[i] = contexts[i] + ids + tokenizer.encode(reply, add_special_tokens=False)
    return sum(is_correct(last_turns.get(i, ""), task) for i, task in enumerate(tasks)) / len(tasks)


def _call_result(text: str) -> str | None:
    if not (text.startswith(CALC_OPEN) and text.endswith(CALC_CLOSE)):
        return None
    try:
        return evaluate(text[len(CALC_OPEN) : -len(CALC_CLOSE)])
    except ExpressionError:
        return None


def _text(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return cast(str, tokenizer.decode(ids))


@torch.no_grad()
def _generate(
    model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], temperature: float, stops: tuple[str, ...]
) -> list[list[int]]:
    """Completions with their stop token. Prompts are padded on the left."""
    pad_id = tokenizer.convert_tokens_to_ids(PAD)
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts], device=model.device)
    real = torch.arange(longest) >= longest - torch.tensor([len(p) for p in prompts])[:, None]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    was_training = model.training
    model.eval()
    stop_ids = [tokenizer.convert_tokens_to_ids(s) for s in stops]
    out = model.generate(
        input_ids=ids,
        attention_mask=real.long().to(model.device),
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=stop_ids,
        pad_token_id=pad_id,
        **(sampling or {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}),
    )
    model.train(was_training)
    return [[t for t in row if t != pad_id] for row in out[:, longest:].tolist()]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="stillhouse builtin measure", description=__doc__)
    parser.add_argument("folders", nargs="*", default=[TEACHER_DIR, STUDENT_DIR])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for folder in args.folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        print(f"{os.fspath(folder)}: {measure(model, tokenizer, seed=args.seed)}")
