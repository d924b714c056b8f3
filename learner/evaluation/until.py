"""When a run has come far enough by its evaluations (`learner.until`), and how far the student is from its teacher."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stillhouse.learner.config import UntilConfig
from stillhouse.learner.evaluation.figures import EvalPoint, MeasuredTeacher, whole_teacher

TEACHER_EVAL: Final = "teacher_eval.json"
"""File in the run folder: pool -> name of a set -> MeasuredTeacher."""
Measured = dict[str, dict[str, MeasuredTeacher]]
NOT_MEASURED: Final[Mapping[str, MeasuredTeacher]] = {}


def read_teachers(run_dir: Path) -> dict[str, MeasuredTeacher]:
    """Name of a set -> the teachers of all pools together; empty if they were not measured."""
    file = run_dir / TEACHER_EVAL
    if not file.is_file():
        return {}
    pools = msgspec.json.decode(file.read_bytes(), type=Measured).values()
    names = dict.fromkeys(name for pool in pools for name in pool)
    return {name: whole_teacher([pool[name] for pool in pools if name in pool]) for name in names}


def gap_figures(result: EvalPoint, teacher: MeasuredTeacher | None) -> dict[str, float]:
    """The teacher's accuracies on the set, and the teacher's minus the student's."""
    found: dict[str, float] = {}
    for half in ("sampled", "greedy"):
        its, own = (getattr(one, f"accuracy_{half}", None) for one in (teacher, result))
        if its is not None:
            found[f"teacher_accuracy_{half}"] = its
            if own is not None:
                found[f"gap_{half}"] = its - own
    return found


class StopRule:
    """Follows one figure of one evaluation set. `reason` says why the run is to end; empty: it goes on."""

    def __init__(self, config: UntilConfig, teachers: Mapping[str, MeasuredTeacher] = NOT_MEASURED) -> None:
        self._config = config
        self._teacher = getattr(teachers.get(config.eval_set), config.figure, None)
        self._best, self._best_step, self._since = -math.inf, 0, 0
        self.reason = ""

    @property
    def tag(self) -> str:
        """Tag of the figure in the metrics."""
        of = f"eval/sets/{self._config.eval_set}" if self._config.eval_set else "eval"
        return f"{of}/{self._config.figure}"

    def add(self, result: EvalPoint) -> None:
        """An evaluation on any set."""
        if result.name == self._config.eval_set:
            self._add(result.step, getattr(result, self._config.figure))

    def restore(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """The evaluations up to `step` in the metrics of the run before."""
        for row in rows:
            if row["kind"] == "eval" and row["step"] <= step and isinstance(value := row.get(self.tag), int | float):
                self._add(row["step"], value)

    def _add(self, step: int, value: float | None) -> None:
        config = self._config
        if value is None or not math.isfinite(value):
            return
        good = -value if config.figure == "reverse_kl" else value
        if good > self._best + (config.min_gain if math.isfinite(self._best) else 0.0):
            self._best, self._best_step, self._since = good, step, 0
        else:
            self._since += 1
        if config.plateau and self._since >= config.plateau:
            best = f"{abs(self._best):.3f} at step {self._best_step}"
            self.reason = f"{self.tag} was not better than {best} in {self._since} evaluations (learner.until.plateau)"
        if config.gap is not None and self._teacher is not None and self._teacher - value <= config.gap:
            self.reason = (
                f"{self.tag} is {value:.3f} at step {step}, the teacher's {self._teacher:.3f} (learner.until.gap)"
            )
