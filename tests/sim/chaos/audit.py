"""Was anything trained twice, too stale, or lost? Judged from what went over the wire (tests.sim.chaos.tap), beside the
buffer's ledger and the learner's own step lines, which must all tell the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from stillhouse.protocol.messages import WeightVersion
from tests.sim.chaos.tap import BatchSeen, ItemSeen, TrainedSeen

MAX_COMPLAINTS = 5
"""Complaints of one kind that are listed; further ones are only counted."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of what was trained and counts, and what is wrong. What a learner trained after the checkpoint from which
    the next one went on counts as long as the buffer lived, which gives no token twice; what went with a whole launch
    does not."""

    batches: int
    tokens: int
    staleness_max: int
    """Counted here, token by token, over tokens that were trained in the epoch that sampled them."""
    other_epoch_tokens: int
    """Sampled before a restart of the learner and trained after it; for these the buffer's count is taken."""
    complaints: list[str]


def audit(
    seen: Sequence[BatchSeen | TrainedSeen],
    summary: Mapping[str, Any],
    steps: Iterable[Mapping[str, Any]],
    *,
    whole_ledger: bool = True,
) -> Audit:
    """`whole_ledger`: the ledger covers the whole run, so that its tokens must be those of the kept branch."""
    complaints: list[str] = []
    batches, trained = _pair(seen, complaints)
    kept = {place: batch for place, batch in trained.items() if not _abandoned(place, batch, trained)}
    answered = {record.version for record in seen if isinstance(record, TrainedSeen) and record.acknowledged}
    acknowledged = [batch for place, batch in kept.items() if place in answered]
    _once(acknowledged, complaints)
    staleness_max, other = _stalest(kept.values())
    bound = int(summary["staleness"]["bound"])
    told_max = max((distance for batch in batches.values() for distance in batch.staleness), default=0)
    for what, stalest in (("counted", staleness_max), ("batches say", told_max)):
        if stalest > bound:
            complaints.append(f"a token {stalest} steps old was handed out, bound {bound} ({what})")
    if summary["staleness"]["max"] > bound:
        complaints.append(f"the ledger says staleness {summary['staleness']['max']}, bound {bound}")
    _compare_steps(kept, steps, complaints)
    tokens, at_least = sum(map(_tokens, kept.values())), sum(map(_tokens, acknowledged))
    if whole_ledger and not at_least <= summary["tokens"]["trained"] <= tokens:  # the last words may have been lost
        complaints.append(f"{at_least} tokens were acknowledged as trained, {tokens} said to be, "
                          f"the ledger says {summary['tokens']['trained']}")  # fmt: skip
    return Audit(
        batches=len(kept),
        tokens=tokens,
        staleness_max=staleness_max,
        other_epoch_tokens=other,
        complaints=complaints,
    )


def _pair(
    seen: Sequence[BatchSeen | TrainedSeen], complaints: list[str]
) -> tuple[dict[tuple[int, int], BatchSeen], dict[WeightVersion, BatchSeen]]:
    """(batches by epoch and id; batches by what they made). The same again is no news, another is."""
    batches: dict[tuple[int, int], BatchSeen] = {}
    trained: dict[WeightVersion, BatchSeen] = {}
    for record in seen:
        key = (record.version.epoch, record.batch_id)
        if isinstance(record, BatchSeen):
            former = batches.setdefault(key, record)
            if former.digest != record.digest:
                complaints.append(f"batch {record.batch_id} of epoch {key[0]} came twice, with different contents")
            continue
        batch = batches.get(key)
        if batch is None:
            complaints.append(f"batch {record.batch_id} of epoch {key[0]} was trained, and never handed out")
        elif trained.setdefault(record.version, _without(batch, record.masked)).digest != batch.digest:
            complaints.append(f"two batches are said to have made version {record.version}")
    return batches, trained


def _without(batch: BatchSeen, masked: Collection[str]) -> BatchSeen:
    """The batch without the rollouts that the learner left out of its step, which are not trained."""
    return msgspec.structs.replace(batch, items=[item for item in batch.items if item.rollout_id not in masked])


def _abandoned(version: WeightVersion, batch: BatchSeen, trained: Mapping[WeightVersion, BatchSeen]) -> bool:
    """A later launch, with another buffer, went on from a checkpoint that was written before this step. That of step s
    is the one of the last learner that made s, and has in its ledger what any learner had trained before."""
    begins: dict[str, WeightVersion] = {}
    for other, anew in trained.items():
        if other.epoch > version.epoch and anew.run_id != batch.run_id:
            begins[anew.run_id] = min(other, begins.get(anew.run_id, other))
    for first in begins.values():
        step = first.step - 1
        writer = max((made.epoch for made in trained if made.step == step and made.epoch < first.epoch), default=-1)
        if version > WeightVersion(writer, step):
            return True
    return False


def _once(batches: Iterable[BatchSeen], complaints: list[str]) -> None:
    taken: dict[tuple[str, str], set[int]] = {}
    twice = Counter[str]()
    for batch in {id(batch): batch for batch in batches}.values():
        for item in batch.items:
            tokens = {position for start, end in item.runs for position in range(start, end)}
            before = taken.setdefault((batch.run_id, item.rollout_id), set())
            if both := tokens & before:
                twice[item.rollout_id] += len(both)
            before |= tokens
    complaints += [f"{n} tokens of {rollout} were trained twice" for rollout, n in twice.most_common(MAX_COMPLAINTS)]
    if len(twice) > MAX_COMPLAINTS:
        complaints.append(f"... and tokens of {len(twice) - MAX_COMPLAINTS} rollouts more")


def _stalest(batches: Iterable[BatchSeen]) -> tuple[int, int]:
    """(largest distance within an epoch, tokens of other epochs). Spans cover every sampled token."""
    largest = other = 0
    for batch in batches:
        for item in batch.items:
            for version, n in _by_version(item):
                if version.epoch == batch.version.epoch:
                    largest = max(largest, batch.version.step - version.step)
                else:
                    other += n
    return largest, other


def _by_version(item: ItemSeen) -> Iterable[tuple[WeightVersion, int]]:
    for start, end in item.runs:
        for span in item.spans:
            n = min(end, span.end) - max(start, span.start)
            if n > 0:
                yield span.version, n


def _tokens(batch: BatchSeen) -> int:
    return sum(end - start for item in batch.items for start, end in item.runs)


def _compare_steps(
    kept: Mapping[WeightVersion, BatchSeen], steps: Iterable[Mapping[str, Any]], complaints: list[str]
) -> None:
    """The learner's line of a step tells as many tokens as the batch of that step had."""
    tokens = {version: _tokens(batch) for version, batch in kept.items()}
    wrong = [
        f"step {row['step']}: the learner trained {row['train/tokens']} tokens, its batch had {n}"
        for row in steps
        if (n := tokens.get(WeightVersion(row["epoch"], row["step"]))) is not None and n != row["train/tokens"]
    ]
    complaints += wrong[:MAX_COMPLAINTS]
    if len(wrong) > MAX_COMPLAINTS:
        complaints.append(f"... and {len(wrong) - MAX_COMPLAINTS} steps more")
