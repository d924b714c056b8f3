"""`stillhouse builtin build` rebuilds builtin/data: problem files, teacher and student (a few CPU minutes).

With one thread and fixed seeds, the same machine gives the same files.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stillhouse.builtin import (
    CALCULATOR_EVAL_JSONL,
    CALCULATOR_TRAIN_JSONL,
    DATA_DIR,
    EVAL_JSONL,
    STUDENT_DIR,
    TEACHER_DIR,
    TRAIN_JSONL,
)
from stillhouse.builtin.addition import Chain, Problem, chains, distinct, problems, write_problems
from stillhouse.builtin.measure import Accuracy, accuracy, measure
from stillhouse.builtin.sft import HeldOut, Recipe, example_stream, new_model, train
from stillhouse.builtin.tokenizer import build_tokenizer

TEACHER = Recipe(hidden=160, mlp=480, steps=1_600, learning_rate=1.5e-3, seed=1, init_std=0.06, label_smoothing=0.001)
STUDENT = Recipe(hidden=64, mlp=192, steps=1_500, learning_rate=1.5e-3, seed=2, init_std=0.08)
STUDENT_TARGET = 0.23
"""Sampled accuracy at which the student's training stops."""
STUDENT_FIRST_LOOK_STEP, STUDENT_LOOK_EVERY_STEPS = 300, 10
PROBLEMS_SEED = 11
TRAIN_PROBLEMS, CALCULATOR_TRAIN_PROBLEMS, EVAL_PROBLEMS = 8_192, 2_048, 256


@dataclass(frozen=True, slots=True)
class ProblemSets:
    """Disjoint sets of problems. `probe` decides when the student's training stops."""

    train: list[Problem]
    eval: list[Problem]
    probe: list[Problem]
    calculator_train: list[Chain]
    calculator_eval: list[Chain]

    @property
    def held_out(self) -> HeldOut:
        return HeldOut(frozenset(self.eval + self.probe), frozenset(self.calculator_eval))


def draw_problem_sets() -> ProblemSets:
    drawn = distinct(problems(PROBLEMS_SEED), TRAIN_PROBLEMS + 2 * EVAL_PROBLEMS)
    eval_end = TRAIN_PROBLEMS + EVAL_PROBLEMS
    drawn_chains = distinct(chains(PROBLEMS_SEED), CALCULATOR_TRAIN_PROBLEMS + EVAL_PROBLEMS)
    return ProblemSets(
        train=drawn[:TRAIN_PROBLEMS],
        eval=drawn[TRAIN_PROBLEMS:eval_end],
        probe=drawn[eval_end:],
        calculator_train=drawn_chains[:CALCULATOR_TRAIN_PROBLEMS],
        calculator_eval=drawn_chains[CALCULATOR_TRAIN_PROBLEMS:],
    )


def build_model(
    label: str, recipe: Recipe, sets: ProblemSets, tokenizer: PreTrainedTokenizerFast, progress: Progress
) -> PreTrainedModel:
    """Train one model. The student's training stops when it solves STUDENT_TARGET of the probe problems."""
    torch.manual_seed(recipe.seed)
    model = new_model(recipe, tokenizer)
    stops_early = label == "student"
    bar = progress.add_task(label, total=recipe.steps, loss=float("nan"), note="")

    def after_step(step: int, loss: float) -> bool:
        progress.update(bar, completed=step, loss=loss)
        if not stops_early or step < STUDENT_FIRST_LOOK_STEP or step % STUDENT_LOOK_EVERY_STEPS:
            return False
        # The probe must not disturb the random numbers of training.
        state = torch.get_rng_state()
        sampled = accuracy(model, tokenizer, sets.probe, temperature=1.0)
        torch.set_rng_state(state)
        progress.update(bar, note=f"sampled {sampled:.2f}")
        return sampled >= STUDENT_TARGET

    pad_id = tokenizer.pad_token_id
    assert isinstance(pad_id, int)
    examples = example_stream(tokenizer, recipe, sets.held_out)
    steps = train(model, examples, recipe, pad_id, after_step)
    progress.update(bar, total=steps, completed=steps)
    return model.eval()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a complete Hugging Face folder: float32 safetensors, configs, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors files are readable by their owner only; users of the package must read them


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="stillhouse builtin build", description=__doc__)
    parser.add_argument("--only", choices=["teacher", "student"], help="do not rebuild the other model")
    parser.add_argument(
        "--pairs", type=Path, help="make only a teacher with another tokenizer (+8 is one token), in this folder"
    )
    parser.add_argument("--hybrid", type=Path, help="make only a student with recurrent layers, in this folder")
    args = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    console = Console()
    sets = draw_problem_sets()
    tokenizer = build_tokenizer(pairs=args.pairs is not None)
    wanted = [("student", STUDENT, STUDENT_DIR), ("teacher", TEACHER, TEACHER_DIR)]
    if args.pairs:
        wanted = [("teacher", TEACHER, args.pairs)]
    elif args.hybrid:
        wanted = [("student", replace(STUDENT, hybrid=True), args.hybrid)]
    else:
        DATA_DIR.mkdir(exist_ok=True)
        write_problems(TRAIN_JSONL, sets.train)
        write_problems(EVAL_JSONL, sets.eval)
        write_problems(CALCULATOR_TRAIN_JSONL, sets.calculator_train)
        write_problems(CALCULATOR_EVAL_JSONL, sets.calculator_eval)
    measured: dict[str, Accuracy] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps  loss {task.fields[loss]:.3f} {task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for label, recipe, folder in wanted:
            if args.only not in (None, label):
                continue
            model = build_model(label, recipe, sets, tokenizer, progress)
            save(model, tokenizer, folder)
            measured[label] = measure(model, tokenizer)
    for label, result in measured.items():
        console.print(f"{label}: {result}")
