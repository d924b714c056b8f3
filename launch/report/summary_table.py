"""The table that the user sees at the end of a run, from summary.json."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stillhouse.launch.report.figures import clock, plural
from stillhouse.launch.report.summary import Summary, TokenCounts
from stillhouse.launch.runfolder import RunFolder
from stillhouse.learner.evaluation.figures import EvalPoint, MeasuredTeacher, TagFigures
from stillhouse.learner.reports.alarms import FEW, LENGTH, PER_ANSWER, REWARD, TRUNCATED, UNREWARDED, WATCHED
from stillhouse.protocol.messages import ForgottenPeers, LedgerCounts, Role

ANSWERS: Final = {
    LENGTH: "length {:.1f} -> {:.1f} tokens",
    TRUNCATED: "truncated {:.0%} -> {:.0%}",
    REWARD: "reward {:.3f} -> {:.3f}",
    UNREWARDED: "without a reward {:.0%} -> {:.0%}",
    PER_ANSWER: "reverse KL per answer {:.2f} -> {:.2f}",
}
"""How each figure of the training rollouts is shown."""
EFFICIENCY: Final = {
    "learner_bubble": ("the learner waited {:.1%} of its time", 1),
    "teacher_wait": ("teachers {:.1%}", 1),
    "teacher_s_per_1000_tokens": ("{:.3g} s of a teacher per 1,000 tokens", 1),
    "weight_pause_s": ("engines stood still {:.3g} ms per version", 1000),
}
"""How each figure is shown, and times what; in the units of the figures of a trace (`tools.trace.figures`)."""


def print_summary(summary: Summary, folder: RunFolder, console: Console | None = None) -> None:
    """Print the table."""
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _rows(summary, folder):
        grid.add_row(label, Text(text))  # not markup: a reason may have brackets in it
    console.print()
    console.print(grid)
    if not summary.tokens.balanced:
        console.print(unbalanced_report(summary), style="bold red", markup=False)


def _rows(summary: Summary, folder: RunFolder) -> Iterator[tuple[str, str]]:
    state = "FAILED" if summary.state == "failed" else summary.state
    on = [alarm.name for alarm in summary.alarms if alarm.over is None]
    said = f", but with {plural(len(on), 'alarm')}: {', '.join(on)}" if on and summary.state == "finished" else ""
    yield "run", f"{summary.name}: {state}{said}, {summary.reason}"
    yield from _result_rows(summary)
    yield from _work_rows(summary)
    yield "checkpoint", str(folder.path / summary.checkpoint) if summary.checkpoint else "none"
    for path in summary.checkpoints_damaged:
        yield "DAMAGED", f"{folder.path / path} could not be read; an older checkpoint was used in its place"
    tensorboard = _as_typed(Path(sys.executable).with_name("tensorboard"))
    events = f"{tensorboard} --logdir {folder.path / summary.tensorboard}" if summary.tensorboard else "none"
    yield "TensorBoard", events
    if not summary.ok:
        yield "to resume", f"{own_command()} --resume --run-dir {folder.path}{lost_steps(summary)}"
    yield "run folder", str(folder.path)


def _result_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    first, last = (summary.eval[0], summary.eval[-1]) if summary.eval else (None, None)
    if first is not None and last is not None:
        for kind in ("sampled", "greedy"):
            before, after = getattr(first, f"accuracy_{kind}"), getattr(last, f"accuracy_{kind}")
            if before is not None and after is not None:
                change = f"{before:.3f} at step {first.step} -> {after:.3f} at step {last.step}"
                yield f"student accuracy, {kind}", change
        yield from _tag_rows(first, last)
    for name in dict.fromkeys(point.name for point in summary.eval_sets):
        points = [point for point in summary.eval_sets if point.name == name]
        yield f"on {name}", _change(points[0], points[-1])
    for point in summary.eval[:1] + summary.eval[1:][-1:]:
        if lacking := lacking_text(point):
            yield "evaluation incomplete", lacking
    if summary.teacher_accuracy:
        yield "teacher accuracy, sampled", teachers_text(summary.teacher_accuracy)
    evaluated = first is not None and first.reverse_kl is not None
    kl_first = summary.reverse_kl_first if first is None or first.reverse_kl is None else first.reverse_kl
    kl_last = summary.reverse_kl_last if last is None or last.reverse_kl is None else last.reverse_kl
    if kl_first is not None and kl_last is not None:
        of = "" if evaluated else " (training: first step, last step)"
        yield "reverse KL per token", f"{kl_first:.3f} -> {kl_last:.3f}{of}"
    if answers := answers_text(summary):
        yield "training rollouts", answers
    if summary.sample is not None:
        yield "sample", str(summary.sample)
    for name, alarms in alarms_by_name(summary).items():
        yield f"ALARM {name}", alarms


def _work_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """What was done, in which time, with which tokens."""
    if (noise := summary.teacher_noise) is not None:
        between = "" if noise.teachers is None else f"; {noise.teachers:.1g} nats between teachers"
        yield "teacher noise", f"{noise.batch:.1g} nats (change of a log-prob when scored in another batch){between}"
    ready = "not all workers became ready" if summary.ready_s is None else f"all ready after {summary.ready_s:.1f} s"
    made = plural(max(0, summary.steps - summary.first_step), "optimizer step")
    launch = f" (this launch; {summary.steps:,} in all)" if summary.first_step else ""
    yield "steps, time", f"{made} in {clock(summary.wall_s)}{launch}, {ready}"
    if summary.bound:
        yield "limit", summary.bound
    if efficiency := efficiency_text(summary):
        yield "efficiency", efficiency
    if summary.flops:
        yield "compute", flops_text(summary.flops)
    if summary.gpu_hours:
        cost = f", {summary.gpu_cost:,.2f} by launch.gpu_hour_price" if summary.gpu_cost else ""
        yield "GPU hours", f"{summary.gpu_hours:,.2f} ({plural(summary.gpus, 'GPU')}){cost}"
    yield "peak memory", f"{summary.peak_memory_bytes / 2**30:.2f} GiB over all processes"
    tokens = summary.tokens
    yield "tokens", f"{tokens.accepted:,} accepted = {counts_text(tokens)}"
    if tokens.accepted:
        yield "goodput", goodput_text(summary)
    if summary.tokens_trained_offline:
        yield "off-policy tokens", f"{summary.tokens_trained_offline:,} trained as well, written by the teacher"
    if summary.failed_rollouts:
        yield "failed rollouts", failed_text(summary)
    source = {"final": "", "last_seen": " (the buffer died; as last seen)", "none": " (never seen)"}
    yield "ledger", ("balanced" if tokens.balanced else "NOT BALANCED") + source[summary.ledger.source]
    stale = summary.staleness
    yield "staleness", f"mean {stale.mean:.2f}, max {stale.max}, bound {stale.bound} optimizer steps"
    if joined := joined_text(summary):
        yield "joined", joined
    restarts = sum(worker.restarts for worker in summary.workers.values())
    of_servers = sum(server.restarts for server in summary.servers.values())
    if restarts or of_servers:
        yield "restarts", str(restarts) + (f", and {of_servers} of inference servers" if of_servers else "")


def efficiency_text(summary: Summary) -> str:
    """The learner's and teachers' waits, and the costs of scores and weights; empty without any."""
    figures = {name.removeprefix("efficiency/"): value for name, value in summary.efficiency.items()}
    parts = [text.format(times * figures[name]) for name, (text, times) in EFFICIENCY.items() if name in figures]
    restarted = sum(worker.restarts for worker in summary.workers.values() if worker.role == "learner")
    since = " (since the learner's last start)" if restarted else " (this launch)" if summary.first_step else ""
    return ", ".join(parts) + since if parts else ""


def flops_text(flops: Mapping[str, float]) -> str:
    """What each role's models computed."""
    total, words = sum(flops.values()), {"learner": "training", "actor": "generation", "teacher": "teachers"}
    parts = ", ".join(f"{words[role]} {value / total:.0%}" for role, value in flops.items())
    return f"{total:.3g} floating-point operations: {parts}"


def answers_text(summary: Summary) -> str:
    """How the training rollouts changed; empty without any."""
    changes = {tag: both for tag, both in summary.changes.items() if tag != UNREWARDED or any(both)}
    texts = [text.format(*changes[tag]) for tag, text in ANSWERS.items() if tag in changes]
    return ", ".join(texts) + f" (first {FEW} steps -> last {FEW})" if texts else ""


def goodput_text(summary: Summary) -> str:
    """The share of the tokens that was trained, and of those the ones that a restart took back."""
    tokens = summary.tokens
    text = f"{tokens.trained / tokens.accepted:.1%} of the tokens written were trained"
    lost = tokens.trained - summary.tokens_trained if summary.tokens_trained is not None else 0
    return text + (f", {lost:,} of them by steps that a restart took back" if lost > 0 else "")


def alarms_by_name(summary: Summary) -> dict[str, str]:
    """One line per figure that left its range: when, and how far at the first time."""
    lines: dict[str, str] = {}
    for alarm in summary.alarms:
        if alarm.name in lines:
            continue
        times = [one for one in summary.alarms if one.name == alarm.name]
        steps = ", ".join(f"{one.began} to {'the end' if one.over is None else one.over}" for one in times)
        lines[alarm.name] = (
            f"{WATCHED[alarm.name].what}: {alarm.tag} {alarm.start:.3g} "
            f"{'at its best' if WATCHED[alarm.name].best else 'at the start'}, {alarm.value:.3g} at step "
            f"{alarm.raised}; steps {steps}"
        )
    return lines


def lost_steps(summary: Summary) -> str:
    """Note on the steps that a resumed run has to repeat; empty when there are none."""
    if summary.checkpoint is None:
        return "    (from step 0: there is no checkpoint)" if summary.steps else ""
    named = re.match(r"step_(\d+)", Path(summary.checkpoint).name)
    if named is None or int(named[1]) >= summary.steps:
        return ""
    return f"    (from step {int(named[1])}: the newest checkpoint)"


def own_command() -> str:
    """The command by which this program was called."""
    if not sys.argv[0].endswith(".py"):
        return _as_typed(Path(sys.argv[0]))
    return f"{_as_typed(Path(sys.executable))} {_as_typed(Path(sys.argv[0]))}"


def _as_typed(path: Path) -> str:
    """Relative to the current folder if it lies inside."""
    here = Path.cwd()
    absolute = path if path.is_absolute() else here / path
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _tag_rows(first: EvalPoint, last: EvalPoint) -> Iterator[tuple[str, str]]:
    """One row per tag and environment of the last evaluation: first and last value, and the number of rollouts."""
    groups = [(f"of {tag}", now, first.tags.get(tag)) for tag, now in last.tags.items()]
    groups += [(f"in {env}", now, first.environments.get(env)) for env, now in last.environments.items()]
    for name_of_group, now, before in groups:
        yield name_of_group, _change(before or TagFigures(), now)


def _change(was: TagFigures, now: TagFigures) -> str:
    """First and last value of each figure that was measured."""
    figures = {
        f"sampled (of {now.n_sampled})": (was.accuracy_sampled, now.accuracy_sampled),
        f"greedy (of {now.n_greedy})": (was.accuracy_greedy, now.accuracy_greedy),
        **{name.replace("_at_", "@"): (was.at_k.get(name), value) for name, value in now.at_k.items()},
        "reverse KL": (was.reverse_kl, now.reverse_kl),
    }
    parts = [
        f"{name} {'?' if before is None else f'{before:.3f}'} -> {after:.3f}"
        for name, (before, after) in figures.items()
        if after is not None
    ]
    return ", ".join(parts) or "nothing could be measured"


def joined_text(summary: Summary) -> str:
    """Work of the workers that joined; empty if none did."""
    parts: list[str] = []
    roles: dict[Role, str] = {"actor": "written", "teacher": "scored"}
    for role, did in roles.items():
        workers = [worker for worker in summary.workers.values() if worker.joined and worker.role == role]
        others = summary.forgotten.get(role, ForgottenPeers())
        if n := len(workers) + others.n:
            tokens = sum(worker.tokens for worker in workers) + others.tokens_total
            parts.append(f"{plural(n, role)} ({tokens:,} tokens {did})")
    return ", ".join(parts)


def teachers_text(measured: Mapping[str, MeasuredTeacher]) -> str:
    """Accuracy of the teachers, by pool if there are several."""
    texts = {pool: f"{one.accuracy_sampled:.3f} (of {one.n_sampled})" for pool, one in measured.items()}
    return (
        next(iter(texts.values())) if len(texts) == 1 else ", ".join(f"{pool} {text}" for pool, text in texts.items())
    )


def failed_text(summary: Summary) -> str:
    """Number of failed rollouts by reason, and the newest text."""
    counted = ", ".join(f"{each.n:,} {reason}" for reason, each in summary.failed_rollouts.items())
    newest = next(reversed(summary.failed_rollouts.values())).newest
    return f"{counted}; newest {newest}"


def lacking_text(point: EvalPoint) -> str:
    """Note on rollouts that this evaluation's figures lack; empty when they cover all that were requested."""
    lacking = {"missing": point.missing or 0, "failed": point.failed or 0}
    if not any(lacking.values()):
        return ""
    why = ", ".join(f"{n} {name}" for name, n in lacking.items() if n)
    asked = (point.n_greedy or 0) + (point.n_sampled or 0) + sum(lacking.values())
    return (
        f"step {point.step}: the figures are of {point.n_greedy or 0} greedy and {point.n_sampled or 0} sampled "
        f"rollouts, {asked} were requested ({why})"
    )


def counts_text(counts: TokenCounts | LedgerCounts) -> str:
    """The right-hand side of the ledger's equation, without zero terms except `trained`."""
    terms = [f"{counts.trained:,} trained"]
    terms += [f"{n:,} masked ({reason})" for reason, n in counts.masked.items() if n]
    terms += [f"{n:,} dropped ({reason})" for reason, n in counts.dropped.items() if n]
    terms += [f"{n:,} {name}" for name, n in (("waiting", counts.waiting), ("in flight", counts.in_flight)) if n]
    return " + ".join(terms)


def unbalanced_report(summary: Summary) -> str:
    """The units that do not balance, and their difference."""
    ledger = summary.ledger
    lines = ["THE LEDGER DOES NOT BALANCE: something was lost or counted twice; please report it with the run folder."]
    units = {"tokens": summary.tokens, "rollouts": ledger.rollouts, "segments": ledger.segments}
    for unit, counts in {**units, "eval_tokens": ledger.eval_tokens}.items():
        gone = counts.trained + sum(counts.masked.values()) + sum(counts.dropped.values())
        off = counts.accepted - gone - counts.waiting - counts.in_flight
        if off:
            lines.append(f"  {unit}: {counts.accepted:,} accepted, but {counts_text(counts)}: off by {off:+,}")
    return "\n".join(lines)
