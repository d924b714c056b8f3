"""How long two roles of a traced run computed at the same time, from the file alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

from tests.tools.trace.chrome_trace import load

COMPUTES: Final = {"learner": ("train",), "actor": ("write",), "teacher": ("score",)}
"""Role -> its slices in which it computes."""


def computing(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Role -> (begin, end) of what it computed, in microseconds, by begin."""
    events = load(path)["traceEvents"]
    roles = {e["pid"]: e["args"]["name"].split("-")[0] for e in events if e["name"] == "process_name"}
    found: dict[str, list[tuple[float, float]]] = {role: [] for role in COMPUTES}
    for event in events:
        role = roles.get(event["pid"], "")
        if event["ph"] == "X" and event["name"] in COMPUTES.get(role, ()):
            found[role].append((event["ts"], event["ts"] + event["dur"]))
    return {role: sorted(times) for role, times in found.items()}


def overlap_s(path: Path) -> dict[tuple[str, str], float]:
    """Two roles -> the seconds in which both computed."""
    times = computing(path)
    return {
        (a, b): sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in times[a] for y in times[b]) / 1e6
        for a, b in itertools.combinations(times, 2)
    }
