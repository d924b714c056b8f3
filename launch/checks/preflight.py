"""Checks a configuration before torch is loaded anywhere: models (launch.checks.model_files), prompts, recorded
batches, whether its parts fit one another (launch.config.consistency), and SGLang servers
(launch.checks.server_preflight).

These checks take well under a second for local folders, so a wrong path is found at once. Problems that only torch or
the whole prompts file can show (a chat template that fails, an unknown architecture) are found by `--check`
(launch.checks.check_command), or when a worker loads the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec

import builtin
from launch.checks.model_files import (
    check_teachers,
    check_weights,
    find_model,
    model_type,
    nearest_path,
    read_vocabulary,
)
from launch.checks.placement import NOWHERE, Placement, choose_engines
from launch.checks.server_preflight import check_servers
from launch.config.consistency import check_consistency
from launch.config.pools import teacher_pools, without_idle_routes
from launch.config.run import BUILTIN, RunConfig
from launch.errors import ConfigError
from launch.machine.devices import lacking_cuda
from launch.machine.machine import Interpreters, Machine, find_machine
from launch.servers.plan import ServerPlan
from protocol.handshake import vocab_fingerprint
from recording.format import RecordError
from recording.reader import read_header
from recording.writer import record_path

ROWS_CHECKED: Final = 20
replace = msgspec.structs.replace
Json = Mapping[str, object]


class Checked(NamedTuple):
    """The checked configuration, and what the launcher needs to start it."""

    config: RunConfig
    """`builtin` and hub names are replaced by folders and files, so that 40 workers need not ask the hub again; routes
    to teachers that do not exist and are not needed are gone."""
    model_types: tuple[str, ...]
    """`model_type` of student and teachers, from config.json."""
    warnings: tuple[str, ...] = ()
    """Warnings: what the run will do differently than expected."""
    servers: tuple[ServerPlan, ...] = ()
    """SGLang servers to be started with the run."""
    server_report: str = ""
    """Text to print: where servers will run, and what running servers can do."""
    placement: Placement = NOWHERE
    """Devices of the learner and of embedded engines."""
    memory: tuple[str, ...] = ()
    """Lines to print: estimated memory on each GPU in use."""
    not_here: tuple[str, ...] = ()
    """Requirements of a pretended machine that this one does not meet."""


def check(config: RunConfig, pretended: Machine | None = None) -> Checked:
    """Check everything. `pretended`: used in place of this machine's GPUs. Raises ConfigError with all mistakes."""
    mistakes: list[str] = []
    config = without_idle_routes(config)
    interpreters = Interpreters()
    machine = pretended or find_machine()  # even if device = cpu, one part may name a GPU
    config, why_engines = choose_engines(config, machine, interpreters)
    named = {"models.student": config.models.student}
    named |= {pool.model_key: pool.config.models.teacher for pool in teacher_pools(config)}
    folders: dict[str, Path] = {}
    for key, name in named.items():
        try:
            folders[key] = find_model(key, name)
        except ConfigError as error:
            mistakes += error.mistakes
    for key, folder in folders.items():
        mistakes += check_weights(key, folder).mistakes
    mistakes += lacking_cuda(config, machine, interpreters.own())
    student = folders.get("models.student")
    if student is not None:
        mistakes += check_teachers(student, {key: folder for key, folder in folders.items() if folder != student})
    tasks = config.learner.tasks
    prompts, eval_prompts = tasks.prompts or BUILTIN, tasks.eval_prompts
    if prompts == BUILTIN:
        prompts, eval_prompts = str(builtin.TRAIN_JSONL), eval_prompts or str(builtin.EVAL_JSONL)
    elif eval_prompts == BUILTIN:
        eval_prompts = str(builtin.EVAL_JSONL)
    for key, path in (("learner.tasks.prompts", prompts), ("learner.tasks.eval_prompts", eval_prompts)):
        if path:
            mistakes += check_prompts(key, Path(path))
    findings = check_consistency(config, student)
    mistakes += findings.mistakes
    config = _with_folders(config, folders)
    servers = check_servers(config, machine, interpreters, why_engines)
    mistakes += servers.mistakes
    if mistakes:
        raise ConfigError(*mistakes)
    config = servers.config
    tasks = replace(tasks, prompts=_absolute(prompts), eval_prompts=_absolute(eval_prompts) if eval_prompts else "")
    learner, offline = config.learner, config.learner.offline
    learner = replace(
        learner,
        tasks=tasks,
        record=_absolute(learner.record) if learner.record else "",
        offline=replace(offline, file=_absolute(offline.file) if offline.file else ""),
    )
    return Checked(
        config=replace(config, learner=learner),
        model_types=tuple(sorted({model_type(folder) for folder in folders.values()})),
        warnings=tuple(findings.warnings),
        servers=servers.plans,
        server_report=servers.report(),
        placement=servers.placement,
        memory=tuple(servers.memory),
        not_here=tuple(servers.not_here),
    )


def _with_folders(config: RunConfig, folders: Mapping[str, Path]) -> RunConfig:
    """Replace the names of models by their folders."""
    found = {key.partition(".")[2]: str(folder) for key, folder in folders.items() if key.startswith("models.")}
    pools = {
        name: replace(pool, model=str(folders.get(f"pools.{name}.model", pool.model)))
        for name, pool in config.pools.items()
    }
    return replace(config, models=replace(config.models, **found), pools=pools)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def check_prompts(key: str, path: Path) -> list[str]:
    """Check the first rows of a prompts file. The learner reads and checks all of it."""
    path = path.expanduser()
    if not path.exists():
        return [f"{key}: no file {str(path)!r}{nearest_path(path)}"]
    try:
        if path.is_dir():
            return _check_folder(key, path)
        if path.suffix == ".parquet":
            return _check_columns(key, path, _parquet_columns(path))
        if path.suffix in (".jsonl", ".json"):
            return next((mistakes for row in _first_rows(key, path) if (mistakes := row)), [])
    except (OSError, ValueError, ImportError) as error:
        return [f"{key}: {path}: {error}"]
    return [f"{key}: {path} is a {path.suffix or 'suffixless'} file, expected .jsonl, .parquet or a datasets folder"]


def _first_rows(key: str, path: Path) -> Iterator[list[str]]:
    seen = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row: object = json.loads(line)
            except json.JSONDecodeError as error:
                yield [f"{key}: {path}:{number} is not JSON: {error}"]
                return
            if not isinstance(row, dict):
                yield [f"{key}: {path}:{number}: got {type(row).__name__}, expected an object with prompt or messages"]
                return
            yield _check_columns(key, Path(f"{path}:{number}"), list(cast(Json, row)))
            seen += 1
            if seen == ROWS_CHECKED:
                return
    if seen == 0:
        yield [f"{key}: {path} holds no prompts"]


def _check_columns(key: str, where: Path, columns: list[str]) -> list[str]:
    if "prompt" in columns or "messages" in columns:
        return []
    return [f"{key}: {where}: got the fields {', '.join(columns) or '(none)'}; expected prompt (text) or messages"]


def _check_folder(key: str, path: Path) -> list[str]:
    if (path / "dataset_info.json").is_file():
        features = cast(Json, json.loads((path / "dataset_info.json").read_text())).get("features")
        return _check_columns(key, path, list(cast(Json, features))) if isinstance(features, Mapping) else []
    parquet = sorted(path.rglob("*.parquet"))
    if parquet:
        return _check_columns(key, parquet[0], _parquet_columns(parquet[0]))
    if (path / "dataset_dict.json").is_file():
        splits = cast(Json, json.loads((path / "dataset_dict.json").read_text())).get("splits")
        return [f"{key}: {path} holds the splits {splits}; name one of them, e.g. {path}/train"]
    return [f"{key}: the folder {path} holds neither a saved dataset (dataset_info.json) nor .parquet files"]


def _parquet_columns(path: Path) -> list[str]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("reading Parquet needs pyarrow: pip install 'stillhouse[data]'") from error
    return [str(name) for name in parquet.read_schema(path).names]


def check_recorded(config: RunConfig, *, resume: bool) -> None:
    """Check recorded batches: the file that the run would write, and the one that it would mix in. `config`: with
    models and paths resolved. Raises ConfigError with all mistakes."""
    mistakes = [*_objective(config), *_written(config, resume=resume), *_mixed_in(config)]
    if mistakes:
        raise ConfigError(*mistakes)


def _objective(config: RunConfig) -> Iterator[str]:
    """Refuse off-policy objectives for the student's own tokens."""
    learner = config.learner
    if learner.objective.divergence.name == "seq_kd":
        yield (
            "learner.objective.divergence: got seq_kd, which teaches nothing on the student's own tokens (the mean of "
            "its gradient is 0); expected another one; seq_kd is for learner.offline.divergence and python -m replay"
        )
    if learner.offline.student_fraction == 0.0:
        yield (
            "learner.offline.student_fraction: got 0, which leaves the actors nothing to do; expected more than 0, or "
            f"python -m replay {learner.offline.file}, which trains on the file alone"
        )


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
    if header.writer != "teacher":
        yield (
            f"learner.offline.file: {file} was written by the student of the run {header.run!r}; expected a file that "
            "the teacher wrote (python -m launch.write)"
        )
    vocabulary = read_vocabulary(Path(config.models.student) / "tokenizer.json")
    if vocabulary is not None and vocab_fingerprint(vocabulary) != header.vocab_fingerprint:
        yield (
            f"learner.offline.file: the token ids of {file} belong to another vocabulary than that of "
            f"{config.models.student}; expected the same token-to-id map"
        )
