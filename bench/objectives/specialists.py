"""Two specialist teachers, one student: does it end better on the union of their domains than either of them?

    python bench/objectives/specialists.py [--folder build/specialists] [--steps 600] [--seeds 1]

Makes the models and problems once (builtin.specialists), runs examples/recipes/specialists.toml from that folder, and
measures by plain sampling (builtin.measure, no engine of ours) each teacher alone, and the student before and after.
Prints the table and writes it to --report (docs/results/specialists.md).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.builtin.addition import Problem, read_problems
from stillhouse.builtin.measure import accuracy
from stillhouse.builtin.specialists import make

ROOT: Final = Path(__file__).resolve().parents[2]
RECIPE: Final = ROOT / "examples" / "recipes" / "specialists.toml"
RUN_TIMEOUT_S: Final = 3600.0
TAGS: Final = ("addition", "multiplication")
Accuracies = dict[str, float]


def main() -> int:
    args = parse(sys.argv[1:])
    torch.set_num_threads(1)
    make(args.folder)
    rows: list[tuple[str, Accuracies]] = []
    for name, folder in (
        ("teacher of sums alone (built in)", TEACHER_DIR),
        ("teacher of products alone", args.folder / "multiplier"),
        ("student before", args.folder / "student"),
    ):
        rows.append((name, measure(folder, args.folder)))
        print(line(*rows[-1]), flush=True)
    for seed in range(args.seeds):
        checkpoint = distil(args.folder, args.steps, seed)
        rows.append((f"student after {args.steps} steps, seed {seed}", measure(checkpoint, args.folder)))
        print(line(*rows[-1]), flush=True)
    args.report.write_text(report(args, rows), encoding="utf-8")
    print(f"written: {args.report}")
    best_teacher = max(found["union"] for _, found in rows[:2])
    return 0 if all(found["union"] > best_teacher for _, found in rows[3:]) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "specialists")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "results" / "specialists.md")
    return parser.parse_args(arguments)


def distil(folder: Path, steps: int, seed: int) -> Path:
    """Run the recipe; its last checkpoint. Raises CalledProcessError."""
    run_dir = folder / f"run-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    words = [
        *(sys.executable, "launch/cluster.py", "--config", str(RECIPE), "--run-dir", str(run_dir)),
        *(f"--steps={steps}", f"--seed={seed}", f"--student={folder / 'student'}"),
        f"--pools.multipliers.model={folder / 'multiplier'}",
        *(f"--prompts={folder / 'train.jsonl'}", f"--eval-prompts={folder / 'eval.jsonl'}"),
    ]
    subprocess.run(words, cwd=ROOT, check=True, timeout=RUN_TIMEOUT_S)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return run_dir / summary["checkpoint"]  # relative, as it lies inside


def measure(model_folder: Path, folder: Path) -> Accuracies:
    """Share of the evaluation problems answered exactly, one sample each at temperature 1."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(STUDENT_DIR)
    problems = [task for task in read_problems(folder / "eval.jsonl") if isinstance(task, Problem)]
    found: Accuracies = {}
    for tag in TAGS:
        tasks = [task for task in problems if task.tag == tag]
        found[tag] = accuracy(model, tokenizer, tasks, temperature=1.0)
    return found | {"union": sum(found.values()) / len(found)}


def line(name: str, found: Accuracies) -> str:
    return f"| {name} | " + " | ".join(f"{found[tag]:.2f}" for tag in (*TAGS, "union")) + " |"


def report(args: argparse.Namespace, rows: Sequence[tuple[str, Accuracies]]) -> str:
    table = "\n".join(line(*row) for row in rows)
    return f"""# Two specialist teachers and one student

`python bench/objectives/specialists.py --steps {args.steps} --seeds {args.seeds}`: the built-in teacher, which has
never seen a product, and one that has never seen a sum, each score the prompts of their own tag
(`examples/recipes/specialists.toml`, [docs/teachers.md](../teachers.md)). Share of 256 evaluation problems answered
exactly, one sample each at temperature 1; half are sums, half products, of 2 to 5 digits.

| | addition | multiplication | union |
|---|---|---|---|
{table}

The student is 64 wide (0.2 million parameters), and was trained on both kinds until it got about a fifth of them right.
"""


if __name__ == "__main__":
    sys.exit(main())
