"""Accuracy of the checkpoints of a run on the built-in task, by plain `model.generate` (builtin.measure).

    python -m bench.race.evaluate_checkpoints FOLDER [--answers 4] [--seed 1000] [--device cuda]

FOLDER holds step_000010, step_000020, ...: Hugging Face folders, whoever wrote them. Writes FOLDER/scores.json: step
-> accuracy_sampled on the 256 evaluation problems, mean over `--answers` answers to each, and accuracy_greedy on the
first 128. Step 0 is the built-in student. The same seed gives every checkpoint the same random numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.builtin import EVAL_JSONL, STUDENT_DIR
from stillhouse.builtin.addition import read_problems
from stillhouse.builtin.measure import AnyTask, accuracy

N_GREEDY: Final = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", type=int, default=4, help="sampled answers per problem")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    tasks = read_problems(EVAL_JSONL)
    found = {
        step: scores(path, tasks, args.answers, args.seed, args.device)
        for step, path in checkpoints(args.folder, STUDENT_DIR).items()
    }
    (args.folder / "scores.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def checkpoints(folder: Path, student: Path) -> dict[int, Path]:
    """Step -> its Hugging Face folder; 0: the student that training began with."""
    return {0: student} | {int(path.name.removeprefix("step_")): path for path in sorted(folder.glob("step_*"))}


def scores(folder: Path, tasks: Sequence[AnyTask], answers: int, seed: int, device: str = "cpu") -> dict[str, float]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampled = [accuracy(model, tokenizer, tasks, temperature=1.0, seed=seed + i) for i in range(answers)]
    greedy = accuracy(model, tokenizer, tasks[:N_GREEDY], temperature=0.0)
    return {"accuracy_sampled": statistics.mean(sampled), "accuracy_greedy": greedy}


if __name__ == "__main__":
    main()
