"""Counts a whole run: what is read of its folder, and in which order it is counted.

The record is read twice: first to learn which versions there are, since only the last one shows which branch was kept,
then batch by batch, those of the kept branch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from launch.audit.history import History
from launch.audit.record import AuditError, Batch, Begin, Place, RecordFile, Resumed, Version
from launch.audit.report import NOT_RECORDED, OTHER_TOKENS, RECORDED_TWICE, Faults, Report, Where
from launch.audit.samples import Frontier, SampleCount
from launch.audit.tokens import TokenCount

DEFAULT_NAME: Final = "batches.record"
HOW_TO_RECORD: Final = "start a run with --record FILE, and it can be audited"


class Settings(NamedTuple):
    """What a run's config.yaml says."""

    record: Path
    bound: int
    group_size: int


class Row(NamedTuple):
    """A line of metrics.jsonl."""

    kind: str
    version: Version
    """The one that the step made, or that the learner went on under."""
    tokens: int
    nonfinite: int
    """Rollouts that were left out of the step."""


def audit(run: Path, record: Path | None = None) -> Report:
    """Count the run in this folder; `record`: where its record is now, if that is not where config.yaml says. Raises
    AuditError when there is nothing to count."""
    settings = read_settings(run, record)
    rows = list(read_rows(run / "metrics.jsonl"))
    with RecordFile(settings.record) as file:
        return _Count(run, settings, rows, file).report()


class _Count:
    """One audit."""

    def __init__(self, run: Path, settings: Settings, rows: list[Row], file: RecordFile) -> None:
        self._run, self._rows, self._file = run, rows, file
        self._faults = Faults()
        self._notes: list[str] = []
        self._history = History()
        self._begin: Begin | None = None
        self._batches: dict[Version, Place] = {}
        """By the version trained against."""
        self._left: list[Place] = []
        self._maybe_less: set[Version] = set()
        """Made by kept steps whose record does not say which rollouts were left out."""
        self._read_history()
        self._kept = self._history.kept()
        self._bound = self._widest_bound(settings.bound)
        self._settings = settings

    def report(self) -> Report:
        tokens = TokenCount(self._history, self._bound, self._faults)
        samples = SampleCount(self._settings.group_size, self._faults)
        trained = self._count(tokens, samples)
        self._compare_rows(trained)
        frontier, checkpoint = self._frontier()
        if frontier is not None and self._faults.by_kind[NOT_RECORDED].count:
            self._notes.append("steps are missing in the record, so skipped tasks and samples were not looked for")
            frontier = None
        samples.judge(tokens, frontier)
        return Report(
            run=str(self._run),
            record=str(self._file.path),
            steps_kept=len(self._kept),
            steps_abandoned=len(self._left) + len(self._batches.keys() - set(self._kept)),
            epochs=self._history.n_epochs,
            tokens=tokens.tokens,
            samples=tokens.n_samples,
            bound=self._bound,
            stalest=tokens.stalest,
            checkpoint=checkpoint,
            tasks=frontier.next_task_id if frontier is not None else 0,
            faults=self._faults.by_kind,
            notes=tuple(self._notes),
        )

    def _read_history(self) -> None:
        """The versions of the record and of metrics.jsonl; where each batch is."""
        for place in self._file.places():
            match place.record:
                case Begin():
                    self._begin = self._begin or place.record
                case Resumed(version, parent):
                    self._history.begin(version, parent)
                case Batch(batch_id, version):
                    self._remember(place, batch_id, version)
        if self._begin is None or not self._batches:
            raise AuditError(f"{self._file.path} holds no batch; there is nothing to count")
        if self._file.torn_bytes:
            self._notes.append(f"the last {self._file.torn_bytes} bytes of the record are not finished; left out")
        for row in self._rows:
            if row.kind == "resume":
                self._history.begin(row.version, None)
            elif row.kind == "step":
                self._history.step(row.version._replace(step=row.version.step - 1))
        if not self._rows:
            self._notes.append("no metrics.jsonl to compare with")
        self._history.find_parents()
        if self._history.guessed:
            told = ", ".join(map(str, self._history.guessed))
            self._notes.append(f"the record does not say from which version these went on: {told}; inferred by step")

    def _remember(self, place: Place, batch_id: int, version: Version) -> None:
        self._history.step(version)
        if version in self._batches:
            told = "another batch was recorded for this step before"
            self._faults.add(RECORDED_TWICE, Where(step=version, batch=batch_id, detail=told))
            self._left.append(self._batches[version])
        self._batches[version] = place._replace(record=Resumed(version))  # the items are read again when it is counted

    def _count(self, tokens: TokenCount, samples: SampleCount) -> dict[Version, int]:
        """Tokens trained by each kept step, by the version that it made."""
        kept, trained = set(self._kept), dict[Version, int]()
        for place in [*self._left, *(place for version, place in self._batches.items() if version not in kept)]:
            samples.leave(self._file.batch(place))
        for version in self._kept:
            place = self._batches.get(version)
            if place is None:
                told = "the record lacks the batch of this step"
                self._faults.add(NOT_RECORDED, Where(step=version, detail=told))
                continue
            batch, before = self._file.batch(place), tokens.tokens
            samples.add(batch)
            for item in batch.trained_items:
                tokens.add(batch, item, self._file.runs(item, place.blob_at))
            trained[Version(version.epoch, version.step + 1)] = tokens.tokens - before
            if batch.masked is None:
                self._maybe_less.add(Version(version.epoch, version.step + 1))
        return trained

    def _compare_rows(self, trained: Mapping[Version, int]) -> None:
        """The learner's own line of a step tells as many tokens."""
        for row in self._rows:
            recorded = trained.get(row.version)
            less = row.nonfinite and row.version in self._maybe_less
            if row.kind == "step" and not less and recorded is not None and recorded != row.tokens:
                told = f"metrics.jsonl tells {row.tokens} tokens of the step that made it, the record {recorded}"
                self._faults.add(OTHER_TOKENS, Where(step=row.version, detail=told))

    def _frontier(self) -> tuple[Frontier | None, str]:
        """Of the newest usable checkpoint on the kept branch, and its folder's name."""
        newest = self._history.newest
        assert newest is not None, "there is a batch"
        found = [
            (frontier, name)
            for name, frontier in read_frontiers(self._run / "checkpoints")
            if self._history.on_branch(frontier.version, newest)
        ]
        return max(found, key=lambda one: one[0].version.step, default=(None, ""))

    def _widest_bound(self, bound: int) -> int:
        """A run may be resumed under another bound: no step is held to the narrower one."""
        assert self._begin is not None
        first = _at(self._begin.config, "buffer", "max_staleness")
        if isinstance(first, int) and first != bound:
            self._notes.append(f"max_staleness was {first} at first and is {bound} now; the larger one is the bound")
            return max(first, bound)
        return bound


def read_settings(run: Path, record: Path | None) -> Settings:
    """Raises AuditError: no run's folder, or one of a run without a record."""
    file = run / "config.yaml"
    try:
        plain: Any = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise AuditError(f"{run} is no run that can be audited: {file} cannot be read: {error}") from error
    told, bound = _at(plain, "learner", "record"), _at(plain, "buffer", "max_staleness")
    size = _at(plain, "learner", "tasks", "group_size")
    if not isinstance(bound, int) or not isinstance(size, int):
        raise AuditError(f"{file} does not say buffer.max_staleness and learner.tasks.group_size; is it whole?")
    if record is None and not told:
        raise AuditError(f"{run} was not recorded (learner.record is empty); {HOW_TO_RECORD}")
    path = record or Path(str(told)).expanduser()
    path = path / DEFAULT_NAME if path.is_dir() else path
    if not path.is_file():
        raise AuditError(f"the record {path} is not there; say where it is by --record FILE, or {HOW_TO_RECORD}")
    return Settings(path, bound, size)


def read_rows(file: Path) -> Iterator[Row]:
    """The lines of metrics.jsonl that tell of a step or a resume; those that are torn or damaged are passed over."""
    with suppress(FileNotFoundError), file.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                version = Version(int(row["epoch"]), int(row["step"]))
                tokens, nonfinite = (int(row.get(f"train/{name}", 0)) for name in ("tokens", "items_nonfinite"))
                yield Row(str(row["kind"]), version, tokens, nonfinite)
            except (ValueError, KeyError, TypeError):
                continue


class _File(msgspec.Struct):
    sha256: str
    bytes: int


class _Manifest(msgspec.Struct):
    version: Version
    files: dict[str, _File]


class _Task(msgspec.Struct):
    task_id: int
    group_size: int


class _Open(msgspec.Struct):
    task: _Task


class _Partial(NamedTuple):
    sample_index: int
    rollout_id: str
    n_trained: int


class _Progress(NamedTuple):
    task_id: int
    settled: tuple[int, ...]
    partial: tuple[_Partial, ...]


class _Tasks(msgspec.Struct):
    next_task_id: int
    outstanding: tuple[_Open, ...]
    progress: tuple[_Progress, ...] = ()
    """Of tasks that are not settled, and of later ones of which a sample is."""


class _Trainer(msgspec.Struct):
    version: Version
    tasks: _Tasks


def read_frontiers(checkpoints: Path) -> Iterator[tuple[str, Frontier]]:
    """Of every checkpoint that can be used, as far as sizes and the checksum of what is read here show."""
    for folder in sorted(checkpoints.glob("step_*")):
        try:
            manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=_Manifest)
            raw = (folder / "trainer.json").read_bytes()
            trainer = msgspec.json.decode(raw, type=_Trainer)
            sizes = all((folder / name).stat().st_size == entry.bytes for name, entry in manifest.files.items())
        except (OSError, msgspec.MsgspecError):
            continue
        if sizes and hashlib.sha256(raw).hexdigest() == manifest.files["trainer.json"].sha256:
            tasks = trainer.tasks
            partial = {(one.task_id, p.sample_index): p.n_trained for one in tasks.progress for p in one.partial}
            yield (
                folder.name,
                Frontier(
                    trainer.version,
                    tasks.next_task_id,
                    group_sizes={one.task.task_id: one.task.group_size for one in tasks.outstanding},
                    settled=frozenset((one.task_id, sample) for one in tasks.progress for sample in one.settled),
                    partial=partial,
                ),
            )


def _at(plain: object, *keys: str) -> object:
    """A value in nested mappings; None where there is none."""
    for key in keys:
        plain = plain.get(key) if isinstance(plain, dict) else None
    return plain
