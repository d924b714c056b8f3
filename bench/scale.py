"""Large runs without a model: 32 to 512 simulated actors, 8 to 64 teachers and a learner around the real buffer.

    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/scale.py --max-staleness 1 2 4
    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/scale.py --actors 32 128 512 --teachers 8 16 64 --time-scale 1 4 16
    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/scale.py --actors 512 --teachers 64 --shards 4 --time-scale 16
    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/scale.py --virtual --preset "7B on 8 GPUs" --batch-rollouts 2048

Links, messages, buffer and journal are the real ones; each worker has a connection of its own, and each of the
buffer's --shards a process. Engines are simulated: tokens come at the named rates, responses have lognormal lengths,
frames have the real sizes. With --virtual there are no links and no journal, only the buffer's state on a virtual
clock: the same schedule, without the machine's limits.

Where rows differ in their actors, batches grow with them: a step takes the same time in all.

CPU time of the buffer is counted from the end of the warm-up to the end of the last step. It has two parts. Heartbeats
and ticks cost the same each second, whatever is done; this is measured before the run begins, when all peers are
connected and idle. The rest is `work`. A run that is slowed down (--time-scale) has more seconds per token: `at full
speed` is the work and as many seconds as there are simulated ones. `busiest shard` is its share of a core, here and at
full speed: below 1, the shard can hold its part of the run. nan: most of the time was not work, so what was cannot be
told; use a smaller --time-scale. In a busy run heartbeats cost less than in an idle one, as they share turns.

messages   sent and received by the peers, without heartbeats and their answers
slowest shard  the part of the learner's wait in which some shards had sent their share of the batch and others had not
ledger     balanced: each shard's last ledger has every token that its actors have sent, and as trained what the
           learner has trained of its tasks, by the peers' own count
share      trained tokens/s over those of the slowest stage alone
limit      largest share that any schedule could reach whose batches have this size and whose actors never pause
           (bench/scale_limit.py)
valid      no: the machine itself was the limit, so the row says nothing. Use a larger --time-scale
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, TypeVar

from bench.scale_count import Figures
from bench.scale_hosts import wire_run
from bench.scale_limit import best_share
from bench.scale_settings import PRESETS, Scenario
from bench.scale_virtual import virtual_run

ValueT = TypeVar("ValueT")
LISTS: Final = ("actors", "teachers", "max_staleness", "time_scale")
LEAST_IDLE: Final = 0.05
"""Below this share of idle cores the machine may have been the limit."""
LATEST: Final = 0.05
"""A peer that was later than this share of a step, likewise."""
BUSY: Final = 0.97
MOST_IDLE: Final = 0.5
"""If more than this share of the CPU time was not work, work is the small difference of two large numbers."""
COLUMNS: Final = (
    ("actors + teachers", "{actors} + {teachers}"),
    ("shards", "{shards}"),
    ("bound", "{bound}"),
    ("share", "{share:.3f}"),
    ("limit", "{limit:.3f}"),
    ("bottleneck", "{bottleneck}"),
    ("actors, teachers, learner busy", "{actors_busy:.2f}, {teachers_busy:.2f}, {learner_busy:.2f}"),
    ("learner waits, s per step", "{wait_s:.2f} of {step_s:.1f}"),
    ("for the slowest shard", "{shard_wait_s:.2f}"),
    ("staleness", "{mean_staleness:.2f}, max {max_staleness}"),
    ("masked", "{masked:.1%}"),
    ("batch, rollouts", "{batch:.2f}"),
    ("context per token", "{context:.2f}"),
    ("buffer CPU s / M tokens", "{cpu_per_m:.2f}: {work_per_m:.2f} work"),
    ("at full speed", "{full_speed_per_m:.2f}"),
    ("busiest shard", "{busiest_per_m:.2f} s / M, {busiest:.2f} of a core, {busiest_full_speed:.2f} at full speed"),
    ("idle, CPU ms per s and peer", "{idle_ms_per_peer:.3f}"),
    ("messages / 1,000 tokens", "{messages_per_1000:.1f}"),
    ("buffer MB: largest shard, all", "{peak_mb:.0f}, {all_mb:.0f}"),
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
        "shards": scenario.shards,
        "bound": scenario.max_staleness,
        "share": count.per_s(warm_up) / scenario.bound_per_s,
        "limit": best_share(scenario),
        "bottleneck": bottleneck(busy),
        **{f"{name}_busy": share for name, share in busy.items()},
        "wait_s": sum(count.waits_s[warm_up:]) / n_steps,
        "step_s": step_s,
        "shard_wait_s": sum(count.shard_waits_s[warm_up:]) / n_steps,
        "mean_staleness": mean_staleness,
        "max_staleness": max_staleness,
        "masked": figures.masked_tokens / max(1, figures.accepted_tokens),
        "batch": count.trained_tokens(warm_up) / n_steps / scenario.step_tokens,
        "context": sum(count.context_tokens) / max(1, trained),
        **buffer_cost(scenario, figures),
        "messages_per_1000": 1000 * figures.messages / max(1, trained),
        "peak_mb": max(shard.peak_mb for shard in figures.shards),
        "all_mb": sum(shard.peak_mb for shard in figures.shards),
        "ledger": "NOT BALANCED" if figures.ledger_faults else "balanced",
        "valid": validity(figures, step_s),
    }


def buffer_cost(scenario: Scenario, figures: Figures) -> dict[str, float]:
    """CPU time of the buffer per million trained tokens, and what an idle peer costs."""
    count, warm_up = figures.count, scenario.warm_up
    millions = count.trained_tokens(warm_up) / 1e6
    simulated_s = count.ended_s[-1] - count.ended_s[warm_up - 1]
    works_s = [shard.cpu_s - shard.idle_cpu * figures.measured_s for shard in figures.shards]
    full_speed_s = [work_s + one.idle_cpu * simulated_s for work_s, one in zip(works_s, figures.shards, strict=True)]
    cpu_s, busiest_s = sum(shard.cpu_s for shard in figures.shards), max(shard.cpu_s for shard in figures.shards)
    idle_cpu = sum(shard.idle_cpu for shard in figures.shards)
    known = 1.0 if sum(works_s) >= MOST_IDLE * cpu_s else math.nan
    return {
        "cpu_per_m": cpu_s / millions,
        "work_per_m": known * sum(works_s) / millions,
        "full_speed_per_m": known * sum(full_speed_s) / millions,
        "busiest_per_m": busiest_s / millions,
        "busiest": busiest_s / figures.measured_s if figures.measured_s else 0.0,
        "busiest_full_speed": known * max(full_speed_s) / simulated_s,
        "idle_ms_per_peer": 1e3 * idle_cpu / (scenario.actors + scenario.teachers + 1),
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
    if base.batch_rollouts % base.shards:
        raise SystemExit(f"--batch-rollouts {base.batch_rollouts}: expected a multiple of --shards {base.shards}")
    actors = args.actors or [base.actors]
    teachers = _one_each(len(actors), args.teachers or [base.teachers], "numbers of teachers")
    time_scales = _one_each(len(actors), args.time_scale or [base.time_scale], "time scales")
    if min(*actors, *teachers) < base.shards:
        raise SystemExit(f"--shards {base.shards}: expected an actor and a teacher for each, or more")
    each = base.batch_rollouts // base.shards
    rollouts = {a: base.shards * round(each * a / actors[0]) for a in actors}
    return [
        replace(base, actors=a, teachers=t, max_staleness=bound, batch_rollouts=rollouts[a], time_scale=scale)
        for a, t, scale in zip(actors, teachers, time_scales, strict=True)
        for bound in args.max_staleness or [base.max_staleness]
    ]


def _one_each(n: int, values: list[ValueT], what: str) -> list[ValueT]:
    """One value for each number of actors."""
    if len(values) not in (1, n):
        raise SystemExit(f"got {len(values)} {what} for {n} of actors; expected one, or as many")
    return values * n if len(values) == 1 else values


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="equal")
    parser.add_argument("--virtual", action="store_true", help="no links and no journal, on a virtual clock")
    parser.add_argument("--limit-s", type=float, default=170.0, help="longest real time of a row")
    for field in fields(Scenario):
        name = f"--{field.name.replace('_', '-')}"
        if field.name in LISTS:
            parser.add_argument(name, type=type(field.default), nargs="+")
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
        faults += figures.ledger_faults
    for fault in faults[:10]:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
