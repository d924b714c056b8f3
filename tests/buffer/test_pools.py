"""A second teacher is asked when the first takes much longer than usual: when, whom, how often, what comes of it."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillhouse.buffer.pools import MIN_TIMES, WINDOW, HedgeBudget, LeaseTimes
from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver

Make = type[Driver]
TIMES = st.lists(st.floats(0.0, 1e6), max_size=2 * WINDOW + 10)


def usual(times: list[float], q: float) -> float:
    """Try each of them, the least first."""
    recent = times[-WINDOW:]
    return next(t for t in sorted(recent) if sum(x <= t for x in recent) >= q * len(recent))


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws long lists slowly
@given(TIMES, st.sampled_from((0.0, 0.1, 0.5, 0.9, 0.95, 1.0)))
def test_the_quantile_is_that_of_the_recent_times(times: list[float], q: float) -> None:
    kept = LeaseTimes()
    for time in times:
        kept.add(time)
    if len(times) < MIN_TIMES:
        assert kept.quantile(q) is None
    else:
        assert kept.quantile(q) == usual(times, q)


@given(st.lists(st.booleans(), max_size=2 * WINDOW + 10), st.sampled_from((0.0, 0.05, 0.3, 1.0)))
def test_hedges_stay_a_share_of_the_recent_leases(wishes: list[bool], share: float) -> None:
    budget, grants = HedgeBudget(), list[bool]()
    for wish in wishes:
        may = budget.allows(share)
        recent = grants[-WINDOW:]
        assert may == (sum(recent) + 1 <= share * len(recent))
        grants.append(wish and may)
        budget.granted(hedge=grants[-1])
        assert sum(grants[-WINDOW:]) <= share * WINDOW


# --------------------------------------------------------------------------------------------------- in the buffer


def practised(make: Make, n: int = 40, took_s: float = 1.0, **settings: Any) -> Driver:
    """Teachers `t` and `u` have answered `n` items in `took_s` each; `t` has more room."""
    defaults: dict[str, Any] = {
        "hedge_multiple": 3.0, "hedge_floor_s": 2.0, "hedge_budget": 0.05, "lease_s": 100.0, "batch": 100
    }  # fmt: skip
    driver = make(**(defaults | settings))
    driver.teacher("u", tokens=1000)
    driver.offer(*range(3))
    for _ in range(n):
        driver.write("train-0-0-0", 1)
        driver.now_s += took_s
        driver.score()
    return driver


def holders(driver: Driver) -> list[str]:
    return [name for name, _, _ in driver.work.values()]


def test_an_overdue_item_goes_to_a_second_teacher_and_the_first_answer_counts(make: Make) -> None:
    driver = practised(make)
    driver.write("train-1-0-0", 2)
    driver.wait(2.9)
    assert holders(driver) == ["t"]
    driver.wait(0.2)
    assert holders(driver) == ["t", "u"]
    slow, quick = driver.work
    driver.wait(50.0)
    assert holders(driver) == ["t", "u"], "once, and no third"
    assert driver.answer(quick, -2.0).statuses == ("accepted",)
    assert driver.answer(slow, -3.0).statuses == ("expired",)
    queues = driver.snapshot.queues
    assert queues["tokens_scored"] == 40 + 2
    assert (queues["hedges_sent_total"], queues["hedges_won_total"]) == (1, 1)
    assert queues["leases_wasted_original_late_total"] == 1 and queues["leases_wasted_hedge_late_total"] == 0


def test_a_rollout_moves_to_the_teacher_whose_hedge_won(make: Make) -> None:
    driver = practised(make)
    driver.write("train-1-0-0", 2)
    driver.wait(3.1)
    driver.answer(max(driver.work))
    driver.work.clear()
    driver.write("train-1-0-0", 1)
    assert holders(driver) == ["u"], "its cache has the prefix"


def test_no_hedge_goes_to_the_same_teacher_or_to_one_without_credit(make: Make) -> None:
    driver = practised(make)
    driver.send("teacher", "u", m.ScoreCredit(0, 2, 0))
    driver.write("train-1-0-0", 2)
    driver.wait(10.0)
    assert holders(driver) == ["t"]
    driver.send("teacher", "u", m.ScoreCredit(100, 3, 0))
    assert holders(driver) == ["t", "u"], "as soon as there is room, before new work"


def test_a_slow_pool_is_not_asked_for_everything_twice(make: Make) -> None:
    """The teachers take ten times as long all at once: a share of the leases is hedged, then what is usual changes."""
    driver = practised(make, n=100)
    before = driver.snapshot.queues["hedges_sent_total"]
    for _ in range(100):
        driver.write("train-1-0-0", 1)
        for _ in range(10):
            driver.wait(1.0)
        driver.score()
    assert 0 < driver.snapshot.queues["hedges_sent_total"] - before <= 0.05 * 256


def test_when_both_fail_the_item_is_tried_again_or_given_up(make: Make) -> None:
    for attempts, masked in ((1, {"unscorable": 2}), (2, {})):
        driver = practised(make, max_score_attempts=attempts)
        driver.write("train-1-0-0", 2)
        driver.wait(3.1)
        for lease in list(driver.work):
            driver.refuse_work(lease)
        assert driver.ledger.tokens.masked == masked
        assert len(driver.work) == (not masked), "a hedge is no attempt"
