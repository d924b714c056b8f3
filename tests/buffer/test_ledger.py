from __future__ import annotations

from stillhouse.buffer.ledger import LOST_AT_RESTART, MAX_REASONS, Held, KindHeld, LedgerBook, UnitCounts
from stillhouse.protocol.messages import Ledger, LedgerCounts

EMPTY = KindHeld(Held(0, 0), Held(0, 0), Held(0, 0))


def test_the_law_holds_only_when_what_is_stored_matches_what_was_counted() -> None:
    counts = UnitCounts()
    counts.accept(10)
    counts.train(3)
    counts.mask(2, "stale")
    counts.drop(1, "actor_lost")
    assert counts.frozen(Held(3, 1)).balanced
    assert not counts.frozen(Held(3, 0)).balanced


def test_a_carried_ledger_goes_on_with_what_was_held_counted_as_lost() -> None:
    held = LedgerCounts(accepted=10, trained=4, masked={"stale": 1}, dropped={}, waiting=3, in_flight=2)
    none = LedgerCounts(accepted=0, trained=0, masked={}, dropped={}, waiting=0, in_flight=0)
    book = LedgerBook(Ledger(rollouts=none, segments=none, tokens=held, rejected={"nan_logprob": 2}, eval_tokens=held))
    ledger = book.frozen(EMPTY, EMPTY)
    assert ledger.balanced
    assert ledger.tokens.dropped == {LOST_AT_RESTART: 5} == ledger.eval_tokens.dropped
    assert ledger.rejected == {"nan_logprob": 2}
    assert ledger.rollouts == none


def test_free_text_cannot_fill_the_books() -> None:
    counts = UnitCounts()
    for i in range(2 * MAX_REASONS):
        counts.drop(1, f"reason_{i}")
    assert len(counts.dropped) == MAX_REASONS + 1
    assert sum(counts.dropped.values()) == 2 * MAX_REASONS
