"""What the run's store (`store`) has of the run, so that it goes on in an empty folder, on any machine.

    <store>/owner.json      which launch may write, and which checkpoints count (protocol.store_owner)
            config.yaml     the resolved configuration, as in the run's folder; there are no secrets in it
            run.json        RunRecord of the newest launch
            launches/<n>/   summary.json and metrics.jsonl of each launch that has ended
            checkpoints/, export/    learner.checkpoints.stored          weights/, teacher_weights/    weights.snapshot

Keys, logs and recorded batches are not in the store. New keys are made in the new folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import msgspec

from stillhouse.engines.provider import EngineRole
from stillhouse.launch.config.command_line import CommandLine
from stillhouse.launch.config.files import read_plain
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import get
from stillhouse.launch.errors import ConfigError, unwritten
from stillhouse.launch.runfolder import RUNS, RunFolder, RunRecord, unwritable
from stillhouse.launch.topology import GroupName, HostGroup
from stillhouse.learner.checkpoints.files import CHECKPOINTS
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.object_store import Store, StoreError
from stillhouse.protocol.store_owner import OWNER, StoreOwner, expect_unused, read_owner

CONFIG: Final = "config.yaml"
RECORD: Final = "run.json"
LAUNCHES: Final = "launches"
RESULTS: Final = ("summary.json", "metrics.jsonl")


def reads_store(config: RunConfig, role: EngineRole) -> bool:
    """Whether workers of this role fetch files from the run's store."""
    if not config.store:
        return False
    if role == "actor":
        return config.weights.transport == "folder"
    ema = config.learner.ema
    return ema.decay > 0 and ema.pool in (config.teacher.pool, *config.pools)


def groups_with_store(config: RunConfig, groups: Iterable[HostGroup]) -> frozenset[GroupName]:
    """Groups whose hosts read or write the run's store, and need its credentials."""
    if not config.store:
        return frozenset()
    readers: dict[GroupName, EngineRole] = {"actors": "actor", "teachers": "teacher"}
    return frozenset(g.name for g in groups if g.name not in readers or reads_store(config, readers[g.name]))


def check_store(config: RunConfig, *, resume: bool) -> None:
    """Raises ConfigError if the store cannot be used by this run."""
    if not config.store:
        return
    try:
        store = Store(config.store)
        store.check()
        owner = read_owner(store)
        if owner is not None and not resume:
            expect_unused(store, owner)
        lost = owner is None and list(store.sizes(CHECKPOINTS))
    except StoreError as error:
        raise ConfigError(f"store: {error}") from error
    if lost:
        raise ConfigError(
            f"store: {config.store} has checkpoints, but no {OWNER}, which says which of them are complete; expected "
            "a whole copy of a run's store, or an empty prefix"
        )


def bring_run(line: CommandLine) -> tuple[CommandLine, str]:
    """With --resume and a store: make the run's folder if it is not here. Returns the command line, which says --resume
    or not where it left that open, and a line for the user, or nothing. Raises ConfigError."""
    path = line.run_dir or (RUNS / line.name if line.name else None)
    if line.resume_or_start and path is None:
        raise ConfigError("--resume-or-start: which run? expected --run-dir DIR or --name NAME, too")
    if not (line.resume or line.resume_or_start) or path is None:
        return line, ""
    if (path / RECORD).exists():  # written last
        return replace(line, resume=True), ""
    url = _named_store(line)
    if not url:
        return line, ""
    try:
        store = Store(url)
        there = store.sizes()
        if RECORD not in there:
            if line.resume_or_start:
                return line, ""
            raise ConfigError(f"--resume: {path} holds no run, and neither does {url}; leave --resume out to start one")
        files = {name: store.read(name) for name in (CONFIG, RECORD) if name in there}
        record = msgspec.json.decode(files[RECORD], type=RunRecord)
    except msgspec.DecodeError as error:
        raise ConfigError(f"store: {url.rstrip('/')}/{RECORD} is not a run record of this version: {error}") from error
    except (StoreError, ValueError) as error:
        raise ConfigError(f"store: {error}") from error
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomic(path / name, content)
    except OSError as error:
        raise unwritable(path, error) from error
    return replace(line, resume=True), f"the run {record.name} of {url} goes on in {path}"


def put_run(owner: StoreOwner, folder: RunFolder) -> None:
    """Put configuration and record into the store. Raises ConfigError."""
    try:
        owner.confirm()
        owner.store.put(folder.config_path, CONFIG)
        owner.store.put(folder.path / RECORD, RECORD)
    except StoreError as error:
        raise ConfigError(f"store: {error}") from error


def put_end(owner: StoreOwner, folder: RunFolder) -> None:
    """Put the record and the results of a launch that has ended into the store. Reports when that fails."""
    there = f"{LAUNCHES}/{folder.record.launches}"
    try:
        owner.confirm()
        owner.store.put(folder.path / RECORD, RECORD)
        for name in RESULTS:
            if (folder.path / name).is_file():
                owner.store.put(folder.path / name, f"{there}/{name}")
    except StoreError as error:
        unwritten(owner.store.url_of(there), error)


def _named_store(line: CommandLine) -> str:
    """On the command line or in its file, without resolving anything."""
    for key, text in reversed(line.overrides):
        if key.name == "store":
            return text
    named = get(read_plain(line.config), "store") if line.config is not None else None
    return named if isinstance(named, str) else ""
