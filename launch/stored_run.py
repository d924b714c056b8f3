"""What the run's store (`store`) has of the run, so that it goes on in an empty folder, on any machine.

    <store>/config.yaml     the resolved configuration, as in the run's folder; there are no secrets in it
            run.json        RunRecord of the newest launch
            checkpoints/    learner.checkpoints.stored          weights/, teacher_weights/    weights.snapshot

Keys, logs, metrics and recorded batches are not in the store. New keys are made in the new folder.
"""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec

from launch.config.command_line import CommandLine
from launch.config.files import read_plain
from launch.config.run import RunConfig
from launch.config.tree import get
from launch.errors import ConfigError, unwritten
from launch.runfolder import RUNS, RunFolder, RunRecord, unwritable
from learner.checkpoints.stored import StoredCheckpoints
from protocol.atomic_file import write_atomic
from protocol.object_store import Store, StoreError

CONFIG = "config.yaml"
RECORD = "run.json"


def check_store(config: RunConfig, *, resume: bool) -> None:
    """Raises ConfigError if the store cannot be used by this run."""
    if not config.store:
        return
    try:
        store = Store(config.store)
        store.check()
        taken = not resume and StoredCheckpoints(store).complete()
    except StoreError as error:
        raise ConfigError(f"store: {error}") from error
    if taken:
        raise ConfigError(
            f"store: {config.store} has checkpoints of a run ({len(taken)}, the newest of step "
            f"{taken[-1].version.step}); go on from them with --resume, or name another prefix"
        )


def bring_run(line: CommandLine) -> str:
    """With --resume and a store: make the run's folder if it is not here. Returns a line for the user, or nothing.
    Raises ConfigError."""
    url, path = _named_store(line), line.run_dir or (RUNS / line.name if line.name else None)
    if not line.resume or not url or path is None or (path / RECORD).exists() or (path / CONFIG).exists():
        return ""
    try:
        store = Store(url)
        if RECORD not in store.sizes():
            raise ConfigError(f"--resume: {path} holds no run, and neither does {url}; leave --resume out to start one")
        config, text = store.read(CONFIG), store.read(RECORD)
    except (StoreError, ValueError) as error:
        raise ConfigError(f"store: {error}") from error
    record = msgspec.json.decode(text, type=RunRecord)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / CONFIG, config)
        write_atomic(path / RECORD, text)
    except OSError as error:
        raise unwritable(path, error) from error
    if record.state == "running" and record.host not in ("", platform.node()):
        still = f"; it did not end in order on {record.host}: see to it that it runs there no more"
    else:
        still = ""
    return f"the run {record.name} of {url} goes on in {path}{still}"


def put_run(config: RunConfig, folder: RunFolder) -> None:
    """Put configuration and record into the store. Raises StoreError."""
    store = Store(config.store)
    store.put(folder.config_path, CONFIG)
    store.put(folder.path / RECORD, RECORD)


def put_end(config: RunConfig, folder: RunFolder) -> None:
    """Put the record of a run that has ended into the store. Reports when that fails."""
    try:
        Store(config.store).put(folder.path / RECORD, RECORD)
    except StoreError as error:
        unwritten(Path(config.store) / RECORD, error)


def _named_store(line: CommandLine) -> str:
    """On the command line or in its file, without resolving anything."""
    for key, text in reversed(line.overrides):
        if key.name == "store":
            return text
    named = get(read_plain(line.config), "store") if line.config is not None else None
    return named if isinstance(named, str) else ""
