from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.buffer.ledger import RejectReason
from stillhouse.buffer.versions import VersionTable
from stillhouse.protocol.messages import WeightVersion
from tests.buffer.driver import v
from tests.sim.buffer.model import VersionTree


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99), st.integers(1, 2)), max_size=6),
)
def test_distance_is_the_path_length_in_the_tree_of_versions(start: int, lives: list[tuple[int, int, int]]) -> None:
    table, tree = VersionTable(v(start)), VersionTree(v(start))
    known = [v(start)]
    for steps, choice, epochs in lives:
        newest = table.newest
        known += [WeightVersion(newest.epoch, newest.step + i) for i in range(steps + 1)]
        table.reach(known[-1])
        parent = known[choice % len(known)]  # of any branch, also of one that was left before
        fork = WeightVersion(newest.epoch + epochs, parent.step)
        table.fork(fork, parent)
        tree.fork(fork, parent)
        known.append(fork)
    for now in known[-8:]:
        for sampled in known:
            assert table.distance(sampled, now) == tree.distance(sampled, now), (sampled, now)


@pytest.mark.parametrize("parent", [v(4), v(3, epoch=7), v(1, epoch=1)])
def test_a_fork_from_a_version_that_never_was_is_an_error(parent: WeightVersion) -> None:
    table = VersionTable(v(0))
    table.fork(v(2, epoch=1), v(2))
    with pytest.raises(ValueError, match=r"fork (at 2.3|from 1.1)"):
        table.fork(v(1 if parent.epoch == 1 else 3, epoch=2), parent)


def test_one_step_past_what_the_learner_has_shown_is_possible_and_two_are_not() -> None:
    table = VersionTable(v(4))
    assert table.refusal(v(5)) is None
    assert table.refusal(v(6)) is RejectReason.FUTURE_VERSION
    table.reach(v(5))
    assert table.refusal(v(6)) is None
    assert table.refusal(v(0, epoch=1)) is RejectReason.FUTURE_VERSION


def test_versions_that_never_were_are_unknown() -> None:
    table = VersionTable(v(4, epoch=2))
    assert table.refusal(v(3, epoch=2)) is RejectReason.UNKNOWN_VERSION
    assert table.refusal(v(4, epoch=1)) is RejectReason.UNKNOWN_VERSION
    table.reach(v(9, epoch=2))
    table.fork(v(6, epoch=3), v(6, epoch=2))
    assert table.refusal(v(10, epoch=2)) is None, "the former learner may have broadcast it as it died"
    assert table.refusal(v(11, epoch=2)) is RejectReason.FUTURE_VERSION
    assert table.refusal(v(5, epoch=3)) is RejectReason.UNKNOWN_VERSION


def test_an_epoch_that_does_not_rise_is_no_fork() -> None:
    table = VersionTable(v(0, epoch=1))
    with pytest.raises(ValueError, match="expected an epoch above 1"):
        table.fork(v(3, epoch=1), v(3, epoch=1))
