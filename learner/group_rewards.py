"""Rewards from a function of the user's that sees all answers of a group at once (`learner.tasks.group_reward`).

    def shortest_wins(rows, texts, rewards): ...        -> one reward, or None (not judged), per answer

It is called once per group, when the learner gets the group's batch, before anything is trained or recorded: a
recording has the rewards that were trained on, and a replay does not call it again. Evaluations keep the environments'
rewards.

A group for which it fails is not judged, and counted by reason. If it fails for every group of a batch, the run
ends."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
import numpy as np

from stillhouse.learner.batch import FRAMES_PER_ITEM
from stillhouse.learner.turns import pieces_of
from stillhouse.protocol.messages import Batch, BatchItem
from stillhouse.protocol.plugins import load_callable
from stillhouse.protocol.printable import in_one_line

log = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]

GroupRewardFn: TypeAlias = Callable[
    [Sequence[Mapping[str, Any]], Sequence[str], Sequence[float | None]], Sequence[float | None]
]
"""(rows, texts, rewards) -> rewards. One entry per answer that is there: its row of the prompts file (the same for the
whole group), what the student wrote in it (its turns, joined by line breaks), and its environment's reward."""
Fault: TypeAlias = Literal["raised", "bad_result", "no_row", "reward_out_of_range"]
"""raised: the function raised; bad_result: it did not return one finite number or None per answer; no_row: the row is
not known any more, after a restart; reward_out_of_range: a reward is beyond buffer.reward_limit."""
_LOGGED: Final = 5


class GroupRewardsFailed(RuntimeError):
    """The function failed for every group of a batch. The message has the last failure."""


class GroupRewards:
    """Owned by the learner's loop."""

    def __init__(
        self, path: str, row_of: Callable[[int], bytes | None], decode: Callable[[list[int]], str], limit: float
    ) -> None:
        """`path`: `module:function`. `row_of`: the columns of a task's row, as JSON. `limit`: of rewards, either side
        of 0. Raises ValueError if the function cannot be loaded."""
        self._path = path
        self._limit = limit
        self._function: GroupRewardFn = load_callable(path, "tasks.group_reward")
        self._row_of = row_of
        self._decode = decode
        self._faults: Counter[Fault] = Counter()

    @property
    def figures(self) -> dict[str, float]:
        """Running totals for the metrics."""
        return {f"rollouts/group_reward_{reason}_total": float(n) for reason, n in self._faults.items()}

    def apply(self, batch: Batch, arrays: Sequence[Array]) -> Batch:
        """The batch with these rewards. Raises GroupRewardsFailed."""
        left, texts = iter(arrays), dict[str, str]()
        groups: defaultdict[int, list[BatchItem]] = defaultdict(list)
        for item in batch.items:
            ids, _, mask, *_ = islice(left, FRAMES_PER_ITEM + bool(item.top_k))
            if item.final:
                groups[item.task_id].append(item)
                texts[item.rollout_id] = self._text(item, ids, mask)
        judged, failed = dict[str, float | None](), list[str]()
        for task_id, items in groups.items():
            try:
                rewards = self._judge(task_id, items, [texts[item.rollout_id] for item in items])
            except _Failed as error:
                failed.append(self._count(error, task_id))
                rewards = [None] * len(items)
            judged |= {item.rollout_id: reward for item, reward in zip(items, rewards, strict=True)}
        if groups and len(failed) == len(groups):
            raise GroupRewardsFailed(
                f"learner.tasks.group_reward {self._path!r} failed for all {len(failed)} groups of a batch; "
                f"{failed[-1]}"
            )
        return msgspec.structs.replace(batch, items=tuple(_with_reward(item, judged) for item in batch.items))

    def _judge(self, task_id: int, items: Sequence[BatchItem], texts: Sequence[str]) -> list[float | None]:
        """Raises _Failed."""
        row = self._row_of(task_id)
        if row is None:
            raise _Failed("no_row", "its row is not known any more")
        columns: list[dict[str, Any]] = [msgspec.json.decode(row or b"{}", type=dict[str, Any]) for _ in items]
        try:
            returned: object = self._function(columns, list(texts), [item.reward for item in items])
        except Exception as error:
            raise _Failed("raised", f"{type(error).__name__}: {error}") from error
        try:
            rewards = [None if one is None else float(one) for one in cast(Sequence[Any], returned)]
        except (TypeError, ValueError) as error:
            raise _Failed("bad_result", f"it returned {returned!r:.80}") from error
        if len(rewards) != len(items) or not all(one is None or math.isfinite(one) for one in rewards):
            raise _Failed("bad_result", f"it returned {returned!r:.80}, expected {len(items)} finite numbers or None")
        if any(one is not None and abs(one) > self._limit for one in rewards):
            which = next(item for item, one in zip(items, rewards, strict=True) if one and abs(one) > self._limit)
            raise _Failed(
                "reward_out_of_range",
                f"it returned {returned!r:.80}, of which that of rollout {which.rollout_id} is outside "
                f"+-{self._limit:g} (buffer.reward_limit)",
            )
        return rewards

    def _text(self, item: BatchItem, ids: Array, mask: Array) -> str:
        sampled = mask.astype(bool)
        for span in item.spans:
            sampled[span.start : span.end] = True
        places = np.flatnonzero(sampled)
        turns = pieces_of(sampled, item.branches).of(places) if len(places) else places
        return "\n".join(self._decode(ids[places[turns == turn]].tolist()) for turn in np.unique(turns))

    def _count(self, error: _Failed, task_id: int) -> str:
        self._faults[error.reason] += 1
        what = in_one_line(f"task {task_id}: {error}")
        if self._faults[error.reason] <= _LOGGED:
            log.error("group reward %r (%s): %s", self._path, error.reason, what)
        return what


class _Failed(Exception):
    def __init__(self, reason: Fault, what: str) -> None:
        super().__init__(what)
        self.reason: Fault = reason


def _with_reward(item: BatchItem, judged: Mapping[str, float | None]) -> BatchItem:
    if item.rollout_id not in judged:
        return item
    reward = judged[item.rollout_id]
    return msgspec.structs.replace(item, reward=reward, turn_rewards=() if reward is None else item.turn_rewards)
