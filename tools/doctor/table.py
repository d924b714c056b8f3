"""The checks of the doctor, cheap ones first. docs/doctor.md explains each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Final, NamedTuple

from stillhouse.launch.config.run import RunConfig
from stillhouse.tools.doctor import engines
from stillhouse.tools.doctor.case import Case
from stillhouse.tools.doctor.configuration import configuration, memory, prompts
from stillhouse.tools.doctor.disk import disk
from stillhouse.tools.doctor.finding import Finding
from stillhouse.tools.doctor.gpus import gpus
from stillhouse.tools.doctor.host import clocks, cores, open_files, shared_memory
from stillhouse.tools.doctor.ports import ports


def _no_longer(config: RunConfig) -> float:
    return 0.0


def _later(module: str, function: str) -> Callable[[Case], Iterator[Finding]]:
    """A check of this folder whose module imports torch, which the printing process does without."""

    def examine(case: Case) -> Iterator[Finding]:
        yield from getattr(import_module(f"stillhouse.tools.doctor.{module}"), function)(case)

    return examine


class Check(NamedTuple):
    """One check. `examine` may raise tools.doctor.case.Impossible."""

    name: str
    examine: Callable[[Case], Iterator[Finding]]
    longer_s: Callable[[RunConfig], float] = _no_longer
    """Seconds that it may take beyond those of any check."""


CHECKS: Final = (
    Check("configuration", configuration),
    Check("open files", open_files),
    Check("cores", cores),
    Check("shared memory", shared_memory),
    Check("clocks", clocks),
    Check("ports", ports),
    Check("disk", disk),
    Check("memory", memory),
    Check("gpus", gpus),
    Check("prompts", prompts),
    Check("tokenizer maps", _later("tokenizers", "tokenizer_maps")),
    Check("turn ends", _later("tokenizers", "turn_ends")),
    Check("chat template", _later("chat_template", "chat_template")),
    Check("servers", _later("engines", "servers"), engines.starting_s),
    Check("off by one", _later("scoring", "off_by_one")),
    Check("temperature", _later("scoring", "temperature")),
    Check("known text", _later("scoring", "known_text")),
    Check("replica noise", _later("scoring", "replica_noise")),
    Check("weights taken", _later("weight_swap", "weights_taken")),
)
