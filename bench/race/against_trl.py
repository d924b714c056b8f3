"""Seconds to the same accuracy: TRL's on-policy distillation and ours, in turn, on the built-in models and prompts.

    make trl                                                               once: TRL in an environment of its own
    python -m bench.race.against_trl --folder DIR [--settings same,best] [--seeds 0,1,2] [--lr 1e-3]
    python -m bench.race.against_trl --folder DIR --sweep                       TRL's settings, one after the other
    python -m bench.race.against_trl --folder DIR --markdown                    the tables of what is in DIR, no runs
    python -m bench.race.against_trl --folder DIR --settings best --seeds 0 --device cuda       on a GPU

A pair is one run of each side with the same seed, one after the other, each alone on the same cores; who goes first
alternates. Both train the built-in student on the same 8,192 prompts with 64 rollouts per step, in float32, on a GPU
with products in bfloat16. TRL_PYTHON in the environment: an interpreter that has TRL, if not that of make trl. Seconds
count from the moment a side is ready to train. Checkpoints are evaluated afterwards, both by the same program
(bench/race/evaluate_checkpoints.py), so evaluation is in neither side's time. A run that is in DIR is not made again.

same: equal learning rate, schedule, divergence (reverse KL of whole distributions) and number of steps.
best: each side's own best settings. TRL's is TRL_BEST below, found by --sweep; ours is examples/demo.toml as it is.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.race.race import OURS, PEER, Race, pair_table, role_table, run_table
from bench.race.race_runs import TRL_PYTHON, make, ours, read, trl
from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR, TRAIN_JSONL

ROLLOUTS: Final = 64
SAME: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "warmup_steps": 10,
    "min_lr_ratio": 0.1,
    "steps": 100,
    "threads": 2,
    "device": "cpu",
    "rollouts": ROLLOUTS,
    "max_new_tokens": 96,
    "student": str(STUDENT_DIR),
    "teacher": str(TEACHER_DIR),
    "prompts": str(TRAIN_JSONL),
    "trl": {"beta": 1.0, "gradient_checkpointing": False},
}
"""TRL with the schedule of the demo. Computing activations twice (gradient_checkpointing) is TRL's default; it saves
memory that nobody needs here, and costs time."""
JSD: Final[dict[str, Any]] = SAME["trl"] | {"beta": 0.5}
SWEEP: Final[dict[str, dict[str, Any]]] = {
    "lr 1e-3": SAME,
    "lr 3e-4": SAME | {"lr": 3e-4},
    "lr 2e-3": SAME | {"lr": 2e-3},
    "lr 1e-3, 1 thread": SAME | {"threads": 1},
    "lr 1e-3, beta 0.5": SAME | {"trl": JSD},
    "lr 2e-3, beta 0.5": SAME | {"lr": 2e-3, "trl": JSD},
    "lr 1e-3, beta 0.5, 32 rollouts": SAME | {"trl": JSD, "rollouts": 32, "steps": 200},
    "lr 1e-3, 32 rollouts": SAME | {"rollouts": 32, "steps": 200},
}
TRL_BEST: Final = "lr 1e-3, beta 0.5"
EVALUATOR: Final = "bench.race.evaluate_checkpoints"
SCORE: Final = "accuracy_sampled"


def main() -> int:
    args = parse(sys.argv[1:])
    evaluator = [EVALUATOR, f"--answers={args.answers}", f"--device={args.device}"]
    for side, settings, seed in [] if args.markdown else wanted(args):
        run = args.folder / f"{side.lower()}-{settings.replace(' ', '_').replace(',', '')}-{seed}"
        if not (run / "result.json").exists():
            train = partial(ours, words=our_words(args, settings, seed), save_every=args.save_every)
            if side == PEER:
                train = partial(trl, given=trl_settings(args, settings, seed))
            race = make(run, settings, seed, train, evaluator)
            print(run_table([race], SCORE, steps_shown([race]))[-1], flush=True)
    print("\n".join(report(read(args.folder), args)))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--settings", default="same,best")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--lr", type=float, default=SAME["lr"], help="learning rate of `same`")
    parser.add_argument("--steps", type=int, default=SAME["steps"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both sides")
    parser.add_argument("--words", type=shlex.split, default=[], help="more words for our command line")
    parser.add_argument("--threads", type=int, default=0, help="TRL's threads, if not those of its settings (2)")
    parser.add_argument("--only", choices=(OURS, PEER), help="make the runs of one side only")
    parser.add_argument("--sweep", action="store_true", help="make TRL's rows of SWEEP with the first seed")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two evaluated checkpoints")
    parser.add_argument("--answers", type=int, default=4, help="sampled answers per evaluation problem")
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--markdown", action="store_true", help="only print the tables")
    args = parser.parse_args(arguments)
    if unknown := set(args.settings.split(",")) - {"same", "best"}:
        parser.error(f"unknown settings {sorted(unknown)}; there are same and best")
    if not args.markdown and args.only != OURS and not TRL_PYTHON.exists():
        parser.error(f"{TRL_PYTHON} is not there; make trl installs it")
    return args


def wanted(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Side, settings and seed of each run, in order."""
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.sweep:
        return [(PEER, name, seeds[0]) for name in SWEEP]
    runs: list[tuple[str, str, int]] = []
    for settings in args.settings.split(","):
        for seed in seeds:
            sides = (OURS, PEER) if seed % 2 == 0 else (PEER, OURS)
            runs += [(side, settings, seed) for side in sides if args.only in (None, side)]
    return runs


def our_words(args: argparse.Namespace, settings: str, seed: int) -> list[str]:
    words = ["--config", "examples/demo.toml", f"--seed={seed}", f"--device={args.device}", f"--steps={args.steps}"]
    words += args.words
    if settings == "same":
        words += [
            f"--learner.lr={args.lr}",
            f"--buffer.batch_rollouts={ROLLOUTS}",
            "--learner.updates_per_batch=1",
        ]
        words += [f"--learner.warmup_steps={SAME['warmup_steps']}", "--learner.schedule=cosine"]
        words += [f"--learner.min_lr_ratio={SAME['min_lr_ratio']}"]
    return words


def trl_settings(args: argparse.Namespace, settings: str, seed: int) -> dict[str, Any]:
    own: dict[str, Any] = {"seed": seed, "save_every": args.save_every, "device": args.device}
    if args.steps != SAME["steps"]:
        own["steps"] = args.steps
    if args.threads:
        own["threads"] = args.threads
    if settings == "same":
        return SAME | {"lr": args.lr} | own
    return SWEEP[TRL_BEST if settings == "best" else settings] | own


def steps_shown(races: Sequence[Race]) -> list[int]:
    return sorted({point.step for race in races for point in race.points})


def report(races: Sequence[Race], args: argparse.Namespace) -> list[str]:
    runs = run_table(races, SCORE, steps_shown(races), args.target)
    return [*pair_table(races, SCORE, args.target), "", f"{SCORE}:", "", *runs, "", *role_table(races)]


if __name__ == "__main__":
    sys.exit(main())
