"""`bench/faults/chaos.py --runs N`: run after run under other settings, and a table of what each audit found."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stillhouse.tools.audit import report as kinds
from stillhouse.tools.audit.report import Report
from tests.sim.chaos.campaign import run_campaign
from tests.sim.chaos.plan import Plan
from tests.sim.chaos.verdict import Verdict

BOUNDS: Final = (0, 1, 4)
RELEASES: Final = ("rollout", "segment", "deadline")
GROUPS: Final = (4, 8)
"""Samples of a task."""
BATCHES: Final = {4: 18, 8: 20}
"""Rollouts of a batch: with a checkpoint every 3 steps, groups straddle batches and checkpoints."""
WHOLE_GROUPS: Final = 16
"""Rollouts of a batch under the policy `rollout`, whose batches are of whole groups."""
CHECKPOINT_EVERY: Final = 3
COLUMNS: Final = (
    ("twice", (kinds.TWICE_ROLLOUT, kinds.TWICE_SAMPLE, kinds.BEGUN_ANEW)),
    ("skipped", (kinds.SKIPPED_TASKS, kinds.SKIPPED_SAMPLES)),
    ("settled wrongly", (kinds.SETTLED_TWICE, kinds.SETTLED_WRONG)),
    ("over the bound", (kinds.OVER_BOUND, kinds.UNKNOWN_WEIGHTS)),
    ("not counted", (kinds.NOT_RECORDED, kinds.RECORDED_TWICE, kinds.OTHER_TOKENS)),
)


class Setting(NamedTuple):
    """The settings that differ between runs."""

    seed: int
    bound: int
    release: str
    group: int
    batch: int


class Audited(NamedTuple):
    """One run, over."""

    setting: Setting
    plan: Plan
    verdict: Verdict


def audit_runs(plan: Plan, n: int, folder: Path, report_file: Path | None) -> int:
    """The exit code. The table is written after each run, so that what was measured is not lost with the next one."""
    done: list[Audited] = []
    for setting in settings(plan.seed, n):
        print(f"run {len(done) + 1} of {n}: {setting}", flush=True)
        keys = (
            f"--buffer.release={setting.release}",
            f"--learner.tasks.group_size={setting.group}",
            f"--buffer.batch_rollouts={setting.batch}",
            f"--learner.checkpoint_every={CHECKPOINT_EVERY}",
        )
        own = msgspec.structs.replace(
            plan, seed=setting.seed, max_staleness=setting.bound, arguments=(*keys, *plan.arguments)
        )
        verdict = run_campaign(own, folder / f"run-{setting.seed}", lambda line: print(line, flush=True))
        done.append(Audited(setting, own, verdict))
        print("\n".join([*verdict.complaints, "held" if not verdict.complaints else "WRONG"]), flush=True)
        if report_file is not None:
            report_file.write_text(text(done, " ".join(["python", *sys.argv])), encoding="utf-8")
    print(f"\n{text(done, ' '.join(['python', *sys.argv]))}")
    return 1 if any(one.verdict.complaints for one in done) else 0


def settings(seed: int, n: int) -> list[Setting]:
    """Each bound with each release policy within nine runs."""
    chosen: list[Setting] = []
    for i in range(n):
        release, group = RELEASES[(i + i // 3) % 3], GROUPS[i % 2]
        batch = WHOLE_GROUPS if release == "rollout" else BATCHES[group]
        chosen.append(Setting(seed + i, BOUNDS[i % 3], release, group, batch))
    return chosen


def text(done: Sequence[Audited], command: str) -> str:
    """Markdown."""
    struck = [one for run in done for one in run.verdict.struck]
    restarts = sum(one.fault.restarts_run for one in struck)
    held = all(not run.verdict.complaints for run in done)
    plan = done[0].plan
    where = f"{plan.hosts} hosts ({plan.delay_ms:g} ms, {plan.loss:.0%} of frames lost), " if plan.hosts > 1 else ""
    lines = [
        f"# Chaos, audited: {len(done)} runs of {plan.faults} faults",
        "",
        f"    {command}",
        "",
        f"{time.strftime('%Y-%m-%d')}. Each run: the built-in task, {plan.actors} actors, {plan.teachers} teachers, "
        f"{where}{plan.steps} steps, a checkpoint every {CHECKPOINT_EVERY}. {len(struck)} faults struck; after "
        f"{restarts} of them the launcher had ended, by SIGKILL or Ctrl-C, and `--resume` went on.",
        "",
        f"**{'Everything held' if held else 'WRONG'}**",
        "",
        "| seed | bound | release | group | batch | faults | launcher killed | Ctrl-C | several at once | traps "
        "| steps kept | abandoned | epochs | tokens | stalest | "
        + " | ".join(name for name, _ in COLUMNS)
        + " | run |",
        "|---" * 3 + "|---:" * (12 + len(COLUMNS)) + "|---|",
        *(_row(run) for run in done),
        "",
        "Counted by `stillhouse audit` (docs/results/reliability.md). twice: tokens of the kept branch "
        "that were trained before, and samples with tokens of two rollouts; skipped: tasks and samples; settled "
        "wrongly: samples settled twice, trained after they were settled, or settled and open; over the bound: tokens; "
        "not counted: steps that the record lacks or tells otherwise than `metrics.jsonl`.",
    ]
    for run in done:
        lines += ["", f"Seed {run.setting.seed}:", *(f"- {line}" for line in run.verdict.complaints)] if (
            run.verdict.complaints
        ) else []  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(run: Audited) -> str:
    struck, setting, report = [one.fault for one in run.verdict.struck], run.setting, run.verdict.report
    cells = [
        *setting,
        len(struck),
        sum(fault.restarts_run and fault.kind != "interrupt" for fault in struck),
        sum(fault.restarts_run and fault.kind == "interrupt" for fault in struck),
        sum(fault.kind == "together" for fault in struck),
        sum(fault.kind == "trap" for fault in struck),
        *(_counted(report) if report is not None else ["-"] * (5 + len(COLUMNS))),
        "held" if not run.verdict.complaints else "WRONG",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _counted(report: Report) -> list[str]:
    found = [sum(report.faults[kind].count for kind in of) for _, of in COLUMNS]
    figures = [report.steps_kept, report.steps_abandoned, report.epochs, f"{report.tokens:,}", report.stalest]
    return [*map(str, figures), *map(str, found)]
