"""Counts trained tokens, and finds those trained twice or over the staleness bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stillhouse.tools.audit.history import History
from stillhouse.tools.audit.record import Item, RecordedBatch, SampledRollout, Version
from stillhouse.tools.audit.report import (
    BEGUN_ANEW,
    OVER_BOUND,
    TWICE_ROLLOUT,
    TWICE_SAMPLE,
    UNKNOWN_WEIGHTS,
    Faults,
    Where,
)


class TrainedTokens(NamedTuple):
    """Tokens [start, end) that a kept step trained."""

    start: int
    end: int
    step: int


class TokenCount:
    """Counts the items of all kept steps, which `add` takes in order."""

    def __init__(self, history: History, bound: int, faults: Faults) -> None:
        self._history = history
        self._bound = bound
        self._faults = faults
        self._rollouts: dict[str, list[TrainedTokens]] = {}
        self._samples: dict[tuple[int, int], list[str]] = {}
        """(task, sample) -> its rollouts with trained tokens."""
        self._distances: dict[tuple[Version, Version], int | None] = {}
        self.tokens = 0
        self.stalest = 0

    @property
    def n_samples(self) -> int:
        return len(self._samples)

    def last_step(self, sample: tuple[int, int]) -> int | None:
        """The newest step that trained a token of this sample, or None."""
        rollouts = self._samples.get(sample, ())
        return max((part.step for rollout in rollouts for part in self._rollouts[rollout]), default=None)

    def trained_before(self, step: int) -> dict[tuple[int, int], int]:
        """Number of tokens of each sample that were trained before this step."""
        found: dict[tuple[int, int], int] = {}
        for sample, rollouts in self._samples.items():
            parts = [part for rollout in rollouts for part in self._rollouts[rollout] if part.step < step]
            if parts:
                found[sample] = sum(part.end - part.start for part in parts)
        return found

    def add(self, batch: RecordedBatch, item: Item, runs: Sequence[tuple[int, int]]) -> None:
        """`runs`: ranges of tokens of the item that the batch trained."""
        for start, end in runs:
            self._once(batch, item.item, start, end)
            self._in_bound(batch, item.item, start, end)
            self.tokens += end - start

    def _once(self, batch: RecordedBatch, sampled: SampledRollout, start: int, end: int) -> None:
        rollouts = self._samples.setdefault(sampled.sample, [])
        if rollouts and sampled.rollout_id not in rollouts:
            detail = f"tokens of {', '.join(rollouts)} are kept, too"
            self._faults.add(BEGUN_ANEW, _where(batch, sampled, (start, end), detail))
        if sampled.rollout_id not in rollouts:
            rollouts.append(sampled.rollout_id)
        own = self._rollouts.setdefault(sampled.rollout_id, [])
        every = [part for rollout in rollouts for part in self._rollouts[rollout]]
        for kind, before in ((TWICE_ROLLOUT, own), (TWICE_SAMPLE, every)):
            if overlaps := [part for part in before if part.start < end and start < part.end]:
                first, n = overlaps[0], _covered(overlaps, start, end)
                detail = f"{n} tokens, before at step {first.step}"
                where = _where(batch, sampled, (max(start, first.start), min(end, first.end)), detail)
                self._faults.add(kind, where, n)
        own.append(TrainedTokens(start, end, batch.version.step))

    def _in_bound(self, batch: RecordedBatch, sampled: SampledRollout, start: int, end: int) -> None:
        known = 0
        for span in sampled.spans:
            low, high = max(start, span.start), min(end, span.end)
            if low >= high:
                continue
            known += high - low
            distance = self._distance(span.version, batch.version)
            if distance is None:
                detail = f"sampled by version {span.version}, which never existed"
                self._faults.add(UNKNOWN_WEIGHTS, _where(batch, sampled, (low, high), detail), high - low)
                continue
            self.stalest = max(self.stalest, distance)
            if distance > self._bound:
                detail = f"sampled by version {span.version}, {distance} steps away; the bound is {self._bound}"
                self._faults.add(OVER_BOUND, _where(batch, sampled, (low, high), detail), high - low)
        if known < end - start:
            detail = f"{end - start - known} of these tokens have no version"
            self._faults.add(UNKNOWN_WEIGHTS, _where(batch, sampled, (start, end), detail), end - start - known)

    def _distance(self, sampled: Version, now: Version) -> int | None:
        """None: these weights never existed."""
        key = (sampled, now)
        if key not in self._distances:
            if len(self._distances) > 10_000:  # few versions are in use at a time; old ones are not needed
                self._distances.clear()
            known = self._history.knows(sampled)
            self._distances[key] = self._history.distance(sampled, now) if known else None
        return self._distances[key]


def _covered(parts: Sequence[TrainedTokens], start: int, end: int) -> int:
    """Number of tokens of [start, end) that are in any of the parts."""
    n, at = 0, start
    for part in sorted(parts):
        low, high = max(at, part.start), min(end, part.end)
        if low < high:
            n, at = n + high - low, high
    return n


def _where(batch: RecordedBatch, sampled: SampledRollout, tokens: tuple[int, int], detail: str) -> Where:
    return Where(
        step=batch.version,
        batch=batch.batch_id,
        rollout=sampled.rollout_id,
        task=sampled.task_id,
        sample=sampled.sample_index,
        tokens=tokens,
        detail=detail,
    )
