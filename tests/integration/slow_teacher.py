"""An engine that scores as the embedded one does, and sleeps for each item: a teacher of which the time is known, and
which needs no processor for it. Or it computes for as long, so that it needs one all the time."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from stillhouse.engines.base import LOGPROBS_ONLY, ScoreOptions, ScoreRequest, ScoreResult, ScoringEngine
from stillhouse.engines.provider import ScorerSource
from stillhouse.engines.torch.provider import TorchProvider

ITEM_S = "SLOW_TEACHER_ITEM_S"
"""Environment variable: seconds per item."""


class Sleeps:
    """A ScoringEngine around another."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine, self._item_s = engine, float(os.environ[ITEM_S])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        time.sleep(self._item_s * len(requests))
        return self._engine.score(requests, options)


class SlowTeacher(TorchProvider):
    name = "slow"

    def scorer(self, ctx: Any) -> ScorerSource:
        source = super().scorer(ctx)
        return dataclasses.replace(source, start=lambda: Sleeps(source.start()))


PROVIDER = SlowTeacher()
