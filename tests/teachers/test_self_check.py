"""The noise of a teacher's scores, measured at its start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from stillhouse.builtin import TEACHER_DIR
from stillhouse.engines.base import LOGPROBS_ONLY, ScoreOptions, ScoreRequest, ScoreResult
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.teachers.config import TeacherConfig
from stillhouse.teachers.self_check import LENGTHS, self_check


class Moody:
    """Gives each token -2, and `mood` more for each other text of the batch."""

    vocab_size, max_context = 30, 50

    def __init__(self, mood: float) -> None:
        self._mood = mood
        self.lengths: list[list[int]] = []

    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        if np.isnan(self._mood):
            raise RuntimeError("no kernel for this")
        self.lengths.append([len(request.token_ids) for request in requests])
        assert all(request.token_ids.max() < 20 for request in requests)
        score = np.float32(-2.0 + self._mood * (len(requests) - 1))
        return [ScoreResult(np.full(len(r.token_ids) - r.start, score, np.float32)) for r in requests]

    def close(self) -> None: ...


def test_a_score_that_depends_on_its_batch_is_measured_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = Moody(0.1)
    found = self_check(engine, 20)
    assert found is not None
    assert found.noise_nats == pytest.approx(0.1 * (len(LENGTHS) - 1), abs=1e-6)
    assert found.logprob == pytest.approx(-2.0)
    assert "differs by up to 0.3 nats" in caplog.text
    assert engine.lengths == [[50], [17, 40, 5, 50]], "no longer than the model can read"


def test_a_steady_teacher_has_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    found = self_check(Moody(0.0), 20)
    assert found is not None and found.gauges() == {"noise_nats": 0.0, "check_logprob": -2.0}
    assert not caplog.text


def test_a_teacher_that_cannot_be_measured_says_so_and_works_on(caplog: pytest.LogCaptureFixture) -> None:
    assert self_check(Moody(float("nan")), 20) is None
    assert "could not be measured: no kernel for this" in caplog.text


def test_the_embedded_teacher_hardly_minds_its_company() -> None:
    """Packed attention and float32: rounding, and twice the same number for the same text."""
    first, second = (self_check(TorchScorer.load(TEACHER_DIR, TeacherConfig(device="cpu")), 20) for _ in range(2))
    assert first is not None and first.noise_nats < 1e-3
    assert second == first
