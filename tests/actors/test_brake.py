from __future__ import annotations

import pytest

from stillhouse.actors.failures import FIRST_S, LONGEST_S, Brake, TooManyFailures


def test_each_failure_in_a_row_doubles_the_pause_up_to_a_bound_and_one_success_ends_it() -> None:
    now_s = 100.0
    brake = Brake(1000, lambda: now_s)
    pauses: list[float] = []
    for _ in range(12):
        brake.failure("x")
        pauses.append(brake.holds_s())
    assert pauses[:3] == pytest.approx([FIRST_S * 2, FIRST_S * 4, FIRST_S * 8])
    assert pauses[-1] == LONGEST_S
    now_s += LONGEST_S
    assert brake.holds_s() == 0
    brake.failure("x")
    brake.success()
    assert brake.holds_s() == 0


def test_too_many_in_a_row_stop_the_actor_with_the_last_reason_and_a_success_starts_the_count_anew() -> None:
    brake = Brake(3)
    for _ in range(2):
        brake.failure("a")
    brake.success()
    for _ in range(2):
        brake.failure("b")
    with pytest.raises(TooManyFailures, match=r"3 rollouts in a row failed.*the tool is down"):
        brake.failure("the tool is down")
