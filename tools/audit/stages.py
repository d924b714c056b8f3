"""Audits all stages of a run with stages: each by itself, and that each began with what the one before ended with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import yaml

from stillhouse.tools.audit.record import AuditError
from stillhouse.tools.audit.replayed import ReplayReport, audit_replay
from stillhouse.tools.audit.report import Report
from stillhouse.tools.audit.run import audit

STATE: Final = "stages.json"


class _Stage(msgspec.Struct, frozen=True):
    name: str
    folder: str
    text: str
    begun: bool
    done: bool
    phases: tuple[str, ...]
    result: str
    checkpoint: str
    models_from: dict[str, str]
    models: dict[str, str]
    sources: dict[str, str]


class _State(msgspec.Struct, frozen=True):
    stages: tuple[_Stage, ...]


class StagesReport(msgspec.Struct, frozen=True, kw_only=True):
    """The reports of the stages that have begun, by name, and what is wrong between them."""

    stages: dict[str, Report | ReplayReport]
    faults: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.faults and all(report.clean for report in self.stages.values())

    def __str__(self) -> str:
        parts = [f"stage {name}\n\n{report}" for name, report in self.stages.items()]
        last = "clean" if self.clean else "WRONG"
        return "\n\n".join([*parts, *self.faults, f"all stages: {last}"])


def audit_stages(run: Path) -> StagesReport:
    """Raises AuditError if a stage that has begun cannot be counted."""
    try:
        stages = msgspec.json.decode((run / STATE).read_bytes(), type=_State).stages
    except (OSError, msgspec.MsgspecError) as error:
        raise AuditError(f"{run / STATE} cannot be read: {error}") from error
    reports: dict[str, Report | ReplayReport] = {}
    for stage in (one for one in stages if one.begun):
        folder, record = run / stage.folder, run / f"{stage.folder}.record"
        try:
            if not stage.text:
                reports[stage.name] = audit(folder)
                continue
            if stage.text == "teacher":
                reports[f"{stage.name}, its text"] = audit(run / f"{stage.folder}-text", record)
            if "write" in stage.phases:
                reports[stage.name] = audit_replay(folder, record)
        except AuditError as error:
            raise AuditError(f"stage {stage.name}: {error}") from error
    if not reports:
        raise AuditError(f"no stage of {run} has begun; there is nothing to count")
    return StagesReport(stages=reports, faults=tuple(_between(run, stages)))


def _between(run: Path, stages: tuple[_Stage, ...]) -> Iterator[str]:
    earlier: dict[str, _Stage] = {}
    for stage in stages:
        if stage.begun:
            for one in earlier.values():
                if not one.done:
                    yield f"stage {stage.name} has begun, and {one.name} before it is not done"
            for key, name in stage.models_from.items():
                yield from _handed_over(run, stage, key, earlier[name])
        earlier[stage.name] = stage


def _handed_over(run: Path, stage: _Stage, key: str, source: _Stage) -> Iterator[str]:
    """Whether a stage's configuration names the student that the other ended with, and that is still the same."""
    where = f"stage {stage.name}, {key}"
    manifest = run / source.checkpoint / "manifest.json"
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None
    if digest != stage.sources.get(key):
        yield f"{where}: the checkpoint {source.checkpoint} is not the one that it began with"
    named: object = yaml.safe_load((run / stage.folder / "config.yaml").read_text(encoding="utf-8"))
    for level in key.split("."):
        named = named.get(level) if isinstance(named, dict) else None
    if stage.models.get(key) != source.result or not str(named).endswith(f"/{source.result}"):
        yield f"{where}: began with {named}, expected {source.result}, with which stage {source.name} ended"
