"""A run at full rate for some minutes: does memory, or any file, keep growing?

    python -m bench.faults.soak --minutes 30 [--actors 2] [--teachers 1] [--report FILE]

Every few seconds, of the launcher, its fork server and each worker (by the pid in its log): resident memory (without
pages of files, for the journal is mapped), PSS (pages shared with others counted by the share), threads and file
descriptors; and bytes of each kind of file in the run folder. What comes before the first third is warming up. Slope:
least squares over the means of ten equal stretches of time, with its 95 % confidence (Student's t, 8 degrees of
freedom; the means, because neighbouring samples depend on one another). A role grows when even the lower end is above
--bound-mib-h, or when it has more threads or file descriptors at the end than after warming up. Journal, weights and
checkpoints must be flat in the same sense; logs, metrics and TensorBoard grow by line and step, and are held to
--bound-kib-step. Exit code 1 if anything grows.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from tests.sim.chaos.harness import READY, READY_S, ROOT, TASK, Run

SAMPLE_S: Final = 2.0
PROGRESS_S: Final = 15.0
STRETCHES: Final = 10
T_95: Final = 2.306
"""Two-sided 95 % quantile of Student's t with STRETCHES - 2 degrees of freedom."""
JOURNAL_MB: Final = 4
"""So small that it begins anew every minute or two; the default would show a few minutes of one long rise."""
WARM_UP: Final = 1 / 3
FLAT: Final = frozenset({"journal", "weights", "checkpoints"})
MIB: Final = 1 << 20
END_S: Final = 90.0

HANDLES_SPREAD: Final = 2
"""Threads and descriptors that come and go with a checkpoint or a connection."""

Series = list[tuple[float, float]]
"""(seconds, bytes or number)"""


@dataclass(frozen=True)
class Samples:
    """By process, or by kind of file."""

    resident: dict[str, Series]
    pss: dict[str, Series]
    threads: dict[str, Series]
    descriptors: dict[str, Series]
    files: dict[str, Series]


class Slope(NamedTuple):
    """Bytes per second, and half the width of its 95 % confidence interval."""

    per_s: float
    within: float


def main() -> int:
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(143))  # so that whatever was started ends with us
    args = parse(sys.argv[1:])
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    arguments = [
        *TASK,
        f"--actors={args.actors}",
        f"--teachers={args.teachers}",
        "--steps=1000000",
        "--max-staleness=2",
    ]
    arguments += ["--learner.eval_every=200", f"--buffer.journal_log_mb={JOURNAL_MB}", *args.set]
    run = Run(folder / "run", arguments, f"soak-{secrets.token_hex(4)}")
    try:
        run.until(lambda: READY in run.text, "all workers to be ready", READY_S)
        first_step, loads = len(run.steps()), [os.getloadavg()[0]]
        samples = watch(run, args.minutes * 60)
        steps = len(run.steps()) - first_step
        loads.append(os.getloadavg()[2])
        run.process.send_signal(signal.SIGINT)
        code = run.process.wait(END_S)
    finally:
        run.end()
    text, grows = report(args, samples, steps, " ".join(["python", *sys.argv]))
    rollouts = run.summary()["ledger"]["rollouts"]["trained"]
    text += (
        f"\n{rollouts} rollouts trained. Load average: {loads[0]:.1f} at the start (1 minute), {loads[1]:.1f} at the "
        f"end (15 minutes), on {os.cpu_count()} cores.\n"
    )
    if code != 130 or not run.summary()["tokens"]["balanced"]:
        grows.append(f"the run ended with exit code {code}, expected 130 and a ledger that balances")
    text += f"\n**{'Nothing grows' if not grows else 'WRONG'}**\n" + "".join(f"- {line}\n" for line in grows)
    print(f"\n{text}")
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    return 1 if grows else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--teachers", type=int, default=1)
    parser.add_argument(
        "--bound-mib-h", type=float, default=30.0, help="of resident memory per process, and flat files"
    )
    parser.add_argument(
        "--bound-kib-step", type=float, default=16.0, help="of files that grow with the steps, together"
    )
    parser.add_argument("--set", action="append", default=[], metavar="--KEY=VALUE", help="further keys of the run")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--report", type=Path)
    return parser.parse_args(arguments)


def processes(run: Run) -> dict[str, psutil.Process]:
    names = [name for role in ("buffer", "learner", "teacher", "actor") for name in run.names(role)]
    found = {name: psutil.Process(pid) for name in names if (pid := run.pid(name)) is not None}
    launcher = psutil.Process(run.process.pid)
    parent = found["actor-0"].parent()
    if parent is not None and parent != launcher:
        found["fork server"] = parent
    return found | {"launcher": launcher}


def watch(run: Run, seconds: float) -> Samples:
    resident, pss, threads, descriptors, files = (defaultdict[str, Series](list) for _ in range(5))
    watched = processes(run)
    began_s = time.monotonic()
    told_s = began_s
    while (now_s := time.monotonic()) - began_s < seconds:
        assert run.running, f"the run ended by itself:\n{run.text}"
        for name, process in watched.items():
            figures = process.memory_full_info()
            resident[name].append((now_s - began_s, figures.rss - figures.shared))
            pss[name].append((now_s - began_s, figures.pss))
            threads[name].append((now_s - began_s, process.num_threads()))
            descriptors[name].append((now_s - began_s, process.num_fds()))
        for kind, size in file_bytes(run.run_dir).items():
            files[kind].append((now_s - began_s, size))
        if now_s - told_s > PROGRESS_S:
            told_s = now_s
            sizes = ", ".join(f"{name} {series[-1][1] / MIB:.1f}" for name, series in {**resident, **files}.items())
            print(f"{(now_s - began_s) / 60:5.1f} min  step {len(run.steps())}  MiB: {sizes}", flush=True)
        time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - now_s)))
    return Samples(resident, pss, threads, descriptors, files)


def file_bytes(run_dir: Path) -> dict[str, int]:
    """By kind: the folder in the run folder, or the file's own name."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for folder, _, names in os.walk(run_dir):  # which passes over folders that go meanwhile, as snapshots do
        for path in (Path(folder) / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                sizes[path.relative_to(run_dir).parts[0]] += path.stat().st_size
    return {kind: size for kind, size in sizes.items() if size > 64 << 10}


def slope(series: Series) -> Slope:
    """After warming up. Zero where there is too little to tell."""
    end_s = series[-1][0]
    kept = warm(series)
    stretches: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    width_s = (end_s - kept[0][0]) / STRETCHES or 1.0
    for t, y in kept:
        stretches[min(STRETCHES - 1, int((t - kept[0][0]) / width_s))].append((t, y))
    if len(stretches) < STRETCHES:
        return Slope(0.0, math.inf)
    means = [(sum(t for t, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches.values()]
    t_mean, y_mean = (sum(values) / STRETCHES for values in zip(*means, strict=True))
    spread = sum((t - t_mean) ** 2 for t, _ in means)
    per_s = sum((t - t_mean) * (y - y_mean) for t, y in means) / spread
    rest = sum((y - y_mean - per_s * (t - t_mean)) ** 2 for t, y in means)
    return Slope(per_s, T_95 * math.sqrt(rest / (STRETCHES - 2) / spread))


def warm(series: Series) -> Series:
    return [(t, y) for t, y in series if t >= WARM_UP * series[-1][0]]


def mib_h(found: Slope) -> str:
    return f"{found.per_s * 3600 / MIB:+.1f} ± {found.within * 3600 / MIB:.1f}"


def handles(series: Series) -> tuple[float, float]:
    """(after warming up, at the end): medians of a tenth of what follows the warming up."""
    values = [y for _, y in warm(series)]
    tenth = max(1, len(values) // STRETCHES)
    return statistics.median(values[:tenth]), statistics.median(values[-tenth:])


def report(args: argparse.Namespace, samples: Samples, steps: int, command: str) -> tuple[str, list[str]]:
    """(Markdown, what grows)."""
    seconds = max(series[-1][0] for series in samples.resident.values())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, encoding="utf-8"
    ).stdout
    lines = [
        f"# Soak: {seconds / 60:.0f} minutes at full rate",
        "",
        f"    {command}",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit.strip() or 'unknown'}. {args.actors} actors, {args.teachers} "
        f"teachers, {steps} steps, {steps / seconds:.2f} a second. Slopes leave the first {WARM_UP * seconds / 60:.1f} "
        f"minutes out; ± is 95 % confidence. Bounds: {args.bound_mib_h} MiB/h, {args.bound_kib_step} KiB a step.",
        "",
    ]
    grows = memory_table(args, samples, lines) + files_table(args, samples.files, steps, lines)
    return "\n".join(lines) + "\n", grows


def memory_table(args: argparse.Namespace, samples: Samples, lines: list[str]) -> list[str]:
    """Appends to `lines`; returns what grows."""
    lines += [
        "| process | MiB at the start | after warming up | at the end | slope MiB/h | PSS at the end | slope MiB/h "
        "| threads | descriptors |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    grows: list[str] = []
    for name, series in samples.resident.items():
        found, pss = slope(series), samples.pss[name]
        cells = [f"{y / MIB:.1f}" for y in (series[0][1], warm(series)[0][1], series[-1][1])]
        cells += [mib_h(found), f"{pss[-1][1] / MIB:.1f}", mib_h(slope(pss))]
        for what, numbers in (("threads", samples.threads[name]), ("descriptors", samples.descriptors[name])):
            before, after = handles(numbers)
            cells.append(f"{before:.0f} to {after:.0f}")
            if after > before + HANDLES_SPREAD:
                grows.append(f"{name} has {after:.0f} {what} at the end, {before:.0f} after warming up")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        grows += too_steep(name, found, args.bound_mib_h)
    return grows


def files_table(args: argparse.Namespace, files: dict[str, Series], steps: int, lines: list[str]) -> list[str]:
    """Appends to `lines`; returns what grows."""
    lines += [
        "",
        "| files | MiB after warming up | at the end | slope MiB/h | KiB a step |",
        "|---|---:|---:|---:|---:|",
    ]
    grows: list[str] = []
    together_kib = 0.0
    for kind, series in files.items():
        found, kib_step = slope(series), (series[-1][1] - series[0][1]) / 1024 / max(1, steps)
        cells = [f"{warm(series)[0][1] / MIB:.1f}", f"{series[-1][1] / MIB:.1f}", mib_h(found)]
        lines.append(f"| {kind} | {' | '.join(cells)} | {'flat' if kind in FLAT else f'{kib_step:.2f}'} |")
        if kind in FLAT:
            grows += too_steep(kind, found, args.bound_mib_h)
        else:
            together_kib += kib_step
    lines += ["", f"Logs, metrics and TensorBoard: {together_kib:.1f} KiB a step."]
    if together_kib > args.bound_kib_step:
        grows.append(f"logs and metrics take {together_kib:.1f} KiB a step, at most {args.bound_kib_step} are allowed")
    return grows


def too_steep(what: str, found: Slope, bound_mib_h: float) -> list[str]:
    lower_mib_h = (found.per_s - found.within) * 3600 / MIB
    if lower_mib_h <= bound_mib_h:
        return []
    return [f"{what} grows by {mib_h(found)} MiB/h, at most {bound_mib_h} are allowed"]


if __name__ == "__main__":
    sys.exit(main())
