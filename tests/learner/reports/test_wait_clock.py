"""Each moment of the learner's time belongs to one account."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.learner.reports.wait_clock import WAIT_CAUSES, WaitClock


class Time:
    """A clock that stands still between two calls of `pass_s`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def test_an_open_wait_counts_up_to_now_and_an_error_ends_it() -> None:
    time = Time()
    clock = WaitClock(time)
    with pytest.raises(KeyError), clock.waiting("checkpoint"):
        time.pass_s(3)
        assert clock.total().wait_s["checkpoint"] == 3.0
        raise KeyError
    time.pass_s(1)
    assert (clock.total().wait_s["checkpoint"], clock.total().busy_s) == (3.0, 1.0)


def test_blame_needs_a_wait() -> None:
    with pytest.raises(ValueError, match="the learner is busy"):
        WaitClock().blame("data")


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "blame", "take"]), st.integers(0, 4), st.floats(0, 1e6))))
def test_whatever_happens_shares_sum_to_one_and_takes_to_the_total(history: list[tuple[str, int, float]]) -> None:
    time = Time()
    clock = WaitClock(time)
    open_waits: list[ExitStack] = []
    taken_s: list[float] = []
    for action, cause_index, seconds in history:
        time.pass_s(seconds)
        cause = WAIT_CAUSES[cause_index]
        if action == "open":
            open_waits.append(ExitStack())
            open_waits[-1].enter_context(clock.waiting(cause))
        elif action == "close" and open_waits:
            open_waits.pop().close()
        elif action == "blame" and open_waits:
            clock.blame(cause)
        elif action == "take":
            taken_s.append(clock.take().wall_s)
    while open_waits:
        open_waits.pop().close()
    taken_s.append(clock.take().wall_s)
    total = clock.total()
    assert total.wall_s == pytest.approx(time.now_s - 100.0, rel=1e-9, abs=1e-6)
    assert total.busy_fraction + sum(total.wait_fraction.values()) == pytest.approx(1.0)
    assert sum(taken_s) == pytest.approx(total.wall_s, rel=1e-9, abs=1e-6)
