"""On-policy distillation of SmolLM2 beside its controls, one run after the other, and their figures as a table.

    OMP_NUM_THREADS=1 .venv/bin/python examples/smollm2/compare.py DIR [--seeds 0,1,2] [--methods opd,off_policy,null]
    .venv/bin/python examples/smollm2/compare.py DIR --table             the table of what is in DIR, and nothing else

From the repository root, after `make smollm2`. Runs that ended well in DIR are not made again, so it can be stopped
(Ctrl-C) and continued. Each run's log is beside its folder.

Equal compute: all methods make the same number of optimizer steps with the same optimizer and learning rate (but LoRA),
each on 8 rollouts of at most 24 tokens after the same training questions. The number of tokens differs, because
answers differ in length; the table has it. All are evaluated on the same 24 held-out questions, greedily and sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
STEPS: Final = 8
BATCH: Final = 8
PROMPTS: Final = 24
TOKENS: Final = 24
SHAPE: Final = (
    "--config=examples/smollm2/context.toml",
    f"--steps={STEPS}",
    f"--learner.eval_every={STEPS}",
    f"--buffer.batch_rollouts={BATCH}",
    f"--learner.tasks.max_new_tokens={TOKENS}",
    f"--learner.tasks.eval_greedy={PROMPTS}",
    f"--learner.tasks.eval_sampled={PROMPTS}",
)
RUN_TIMEOUT_S: Final = 3600.0


class Method(NamedTuple):
    """One row of the table."""

    title: str
    arguments: tuple[str, ...] = ()
    off_policy: bool = False
    """The teacher writes first; then a replay trains on that."""
    setting: str = "one turn"
    """Figures are compared within it: before training, all of its runs are at the same point."""


METHODS: Final = {
    "opd": Method("on-policy distillation"),
    "off_policy": Method("off-policy: the teacher's own answers", off_policy=True),
    "null": Method(
        "null teacher: -0.5 on unlikely tokens",
        ("--divergence=null", "--learner.objective.divergence.kl_student=behaviour"),
    ),
    "lora": Method(
        "on-policy, LoRA of rank 16, rate 2e-4",
        ("--learner.lora.rank=16", "--learner.lora.alpha=32", "--learner.lr=2e-4"),
    ),
    "sglang": Method(
        "on-policy, SGLang servers on the CPU",
        (
            *("--actor.engine=sglang", "--teacher.engine=sglang", "--device=cpu"),
            *(f"--{role}.server.args=--max-total-tokens,8192" for role in ("actor", "teacher")),  # 0.4 GB of KV cache
        ),
    ),
    "two_turns": Method(
        "on-policy, with a follow-up question",
        (
            "--actor.environments.follow_up.name=follow_up:rollout",
            "--actor.environments.follow_up.max_turns=2",
            f"--actor.environments.follow_up.options.tokens_per_turn={TOKENS}",
            f"--learner.tasks.max_new_tokens={2 * TOKENS}",
            "--learner.tasks.env=follow_up",
        ),
        setting="two turns",
    ),
}
DEFAULT: Final = ("opd", "off_policy", "null")


class Figures(NamedTuple):
    """What one run's own files say."""

    before: dict[str, Any]
    """Row of metrics.jsonl of the evaluation at step 0."""
    after: dict[str, Any]
    tokens: int
    """Trained tokens."""


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    failed = [] if args.table else make_all(args.folder, args.methods, args.seeds)
    print(table(args.folder, args.methods, args.seeds))
    for name, seed in failed:
        print(f"failed: {name}, seed {seed}: see {log_of(args.folder, name, seed)}", file=sys.stderr)
    return 1 if failed else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2])
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=list(DEFAULT), help=f"of {', '.join(METHODS)}"
    )
    parser.add_argument("--table", action="store_true", help="make no run")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.methods if name not in METHODS]:
        parser.error(f"unknown methods {unknown}; there are {', '.join(METHODS)}")
    return args


def make_all(folder: Path, methods: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Make the runs that are missing, by seed, so that there is something to compare early. Returns the failed ones."""
    failed: list[tuple[str, int]] = []
    for seed in seeds:
        for name in methods:
            if figures(folder, name, seed) is not None:
                continue
            print(f"{name}, seed {seed}: {log_of(folder, name, seed)}", file=sys.stderr, flush=True)
            if not make(folder, name, seed) or figures(folder, name, seed) is None:
                failed.append((name, seed))
    return failed


def place_of(folder: Path, name: str, seed: int) -> Path:
    return folder.resolve() / name / f"seed-{seed}"


def log_of(folder: Path, name: str, seed: int) -> Path:
    return place_of(folder, name, seed).with_suffix(".log")


def make(folder: Path, name: str, seed: int) -> bool:
    """One run, anew. Returns False if it did not end well."""
    place = place_of(folder, name, seed)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    python_path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": python_path}  # of follow_up
    with log_of(folder, name, seed).open("wb") as log:
        for words in commands(place, METHODS[name], seed):
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=RUN_TIMEOUT_S,
                check=False,
            )  # fmt: skip
            if done.returncode:
                return False
    return True


def commands(place: Path, method: Method, seed: int) -> list[list[str]]:
    """Command lines, to be run one after the other. The last one leaves its figures in `place`."""
    own = [*SHAPE, f"--seed={seed}", *method.arguments]
    if not method.off_policy:
        return [["launch/cluster.py", f"--run-dir={place}", *own]]
    file, writing = place.with_suffix(".record"), place.with_name(f"{place.name}-written")
    file.unlink(missing_ok=True)
    shutil.rmtree(writing, ignore_errors=True)
    return [
        ["-m", "stillhouse.launch.cluster", "write", str(file), *own, f"--run-dir={writing}", "--learner.eval_every=0"],
        ["-m", "replay", str(file), *own, f"--run-dir={place}"],
    ]


def figures(folder: Path, name: str, seed: int) -> Figures | None:
    """None for a run that is missing, or did not end well after STEPS steps."""
    place = place_of(folder, name, seed)
    try:
        if METHODS[name].off_policy:
            summary = json.loads((place / "replay.json").read_text(encoding="utf-8"))
            tokens, ok = summary["tokens_trained"], summary["exit_code"] == 0
        else:
            summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
            tokens, ok = summary["tokens"]["trained"], summary["ok"] and summary["tokens"]["balanced"]
        rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    at = {row["step"]: row for row in rows if row["kind"] == "eval"}
    if not ok or summary["steps"] != STEPS or set(at) != {0, STEPS}:
        return None
    return Figures(at[0], at[STEPS], tokens)


def table(folder: Path, methods: Sequence[str], seeds: Sequence[int]) -> str:
    """Markdown: mean over the seeds that are there (lowest to highest)."""
    lines = [
        f"| after {STEPS} steps of {BATCH} rollouts | seeds | reverse KL per token, nats | reverse KL per answer | "
        "mean length, greedy | mean length, sampled | tokens trained |",
        "|---|---|---|---|---|---|---|",
    ]
    found = {
        name: {seed: run for seed in seeds if (run := figures(folder, name, seed)) is not None} for name in methods
    }
    for setting in dict.fromkeys(METHODS[name].setting for name in methods):
        those = {name: runs for name, runs in found.items() if runs and METHODS[name].setting == setting}
        starts = [run.before for runs in those.values() for run in runs.values()]
        if starts:
            lines.append(f"| before training, {setting} ({len(starts)} runs) | | {' | '.join(cells(starts))} | |")
        for name, runs in those.items():
            tokens = f"{statistics.mean(run.tokens for run in runs.values()):,.0f}"
            ends = " | ".join(cells([run.after for run in runs.values()]))
            lines.append(f"| {METHODS[name].title} | {', '.join(map(str, runs))} | {ends} | {tokens} |")
    return "\n".join(lines)


def cells(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    return [
        spread([row["eval/reverse_kl"] for row in evaluations], ".3f"),
        spread([row["eval/reverse_kl"] * row["eval/mean_length_sampled"] for row in evaluations], ".2f"),
        spread([row["eval/mean_length_greedy"] for row in evaluations], ".1f"),
        spread([row["eval/mean_length_sampled"] for row in evaluations], ".1f"),
    ]


def spread(values: Sequence[float], form: str) -> str:
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
