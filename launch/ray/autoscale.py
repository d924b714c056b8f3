"""Adds and removes hosts of a run on Ray by what the run says limits it (gauges bound/* and efficiency/teacher_wait).

A host is added to the role that the learner waits for, if more of it is predicted to help. A host of teachers is
removed when the others could do its work. The gauges cover a minute (learner.reports.attribution), so that decisions
are at least two of these apart: each one sees only what came after the one before. cluster.actors.most and
cluster.teachers.most set the limits; a role without `most` is left alone. Every decision has an outcome, also one to
change nothing; launch.ray.hosts counts them (learner.reports.scaling).
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from stillhouse.launch.config.cluster import ClusterConfig, RoleHostsConfig
from stillhouse.launch.ray.wanted import Wanted
from stillhouse.launch.report.figures import plural
from stillhouse.launch.topology import shares
from stillhouse.learner.reports.attribution import WINDOW_S
from stillhouse.learner.reports.scaling import Outcome

EVERY_S: Final = 2 * WINDOW_S
WAITS: Final = 0.2
"""Share of the learner's time in which it waits for a role, from which on a host is added."""
WORTH: Final = 1.1
"""Predicted speedup from which on a host is added."""
FULL: Final = 0.6
"""A host of teachers is removed if the others would then work for less than this share of the time."""
TAIL_BYTES: Final = 65536
RoleName: TypeAlias = Literal["teachers", "actors"]


class Decision(NamedTuple):
    outcome: Outcome
    wanted: Wanted
    """Workers that are wanted from now on."""
    why: str


class Autoscaler:
    """`decide` is asked again and again; it mostly says nothing."""

    def __init__(self, cluster: ClusterConfig, run_dir: Path, now_s: float, *, fewest: int = 1) -> None:
        """`fewest`: teachers that are always kept, one for each shard of the buffer."""
        hosts: dict[RoleName, RoleHostsConfig] = {"teachers": cluster.teachers, "actors": cluster.actors}
        self._roles: dict[RoleName, RoleHostsConfig] = {role: one for role, one in hosts.items() if one.most}
        self._run_dir, self._fewest = run_dir, fewest
        self._next_s = now_s + EVERY_S
        self._judged: Any = None
        """Epoch and step of the figures of the last decision."""

    def decide(self, wanted: Wanted, now_s: float) -> Decision | None:
        """A decision, if it is time for one."""
        if not self._roles or now_s < self._next_s:
            return None
        self._next_s = now_s + EVERY_S
        row = last_row(self._run_dir / "metrics.jsonl")
        place = (row["epoch"], row["step"]) if row else None
        if row is None or place == self._judged:
            decision = Decision("no_figures", wanted, "no step was made since the last decision")
        else:
            decision = self._judge(wanted, row)
        self._judged = place
        return decision

    def _judge(self, wanted: Wanted, row: dict[str, Any]) -> Decision:
        for role, hosts in self._roles.items():
            if (waits := row.get(f"bound/{role}", 0.0)) >= WAITS:
                why = f"the learner waits {waits:.0%} of its time for {role}"
                return _add(role, hosts, wanted, row, why)
        if "teachers" in self._roles and (fewer := self._fewer(wanted, row)) is not None:
            why = f"teachers wait {row['efficiency/teacher_wait']:.0%} of their time; {fewer} would do"
            return Decision("removed_teachers", msgspec.structs.replace(wanted, teachers=fewer), why)
        return Decision("kept", wanted, f"the learner does not wait for {' or '.join(self._roles)}")

    def _fewer(self, wanted: Wanted, row: dict[str, Any]) -> int | None:
        """Number of teachers without the last host; None if the others could not do its work."""
        waits = row.get("efficiency/teacher_wait")
        fewer = sum(shares(wanted.teachers, self._roles["teachers"].each)[:-1])
        if fewer < self._fewest or waits is None or _there("teachers", row) < wanted.teachers:
            return None
        return fewer if (1 - waits) * wanted.teachers <= FULL * fewer else None


def _add(role: RoleName, hosts: RoleHostsConfig, wanted: Wanted, row: dict[str, Any], why: str) -> Decision:
    """The learner waits for this role: add a host, or say why not."""
    now, speedup = getattr(wanted, role), row.get("bound/speedup")
    missing, more = now - _there(role, row), min(now + hosts.each, hosts.most)
    if missing > 0:
        why += f", but {plural(missing, role.removesuffix('s'))} of {now} have not joined yet"
        return Decision("refused_not_there", wanted, why)
    if speedup is None or speedup < WORTH:
        gain = "what more of them would give cannot be predicted" if speedup is None else "more of them would not help"
        return Decision("refused_little_gain", wanted, f"{why}, but {gain}")
    why += f", and more would give {speedup:.1f} times"
    if more <= now:
        return Decision("refused_most", wanted, f"{why}; cluster.{role}.most is {hosts.most}")
    outcomes: dict[RoleName, Outcome] = {"actors": "added_actors", "teachers": "added_teachers"}
    return Decision(outcomes[role], msgspec.structs.replace(wanted, **{role: more}), why)


def _there(role: RoleName, row: dict[str, Any]) -> int:
    """Workers of the role that were connected at that step."""
    return int(row.get(f"{role}/alive", 0))


def last_row(metrics: Path) -> dict[str, Any] | None:
    """Figures of the newest step; None when there is none."""
    if not metrics.is_file():
        return None
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]  # what follows the last newline is not written out yet
    for line in reversed(lines):
        with suppress(ValueError):  # two lines in one, where a full disk took the end of the first
            if line.startswith(b"{") and (row := json.loads(line)).get("kind") == "step":
                return row
    return None
