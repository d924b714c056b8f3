"""The figures of a trace, against ones that are worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillhouse.tools.trace.figures import read_figures
from stillhouse.tools.trace.merge import merge
from tests.tools.trace.test_merge import a_run, sent, slice_, write


def test_the_figures_of_a_small_run(tmp_path: Path) -> None:
    a_run(tmp_path)
    figures = read_figures(merge(tmp_path, tmp_path / "out.json.gz").path)
    assert figures.learner_bubble == pytest.approx(27 / 57)  # waits 3 to 30, of 3 to 60
    assert figures.wait_s == pytest.approx({"data": 0.027})
    assert figures.teacher_wait == pytest.approx(1 - 6 / 21)  # teacher-1 has no `ready`; teacher-0: 4 to 25
    assert figures.teacher_s_per_1000_tokens == pytest.approx(0.006 / 17 * 1000)
    assert figures.goodput == 1.0
    assert figures.weight_pause_s == figures.weight_pause_max_s == pytest.approx(0.001)
    assert [label for label, _ in figures.lines()][:2] == ["learner bubble", "teacher wait"]


def test_nested_waits_count_once_and_for_the_inner_cause(tmp_path: Path) -> None:
    learner = [
        ["I", "ready", 0],
        slice_("learner", "wait: weights", 4, 6),
        slice_("learner", "wait: data", 2, 8),
        slice_("learner", "train", 8, 10, step=1, items=[], tokens=0),
        slice_("learner", "wait: eval", 12, 90),  # after the last step
    ]
    write(tmp_path / "trace", "learner-0", learner)
    figures = read_figures(merge(tmp_path, tmp_path / "out.json").path)
    assert figures.learner_bubble == pytest.approx(0.6)
    assert figures.wait_s == pytest.approx({"data": 0.004, "weights": 0.002})
    assert figures.goodput is figures.teacher_wait is figures.weight_pause_s is None


def test_swaps_of_idle_engines_and_tokens_of_evaluations_do_not_count(tmp_path: Path) -> None:
    a_run(tmp_path)
    more = [slice_("engine", "swap", 1, 9, version="0.1", running=0), sent(30, 31, 0, 100, "eval-3-0-0")]
    write(tmp_path / "trace", "actor-1", [*more, sent(32, 33, 0, 4, "train-3-0-0")])
    figures = read_figures(merge(tmp_path, tmp_path / "out.json").path)
    assert figures.weight_pause_s == pytest.approx(0.001)
    assert figures.goodput == pytest.approx(12 / 16)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="one event per line"):
        read_figures(tmp_path / "x.json")
