"""`stillhouse builtin specialists FOLDER` makes the files of a run with two specialist teachers, in addition to
builtin/data:

    multiplier/   a teacher trained on products only, as the built-in teacher was trained on sums only
    student/      a student that is poor at both
    train.jsonl, eval.jsonl   sums and products, half of each, with the tags `addition` and `multiplication`

Takes a few CPU minutes on one thread, with fixed seeds. Existing files are kept.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stillhouse.builtin import STUDENT_DIR
from stillhouse.builtin.addition import Operator, Problem, distinct, problems, write_problems
from stillhouse.builtin.build import save
from stillhouse.builtin.measure import accuracy
from stillhouse.builtin.sft import HeldOut, Recipe, example_stream, new_model, train

MULTIPLIER = Recipe(
    hidden=128,
    mlp=384,
    steps=1_000,
    learning_rate=1.5e-3,
    seed=3,
    init_std=0.06,
    calculator_share=0.0,
    operators=("*",),
    label_smoothing=0.001,
)
STUDENT = Recipe(
    hidden=64,
    mlp=192,
    steps=1_500,
    learning_rate=1.5e-3,
    seed=4,
    init_std=0.08,
    calculator_share=0.0,
    operators=("+", "*"),
)
STUDENT_TARGET = 0.2
"""Sampled accuracy on both kinds of problems at which the student's training stops."""
LOOK_EVERY_STEPS = 25
PROBLEMS_SEED = 23
TRAIN_PER_TAG, EVAL_PER_TAG, PROBE_PER_TAG = 2_048, 128, 64


def problem_sets() -> tuple[list[Problem], list[Problem], list[Problem]]:
    """(train, eval, probe), disjoint, half sums and half products."""
    operators: tuple[Operator, ...] = ("+", "*")
    sets: tuple[list[Problem], list[Problem], list[Problem]] = ([], [], [])
    for operator in operators:
        drawn = distinct(problems(PROBLEMS_SEED, operator=operator), TRAIN_PER_TAG + EVAL_PER_TAG + PROBE_PER_TAG)
        parts = (drawn[:TRAIN_PER_TAG], drawn[TRAIN_PER_TAG:-PROBE_PER_TAG], drawn[-PROBE_PER_TAG:])
        for kept, part in zip(sets, parts, strict=True):
            kept += part
    return sets


def make(folder: Path) -> None:
    """Make the files that `folder` lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    train_set, eval_set, probe = problem_sets()
    if not (folder / "eval.jsonl").is_file():
        half = len(eval_set) // 2  # alternating, so that every prefix is half and half
        write_problems(folder / "eval.jsonl", chain.from_iterable(zip(eval_set[:half], eval_set[half:], strict=True)))
        write_problems(folder / "train.jsonl", train_set)
    held_out = HeldOut(frozenset(eval_set + probe), frozenset())
    tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(STUDENT_DIR))
    for name, recipe in (("student", STUDENT), ("multiplier", MULTIPLIER)):
        if not (folder / name / "tokenizer.json").is_file():  # written last
            _make_model(folder / name, recipe, tokenizer, held_out, probe if name == "student" else [])


def _make_model(
    folder: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, held_out: HeldOut, probe: list[Problem]
) -> None:
    """Train one model to the end of its schedule, or until it is good enough at the probe problems."""
    torch.manual_seed(recipe.seed)
    model = new_model(recipe, tokenizer)

    def after_step(step: int, loss: float) -> bool:
        if step % LOOK_EVERY_STEPS:
            return False
        progress = f"{folder.name}: {step} of {recipe.steps} steps, loss {loss:.3f}"
        if not probe or step < 8 * LOOK_EVERY_STEPS:
            print(progress, flush=True)
            return False
        state = torch.get_rng_state()  # the probe must not disturb the random numbers of training
        sampled = accuracy(model, tokenizer, probe, temperature=1.0)
        torch.set_rng_state(state)
        print(f"{progress}, sampled {sampled:.2f}", flush=True)
        return sampled >= STUDENT_TARGET

    pad_id = tokenizer.pad_token_id
    assert isinstance(pad_id, int)
    train(model, example_stream(tokenizer, recipe, held_out), recipe, pad_id, after_step)
    save(model.eval(), tokenizer, folder)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="stillhouse builtin specialists", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    make(parser.parse_args(arguments).folder)
