"""Objectives and staleness on the built-in task, several seeds each, at equal numbers of rollouts.

    python -m bench.objectives.compare_objectives --folder DIR [--tables objectives,staleness,tokenizers]
        [--seeds 3] [--steps 150] [--jobs 1]

Runs launch/cluster.py once per row and seed, each in a folder of its own in DIR; for off-policy rows stillhouse write,
and replay on what the teacher wrote. A run that ended well there is not made again,
so that the grid can be stopped (Ctrl-C) and gone on with; whatever is there is written to --report
(docs/results/objectives.md) after every run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, BinaryIO, Final

from bench.objectives.objective_grid import BASE, Row, objectives, staleness, tokenizers

ROOT: Final = Path(__file__).resolve().parents[2]
TABLES: Final = {"objectives": objectives, "staleness": staleness, "tokenizers": tokenizers}
ABOUT: Final = {"staleness": ", learning rate 1e-4"}
RUN_TIMEOUT_S: Final = 1800.0


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background of a shell SIGINT would be ignored
        signal.signal(number, signal.default_int_handler)
    args = parse(sys.argv[1:])
    rows = [row for table in args.tables.split(",") for row in TABLES[table]()]
    if args.only:
        rows = [row for row in rows if any(word in row.name for word in args.only.split(";"))]
    wanted = [(row, seed) for seed in range(args.seeds) for row in rows]
    missing = [(row, seed) for row, seed in wanted if summary_of(args.folder, row, seed, args.steps) is None]
    print(f"{len(wanted)} runs, {len(missing)} to be made, in {args.folder}", flush=True)
    failed = 0
    began_s = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool, Running() as running:
        runs = {pool.submit(running.make, args.folder, row, seed, args.steps): (row, seed) for row, seed in missing}
        for n_done, future in enumerate(as_completed(runs), 1):
            row, seed = runs[future]
            failed += not future.result()
            left_s = (time.monotonic() - began_s) / n_done * (len(runs) - n_done)
            print(
                f"{n_done}/{len(runs)} {row.table}: {row.name}, seed {seed}: "
                f"{outcome(summary_of(args.folder, row, seed, args.steps))}; {left_s / 60:.0f} min left",
                flush=True,
            )
            args.report.write_text(report(args), encoding="utf-8")
    args.report.write_text(report(args), encoding="utf-8")
    print(f"written: {args.report}")
    return 1 if failed else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--only", default="", help="rows whose name contains one of these; separated by ;")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "results" / "objectives.md")
    args = parser.parse_args(arguments)
    if unknown := set(args.tables.split(",")) - set(TABLES):
        parser.error(f"unknown tables {sorted(unknown)}; there are {', '.join(TABLES)}")
    return args


def run_folder(folder: Path, row: Row, seed: int, steps: int) -> Path:
    return folder / f"{steps}" / row.folder / f"seed-{seed}"


class Running:
    """The runs that are being made. Leaving it ends them, and lets none begin."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._over = False
        self._lock = threading.Lock()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            for process in self._processes:
                process.send_signal(signal.SIGINT)

    def make(self, folder: Path, row: Row, seed: int, steps: int) -> bool:
        """One run of the launcher, its output beside its folder. False: it did not end well."""
        place = run_folder(folder, row, seed, steps)
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        with (place.parent / f"seed-{seed}.log").open("wb") as log:
            return all(self._run(words, log) for words in commands(place, row, seed, steps))

    def _run(self, words: Sequence[str], log: BinaryIO) -> bool:
        with self._lock:
            if self._over:
                return False
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, process_group=0
            )
            self._processes.add(process)
        try:
            return process.wait(RUN_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            process.kill()  # the launcher's children end with it
            process.wait()
            return False
        finally:
            with self._lock:
                self._processes.discard(process)


def commands(place: Path, row: Row, seed: int, steps: int) -> list[list[str]]:
    """To be run one after the other; the last one leaves its figures in `place`."""
    steps *= row.steps_times
    common = ["--config", "examples/demo.toml", *BASE, f"--steps={steps}", f"--seed={seed}"]
    rollouts, evaluated = f"--buffer.batch_rollouts={row.batch_rollouts}", f"--learner.eval_every={steps}"
    own = ["--run-dir", str(place), *common, evaluated, *row.arguments]
    if row.prepare is None:
        return [[sys.executable, "launch/cluster.py", *own, rollouts]]
    writing, file = place.with_name(f"seed-{seed}-written"), place.with_name(f"seed-{seed}.record")
    shutil.rmtree(writing, ignore_errors=True)
    file.unlink(missing_ok=True)
    written = ["--run-dir", str(writing), *common, "--learner.eval_every=0", rollouts, *row.prepare]
    return [
        [sys.executable, "-m", "stillhouse.launch.cluster", "write", str(file), *written],
        [sys.executable, "-m", "stillhouse.launch.cluster", "replay", str(file), *own],
    ]


def summary_of(folder: Path, row: Row, seed: int, steps: int) -> dict[str, Any] | None:
    """None where there is no run that ended well. Of a replay: what it has in common with a run's."""
    try:
        place = run_folder(folder, row, seed, steps)
        summary = json.loads(
            (place / ("summary.json" if row.prepare is None else "replay.json")).read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return None
    if row.prepare is not None:
        trained = summary["tokens_trained"]
        summary["ok"] = summary["exit_code"] == 0
        summary["tokens"] = {"trained": trained, "accepted": trained, "masked": {}}
        summary["staleness"] = None
    return summary if summary["ok"] and summary["steps"] == steps * row.steps_times else None


def outcome(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "failed: see its log"
    last = summary["eval"][-1]
    return f"sampled {last['accuracy_sampled']:.3f}, reverse KL {last['reverse_kl']:.3f}, {summary['wall_s']:.0f} s"


def report(args: argparse.Namespace) -> str:
    """Markdown of all that is in the folder."""
    lines = [
        "# Objectives and staleness, measured",
        "",
        f"    python -m bench.objectives.compare_objectives --folder DIR --seeds {args.seeds} --steps {args.steps}",
        "",
        f"{time.strftime('%Y-%m-%d')}. The built-in task, `examples/demo.toml` (Adam, learning rate 3e-4, 10 warm-up "
        "steps) with k1, 8 rollouts per prompt, and what the row says; nothing is tuned per row. Evaluation at the "
        "end: 256 prompts sampled, 128 greedy. Mean over seeds (lowest to highest). What follows from it: "
        "[the defaults](../decisions/objective-defaults.md).",
        "",
    ]
    for table, rows_of in TABLES.items():
        rows = [(row, summaries(args, row)) for row in rows_of()]
        if any(found for _, found in rows):
            shape = f"{args.steps * rows[0][0].steps_times} steps of {rows[0][0].batch_rollouts} rollouts"
            lines += [f"## {table.capitalize()}", "", f"{shape}{ABOUT.get(table, '')}.", ""]
            lines += [*header(), *(line(row, found) for row, found in rows), ""]
    return "\n".join(lines)


def summaries(args: argparse.Namespace, row: Row) -> list[dict[str, Any]]:
    found = (summary_of(args.folder, row, seed, args.steps) for seed in range(args.seeds))
    return [summary for summary in found if summary is not None]


def header() -> list[str]:
    return [
        "| | seeds | accuracy, sampled | greedy | reverse KL | tokens trained | mean staleness | masked as stale |",
        "|---|---:|---|---|---|---:|---:|---:|",
    ]


def line(row: Row, found: list[dict[str, Any]]) -> str:
    if not found:
        return f"| {row.name} | 0 | | | | | | |"
    ends = [summary["eval"][-1] for summary in found]
    stale = [summary["tokens"]["masked"].get("stale", 0) / max(1, summary["tokens"]["accepted"]) for summary in found]
    cells = [
        row.name,
        str(len(found)),
        spread([end["accuracy_sampled"] for end in ends]),
        spread([end["accuracy_greedy"] for end in ends]),
        spread([end["reverse_kl"] for end in ends]),
        f"{statistics.mean(summary['tokens']['trained'] for summary in found):,.0f}",
        *(
            (
                f"{statistics.mean(summary['staleness']['mean'] for summary in found):.2f}",
                f"{statistics.mean(stale):.1%}",
            )
            if row.prepare is None
            else ("-", "-")
        ),
    ]
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
