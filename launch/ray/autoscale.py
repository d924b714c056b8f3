"""Adds and removes hosts of a run on Ray by what the run says limits it (gauges bound/* and efficiency/teacher_wait).

A host is added to the role that the learner waits for, if more of it is predicted to help. A host of teachers is
removed when the others could do its work. The gauges cover a minute (learner.reports.attribution), so that decisions
are at least two of these apart: each one sees only what came after the one before. cluster.actors.most and
cluster.teachers.most set the limits; a role without `most` is left alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from launch.config.cluster import ClusterConfig
from launch.ray.hosts import Wanted
from learner.reports.attribution import WINDOW_S

EVERY_S: Final = 2 * WINDOW_S
WAITS: Final = 0.2
"""Share of the learner's time in which it waits for a role, from which on a host is added."""
WORTH: Final = 1.1
"""Predicted speedup from which on a host is added."""
FULL: Final = 0.6
"""A host of teachers is removed if the others would then work for less than this share of the time."""
TAIL_BYTES: Final = 65536


class Decision(NamedTuple):
    wanted: Wanted
    why: str


class Autoscaler:
    """`decide` is asked again and again; it mostly says nothing."""

    def __init__(self, cluster: ClusterConfig, run_dir: Path, now_s: float) -> None:
        self._cluster, self._metrics = cluster, run_dir / "metrics.jsonl"
        self._next_s = now_s + EVERY_S

    def decide(self, wanted: Wanted, now_s: float) -> Decision | None:
        """What to change, if anything."""
        if now_s < self._next_s:
            return None
        self._next_s = now_s + EVERY_S
        return self._add(wanted, row) or self._remove(wanted, row) if (row := last_row(self._metrics)) else None

    def _add(self, wanted: Wanted, row: dict[str, Any]) -> Decision | None:
        for role, hosts in (("teachers", self._cluster.teachers), ("actors", self._cluster.actors)):
            waits, speedup = row.get(f"bound/{role}", 0.0), row.get("bound/speedup", 1.0)
            more = min(getattr(wanted, role) + hosts.each, hosts.most)
            if waits >= WAITS and speedup >= WORTH and more > getattr(wanted, role):
                why = f"the learner waits {waits:.0%} of its time for {role}, and more would give {speedup:.1f} times"
                return Decision(msgspec.structs.replace(wanted, **{role: more}), why)
        return None

    def _remove(self, wanted: Wanted, row: dict[str, Any]) -> Decision | None:
        hosts, waits = self._cluster.teachers, row.get("efficiency/teacher_wait")
        fewer = wanted.teachers - hosts.each
        if not hosts.most or fewer < 1 or waits is None or (1 - waits) * wanted.teachers > FULL * fewer:
            return None
        why = f"teachers wait {waits:.0%} of their time; {fewer} would do"
        return Decision(msgspec.structs.replace(wanted, teachers=fewer), why)


def last_row(metrics: Path) -> dict[str, Any] | None:
    """Figures of the newest step; None when there is none."""
    if not metrics.is_file():
        return None
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]  # what follows the last newline is not written out yet
    for line in reversed(lines):
        if line.startswith(b"{") and (row := json.loads(line)).get("kind") == "step":
            return row
    return None
