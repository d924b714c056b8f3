"""The checks of the doctor: those of every start, then those that take longer. docs/doctor.md explains each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Final

from stillhouse.launch.checks import table
from stillhouse.launch.checks.finding import Check, Finding
from stillhouse.tools.doctor import engines
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.disk_speed import disk_speed
from stillhouse.tools.doctor.gpus import gpus


def _later(module: str, function: str) -> Callable[[ModelCase], Iterator[Finding]]:
    """A check whose module imports torch, which the printing process does without."""

    def examine(case: ModelCase) -> Iterator[Finding]:
        yield from getattr(import_module(f"stillhouse.{module}"), function)(case)

    return examine


CHECKS: Final[tuple[Check[ModelCase], ...]] = (
    *table.CHECKS,
    Check("disk speed", disk_speed),
    Check("gpus", gpus),
    Check("prompts", _later("launch.checks.check_command", "prompts")),
    Check("tokenizer maps", _later("tools.doctor.tokenizers", "tokenizer_maps")),
    Check("chat template", _later("tools.doctor.chat_template", "chat_template")),
    Check("servers", _later("tools.doctor.engines", "servers"), longer_s=engines.starting_s),
    Check("off by one", _later("tools.doctor.scoring", "off_by_one")),
    Check("temperature", _later("tools.doctor.scoring", "temperature")),
    Check("known text", _later("tools.doctor.scoring", "known_text")),
    Check("replica noise", _later("tools.doctor.scoring", "replica_noise")),
    Check("weights taken", _later("tools.doctor.weight_swap", "weights_taken")),
)
