"""Who should be in the weight group, and when it is made anew."""

from __future__ import annotations

from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.roster import GroupSeat, Roster

CONFIG = WeightsConfig(join_window_s=2.0, rejoin_delay_s=5.0)
A, B, C = GroupSeat("a", "1"), GroupSeat("b", "1"), GroupSeat("c", "1")


def roster(expected: int = 0) -> Roster:
    return Roster(CONFIG, expected)


def test_the_window_starts_at_the_first_change_and_is_not_stretched_by_later_ones() -> None:
    r = roster()
    r.connect(10.0, [A])
    assert r.rebuild_in_s(10.0, (), urgent=False) == 2.0
    r.connect(11.5, [A, B])
    assert r.rebuild_in_s(11.5, (), urgent=False) == 0.5
    assert r.rebuild_in_s(12.0, (), urgent=False) == 0.0
    assert r.wanted(12.0) == (A, B)


def test_the_window_is_cut_short_when_all_expected_actors_are_there() -> None:
    r = roster(expected=2)
    r.connect(10.0, [A])
    assert r.rebuild_in_s(10.0, (), urgent=False) == 2.0
    r.connect(10.1, [B, A])
    assert r.rebuild_in_s(10.1, (), urgent=False) == 0.0


def test_more_than_the_expected_have_joined_from_elsewhere_and_get_their_window() -> None:
    r = roster(expected=1)
    r.connect(10.0, [A])
    assert r.rebuild_in_s(10.0, (), urgent=False) == 0.0
    r.rebuilt()
    r.connect(20.0, [A, B])
    assert r.rebuild_in_s(20.0, (A,), urgent=False) == 2.0
    r.connect(21.0, [A, B, C])
    assert r.rebuild_in_s(21.0, (A,), urgent=False) == 1.0


def test_a_group_as_wanted_is_left_alone_and_the_same_membership_again_changes_nothing() -> None:
    r = roster()
    r.connect(10.0, [A, B])
    r.rebuilt()
    r.connect(20.0, [B, A])
    assert r.rebuild_in_s(20.0, (A, B), urgent=True) is None


def test_a_change_that_is_taken_back_within_the_window_leads_to_no_rebuild() -> None:
    r = roster()
    r.connect(10.0, [A, B])
    r.rebuilt()
    r.connect(20.0, [A])
    assert r.rebuild_in_s(20.0, (A, B), urgent=False) == 2.0
    r.connect(20.5, [A, B])
    assert r.rebuild_in_s(20.5, (A, B), urgent=False) is None


def test_a_group_that_cannot_be_used_is_replaced_without_waiting() -> None:
    r = roster()
    r.connect(10.0, [A, B])
    assert r.rebuild_in_s(10.0, (), urgent=True) == 0.0


def test_a_struck_seat_comes_back_after_delays_that_double_up_to_the_bound() -> None:
    r = roster()
    r.connect(0.0, [A, B])
    for n, delay_s in enumerate((5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0)):
        now_s = 1000.0 * n
        assert r.strike(now_s, B) == delay_s
        assert r.wanted(now_s + delay_s - 0.1) == (A,)
        assert r.cooled_in_s(now_s + 1.0) == delay_s - 1.0
        assert r.wanted(now_s + delay_s) == (A, B)
        assert r.cooled_in_s(now_s + delay_s) is None


def test_a_confirmed_version_makes_up_for_former_strikes() -> None:
    r = roster()
    r.connect(0.0, [A, B])
    r.strike(0.0, B)
    r.strike(50.0, B)
    r.confirm([B])
    assert r.strike(100.0, B) == 5.0


def test_a_restarted_actor_is_wanted_at_once_and_its_former_self_is_forgotten() -> None:
    r = roster()
    r.connect(0.0, [A, B])
    r.strike(0.0, B)
    reborn = GroupSeat("b", "2")
    r.connect(1.0, [A, reborn])
    assert r.wanted(1.0) == (A, reborn)
    assert r.cooled_in_s(1.0) is None


def test_ranks_follow_the_names_whatever_the_order_of_arrival() -> None:
    r = roster()
    r.connect(0.0, [C, A, B])
    assert r.wanted(0.0) == (A, B, C)
