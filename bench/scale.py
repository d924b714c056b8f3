"""Large runs without a model: 32 to 512 simulated actors, 8 to 64 teachers and a learner around the real buffer.

    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/scale.py --max-staleness 1 2 4
    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/scale.py --actors 32 128 512 --teachers 8 16 64 --time-scale 4
    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/scale.py --virtual --preset "7B on 8 GPUs" --batch-rollouts 2048

Links, messages, buffer and journal are the real ones; each worker has a connection of its own. Engines are simulated:
tokens come at the named rates, responses have lognormal lengths, frames have the real sizes. With --virtual there are
no links and no journal, only the buffer's state on a virtual clock: the same schedule, without the machine's limits.

Where rows differ in their actors, batches grow with them: a step takes the same time in all.

share      trained tokens/s over those of the slowest stage alone
limit      largest share that any schedule could reach whose batches have this size and whose actors never pause
           (bench/scale_limit.py)
valid      no: the machine itself was the limit, so the row says nothing. Use a larger --time-scale
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from bench.scale_count import Figures
from bench.scale_hosts import wire_run
from bench.scale_limit import best_share
from bench.scale_settings import PRESETS, Scenario
from bench.scale_virtual import virtual_run

LISTS: Final = ("actors", "teachers", "max_staleness")
LEAST_IDLE: Final = 0.05
"""Below this share of idle cores the machine may have been the limit."""
LATEST: Final = 0.05
"""A peer that was later than this share of a step, likewise."""
BUSY: Final = 0.97
COLUMNS: Final = (
    ("actors + teachers", "{actors} + {teachers}"),
    ("bound", "{bound}"),
    ("share", "{share:.3f}"),
    ("limit", "{limit:.3f}"),
    ("bottleneck", "{bottleneck}"),
    ("actors, teachers, learner busy", "{actors_busy:.2f}, {teachers_busy:.2f}, {learner_busy:.2f}"),
    ("learner waits, s per step", "{wait_s:.2f} of {step_s:.1f}"),
    ("staleness", "{mean_staleness:.2f}, max {max_staleness}"),
    ("masked", "{masked:.1%}"),
    ("batch, rollouts", "{batch:.2f}"),
    ("context per token", "{context:.2f}"),
    ("buffer CPU s / M tokens", "{cpu_per_m:.2f}"),
    ("messages/s", "{messages_per_s:,.0f}"),
    ("buffer MB", "{peak_mb:.0f}"),
    ("ledger", "{ledger}"),
    ("valid", "{valid}"),
)


def row(scenario: Scenario, figures: Figures) -> dict[str, object]:
    """The figures of a row, by name."""
    count, warm_up = figures.count, scenario.warm_up
    busy = {
        "actors": figures.busy_slot_s / (figures.seconds * scenario.actors * scenario.slots),
        "teachers": figures.busy_teacher_s / (figures.seconds * scenario.teachers),
        "learner": count.busy_s / figures.seconds,
    }
    n_steps = len(count.ended_s) - warm_up
    step_s = (count.ended_s[-1] - count.ended_s[warm_up - 1]) / n_steps
    mean_staleness, max_staleness = count.staleness(warm_up)
    trained = count.trained_tokens()
    return {
        "actors": scenario.actors,
        "teachers": scenario.teachers,
        "bound": scenario.max_staleness,
        "share": count.per_s(warm_up) / scenario.bound_per_s,
        "limit": best_share(scenario),
        "bottleneck": bottleneck(busy),
        **{f"{name}_busy": share for name, share in busy.items()},
        "wait_s": sum(count.waits_s[warm_up:]) / n_steps,
        "step_s": step_s,
        "mean_staleness": mean_staleness,
        "max_staleness": max_staleness,
        "masked": figures.masked_tokens / max(1, figures.accepted_tokens),
        "batch": count.trained_tokens(warm_up) / n_steps / scenario.step_tokens,
        "context": sum(count.context_tokens) / max(1, trained),
        "cpu_per_m": figures.buffer_cpu_s / trained * 1e6,
        "messages_per_s": figures.messages / (figures.wall_s or figures.seconds),
        "peak_mb": figures.buffer_peak_mb,
        "ledger": "balanced" if figures.balanced else "NOT BALANCED",
        "valid": validity(figures, step_s),
    }


def bottleneck(busy: dict[str, float]) -> str:
    """The busiest stage if it hardly ever waits, otherwise the schedule between the stages."""
    name = max(busy, key=lambda stage: busy[stage])
    return name if busy[name] >= BUSY else "schedule"


def validity(figures: Figures, step_s: float) -> str:
    if figures.idle_share < LEAST_IDLE:
        return f"no: cores {1 - figures.idle_share:.0%} busy"
    if figures.late_s > LATEST * step_s:
        return f"no: a peer was {figures.late_s:.1f} s late"
    return "yes"


def scenarios(args: argparse.Namespace) -> list[Scenario]:
    base = PRESETS[args.preset]
    given = {f.name: getattr(args, f.name) for f in fields(Scenario) if f.name not in LISTS}
    base = replace(base, **{name: value for name, value in given.items() if value is not None})
    if base.steps <= base.warm_up or base.warm_up < 1:
        raise SystemExit(
            f"--steps {base.steps}, --warm-up {base.warm_up}: expected at least 1 and fewer than the steps"
        )
    actors, teachers = args.actors or [base.actors], args.teachers or [base.teachers]
    if len(teachers) not in (1, len(actors)):
        raise SystemExit(
            f"got {len(teachers)} numbers of teachers for {len(actors)} of actors; expected one, or as many"
        )
    teachers = teachers * len(actors) if len(teachers) == 1 else teachers
    rollouts = {a: round(base.batch_rollouts * a / actors[0]) for a in actors}
    return [
        replace(base, actors=a, teachers=t, max_staleness=bound, batch_rollouts=rollouts[a])
        for a, t in zip(actors, teachers, strict=True)
        for bound in args.max_staleness or [base.max_staleness]
    ]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="equal")
    parser.add_argument("--virtual", action="store_true", help="no links and no journal, on a virtual clock")
    parser.add_argument("--limit-s", type=float, default=170.0, help="longest real time of a row")
    for field in fields(Scenario):
        name = f"--{field.name.replace('_', '-')}"
        if field.name in LISTS:
            parser.add_argument(name, type=int, nargs="+")
        elif field.name == "release":
            parser.add_argument(name, choices=("segment", "deadline"))
        else:
            parser.add_argument(name, type=type(field.default))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = options().parse_args(argv)
    print(f"| {' | '.join(title for title, _ in COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    faults: list[str] = []
    for scenario in scenarios(args):
        with tempfile.TemporaryDirectory(prefix="scale-") as folder:
            figures = virtual_run(scenario) if args.virtual else wire_run(scenario, Path(folder, "run"), args.limit_s)
        cells = row(scenario, figures)
        print(f"| {' | '.join(form.format(**cells) for _, form in COLUMNS)} |", flush=True)
        faults += figures.count.faults
        faults += [] if figures.balanced else ["the ledger does not balance, or refused something"]
    for fault in faults[:10]:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
