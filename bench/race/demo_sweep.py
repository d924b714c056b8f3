"""Which settings bring the demo to an accuracy of 0.75 soonest: rows of settings over examples/demo.toml.

    python bench/race/demo_sweep.py --folder DIR [--rows NAME;NAME] [--seeds 0,1,2] [--steps 50] [--answers 4]
    python bench/race/demo_sweep.py --folder DIR --markdown               the tables of what is in DIR, no runs

Each run is timed and evaluated as in bench/race/against_trl.py. A run that is in DIR is not made again. Rows with fewer
rollouts per step make more steps, so that each row sees as many rollouts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.race.race import Race, role_table, seconds, seconds_to
from bench.race.race_runs import make, ours, read

SCORE: Final = "accuracy_sampled"
ROLLOUTS: Final = 64
HIDDEN: Final = ("--teacher.payload=hidden", "--teacher.top_k=0")
SETS: Final = ("--teacher.payload=top_k", "--teacher.top_k=256")
TWO: Final = (*HIDDEN, "--learner.updates_per_batch=2")
ROWS: Final[dict[str, tuple[str, ...]]] = {
    "demo": (),
    "top-k sets": (*SETS, "--learner.updates_per_batch=1"),
    "top-k sets, two updates": (*SETS, "--learner.updates_per_batch=2"),
    "hidden": (*HIDDEN, "--learner.updates_per_batch=1"),
    "hidden, lr 2e-3": (*HIDDEN, "--learner.updates_per_batch=1", "--learner.lr=2e-3"),
    "hidden, 32 rollouts": (*HIDDEN, "--learner.updates_per_batch=1", "--buffer.batch_rollouts=32"),
    "hidden, jsd": (*HIDDEN, "--learner.updates_per_batch=1", "--divergence=jsd"),
    "two updates": TWO,
    "two updates, lr 2e-3": (*TWO, "--learner.lr=2e-3"),
    "two updates, constant lr": (*TWO, "--learner.schedule=constant"),
    "two updates, warm-up 3": (*TWO, "--learner.warmup_steps=3"),
    "two updates, 32 rollouts": (*TWO, "--buffer.batch_rollouts=32"),
    "two updates, 16 rollouts": (*TWO, "--buffer.batch_rollouts=16"),
    "two updates, one actor": (*TWO, "--actors=1"),
    "two updates, bound 0": (*TWO, "--max-staleness=0"),
    "two updates, bound 2": (*TWO, "--max-staleness=2"),
    "two updates, bound 4": (*TWO, "--max-staleness=4"),
    "two updates, groups of 8": (*TWO, "--learner.tasks.group_size=8"),
    "two updates, jsd": (*TWO, "--divergence=jsd"),
    "two updates, jsd, lr 1e-3": (*TWO, "--divergence=jsd", "--learner.lr=1e-3"),
    "two updates, jsd, lr 1.5e-3": (*TWO, "--divergence=jsd", "--learner.lr=1.5e-3"),
    "two updates, jsd, 32 rollouts": (*TWO, "--divergence=jsd", "--buffer.batch_rollouts=32"),
    "two updates, forward_kl": (*TWO, "--divergence=forward_kl"),
    "three updates, jsd, 32 rollouts": (
        *HIDDEN,
        *("--learner.updates_per_batch=3", "--divergence=jsd", "--buffer.batch_rollouts=32"),
    ),
    "three updates": (*HIDDEN, "--learner.updates_per_batch=3"),
    "four updates": (*HIDDEN, "--learner.updates_per_batch=4"),
    "k1, lr 3e-4": (
        *("--divergence=k1", "--teacher.payload=top_k", "--teacher.top_k=0"),
        *("--learner.lr=3e-4", "--learner.updates_per_batch=1"),
    ),
}
"""What lies over examples/demo.toml. Reverse KL where nothing is said."""


def main() -> int:
    args = parse(sys.argv[1:])
    evaluator = ["bench.race.evaluate_checkpoints", f"--answers={args.answers}"]
    for seed in [] if args.markdown else args.seeds.split(","):
        for name in args.rows.split(";"):
            run = args.folder / f"{name.replace(' ', '_').replace(',', '')}-{seed}"
            if not (run / "result.json").exists():
                words = ["--config", "examples/demo.toml", f"--seed={seed}", *ROWS[name]]
                every = args.save_every * steps_times(name)
                words.append(f"--steps={args.steps * steps_times(name)}")
                race = make(run, name, int(seed), partial(ours, words=words, save_every=every), evaluator)
                print("\n".join(report([race], args.target)[2:3]), flush=True)
    print("\n".join(report(read(args.folder), args.target)))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", default=";".join(ROWS), help="names of rows, separated by ;")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=50, help="steps of 64 rollouts; a row with fewer makes more")
    parser.add_argument("--save-every", type=int, default=10, help="steps of 64 rollouts between two checkpoints")
    parser.add_argument("--answers", type=int, default=4, help="sampled answers per evaluation problem")
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--markdown", action="store_true", help="only print the tables")
    args = parser.parse_args(arguments)
    if unknown := set(args.rows.split(";")) - set(ROWS):
        parser.error(f"unknown rows {sorted(unknown)}; there are {'; '.join(ROWS)}")
    return args


def steps_times(name: str) -> int:
    """How many times as many steps a row makes."""
    found = [word.partition("=")[2] for word in ROWS[name] if word.startswith("--buffer.batch_rollouts=")]
    return ROLLOUTS // int(found[0]) if found else 1


def report(races: Sequence[Race], target: float) -> list[str]:
    lines = [
        f"| | seeds | seconds to {target:g} | CPU seconds to it | s per step | CPU s per step | at the end |",
        "|---|---|---|---|---:|---:|---|",
    ]
    by_row: dict[str, list[Race]] = {}
    for race in races:
        by_row.setdefault(race.settings, []).append(race)
    for name, runs in by_row.items():
        to = [seconds_to(run.points, SCORE, target) for run in runs]
        cpu = [None if s is None else s / run.step_s * run.cpu_step_s for s, run in zip(to, runs, strict=True)]
        cells = [
            name,
            ", ".join(str(run.seed) for run in runs),
            ", ".join(map(seconds, to)),
            ", ".join(map(seconds, cpu)),
            f"{statistics.median(run.step_s for run in runs):.3f}",
            f"{statistics.median(run.cpu_step_s for run in runs):.3f}",
            ", ".join(f"{run.points[-1].scores[SCORE]:.3f}" for run in runs),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *role_table(races)]


if __name__ == "__main__":
    sys.exit(main())
