"""Which rollouts are over, so that a segment that comes late or twice is known for what it is."""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from buffer.runs import Runs

MAX_RUNS_REMEMBERED: Final = 65_536
"""Of tasks in a row whose rollouts had as many segments: at least as many rollouts, and some 4 MiB."""
_ROLLOUT_ID: Final = re.compile(r"(train|eval)-(-?\d{1,20})-(\d{1,20})-(\d{1,20})", re.ASCII)

Series: TypeAlias = tuple[str, int, int]
"""Kind, sample index, attempt."""


class EndedRollouts:
    """How many segments were accepted of each rollout that is over. The tasks with the lowest ids are forgotten first,
    of the sample and attempt of which most is remembered."""

    def __init__(self) -> None:
        self._series: dict[Series, Runs[int]] = {}
        """Segments by task id."""
        self._n_runs = 0

    def __repr__(self) -> str:
        return f"EndedRollouts(runs={self._n_runs}, series={len(self._series)})"

    @property
    def n_runs(self) -> int:
        """What the memory goes by."""
        return self._n_runs

    def put(self, rollout_id: str, n_segments: int) -> None:
        """Raises ValueError for an id that no ticket can have."""
        found = _parsed(rollout_id)
        if found is None:
            raise ValueError(f"rollout id {rollout_id!r}: expected kind-task-sample-attempt")
        series, task_id = found
        runs = self._series.get(series)
        if runs is None:
            runs = self._series[series] = Runs()
        before = runs.n_runs
        runs.put(task_id, n_segments)
        self._n_runs += runs.n_runs - before
        while self._n_runs > MAX_RUNS_REMEMBERED:
            self._forget_one()

    def get(self, rollout_id: str) -> int | None:
        """None for a rollout that is not remembered. The id may be any text."""
        found = _parsed(rollout_id)
        runs = None if found is None else self._series.get(found[0])
        return None if found is None or runs is None else runs.get(found[1])

    def _forget_one(self) -> None:
        series = max(self._series, key=lambda series: self._series[series].n_runs)
        runs = self._series[series]
        runs.forget_lowest()
        self._n_runs -= 1
        if runs.n_runs == 0:
            del self._series[series]


def _parsed(rollout_id: str) -> tuple[Series, int] | None:
    """Series and task id; None for text that is not what `make_ticket` writes, to the letter."""
    found = _ROLLOUT_ID.fullmatch(rollout_id)
    if found is None:
        return None
    kind, (task_id, sample, attempt) = found[1], map(int, found.groups()[1:])
    if f"{kind}-{task_id}-{sample}-{attempt}" != rollout_id:
        return None
    return (kind, sample, attempt), task_id
