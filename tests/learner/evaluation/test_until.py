"""A run ends by its evaluations when they stop getting better, or when the student is near enough to its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillhouse.launch.config.tree import build
from stillhouse.learner.config import LearnerConfig, UntilConfig
from stillhouse.learner.evaluation.figures import EvalPoint, MeasuredTeacher
from stillhouse.learner.evaluation.until import TEACHER_EVAL, StopRule, gap_figures, read_teachers

TEACHERS = {"": MeasuredTeacher(accuracy_sampled=0.9, n_sampled=10, accuracy_greedy=1.0, n_greedy=4)}


def points(values: list[float | None], name: str = "", figure: str = "accuracy_sampled") -> list[EvalPoint]:
    return [EvalPoint(step=10 * n, name=name, **{figure: value}) for n, value in enumerate(values)]  # type: ignore[arg-type]


def ended_at(until: UntilConfig, values: list[float | None], **of: str) -> int | None:
    """The step of the evaluation after which the run is to end."""
    rule = StopRule(until, TEACHERS)
    for point in points(values, **of):
        rule.add(point)
        if rule.reason:
            return point.step
    return None


@pytest.mark.parametrize(
    ("until", "values", "step"),
    [
        ({"plateau": 2}, [0.1, 0.2, 0.2, 0.3, 0.3, 0.2, 0.9], 50),
        ({"plateau": 2, "min_gain": 0.15}, [0.1, 0.2, 0.3, 0.4, 0.5], None),  # 0.3 and 0.5 are each 0.2 above the best
        ({"plateau": 2, "min_gain": 0.25}, [0.1, 0.2, 0.3, 0.4], 20),
        ({"plateau": 1}, [0.1, None, 0.2, None, 0.3], None),  # what could not be measured counts for nothing
        ({"plateau": 1, "figure": "reverse_kl"}, [0.5, 0.4, 0.3, 0.35], 30),  # lower is better
        ({"plateau": 1, "eval_set": "other"}, [0.1, 0.1, 0.1], None),  # these are of the run's own set
        ({"gap": 0.05}, [0.1, 0.5, 0.84, 0.86, 0.9], 30),
        ({"gap": 0.0, "figure": "accuracy_greedy"}, [0.9, 1.0], 10),
        ({}, [0.1, 0.1, 0.1, 0.9], None),
    ],
)
def test_it_ends_when_it_should(until: dict[str, Any], values: list[float | None], step: int | None) -> None:
    config = build(UntilConfig, until)
    assert ended_at(config, values, figure=config.figure) == step


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    """With the rows of its metrics up to the step that it goes on from."""
    values = [0.3, 0.2, 0.1, 0.2, 0.2]
    rows: list[dict[str, Any]] = [
        {"kind": "eval", "step": point.step, "epoch": 0, "eval/accuracy_sampled": point.accuracy_sampled}
        for point in points(list(values))
    ]
    rule = StopRule(UntilConfig(plateau=4))
    rule.restore(rows, 20)
    assert not rule.reason
    for point in points(list(values))[3:]:
        rule.add(point)
    assert (
        rule.reason
        == "eval/accuracy_sampled was not better than 0.300 at step 0 in 4 evaluations (learner.until.plateau)"
    )


def test_the_gap_is_to_all_pools_together(tmp_path: Path) -> None:
    measured = {
        "a": {"": MeasuredTeacher(accuracy_sampled=1.0, n_sampled=3), "set": TEACHERS[""]},
        "b": {"": MeasuredTeacher(accuracy_sampled=0.6, n_sampled=1, accuracy_greedy=0.5, n_greedy=2)},
    }
    assert read_teachers(tmp_path) == {}
    (tmp_path / TEACHER_EVAL).write_bytes(msgspec.json.encode(measured))
    teachers = read_teachers(tmp_path)
    assert teachers["set"] == TEACHERS[""]
    assert teachers[""].accuracy_sampled == pytest.approx((3 * 1.0 + 0.6) / 4)
    point = EvalPoint(step=5, accuracy_sampled=0.5, accuracy_greedy=None)
    figures = gap_figures(point, teachers[""])
    assert figures == {
        "teacher_accuracy_sampled": pytest.approx(0.9),
        "gap_sampled": pytest.approx(0.4),
        "teacher_accuracy_greedy": pytest.approx(0.5),
    }
    assert gap_figures(point, None) == {}


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({"until": {"plateau": 2}, "eval_every": 0}, "eval_every is 0"),
        ({"until": {"plateau": 2, "eval_set": "x"}}, "expected a name of learner.eval_sets: none"),
        ({"until": {"gap": 0.1}}, "expected eval_teacher = true"),
        ({"until": {"gap": 0.1, "figure": "reverse_kl"}, "eval_teacher": True}, "only accuracies are measured"),
        ({"until": {"plateau": 1}, "tasks": {"eval_sampled": 0}}, "asks no prompt of that kind"),
    ],
)
def test_rules_that_could_never_end_a_run_are_refused(learner: dict[str, Any], expected: str) -> None:
    with pytest.raises(Exception, match=expected):
        build(LearnerConfig, learner)
