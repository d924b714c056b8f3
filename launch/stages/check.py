"""Checks every stage before the first one starts: a mistake in the last is found at once. A stage that begins with the
student of another is checked with the model that this one begins with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from stillhouse.engines.registry import EMBEDDED
from stillhouse.launch.checks import preflight
from stillhouse.launch.checks.finding import Case, Finding
from stillhouse.launch.checks.preflight import Checked, check_recorded
from stillhouse.launch.checks.table import examined
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.machine.machine import Machine
from stillhouse.launch.stages.config import TEACHER, Stage
from stillhouse.learner.config import LoraConfig, UntilConfig
from stillhouse.learner.objectives.config import ObjectiveConfig, OfflineConfig, check_given
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.records import DataError

replace = msgspec.structs.replace


def writing(config: RunConfig, text: str) -> RunConfig:
    """The configuration with which a stage's text is written: by the teacher, whose student is not trained, or from
    rows, whose columns are not those of the prompts."""
    if text != TEACHER:
        tasks = replace(config.learner.tasks, columns={})
        return replace(config, learner=replace(config.learner, tasks=tasks))
    learner = replace(
        config.learner,
        objective=ObjectiveConfig(),
        lora=LoraConfig(),
        offline=OfflineConfig(),
        until=UntilConfig(),
        eval_teacher=False,
    )
    return replace(config, learner=learner)


def training(config: RunConfig) -> RunConfig:
    """The configuration with which one process trains on text, and evaluates by engines of its own."""
    here = {"engine": EMBEDDED, "urls": ()}
    pools = {name: replace(pool, **here) for name, pool in config.pools.items()}
    return replace(
        config,
        actors=1,
        learner=replace(config.learner, record=""),
        weights=replace(config.weights, backend="gloo"),
        actor=replace(config.actor, **here),
        teacher=replace(config.teacher, **here),
        pools=pools,
    )


def check_stages(stages: Sequence[Stage], folders: Sequence[Path], pretended: Machine | None, *, whole: bool) -> None:
    """Print what is found. `whole`: also what takes a while, and is said by `--check` only. Raises ConfigError with the
    mistakes of all stages that would be refused."""
    mistakes: list[str] = []
    for stage, folder in zip(stages, folders, strict=True):
        try:
            findings = _findings(stage, folder, pretended, whole=whole)
        except ConfigError as error:
            mistakes += [f"stage {stage.own.name}: {mistake}" for mistake in error.mistakes]
            continue
        for finding in findings:
            if whole or finding.status in ("warning", "failed"):
                status = "" if finding.status == "ok" else f"{finding.status}: "
                print(f"stage {stage.own.name}: {status}{finding.text()}")
    if mistakes:
        raise ConfigError(*mistakes)


def _findings(stage: Stage, folder: Path, pretended: Machine | None, *, whole: bool) -> list[Finding]:
    found: list[Finding] = []
    for config in _runs(stage):
        checked = preflight.check(config, pretended)
        check_recorded(checked.config, resume=folder.exists())
        found += _examined(checked, folder, pretended, whole=whole)
    if stage.own.text:
        tasks = replace(stage.config.learner.tasks, group_reward="")
        config = training(replace(stage.config, learner=replace(stage.config.learner, tasks=tasks)))
        preflight.check(config, pretended)  # one process, of which the planner knows nothing
        _check_text(stage)
    return found


def _runs(stage: Stage) -> list[RunConfig]:
    """Runs of actors and teachers that a stage consists of."""
    if not stage.own.text:
        return [stage.config]
    if stage.own.text != TEACHER:
        return []
    models = replace(stage.config.models, student=stage.config.models.teacher)
    return [replace(writing(stage.config, TEACHER), models=models)]


def _examined(checked: Checked, folder: Path, pretended: Machine | None, *, whole: bool) -> list[Finding]:
    here = pretended is None and checked.config.launch.backend == "local"
    findings, refusing = examined(Case(checked.config, folder, checked), here=here)
    if whole:
        from stillhouse.launch.checks.check_command import check_run  # imports torch, which the launcher does without

        findings = [*check_run(checked.config, devices=pretended is None), *findings]
    if refusing and not whole:
        raise ConfigError(*(finding.text() for finding in refusing))
    return findings


def _check_text(stage: Stage) -> None:
    own, config = stage.own, stage.config
    if config.learner.ranks > 1:
        raise ConfigError(f"learner.ranks: got {config.learner.ranks}, expected 1: one process trains on text")
    try:
        if own.text != TEACHER:
            open_prompts(own.text, answers=True)
            check_given("data", own.text, config.learner.objective)
    except (DataError, OSError, ValueError) as error:
        raise ConfigError(f"text: {error}") from error
    for pool in config.pools or {config.teacher.pool: None}:
        if (needs := config.learner.objective.needs_top_k_for(pool)) and not config.teacher.sends.distributions:
            raise ConfigError(
                f"learner.objective.{needs} needs sets of tokens with the text; expected teacher.top_k above 0"
            )
