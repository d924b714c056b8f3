"""Checks of weights in few bits: `learner.lora.quantize`, `teacher.quantize`, and a student that is so already."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillhouse.launch.config.pools import teacher_pools
from stillhouse.launch.config.run import RunConfig


def quantized(config: RunConfig, student: Path | None) -> Iterator[str]:
    """Mistakes, one line each."""
    yield from _student(student)
    yield from _learner(config)
    yield from _teachers(config)


def _student(student: Path | None) -> Iterator[str]:
    """Its weights change, and every engine takes them as they are."""
    said: Any = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        said = json.loads((student / "config.json").read_text(encoding="utf-8")) if student is not None else {}
        said = said.get("quantization_config")
    if said:
        yield (
            f"models.student: {student} is quantized already (quantization_config of its config.json), expected the "
            "checkpoint that it was made of"
        )


def _learner(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if learner.lora.quantize == "none":
        return
    got = f"learner.lora.quantize: got {learner.lora.quantize}"
    if learner.ranks > 1:
        yield f"{got} with learner.ranks = {learner.ranks}, expected none: weights in 4 bits cannot be divided"
    if learner.ema.decay:
        yield f"{got} with learner.ema.decay = {learner.ema.decay}, expected 0: the average is of whole weights"
    if missing := _missing():
        yield f"{got}, and {' and '.join(missing)} is missing: pip install -e '.[bitsandbytes]'"


def _missing() -> list[str]:
    return [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]


def _teachers(config: RunConfig) -> Iterator[str]:
    for pool in teacher_pools(config):
        teacher, average = pool.config.teacher, config.learner.ema.decay and pool.name == config.learner.ema.pool
        if teacher.quantize == "none":
            continue
        got = f"{pool.key}.quantize: got {teacher.quantize}"
        if teacher.engine not in ("auto", "torch"):
            yield (
                f"{got} with engine {teacher.engine}, expected none: it is of embedded teachers. For servers: "
                f"--{pool.key}.server.args=--quantization,fp8 or a checkpoint in fewer bits"
            )
        elif average:
            yield f"{got} for teachers that become the student's average, expected none: its weights arrive as they are"
        elif missing := _missing():
            yield f"{got}, and {' and '.join(missing)} is missing: pip install -e '.[bitsandbytes]'"
