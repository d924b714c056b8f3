"""Brings the times of several machines onto one clock, that of the learner's machine.

Processes of one machine share a monotonic clock. Another machine's is moved by the difference of the two wall clocks,
and these may differ by seconds. So the arrows of the trace correct it: a segment is sent before a teacher begins to
score it, a score is there before the step that trains with it begins, and a broadcast begins before an engine swaps its
weights in. Each arrow between a machine and the learner's bounds the offset on one side. The wall clocks' offset is
moved into those bounds, and `Offset` says what is left unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Arrow(NamedTuple):
    """What happened at `cause_ns` of one machine's clock was before what happened at `effect_ns` of another's."""

    cause_machine: str
    cause_ns: int
    effect_machine: str
    effect_ns: int


class Offset(NamedTuple):
    """To be added to a machine's times."""

    ns: int
    by_wall_clocks_ns: int
    least_ns: float
    """The arrows allow no less; -inf without such an arrow."""
    most_ns: float

    def said(self, host: str) -> str:
        """For the user."""
        text = f"{host}: its clock was set by the wall clocks of both machines"
        if self.ns != self.by_wall_clocks_ns:
            text += f", and moved by {(self.ns - self.by_wall_clocks_ns) / 1e6:+.1f} ms so that no arrow goes back"
        if self.least_ns > self.most_ns:
            return f"{text}; the arrows contradict each other by {(self.least_ns - self.most_ns) / 1e6:.1f} ms"
        if math.isinf(self.most_ns - self.least_ns):
            return f"{text}; it may still be off by any time that the wall clocks differ by"
        return f"{text}; it is right to within {(self.most_ns - self.least_ns) / 1e6:.1f} ms"


def offsets(wall_ns: Mapping[str, int], home: str, arrows: Iterable[Arrow]) -> dict[str, Offset]:
    """One per machine. `wall_ns`: of each machine, its wall clock minus its monotonic clock."""
    least, most = dict.fromkeys(wall_ns, -math.inf), dict.fromkeys(wall_ns, math.inf)
    for arrow in arrows:
        if arrow.cause_machine == arrow.effect_machine:
            continue
        if arrow.effect_machine == home:
            machine = arrow.cause_machine
            most[machine] = min(most[machine], arrow.effect_ns - arrow.cause_ns)
        elif arrow.cause_machine == home:
            machine = arrow.effect_machine
            least[machine] = max(least[machine], arrow.cause_ns - arrow.effect_ns)
    found: dict[str, Offset] = {}
    for machine, difference_ns in wall_ns.items():
        by_wall = 0 if machine == home else difference_ns - wall_ns[home]
        low, high = least[machine], most[machine]
        ns = round((low + high) / 2) if low > high else round(min(max(by_wall, low), high))
        found[machine] = Offset(ns, by_wall, low, high)
    return found
