"""The models of the grid: a teacher and two students. Built once, on right solutions, by the plain loop of the
built-in models (builtin.sft).

    teacher   2 layers of 128
    start     2 layers of 64, a quarter of the teacher's parameters, stopped when it is right START of the time, sampled
    small     2 layers of 32, stopped as `start` is
    long-...  the same for long tallies
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import PreTrainedModel

from bench.claims.arm import model_folder, result_file, terms_of, write_lines
from bench.claims.student import TOKENIZER, Writer
from stillhouse.builtin.sft import IGNORED, Example, Recipe, new_model, train
from stillhouse.builtin.tally import tallies
from stillhouse.builtin.tokenizer import END_OF_TURN, PAD, prompt_token_ids

TEACHER: Final = Recipe(
    hidden=128, mlp=384, layers=2, head_dim=32, steps=450, learning_rate=3e-3, seed=1, init_std=0.08
)
STUDENT: Final = Recipe(hidden=64, mlp=192, layers=2, head_dim=16, steps=800, learning_rate=4e-3, seed=2, init_std=0.08)
SMALL: Final = Recipe(hidden=32, mlp=96, layers=2, head_dim=8, steps=1600, learning_rate=6e-3, seed=3, init_std=0.08)
RECIPES: Final = {
    **{"teacher": TEACHER, "start": STUDENT, "small": SMALL},
    **{"long-teacher": replace(TEACHER, steps=600), "long-start": STUDENT},
}
START: Final = 0.35
LOOK_EVERY_STEPS: Final = 10
LOOK_BELOW_LOSS: Final = 0.05
PROBE_SEED, PROBES = 8, 96
PAD_ID: Final = cast(int, TOKENIZER.convert_tokens_to_ids(PAD))
SHORT_SHARE: Final = 0.3
"""Share of examples with fewer digits than the task has, down to 4."""


def examples(seed: int, terms: tuple[int, int]) -> Iterator[Example]:
    rng = random.Random(seed)
    streams = tallies(200 + seed, terms=terms), tallies(300 + seed, terms=(4, terms[0]))
    while True:
        task = next(streams[rng.random() < SHORT_SHARE])
        prompt = prompt_token_ids(TOKENIZER, task.prompt)
        answer: list[int] = TOKENIZER.encode(task.solution + END_OF_TURN, add_special_tokens=False)
        yield Example(prompt + answer, [IGNORED] * len(prompt) + answer)


def save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)


def build(name: str, folder: Path) -> None:
    """Train the model of that name; Run's file of it is `pair-` and the name."""
    recipe, terms = RECIPES[name], terms_of(name)
    began_s, probes = time.process_time(), list(islice(tallies(PROBE_SEED, terms=terms), PROBES))
    torch.manual_seed(recipe.seed)
    model = new_model(recipe, TOKENIZER)
    lines: list[dict[str, Any]] = [{"parameters": sum(p.numel() for p in model.parameters())}]

    def sampled(place: Path) -> float:
        save(model, place)
        return Writer(place).accuracy(probes, greedy=False)

    def after_step(step: int, loss: float) -> bool:
        if name.endswith("teacher") or loss > LOOK_BELOW_LOSS or step % LOOK_EVERY_STEPS:
            return False
        right = sampled(model_folder(folder, f"draft-{name}"))
        model.train()
        lines.append({"step": step, "loss": loss, "sampled": right})
        return right >= START

    steps = train(model, examples(recipe.seed, terms), recipe, PAD_ID, after_step)
    right = sampled(model_folder(folder, name))
    lines += [{"step": steps, "sampled": right}, {"done": True, "cpu_s": time.process_time() - began_s}]
    write_lines(result_file(folder, f"pair-{name}"), lines)
