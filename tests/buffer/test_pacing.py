from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.buffer.pacing import Pacing
from stillhouse.protocol.messages import WeightVersion
from tests.buffer.driver import v


def test_tickets_stop_at_what_the_bound_allows_and_go_on_as_rollouts_settle() -> None:
    pacing = Pacing(batch_rollouts=4, max_staleness=2, start=v(0))
    for _ in range(12):
        pacing.issue()
    assert pacing.free == 0
    with pytest.raises(RuntimeError, match="ask `free` first"):
        pacing.issue()
    pacing.settle()
    assert pacing.free == 1


def test_settling_more_than_was_issued_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="more rollouts settled"):
        Pacing(batch_rollouts=4, max_staleness=2, start=v(0)).settle()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_with_exact_batches_the_nth_ticket_waits_for_its_step_less_the_bound(staleness: int) -> None:
    batch, start = 4, v(10, epoch=2)
    pacing = Pacing(batch_rollouts=batch, max_staleness=staleness, start=start)
    n_issued = 0
    for step in range(10, 16):
        while pacing.free > 0:
            n = pacing.issue()
            assert n == n_issued
            expected = 10 + max(0, n // batch - staleness)
            assert pacing.min_version(n) == WeightVersion(2, max(expected, step - staleness))
            if staleness == 0:
                assert pacing.min_version(n) == WeightVersion(2, step)
            n_issued += 1
        for _ in range(batch):
            pacing.settle()
        pacing.trained(WeightVersion(2, step + 1))


def test_fewer_may_be_out_when_tokens_are_stale_and_more_when_the_learner_waits() -> None:
    pacing = Pacing(batch_rollouts=10, max_staleness=4, start=v(0))
    for _ in range(40):
        pacing.issue()
    pacing.batch_left(0.25, 0.0)
    assert (pacing.allowed, pacing.free) == (30, 0), "a quarter less than are out"
    for _ in range(3):
        pacing.batch_left(0.25, 0.0)
    assert pacing.allowed == 30, "these were out before"
    pacing.batch_left(0.9, 0.0)
    assert pacing.allowed == 20, "two batches at least"
    pacing.batch_left(0.005, 0.005)
    assert pacing.allowed == 20, "too little to act on"
    for _ in range(20):
        pacing.batch_left(0.9, 0.04)
    assert pacing.allowed == 24, "a learner that waits needs more, whatever is stale"
    for _ in range(20):
        pacing.batch_left(0.0, 1.0)
    assert pacing.allowed == pacing.limit == 50


def test_a_cut_takes_at_most_half() -> None:
    pacing = Pacing(batch_rollouts=10, max_staleness=9, start=v(0))
    for _ in range(100):
        pacing.issue()
    pacing.batch_left(0.9, 0.0)
    assert (pacing.allowed, pacing.places) == (50, 0)


@pytest.mark.parametrize("bound", [0, 1])
def test_stale_tokens_change_nothing_at_low_bounds(bound: int) -> None:
    pacing = Pacing(batch_rollouts=4, max_staleness=bound, start=v(0))
    pacing.issue()
    pacing.batch_left(0.5, 0.0)
    assert pacing.allowed == pacing.limit


EVENTS = ["issue", "settle", "train", "restart", "stale", "wait"]


@given(st.integers(1, 5), st.integers(0, 4), st.lists(st.sampled_from(EVENTS)))
def test_the_demanded_version_can_always_be_had_and_is_never_stale(batch: int, bound: int, events: list[str]) -> None:
    """Whatever is dropped, masked or trained in batches of any size."""
    pacing = Pacing(batch_rollouts=batch, max_staleness=bound, start=v(3))
    issued: list[int] = []
    for event in events:
        newest = pacing.trained_version
        if event == "issue" and pacing.free > 0:
            issued.append(pacing.issue())
        elif event == "settle" and pacing.live > 0:
            pacing.settle()
        elif event == "train":
            pacing.trained(WeightVersion(newest.epoch, newest.step + 1))
        elif event == "restart":
            pacing.restart(WeightVersion(newest.epoch + 1, max(0, newest.step - 2)))
        elif event in ("stale", "wait"):
            pacing.batch_left(0.3 * (event == "stale"), 0.3 * (event == "wait"))
        assert min(2 * batch, pacing.limit) <= pacing.allowed <= pacing.limit
        assert 0 <= pacing.free <= pacing.places
        assert 0 <= pacing.live <= (bound + 1) * batch
        for n in issued:
            demanded = pacing.min_version(n)
            assert demanded.epoch == pacing.trained_version.epoch
            assert pacing.trained_version.step - bound <= demanded.step <= pacing.trained_version.step


def test_a_version_of_a_left_branch_does_not_move_the_clock() -> None:
    pacing = Pacing(batch_rollouts=2, max_staleness=1, start=v(0))
    pacing.trained(v(7))
    pacing.restart(v(5, epoch=1))
    pacing.trained(v(8))
    assert pacing.trained_version == v(5, epoch=1)
