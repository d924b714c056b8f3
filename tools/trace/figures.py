"""What a trace says of a run as a whole. Reads the finished file (`tools.trace.merge`), and shares no code with what
writes it or with the sums in metrics.jsonl, so that each can be checked by the other.

Only slices count, from the mark `ready` of the newest process of the learner to its last step: what is left out is an
earlier launch, the last evaluation and the end of the processes. That of the other workers begins with their own
`ready` if that is later. Swaps count up to the end. Goodput is that of the whole trace, all launches.

    learner bubble     time of the learner inside of a `wait: ...`, over its time
    teacher wait       time of the teachers without a `score`, over their time
    goodput            tokens of all `train`, over the tokens of all `send` of rollouts for training
    cost               seconds of `score` per 1,000 tokens of them
    pause              time of a `swap` of an engine that had requests, mean over those swaps
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Slice = tuple[float, float]
"""When it began and ended, microseconds."""


class TraceFigures(NamedTuple):
    """None: the trace has nothing to compute it from."""

    learner_bubble: float | None
    wait_s: dict[str, float]
    """The learner's waits by cause. A wait inside of another one counts for its own cause only."""
    teacher_wait: float | None
    goodput: float | None
    teacher_s_per_1000_tokens: float | None
    weight_pause_s: float | None
    weight_pause_max_s: float | None

    def lines(self) -> Iterator[tuple[str, str]]:
        """For the user: label and text."""
        if self.learner_bubble is not None:
            causes = sorted(self.wait_s.items(), key=lambda entry: -entry[1])
            by_cause = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in causes if seconds >= 0.05)
            yield "learner bubble", f"{self.learner_bubble:.1%} of its time" + (f" ({by_cause})" if by_cause else "")
        if self.teacher_wait is not None:
            yield "teacher wait", f"{self.teacher_wait:.1%} of the teachers' time"
        if self.goodput is not None:
            yield "goodput", f"{self.goodput:.1%} of the tokens written were trained"
        if self.teacher_s_per_1000_tokens is not None:
            yield "cost of scores", f"{self.teacher_s_per_1000_tokens:.3g} s of a teacher per 1,000 tokens"
        if self.weight_pause_s is not None and self.weight_pause_max_s is not None:
            mean_ms, max_ms = 1e3 * self.weight_pause_s, 1e3 * self.weight_pause_max_s
            yield "pause for weights", f"{mean_ms:.3g} ms per version and engine, at most {max_ms:.3g} ms"


@dataclass
class _Process:
    name: str = ""
    ready: float | None = None
    last: float = 0.0
    waits: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])
    steps: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])
    scores: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])
    swaps: list[Slice] = field(default_factory=list[Slice])
    sent_tokens: int = 0


def read_figures(file: Path) -> TraceFigures:
    """The figures of a trace. Raises OSError, and ValueError for a file that is none."""
    processes: defaultdict[int, _Process] = defaultdict(_Process)
    for event in _events(file):
        _take(processes[event["pid"]], event)
    learners = [one for one in processes.values() if one.ready is not None and one.steps]
    learner = max(learners, key=lambda one: one.ready or 0.0, default=_Process())
    first = learner.ready or 0.0
    last = max((end for _, end, _ in learner.steps), default=0.0)
    waits = [(max(begin, first), min(end, last), name) for begin, end, name in learner.waits if begin < last]
    waited_us = _covered([(begin, end) for begin, end, _ in waits])
    wait_us: defaultdict[str, float] = defaultdict(float)
    for name, own_us in _own_time(waits):
        wait_us[name] += own_us
    teacher_us, busy_us, scored = _teachers(list(processes.values()), first, last)
    trained = sum(tokens for one in learners for _, _, tokens in one.steps)
    sent = sum(one.sent_tokens for one in processes.values())
    swaps = [end - begin for one in processes.values() for begin, end in one.swaps if first <= begin]
    return TraceFigures(
        learner_bubble=waited_us / (last - first) if last > first else None,
        wait_s={name: us / 1e6 for name, us in wait_us.items()},
        teacher_wait=1 - busy_us / teacher_us if teacher_us else None,
        goodput=trained / sent if sent else None,
        teacher_s_per_1000_tokens=busy_us / 1e3 / scored if scored else None,
        weight_pause_s=sum(swaps) / len(swaps) / 1e6 if swaps else None,
        weight_pause_max_s=max(swaps) / 1e6 if swaps else None,
    )


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """One per line, between the first line and the last."""
    with gzip.open(file, "rt", encoding="utf-8") if file.name.endswith(".gz") else file.open(encoding="utf-8") as lines:
        if not next(lines, "").rstrip().endswith('"traceEvents":['):
            raise ValueError(
                f"{file}: expected a trace with one event per line, as stillhouse.tools.trace.merge writes it"
            )
        for line in lines:
            if line.startswith("]"):
                return
            yield json.loads(line.rstrip().removesuffix(","))


def _take(process: _Process, event: dict[str, Any]) -> None:
    name, kind = event["name"], event["ph"]
    if kind == "M" and name == "process_name":
        process.name = event["args"]["name"]
    elif kind == "i":
        process.last = max(process.last, event["ts"])
        if name == "ready":
            process.ready = event["ts"]
    if kind != "X":
        return
    begin, end, args = event["ts"], event["ts"] + event["dur"], event["args"]
    process.last = max(process.last, end)
    match event["cat"], name.partition(": "):
        case "learner", ("wait", _, cause):
            process.waits.append((begin, end, cause))
        case "learner", ("train", _, _):
            process.steps.append((begin, end, args["tokens"]))
        case "scoring", ("score", _, _):
            process.scores.append((begin, end, args["tokens"]))
        case "segments", ("send", _, _) if args["rollout"].startswith("train-"):
            process.sent_tokens += args["tokens"]
        case "engine", ("swap", _, _) if args["running"]:
            process.swaps.append((begin, end))
        case _:
            pass


def _teachers(processes: list[_Process], first: float, last: float) -> tuple[float, float, int]:
    """Their time, their time inside of `score`, and the tokens scored in it."""
    whole = busy = 0.0
    scored = 0
    for one in processes:
        if not one.name.startswith("teacher") or one.ready is None:
            continue
        since, until = max(one.ready, first), min(one.last, last)
        if since >= until:
            continue
        whole += until - since
        inside = [(begin, end, tokens) for begin, end, tokens in one.scores if since <= begin and end <= until]
        busy += _covered([(begin, end) for begin, end, _ in inside])
        scored += sum(tokens for _, _, tokens in inside)
    return whole, busy, scored


def _covered(slices: list[Slice]) -> float:
    """Time inside of at least one of them."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(slices):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def _own_time(slices: list[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """Each slice's time outside of the slices inside of it."""
    ordered = sorted(slices, key=lambda one: (one[0], -one[1]))
    for index, (begin, end, name) in enumerate(ordered):
        inner: list[Slice] = []
        for other_begin, other_end, _ in ordered[index + 1 :]:
            if other_begin >= end:
                break
            inner.append((other_begin, other_end))
        yield name, max(0.0, end - begin - _covered(inner))
