"""The clocks of other machines: moved by the wall clocks, and into what the arrows allow."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from stillhouse.tools.trace.clocks import Arrow, offsets

WALL = {"home": 1000, "far": 1300}


def test_without_an_arrow_the_wall_clocks_decide() -> None:
    found = offsets(WALL, "home", [])
    assert found["home"].ns == 0 and found["far"].ns == 300
    assert "may still be off" in found["far"].said("box")


def test_an_arrow_in_each_direction_bounds_the_offset() -> None:
    there, back = Arrow("home", 500, "far", 100), Arrow("far", 200, "home", 650)
    far = offsets(WALL, "home", [there, back, Arrow("far", 5, "far", 1)])["far"]
    assert (far.least_ns, far.most_ns, far.ns) == (400, 450, 400), "the nearest to 300"
    assert "right to within 0.0 ms" in far.said("box") and "moved by" in far.said("box")


def test_arrows_that_contradict_each_other_are_reported() -> None:
    far = offsets(WALL, "home", [Arrow("home", 5_000_000, "far", 0), Arrow("far", 0, "home", 1_000_000)])["far"]
    assert far.ns == 3_000_000 and "contradict each other by 4.0 ms" in far.said("box")


SENT = st.tuples(st.booleans(), st.integers(0, 10**9), st.integers(0, 10**6))
"""From home? When, at home? How long under way?"""


@given(st.integers(-(10**9), 10**9), st.integers(-(10**7), 10**7), st.lists(SENT, max_size=8))
def test_the_true_offset_is_always_inside_the_bounds_and_no_arrow_goes_back(
    true_ns: int, wall_error_ns: int, sent: list[tuple[bool, int, int]]
) -> None:
    """Arrows of a simulated machine whose clock is `true_ns` behind."""
    arrows = [
        Arrow("home", at, "far", at + took - true_ns) if out else Arrow("far", at - true_ns, "home", at + took)
        for out, at, took in sent
    ]
    far = offsets({"home": 0, "far": true_ns + wall_error_ns}, "home", arrows)["far"]
    assert far.least_ns <= true_ns <= far.most_ns
    for arrow in arrows:
        cause, effect = (
            time + (far.ns if machine == "far" else 0)
            for machine, time in ((arrow.cause_machine, arrow.cause_ns), (arrow.effect_machine, arrow.effect_ns))
        )
        assert cause <= effect
    if not arrows:
        assert math.isinf(far.most_ns) and far.ns == true_ns + wall_error_ns
