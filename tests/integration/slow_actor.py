"""An engine that writes as the embedded one does, and sleeps before each decode step: an actor that needs time and no
processor."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from stillhouse.engines.provider import Student, StudentSource
from stillhouse.engines.torch.provider import TorchProvider

STEP_S = "SLOW_ACTOR_STEP_S"
"""Environment variable: seconds per decode step."""


class SlowActor(TorchProvider):
    def student(self, ctx: Any) -> StudentSource:
        source = super().student(ctx)

        def start(wake: Callable[[], None]) -> Student:
            student = source.start(wake)
            engine: Any = student.engine
            step = engine._run_step  # inside of what the engine counts as its work

            def slow(joining: Sequence[Any]) -> None:
                time.sleep(float(os.environ[STEP_S]))
                step(joining)

            engine._run_step = slow
            return student

        return dataclasses.replace(source, start=start)


PROVIDER = SlowActor()
