"""Live status of a run: a table on a terminal, or one line every few seconds elsewhere. It only reads snapshots."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Final, Literal, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stillhouse.launch.report.figures import Figures, Rates, RunView, clock, named, plural, short
from stillhouse.learner.reports.alarms import ALARM_SINCE, MEAN

log = logging.getLogger(__name__)
LOST_SHOWN: Final = 6
"""Number of reasons for lost tokens that the status lists one by one."""
LONGEST: Final = 158
"""Characters of a status line."""
QUOTED: Final = 48
"""Characters of an error in it."""
REDRAW_S: Final = 0.25
RATES: Final = {"actors": "actor", "teachers": "teacher", "learner": "learner"}


class StatusView:
    """Where a launcher shows what happens. This one shows events only."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        """Show an event: it stays on the screen, and in the launcher's log."""
        log.info("%s", text)
        print(text, flush=True)

    def show(self, view: RunView) -> None:
        """Offer the present state, as often as the launcher likes; it is shown when due."""


class LineStatus(StatusView):
    """One line every `every_s`."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._rates = Rates()
        self._shown_s = time.monotonic()

    def show(self, view: RunView) -> None:
        figures = self._rates.figures(view)
        if view.now_s - self._shown_s >= self._every_s:
            self._shown_s = view.now_s
            print(line(figures), flush=True)


class TableStatus(StatusView):
    """A table, redrawn in place; events scroll above it."""

    def __init__(self) -> None:
        self._rates = Rates()
        self._live = Live(console=Console(), refresh_per_second=4, transient=True)
        self._shown_s = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        log.info("%s", text)
        self._live.console.print(text, markup=False, highlight=False)

    def show(self, view: RunView) -> None:
        figures = self._rates.figures(view)
        if view.now_s - self._shown_s >= REDRAW_S:
            self._shown_s = view.now_s
            self._live.update(table(figures))


def make_status(style: Literal["auto", "rich", "plain", "off"], every_s: float) -> StatusView:
    """The view for a style; auto is the table where stdout is a terminal that can redraw."""
    if style == "auto":
        style = "rich" if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" else "plain"
    if style == "rich":
        return TableStatus()
    return LineStatus(every_s) if style == "plain" else StatusView()


def line(f: Figures) -> str:
    """The status in one line of at most LONGEST characters: what is wrong, what is learnt, how fast; and of the rest
    what has room. A terminal's table and the summary have all of it."""
    if f.step is None:
        there = _connected(f) + (f", {_servers(f)}" if f.view.servers else "")
        return f"[{clock(f.view.elapsed_s)}] starting: {there}" + _ending(f)
    trouble = f"ALARM {_cut(alarms)} | " if (alarms := _alarms(f)) else ""
    trouble += f"EQUAL REWARDS: {f.equal_groups} | " if f.equal_groups else ""
    text, ending = f"[{clock(f.view.elapsed_s)}] {trouble}step {f.step}/{f.view.steps}", _cut(_ending(f))
    for part in _parts(f):
        if part and len(text) + len(part) + len(ending) + 3 <= LONGEST:
            text += f" | {part}"
    return (text + ending)[:LONGEST]


def _parts(f: Figures) -> Iterator[str]:
    """The parts of the line, the most important first; some are empty."""
    yield f"FAILED ROLLOUTS {_cut(f.failed)}" if f.failed else ""
    if unsaved := f.learner.get("checkpoints_failed_total"):
        yield f"CHECKPOINTS NOT WRITTEN {unsaved:.0f}"
    if unsent := f.learner.get("ema_failures_total"):
        yield f"AVERAGES NOT SENT {unsent:.0f}"
    for label, n in f.queues.items():
        if label.isupper() and n:
            yield f"{label} {n}"
    yield _servers(f) if f.view.servers_up < f.view.servers else ""
    yield _earned(f)
    yield _answers(f)
    yield f"reverse KL {_number(kl)}" if (kl := f.learner.get("reverse_kl")) is not None else ""
    yield f"tokens/s {' '.join(short(f.rate(role)) for role in RATES.values())}"
    yield f"eta {clock(f.eta_s)}" if f.eta_s is not None else ""
    yield f.bound_short.partition(": ")[0]
    yield f"staleness {f.staleness_mean:.2f} of {f.staleness_bound}"
    yield f"held back: {_cut(_held_back(f))}" if f.held_back else ""
    yield f"joined {f.joined}" if f.joined else ""
    yield f"hedges {_counted(f.hedges)}" if f.hedges else ""
    yield f"loss {_number(f.learner['loss'])}" if "loss" in f.learner else ""
    yield f"lost {_lost(f)}" if f.lost else ""


def table(f: Figures) -> Table:
    """The status as a table, for a terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    if f.step is None:
        grid.add_row("starting", f"{_connected(f)}, {clock(f.view.elapsed_s)}")
    else:
        bar = Table.grid(padding=(0, 2))
        eta = clock(f.eta_s) if f.eta_s is not None else "?"
        progress = ProgressBar(total=max(f.view.steps, 1), completed=f.step, width=40)
        bar.add_row(progress, f"{f.step}/{f.view.steps}   {clock(f.view.elapsed_s)}, {eta} to go")
        grid.add_row("step", bar)
        grid.add_row("tokens/s", _rates(f))
        if evaluated := _evaluated(f):
            grid.add_row("accuracy", f"{evaluated} (newest evaluation)")
        if answers := _answers(f):
            earned = _reward(f)
            grid.add_row("answers", f"{earned}{', ' if earned else ''}{answers}{_per_answer(f)} (newest steps)")
        grid.add_row("learning", _learning(f, "   "))
        if f.view.sample:
            grid.add_row("sample", Text(f.view.sample))
        if alarms := _alarms(f):
            grid.add_row("ALARM", alarms)
        if f.equal_groups:
            grid.add_row("EQUAL REWARDS", f.equal_groups)
        grid.add_row(
            "staleness", f"mean {f.staleness_mean:.2f}   max {f.staleness_max} of {f.staleness_bound} optimizer steps"
        )
        grid.add_row("learner", f.learner_does)
        grid.add_row("limit", f.bound or "not known yet")
        grid.add_row("queues", _counted(f.queues))
        grid.add_row("versions", f.versions_listed)
        grid.add_row("lost", _lost(f) if f.lost else "nothing")
    memory = f"{f.view.memory_bytes / 2**30:.2f} GiB" if f.view.memory_bytes else "?"
    grid.add_row(
        "workers", f"{f.running} of {f.expected} run, {plural(f.view.restarts, 'restart')}, peak memory {memory}"
    )
    if f.joined:
        grid.add_row("joined", f.joined)
    if f.view.servers:
        grid.add_row("servers", _servers(f))
    if f.failed:
        grid.add_row("failed rollouts", Text(f.failed))
    if unsaved := f.learner.get("checkpoints_failed_total"):
        grid.add_row("CHECKPOINTS", f"{unsaved:.0f} could not be written; see learner-0.log")
    if unsent := f.learner.get("ema_failures_total"):
        grid.add_row("AVERAGES", f"{unsent:.0f} could not be sent to teachers; see learner-0.log")
    if f.hedges:
        grid.add_row("hedges", _counted(f.hedges))
    if f.held_back:
        grid.add_row("held back", _held_back(f))
    if f.view.ending is not None:
        grid.add_row("ending", f.view.ending)
    return grid


def _connected(f: Figures) -> str:
    return f"{f.ready} of {plural(f.expected, 'worker')} {'is' if f.ready == 1 else 'are'} connected"


def _rates(f: Figures) -> str:
    rates = {label: short(f.rate(role)) for label, role in RATES.items()}
    return " ".join(f"{label} {rate}" for label, rate in rates.items())


def _learning(f: Figures, between: str) -> str:
    """Loss, and the reverse KL where there is one (not without teachers)."""
    loss = f"loss {_number(f.learner.get('loss'))}"
    kl = f.learner.get("reverse_kl")
    return loss if kl is None else f"reverse KL {_number(kl)}{between}{loss}"


def _alarms(f: Figures) -> str:
    """The alarms that are on, and at which step each began; empty if there are none."""
    return ", ".join(f"{name} since step {step:.0f}" for name, step in named(f.learner, ALARM_SINCE).items())


def _earned(f: Figures) -> str:
    """The mean reward of the newest steps, and the accuracy of the newest evaluation; what there is of them."""
    accuracy = f.learner.get("eval_sampled", f.learner.get("eval_greedy"))
    shown = (_reward(f), "" if accuracy is None else f"accuracy {_number(accuracy, 2)}")
    return ", ".join(text for text in shown if text)


def _reward(f: Figures) -> str:
    """`none` if nothing was judged; a reward that is never there is easily overlooked."""
    reward, without = (f.learner.get(f"{MEAN}{name}") for name in ("reward_mean", "unrewarded_share"))
    if reward is None:
        return "reward none" if without else ""
    return f"reward {_number(reward, 2)}" + (f" ({without:.0%} have none)" if without else "")


def _evaluated(f: Figures) -> str:
    kinds = ("sampled", "greedy")
    return " ".join(f"{kind} {_number(f.learner[key], 2)}" for kind in kinds if (key := f"eval_{kind}") in f.learner)


def _answers(f: Figures) -> str:
    """Length of the answers, and how many ended at the limit, mean over the newest steps."""
    length, truncated = f.learner.get(f"{MEAN}length_mean"), f.learner.get(f"{MEAN}truncated_share", 0.0)
    return "" if length is None else f"length {length:.1f}, {truncated:.0%} truncated"


def _per_answer(f: Figures) -> str:
    cost = f.learner.get(f"{MEAN}reverse_kl_per_answer")
    return "" if cost is None else f", reverse KL {cost:.2f} per answer"


def _cut(text: str) -> str:
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."


def _counted(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name} {short(n)}" for name, n in counts.items())


def _held_back(f: Figures) -> str:
    return "; ".join(f"{name}: {why}" for name, why in f.held_back.items())


def _servers(f: Figures) -> str:
    return f"{f.view.servers_up} of {f.view.servers} inference servers answer"


def _lost(f: Figures) -> str:
    """The largest first. The summary has all of them."""
    largest = sorted(f.lost.items(), key=lambda entry: -entry[1])
    parts = [f"{what} {short(tokens)}" for what, tokens in largest[:LOST_SHOWN]]
    if others := largest[LOST_SHOWN:]:
        parts.append(f"{len(others)} other reasons {short(sum(tokens for _, tokens in others))}")
    return ", ".join(parts) + " tokens"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _ending(f: Figures) -> str:
    return f" | ending: {f.view.ending}" if f.view.ending is not None else ""
