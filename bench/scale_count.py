"""What the learner of bench/scale.py was given, counted from its batches alone. The ledgers of the buffer's shards are
held against that, and against what the actors sent. Imports nothing of buffer/ or protocol/shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.messages import Batch, Ledger

Array = npt.NDArray[Any]


class Work(NamedTuple):
    """Tokens of one batch."""

    trained_tokens: int
    context_tokens: int


@dataclass
class TokenCount:
    """Trained tokens by staleness, and when each step ended."""

    bound: int
    shards: int = 1
    by_staleness: list[Counter[int]] = field(default_factory=list[Counter[int]])
    """One count for each batch."""
    context_tokens: list[int] = field(default_factory=list[int])
    items: list[int] = field(default_factory=list[int])
    ended_s: list[float] = field(default_factory=list[float])
    """End of each step."""
    faults: list[str] = field(default_factory=list[str])
    """Tokens past the bound, or trained twice."""
    waits_s: list[float] = field(default_factory=list[float])
    """Time that the learner waited for each batch."""
    shard_waits_s: list[float] = field(default_factory=list[float])
    """The part of it in which some shards had sent their share of the batch, and others had not."""
    trained_by_shard: Counter[int] = field(default_factory=Counter[int])
    """Trained tokens of each shard's own tasks."""
    busy_s: float = 0.0
    _trained: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict[str, npt.NDArray[np.bool_]])
    """Which tokens of a rollout were trained."""

    def take(self, batch: Batch, arrays: Sequence[Array]) -> Work:
        """Count a batch. Frames per item: ids, log-probs, train mask, teachers' log-probs, and payloads if any."""
        ages: Counter[int] = Counter()
        context, at = 0, 0
        for item in batch.items:
            mask = arrays[at + 2].astype(bool)
            at += 5 if item.top_k else 4
            n = 0
            for span in item.spans:
                in_span = int(mask[span.start : span.end].sum())
                if in_span:
                    ages[batch.version.step - span.version.step] += in_span
                n += in_span
            if n != int(mask.sum()):
                self.faults.append(f"{item.rollout_id}: {int(mask.sum()) - n} tokens without a version")
            self._once(item.rollout_id, mask, final=item.final)
            self.trained_by_shard[item.task_id % self.shards] += n
            context += item.end - n
        late = {age: n for age, n in ages.items() if age > self.bound}
        if late:
            self.faults.append(f"batch of step {batch.version.step}: tokens by staleness {late}, bound {self.bound}")
        self.by_staleness.append(ages)
        self.context_tokens.append(context)
        self.items.append(len(batch.items))
        return Work(sum(ages.values()), context)

    def ended(self, at_s: float) -> None:
        self.ended_s.append(at_s)

    def trained_tokens(self, first_step: int = 0) -> int:
        """Trained in the steps from `first_step` on that have ended."""
        return sum(sum(ages.values()) for ages in self.by_staleness[first_step : len(self.ended_s)])

    def per_s(self, warm_up: int) -> float:
        """Trained tokens per second from the end of step `warm_up` to the end of the last one."""
        seconds = self.ended_s[-1] - self.ended_s[warm_up - 1]
        return self.trained_tokens(warm_up) / seconds

    def staleness(self, warm_up: int) -> tuple[float, int]:
        """Mean and largest."""
        total: Counter[int] = Counter()
        for ages in self.by_staleness[warm_up : len(self.ended_s)]:
            total += ages
        n = sum(total.values())
        return sum(age * k for age, k in total.items()) / max(1, n), max(total, default=0)

    def _once(self, rollout_id: str, mask: npt.NDArray[np.bool_], *, final: bool) -> None:
        before = self._trained.get(rollout_id)
        if before is not None:
            n_twice = int((mask[: len(before)] & before[: len(mask)]).sum())
            if n_twice:
                self.faults.append(f"{rollout_id}: {n_twice} tokens trained twice")
            longer = np.zeros(max(len(mask), len(before)), bool)
            longer[: len(before)] |= before
            longer[: len(mask)] |= mask
            mask = longer
        self._trained[rollout_id] = mask


def ledger_faults(ledger: Ledger, *, sent_tokens: int, trained_tokens: int, over: bool = True) -> list[str]:
    """Compare the last ledger of a shard with what its actors have sent, without what it refused because the run was
    over, and with what the learner has trained of its tasks. `over`: nothing may be left."""
    tokens = ledger.tokens
    left = tokens.waiting + tokens.in_flight
    found = {
        "accepted": (tokens.accepted, sent_tokens),
        "trained": (tokens.trained, trained_tokens),
        "known": (tokens.trained + sum(tokens.masked.values()) + sum(tokens.dropped.values()) + left, sent_tokens),
        "unfinished": (left, 0 if over else left),
    }
    faults = [f"{has} tokens {what}, expected {expected}" for what, (has, expected) in found.items() if has != expected]
    return faults + [f"refused: {reason}" for reason in ledger.rejected if reason != "run_over"]


class ShardFigures(NamedTuple):
    """What one process of the buffer cost."""

    cpu_s: float
    """CPU seconds from the end of the warm-up to the end of the last step."""
    idle_cpu: float
    """CPU seconds per second before the first ticket, when all peers were connected and did nothing but live."""
    peak_mb: float


@dataclass
class Figures:
    """Everything that one run measured. Seconds are simulated ones, except those of CPUs and `wall_s`."""

    count: TokenCount
    seconds: float
    busy_slot_s: float
    busy_teacher_s: float
    masked_tokens: int
    accepted_tokens: int
    ledger_faults: list[str]
    """What is wrong with the ledgers, by the count of the peers."""
    messages: int
    shards: tuple[ShardFigures, ...] = (ShardFigures(0.0, 0.0, 0.0),)
    """0: not measured, as in the next ones."""
    measured_s: float = 0.0
    """Real seconds in which the CPU time of `shards` was measured."""
    peers_cpu_s: float = 0.0
    wall_s: float = 0.0
    idle_share: float = 1.0
    """Share of all cores' time in which nothing ran."""
    late_s: float = 0.0
    """Longest time by which a simulated peer did something too late."""
