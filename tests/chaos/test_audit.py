"""The audit finds what it is there to find."""

from __future__ import annotations

from typing import Any

import msgspec

from stillhouse.protocol.messages import VersionSpan, WeightVersion
from tests.sim.chaos.audit import audit
from tests.sim.chaos.tap import BatchSeen, ItemSeen, TrainedSeen


def batch(batch_id: int, *, step: int, sampled: int, run: tuple[int, int] = (2, 6), rollout: str = "") -> BatchSeen:
    spans = (VersionSpan(WeightVersion(0, sampled), 0, 10),)
    item = ItemSeen(rollout or f"train-{batch_id}-0-0", [run], spans)
    staleness = {step - sampled: run[1] - run[0]}
    return BatchSeen(batch_id, WeightVersion(0, step), staleness, [item], f"digest-{batch_id}")


def trained(batch_id: int, *, made: int) -> TrainedSeen:
    return TrainedSeen(batch_id, WeightVersion(0, made), acknowledged=True)


def row(step: int, tokens: int) -> dict[str, Any]:
    return {"epoch": 0, "step": step, "train/tokens": tokens}


def summary(tokens: int) -> dict[str, Any]:
    return {"staleness": {"bound": 1, "max": 1}, "tokens": {"trained": tokens}}


CLEAN = [batch(1, step=0, sampled=0), batch(1, step=0, sampled=0), trained(1, made=1), trained(1, made=1),
         batch(2, step=1, sampled=0), trained(2, made=2), batch(3, step=2, sampled=2)]  # fmt: skip


def test_repeats_of_the_same_and_batches_under_way_are_fine() -> None:
    found = audit(CLEAN, summary(8), [row(1, 4), row(2, 4)])
    assert (found.complaints, found.batches, found.tokens, found.staleness_max) == ([], 2, 8, 1)


def test_the_same_token_in_two_trained_batches() -> None:
    again = batch(3, step=2, sampled=2, rollout="train-1-0-0", run=(5, 8))
    found = audit([*CLEAN[:-1], again, trained(3, made=3)], summary(11), [])
    assert found.complaints == ["1 tokens of train-1-0-0 were trained twice"]


def test_a_rollout_written_anew_after_a_resume_is_another_one() -> None:
    anew = msgspec.structs.replace(batch(3, step=2, sampled=2, rollout="train-1-0-0"), run_id="the next launch")
    assert audit([*CLEAN[:-1], anew, trained(3, made=3)], summary(12), []).complaints == []


def test_a_token_beyond_the_bound_whatever_the_batch_says_of_it() -> None:
    stale = msgspec.structs.replace(batch(3, step=2, sampled=0), staleness={1: 4})
    found = audit([*CLEAN[:-1], stale, trained(3, made=3)], summary(12), [])
    assert found.complaints == ["a token 2 steps old was handed out, bound 1 (counted)"]


def test_accounts_that_differ() -> None:
    changed = msgspec.structs.replace(CLEAN[0], digest="other")
    assert "different contents" in audit([CLEAN[0], changed], summary(0), []).complaints[0]
    assert "never handed out" in audit([trained(9, made=1)], summary(0), []).complaints[0]
    assert "the ledger says 7" in audit(CLEAN, summary(7), []).complaints[0]
    assert "its batch had 4" in audit(CLEAN, summary(8), [row(2, 5)]).complaints[0]


def test_what_went_with_a_launch_does_not_count() -> None:
    items = [ItemSeen("train-2-0-0", [(2, 6)], ())]
    anew = BatchSeen(1, WeightVersion(1, 1), {}, items, "anew", run_id="the next launch")
    found = audit([*CLEAN, anew, TrainedSeen(1, WeightVersion(1, 2), True)], summary(8), [])
    assert (found.complaints, found.batches) == ([], 2)


def test_what_one_learner_had_trained_is_in_the_checkpoint_that_the_next_one_wrote() -> None:
    """Of one buffer. The next launch goes on from it; or from an older one, if the second learner wrote none."""
    second = BatchSeen(1, WeightVersion(1, 0), {}, [ItemSeen("train-7-0-0", [(2, 6)], ())], "second")
    anew = BatchSeen(
        1, WeightVersion(2, 1), {}, [ItemSeen("train-8-0-0", [(2, 6)], ())], "anew", run_id="the next launch"
    )
    said = [anew, TrainedSeen(1, WeightVersion(2, 2), True)]
    written = [*CLEAN, second, TrainedSeen(1, WeightVersion(1, 1), True), *said]
    assert audit(written, summary(16), []).complaints == []
    assert "the ledger says 12" in audit(written, summary(12), []).complaints[0]
    assert audit([*CLEAN, *said], summary(8), []).complaints == []


def test_a_buffer_that_lived_on_counts_what_another_learner_had_trained_and_gives_it_to_nobody_else() -> None:
    other = BatchSeen(1, WeightVersion(1, 1), {}, [ItemSeen("train-9-0-0", [(2, 6)], ())], "other")
    assert audit([*CLEAN, other, TrainedSeen(1, WeightVersion(1, 2), True)], summary(12), []).complaints == []
    again = msgspec.structs.replace(other, items=[ItemSeen("train-2-0-0", [(2, 6)], ())])
    found = audit([*CLEAN, again, TrainedSeen(1, WeightVersion(1, 2), True)], summary(12), [])
    assert found.complaints == ["4 tokens of train-2-0-0 were trained twice"]


def test_what_was_said_and_not_answered_may_or_may_not_count() -> None:
    said = [*CLEAN, TrainedSeen(3, WeightVersion(0, 3))]
    assert audit(said, summary(8), []).complaints == audit(said, summary(12), []).complaints == []
    assert "the ledger says 13" in audit(said, summary(13), []).complaints[0]
