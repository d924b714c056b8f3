"""Checks a configuration before torch is loaded anywhere: models (launch.checks.model_files), prompts
(launch.checks.prompt_files), recorded batches, whether its parts fit one another (launch.config.consistency), and
SGLang servers (launch.checks.server_preflight).

These checks take well under a second for local folders, so a wrong path is found at once. Problems that only torch or
the whole prompts file can show (a chat template that fails, an unknown architecture) are found by `--check`
(launch.checks.check_command), or when a worker loads the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stillhouse import builtin
from stillhouse.launch.checks.architectures import refusals
from stillhouse.launch.checks.model_files import check_teachers, check_weights, find_model, model_type, read_vocabulary
from stillhouse.launch.checks.placement import choose_engines
from stillhouse.launch.checks.prompt_files import absolute_prompts, check_prompts
from stillhouse.launch.checks.reward_rows import Unreadable, unreadable_rows
from stillhouse.launch.checks.server_preflight import Found, check_servers
from stillhouse.launch.checks.turn_ends import turn_end_warnings
from stillhouse.launch.config.consistency import check_consistency
from stillhouse.launch.config.known_sets import with_known_sets
from stillhouse.launch.config.pools import measurable_pools, teacher_pools, without_idle_routes
from stillhouse.launch.config.run import BUILTIN, RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.machine.devices import lacking_cuda
from stillhouse.launch.machine.machine import Interpreters, Machine, find_machine, host_gib
from stillhouse.learner.config import RUN_FOLDER
from stillhouse.learner.objectives.config import check_given
from stillhouse.learner.reports.trackers.registry import UnknownTracker, check_tracker
from stillhouse.models.files import TokenizerError
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.handshake import vocab_fingerprint
from stillhouse.protocol.processors import usable_cores
from stillhouse.recording.format import RecordError
from stillhouse.recording.reader import read_header
from stillhouse.recording.writer import record_path
from stillhouse.teachers.alignment import Aligner

replace = msgspec.structs.replace
LEASE_IN_TURNS_S: Final = 600.0
"""Least buffer.lease_s with launch.share = turns: a teacher holds its leases while it waits for its turn."""


class Checked(NamedTuple):
    """The checked configuration, and what the launcher needs to start it."""

    config: RunConfig
    """`builtin` and hub names are replaced by folders and files, so that 40 workers need not ask the hub again; routes
    to teachers that do not exist and are not needed are gone."""
    model_types: tuple[str, ...]
    """`model_type` of student and teachers, from config.json."""
    warnings: list[str]
    """Warnings: what the run will do differently than expected."""
    servers: Found
    """The servers, and the devices of all parts."""


def check(config: RunConfig, pretended: Machine | None = None) -> Checked:
    """Check everything. `pretended`: used in place of this machine's GPUs, for a plan that needs no weights. Raises
    ConfigError with all mistakes."""
    mistakes: list[str] = []
    config = with_known_sets(without_idle_routes(config))
    interpreters = Interpreters()
    # even if device = cpu, one part may name a GPU
    machine = pretended or find_machine()._replace(host_gib=host_gib(), cores=usable_cores())
    config, why_engines = choose_engines(config, machine, interpreters)
    if config.launch.share == "turns":
        config = replace(config, buffer=replace(config.buffer, lease_s=max(config.buffer.lease_s, LEASE_IN_TURNS_S)))
    folders, not_found = find_models(config, weights=pretended is None)
    mistakes += not_found
    for key, folder in folders.items():
        mistakes += check_weights(key, folder).mistakes
    mistakes += lacking_cuda(config, machine, interpreters.own())
    student, others = folders.get("models.student"), _other_tokenizers(config)
    if student is not None:
        same = {key: folder for key, folder in folders.items() if folder != student and key not in others}
        mistakes += check_teachers(student, same)
        mistakes += _alignable(student, {key: folder for key, folder in folders.items() if key in others})
    tasks = config.learner.tasks
    prompts, eval_prompts = tasks.prompts or BUILTIN, tasks.eval_prompts
    if prompts == BUILTIN:
        prompts, eval_prompts = str(builtin.TRAIN_JSONL), eval_prompts or str(builtin.EVAL_JSONL)
    elif eval_prompts == BUILTIN:
        eval_prompts = str(builtin.EVAL_JSONL)
    eval_sets = {
        name: replace(one, prompts=str(builtin.EVAL_JSONL) if one.prompts == BUILTIN else one.prompts)
        for name, one in config.learner.eval_sets.items()
    }
    tasks = replace(tasks, prompts=prompts, eval_prompts=eval_prompts)
    of_rows = _prompt_rows(config, replace(config.learner, tasks=tasks, eval_sets=eval_sets).prompt_files)
    mistakes += of_rows.mistakes
    mistakes += _trackers(config)
    findings = check_consistency(config, student)
    mistakes += findings.mistakes
    config = with_folders(config, folders)
    servers = check_servers(config, machine, interpreters, why_engines)
    mistakes += servers.mistakes
    if not not_found:
        mistakes += refusals(config)
    mistakes += _unmeasurable(config)
    if mistakes:
        raise ConfigError(*mistakes)
    config = servers.config
    tasks = replace(tasks, prompts=absolute_prompts(prompts), eval_prompts=absolute_prompts(eval_prompts))
    learner = config.learner
    offline = replace(learner.offline, file=_absolute(learner.offline.file))
    eval_sets = {name: replace(one, prompts=absolute_prompts(one.prompts)) for name, one in eval_sets.items()}
    record = _absolute(learner.record)
    learner = replace(learner, tasks=tasks, eval_sets=eval_sets, record=record, offline=offline)
    model_types = tuple(sorted({model_type(folder) for folder in folders.values()}))
    warnings = [*of_rows.warnings, *findings.warnings, *_turn_ends(folders, others)]
    return Checked(replace(config, learner=learner), model_types, warnings, servers)


def _prompt_rows(config: RunConfig, files: Mapping[str, str]) -> Unreadable:
    columns, found = config.learner.tasks.columns, Unreadable([], [])
    for key, path in files.items():
        if not path:
            continue
        wrong = check_prompts(key, path, config.environments, columns)
        found.mistakes.extend(wrong)
        ours = path in (str(builtin.TRAIN_JSONL), str(builtin.EVAL_JSONL))  # the demo starts a second sooner
        if not wrong and not ours:
            unreadable = unreadable_rows(key, path, config.environments, columns)
            found.mistakes.extend(unreadable.mistakes)
            found.warnings.extend(unreadable.warnings)
    return found


def _unmeasurable(config: RunConfig) -> Iterator[str]:
    """For learner.eval_teacher: pools whose teachers cannot answer prompts."""
    if config.learner.eval_teacher:
        able = {pool.name for pool in measurable_pools(config)}
        for pool in teacher_pools(config):
            if pool.name not in able:
                yield (
                    f"learner.eval_teacher: the teachers of {pool.key} cannot answer the evaluation prompts; expected "
                    "teacher.engine = torch and actor.engine = torch, at least one teacher that is not the student's "
                    "average, and evaluations"
                )
        if not able and config.learner.until.gap is not None:
            yield "learner.until.gap: got a gap to a teacher, but no teacher scores anything here; expected one"


def _other_tokenizers(config: RunConfig) -> set[str]:
    return {pool.model_key for pool in teacher_pools(config) if pool.config.teacher.tokenizer == "other"}


def _alignable(student: Path, teachers: Mapping[str, Path]) -> Iterator[str]:
    for key, folder in teachers.items():
        try:
            Aligner(FileTokenizer(student), FileTokenizer(folder))
        except TokenizerError as error:
            yield f"{key}: teacher.tokenizer = other cannot align {folder} with the student's {student}: {error}"


def _turn_ends(folders: Mapping[str, Path], others: Collection[str]) -> list[str]:
    others = {"models.student", *others}  # ids of other tokenizers cannot be compared
    teachers = {folder: key for key, folder in folders.items() if key not in others}  # each folder is read once
    return [*turn_end_warnings(folders["models.student"], {key: folder for folder, key in teachers.items()})]


def find_models(config: RunConfig, *, weights: bool = True) -> tuple[dict[str, Path], list[str]]:
    """(folders of the models that are there, by the key that names each; a mistake for each other one)."""
    named = {"models.student": config.models.student}
    pools = teacher_pools(config)
    named |= {pool.model_key: pool.config.models.teacher for pool in pools}
    away = {pool.model_key for pool in pools if pool.config.teacher.api.url} - {"models.student"}
    folders, mistakes = dict[str, Path](), list[str]()
    for key, name in named.items():
        try:
            folders[key] = find_model(key, name, weights=weights and key not in away)
        except ConfigError as error:
            mistakes += error.mistakes
    return folders, mistakes


def with_folders(config: RunConfig, folders: Mapping[str, Path]) -> RunConfig:
    """Replace the names of models by their folders."""
    found = {key.partition(".")[2]: str(folder) for key, folder in folders.items() if key.startswith("models.")}
    pools = {
        name: replace(pool, model=str(folders.get(f"pools.{name}.model", pool.model)))
        for name, pool in config.pools.items()
    }
    return replace(config, models=replace(config.models, **found), pools=pools)


def _absolute(path: str) -> str:
    return path if path.startswith(RUN_FOLDER) or not path else str(Path(path).expanduser().absolute())


def check_recorded(config: RunConfig, *, resume: bool) -> None:
    """Check recorded batches: the file that the run would write, and the one that it would mix in. `config`: with
    models and paths resolved. Raises ConfigError with all mistakes."""
    mistakes = [*_objective(config), *_written(config, resume=resume), *_mixed_in(config)]
    if mistakes:
        raise ConfigError(*mistakes)


def _objective(config: RunConfig) -> Iterator[str]:
    """Refuse off-policy objectives for the student's own tokens."""
    learner, objective = config.learner, config.learner.objective
    for pool in ("", *objective.teacher_divergences):  # the common divergence, and those of single pools
        if objective.divergence_of(pool).name == "seq_kd":
            yield (
                f"learner.objective.{objective.divergence_key(pool)}: got seq_kd, which teaches nothing on the "
                "student's own tokens (the mean of its gradient is 0); expected another one; seq_kd is for "
                "learner.offline.divergence and stillhouse replay"
            )
    if learner.offline.student_fraction == 0.0:
        yield (
            "learner.offline.student_fraction: got 0, which leaves the actors nothing to do; expected more than 0, or "
            f"stillhouse replay {learner.offline.file}, which trains on the file alone"
        )


def _trackers(config: RunConfig) -> Iterator[str]:
    for name in config.learner.trackers:
        try:
            check_tracker(name)
        except UnknownTracker as error:
            yield f"learner.trackers: {error}"


def _written(config: RunConfig, *, resume: bool) -> Iterator[str]:
    if not config.learner.record or resume:
        return
    path = record_path(Path(config.learner.record))
    if path.exists() and path.stat().st_size:
        yield f"learner.record: {path} holds another run's batches; expected the name of a new file"


def _mixed_in(config: RunConfig) -> Iterator[str]:
    file = config.learner.offline.file
    if not file:
        return
    try:
        header = read_header(Path(file))
    except (RecordError, OSError) as error:
        yield f"learner.offline.file: {error}"
        return
    try:
        check_given(header.writer, file, config.learner.offline.objective)
    except ValueError as error:
        yield f"learner.offline: {error}"
    if header.writer == "student":
        yield (
            f"learner.offline.file: {file} was written by the student of the run {header.run!r}; expected a file that "
            "the teacher wrote (stillhouse write)"
        )
    vocabulary = read_vocabulary(Path(config.models.student) / "tokenizer.json")
    if vocabulary is not None and vocab_fingerprint(vocabulary) != header.vocab_fingerprint:
        yield (
            f"learner.offline.file: the token ids of {file} belong to another vocabulary than that of "
            f"{config.models.student}; expected the same token-to-id map"
        )
