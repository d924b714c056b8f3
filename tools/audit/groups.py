"""Checks what `buffer.dynamic_sampling` and `buffer.mask_truncated` promise, where a run has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from stillhouse.tools.audit.record import Item, RecordedBatch
from stillhouse.tools.audit.report import EQUAL_GROUPS, TRUNCATED, Faults, Where


class Filters(NamedTuple):
    """Which of the two are on."""

    equal: bool
    truncated: bool


class GroupCount:
    """`add` takes the kept steps."""

    def __init__(self, filters: Filters, faults: Faults) -> None:
        self._filters = filters
        self._faults = faults

    def add(self, batch: RecordedBatch, trained: Sequence[tuple[Item, int]]) -> None:
        """`trained`: the items that the step trained, and of how many tokens each."""
        if self._filters.truncated:
            for item, n_tokens in trained:
                if item.item.finish_reason == "length" and n_tokens:
                    where = Where(step=batch.version, batch=batch.batch_id, rollout=item.item.rollout_id)
                    self._faults.add(TRUNCATED, where, n_tokens)
        if not self._filters.equal:
            return
        rewards: defaultdict[int, set[float]] = defaultdict(set)
        for one in batch.items:
            if not one.offline:
                rewards[one.item.task_id].update(() if one.item.reward is None else (one.item.reward,))
        for task_id, different in rewards.items():
            if len(different) < 2:
                detail = f"its rewards are {', '.join(map(str, different)) or 'not there'}"
                self._faults.add(
                    EQUAL_GROUPS, Where(step=batch.version, batch=batch.batch_id, task=task_id, detail=detail)
                )
