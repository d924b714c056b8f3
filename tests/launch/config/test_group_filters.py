"""Dynamic sampling and overlong filtering are refused where they could not keep what they promise."""

from __future__ import annotations

from typing import Any

import pytest

from stillhouse import builtin
from stillhouse.launch.config.consistency import Findings, check_consistency
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build


def found(*, buffer: dict[str, Any], advantage: str = "grpo", coef: float = 0.0, **tasks: Any) -> Findings:
    learner = {"objective": {"advantage": advantage, "coef": coef}, "tasks": tasks}
    config = {"buffer": {"release": "rollout", **buffer}, "learner": learner, "teachers": 0 if coef == 0.0 else 1}
    return check_consistency(build(RunConfig, config), builtin.STUDENT_DIR)


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp_baseline", "math:fsum"])
def test_dynamic_sampling_is_for_advantages_that_compare_a_group(advantage: str) -> None:
    findings = found(buffer={"dynamic_sampling": 10, "mask_truncated": True}, advantage=advantage, routes={})
    assert findings == ([], [])


@pytest.mark.parametrize(
    ("advantage", "said"),
    [
        ("reinforce_pp", "which compares the rollouts of the whole batch"),
        ("gae", "which compares a reward with its value function"),
        ("turn_returns", "which compares turns"),
    ],
)
def test_others_learn_from_equal_rewards(advantage: str, said: str) -> None:
    (told,) = found(buffer={"dynamic_sampling": 10}, advantage=advantage).mistakes
    start = f"buffer.dynamic_sampling: got 10 with learner.objective.advantage = {advantage!r}, {said}"
    assert told.startswith(start) and "expected grpo, reinforce_pp_baseline" in told


def test_without_an_advantage_there_are_no_rewards_to_compare() -> None:
    (told,) = found(buffer={"dynamic_sampling": 10}, advantage="none", coef=1.0).mistakes
    assert "learner.objective.advantage = 'none', which trains on no reward" in told


def test_a_group_of_one_is_refused() -> None:
    (told,) = found(buffer={"dynamic_sampling": 10}, group_size=1).mistakes
    assert told.startswith("buffer.dynamic_sampling: got 10 with learner.tasks.group_size = 1, expected 2 or more")
    assert found(buffer={"dynamic_sampling": 0}, group_size=1).mistakes == []


@pytest.mark.parametrize("release", ["segment", "deadline"])
def test_other_release_policies_are_refused_by_each_key(release: str) -> None:
    told = found(buffer={"dynamic_sampling": 10, "mask_truncated": True, "release": release}).mistakes
    assert [line.split(",")[0] for line in told] == [
        f"learner.objective.advantage: got 'grpo' with buffer.release = {release}",
        f"buffer.mask_truncated: got true with buffer.release = {release}",
        f"buffer.dynamic_sampling: got 10 with buffer.release = {release}",
    ]


def test_rewards_that_the_learner_makes_come_too_late() -> None:
    (told,) = found(buffer={"dynamic_sampling": 10}, group_reward="operator:mul").mistakes
    assert "got 10 with learner.tasks.group_reward = 'operator:mul', whose rewards are made by the learner" in told


def test_groups_that_teachers_would_have_scored_are_warned_of() -> None:
    findings = found(buffer={"dynamic_sampling": 10}, coef=1.0)
    assert findings.mistakes == []
    assert findings.warnings == [
        "buffer.dynamic_sampling: 10 with learner.objective.coef above 0; groups of equal rewards are dropped before "
        "teachers score them, so they are not distilled either"
    ]
