"""Evaluations under way: offers their tasks, requests results until they are complete, and delivers the figures.

One thread (the loop's). Actors run evaluation rollouts beside training ones, so an evaluation in the middle of a run
may be sampled under several versions; its figures say which."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from stillhouse.learner.evaluation.evaluation import EvaluationResult, EvaluationRun
from stillhouse.learner.prompts.tasks import in_messages
from stillhouse.protocol.messages import EvalResult, Message, WeightVersion

log = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""Interval between requests for results. The buffer also sends results as they arrive."""

Send = Callable[[Message, Sequence[np.ndarray[Any, Any]]], None]


class EvaluationDesk:
    """Owns every evaluation from its start to its figures."""

    def __init__(
        self,
        make: Callable[[WeightVersion, str], EvaluationRun],
        send: Send,
        on_result: Callable[[EvaluationResult], None],
    ) -> None:
        """`make` builds the evaluation of one version on the set of one name; `on_result` gets the figures, in order of
        completion."""
        self._make = make
        self._send = send
        self._on_result = on_result
        self._active: list[EvaluationRun] = []
        self._started: set[tuple[WeightVersion, str]] = set()
        self._asked_s = -math.inf

    @property
    def active(self) -> int:
        return len(self._active)

    def start(self, version: WeightVersion, names: Iterable[str] = ("",)) -> None:
        """Start the evaluations of these sets. One that was started before is not started again: the buffer gives its
        results once, and nobody would get them a second time."""
        for name in names:
            if (version, name) in self._started:
                continue
            self._started.add((version, name))
            evaluation = self._make(version, name)
            for message, frames in in_messages(evaluation.tasks()):
                self._send(message, frames)
            self._active.append(evaluation)
        self._asked_s = -math.inf
        self._close_done()

    def add(self, result: EvalResult, arrays: tuple[np.ndarray[Any, Any], ...]) -> None:
        """Add results from the buffer. Results of an evaluation that is already complete (a repeat) are ignored."""
        for evaluation in self._active:
            if result.eval_id in evaluation.eval_ids:
                evaluation.add(result, arrays)
                self._close_done()
                return
        if result.items:
            log.info("a result of evaluation %s, which is complete", result.eval_id)

    def ask(self) -> None:
        """Request missing results, at most once per REPEAT_S."""
        now_s = time.monotonic()
        if not self._active or now_s - self._asked_s < REPEAT_S:
            return
        self._asked_s = now_s
        for evaluation in self._active:
            for wanted in evaluation.wanted():
                self._send(wanted, ())

    def give_up(self) -> None:
        """Close all evaluations with the results received so far. `missing` counts the rest."""
        for evaluation in self._active:
            self._finish(evaluation)
        self._active.clear()

    def _close_done(self) -> None:
        for evaluation in [e for e in self._active if e.done]:
            self._active.remove(evaluation)
            self._finish(evaluation)

    def _finish(self, evaluation: EvaluationRun) -> None:
        for wanted in evaluation.confirmed():
            self._send(wanted, ())
        result = evaluation.result()
        if result.missing or result.failed:
            log.warning(
                "evaluation at step %d%s: %d missing, %d failed",
                result.step,
                f" on {result.name}" if result.name else "",
                result.missing,
                result.failed,
            )
        self._on_result(result)
