"""GPUs are handed out: the learner's first, then actors' servers, then teachers'; the user's choice wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.launch.checks.placement import Placement
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.machine.gpus import NotEnoughGpus, Places, Wanted, assign_gpus
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.protocol.context import WorkerRole


def test_the_learner_has_the_first_then_come_actors_then_teachers() -> None:
    wanted = [Wanted("actor", 2, 2), Wanted("teacher", 1, 1)]
    assert assign_gpus(8, [0], wanted) == {"actor": ((1, 2), (3, 4)), "teacher": ((5,),)}


def test_a_gpu_that_several_share_counts_once() -> None:
    """In the whole, and for each of those that share it in equal parts."""
    seats = {"learner": 0, "learner rank 1": 3, "teacher-0": 0, "teacher-1": None}
    places = Places(seats, {"actor": ((1, 2), (2,))})
    assert places.gpus == {0: 2, 1: 1, 2: 2, 3: 1}
    engines = {"actor": {"engine": "sglang"}, "teacher": {"engine": "torch"}, "teachers": 2}
    plan = LaunchPlan(config=build(RunConfig, engines), began_s=0.0, placement=Placement(places))
    roles: list[WorkerRole] = ["learner", "teacher", "teacher", "actor", "actor", "buffer"]
    indices = [0, 0, 1, 0, 1, 0]
    assert [plan.gpus_of(*one) for one in zip(roles, indices, strict=True)] == [1.5, 0.5, 0, 1.5, 0.5, 0]


def test_an_explicit_choice_wins_and_the_others_get_what_is_left() -> None:
    wanted = [Wanted("actor", 2, 1), Wanted("teacher", 1, 2, (1, 2))]
    assert assign_gpus(5, [0], wanted) == {"teacher": ((1, 2),), "actor": ((3,), (4,))}


def test_one_gpu_may_be_shared_by_all_when_the_user_says_so() -> None:
    wanted = [Wanted("actor", 2, 1, (0, 0)), Wanted("teacher", 1, 1, (0,))]
    assert assign_gpus(1, [0], wanted) == {"actor": ((0,), (0,)), "teacher": ((0,),)}


def test_too_few_tells_the_counts_and_how_to_share() -> None:
    with pytest.raises(NotEnoughGpus) as caught:
        assign_gpus(4, [0], [Wanted("actor", 2, 2), Wanted("teacher", 1, 1)])
    message = str(caught.value)
    assert "got 4 visible GPUs, 3 of them free (1 has the learner or an embedded engine)" in message
    assert "expected 4 for 2 actor servers (tp 2), 1 for 1 teacher servers (tp 1)" in message
    assert "actors' and teachers' together: 3 with tp 1 or 1 with tp 2" in message
    assert "--actor.server.gpus may name the learner's GPU, or one GPU several times" in message


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted("actor", 2, 1, (0,)), "actor.server.gpus: got 1 GPUs, expected 2: 1 for each of 2 servers"),
        (Wanted("actor", 1, 1, (2,)), "actor.server.gpus: got GPU 2, expected less than 2"),
        (Wanted("teacher", 1, 2, (1, 1)), r"teacher.server.gpus: got \[1, 1\] for one server, expected 2 different"),
    ],
)
def test_choices_that_do_not_fit_are_refused(wanted: Wanted, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_gpus(2, [0], [wanted])


@given(
    n_visible=st.integers(0, 12),
    learner=st.booleans(),
    actors=st.tuples(st.integers(0, 4), st.integers(1, 3)),
    teachers=st.tuples(st.integers(0, 4), st.integers(1, 3)),
)
def test_nobody_shares_unless_asked_and_all_that_fits_is_given(
    n_visible: int, learner: bool, actors: tuple[int, int], teachers: tuple[int, int]
) -> None:
    taken = [0] if learner and n_visible else []
    wanted = [Wanted("actor", *actors), Wanted("teacher", *teachers)]
    needed = actors[0] * actors[1] + teachers[0] * teachers[1]
    if needed > n_visible - len(taken):
        with pytest.raises(NotEnoughGpus):
            assign_gpus(n_visible, taken, wanted)
        return
    given_out = assign_gpus(n_visible, taken, wanted)
    assert [len(groups) for groups in given_out.values()] == [actors[0], teachers[0]]
    flat = taken + [gpu for groups in given_out.values() for group in groups for gpu in group]
    assert len(set(flat)) == len(flat) == len(taken) + needed
    assert all(0 <= gpu < n_visible for gpu in flat)
