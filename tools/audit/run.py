"""Audits a whole run; also the command line of `stillhouse audit`.

The record is read twice: first for the versions, because only the last one shows which branch was kept, then for the
batches of the kept branch. Exit codes: 0 clean, 2 nothing could be counted, 4 something is wrong.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from stillhouse.tools.audit.groups import Filters, GroupCount
from stillhouse.tools.audit.history import History
from stillhouse.tools.audit.record import (
    AuditError,
    Begin,
    Item,
    RecordedBatch,
    RecordFile,
    RecordPlace,
    Resumed,
    Version,
)
from stillhouse.tools.audit.report import NOT_RECORDED, OTHER_TOKENS, RECORDED_TWICE, Faults, Report, Where
from stillhouse.tools.audit.samples import Frontier, SampleCount
from stillhouse.tools.audit.tokens import TokenCount

DEFAULT_NAME: Final = "batches.record"
HOW_TO_RECORD: Final = "start a run with --record FILE so that it can be audited"
WRONG_USAGE_EXIT_CODE: Final = 2
FAULTS_EXIT_CODE: Final = 4
USAGE: Final = """\
usage: stillhouse audit RUN [--record FILE]

Recounts what a run trained, from its record (start the run with --record FILE). It looks for tokens that were trained
twice or over the staleness bound, and for tasks and samples that were skipped or settled twice. It shares no code with
the run's own ledger. Of a run with stages, every stage that has begun is counted. Exit code 0: all is well;
4: something is wrong, with places; 2: nothing could be counted.

  RUN              folder of a run, or its name in runs/
  --record FILE    path of the record [that in the run's config.yaml]
"""


class AuditSettings(NamedTuple):
    """The keys of a run's config.yaml that an audit needs."""

    record: Path
    bound: int
    group_size: int
    filters: Filters


class Row(NamedTuple):
    """A line of metrics.jsonl."""

    kind: str
    version: Version
    """The version that the step made, or under which the learner continued."""
    tokens: int


def main(arguments: Sequence[str]) -> int:
    """Run `stillhouse audit`. Returns the exit code."""
    words, record = list(arguments), None
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    for at, word in enumerate(words):
        if word == "--record" and at + 1 < len(words):
            record = Path(words[at + 1]).expanduser()
            del words[at : at + 2]
            break
        if word.startswith("--record="):
            record = Path(word.partition("=")[2]).expanduser()
            del words[at]
            break
    if len(words) != 1 or words[0].startswith("-"):
        return _refuse(f"got {' '.join(arguments) or 'nothing'}, expected RUN; --help shows how")
    run = next((path for path in (Path(words[0]).expanduser(), Path("runs") / words[0]) if path.is_dir()), None)
    if run is None:
        return _refuse(f"no run {words[0]}; expected the folder of a run, or its name in runs/")
    try:
        if record is None and (run / "stages.json").is_file():
            from stillhouse.tools.audit.stages import audit_stages  # above this module

            report = audit_stages(run)
        else:
            report = audit(run, record)
    except AuditError as error:
        return _refuse(str(error))
    print(f"audit of {run}\n\n{report}")
    return 0 if report.clean else FAULTS_EXIT_CODE


def _refuse(message: str) -> int:
    print(f"stillhouse: audit: {message}", file=sys.stderr)
    return WRONG_USAGE_EXIT_CODE


def audit(run: Path, record: Path | None = None) -> Report:
    """Audit the run in this folder. `record`: path of its record, if it is not where config.yaml says. Raises
    AuditError if there is nothing to count."""
    settings = read_settings(run, record)
    rows = list(read_rows(run / "metrics.jsonl"))
    with RecordFile(settings.record) as file:
        return _Count(run, settings, rows, file).report()


class _Count:
    """The state of one audit."""

    def __init__(self, run: Path, settings: AuditSettings, rows: list[Row], file: RecordFile) -> None:
        self._run, self._rows, self._file = run, rows, file
        self._faults = Faults()
        self._notes: list[str] = []
        self._history = History()
        self._begin: Begin | None = None
        self._batches: dict[Version, RecordPlace] = {}
        """Keyed by the version that the batch was trained against."""
        self._left: list[RecordPlace] = []
        self._read_history()
        self._kept = self._history.kept()
        self._bound = self._widest_bound(settings.bound)
        self._settings = settings
        self._groups = GroupCount(self._filters(settings.filters), self._faults)

    def report(self) -> Report:
        tokens = TokenCount(self._history, self._bound, self._faults)
        samples = SampleCount(self._settings.group_size, self._faults)
        trained = self._count(tokens, samples)
        self._compare_rows(trained)
        frontier, checkpoint = self._frontier()
        if frontier is not None and self._faults.by_kind[NOT_RECORDED].count:
            self._notes.append("steps are missing in the record, so skipped tasks and samples were not checked")
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
            fates=samples.fates,
            bound=self._bound,
            stalest=tokens.stalest,
            checkpoint=checkpoint,
            tasks=frontier.next_task_id if frontier is not None else 0,
            faults=self._faults.by_kind,
            notes=tuple(self._notes),
        )

    def _read_history(self) -> None:
        """Collect the versions in the record and in metrics.jsonl, and the places of the batches."""
        for place in self._file.places():
            match place.record:
                case Begin():
                    self._begin = self._begin or place.record
                case Resumed(version, parent):
                    self._history.begin(version, parent)
                case RecordedBatch(batch_id, version):
                    self._remember(place, batch_id, version)
        if self._begin is None or not self._batches:
            raise AuditError(f"{self._file.path} has no batch; there is nothing to count")
        if self._file.torn_bytes:
            self._notes.append(f"the last {self._file.torn_bytes} bytes of the record are incomplete and were left out")
        for row in self._rows:
            if row.kind == "resume":
                self._history.begin(row.version, None)
            elif row.kind == "step":
                self._history.step(row.version._replace(step=row.version.step - 1))
        if not self._rows:
            self._notes.append("no metrics.jsonl to compare with")
        self._history.find_parents()
        if self._history.guessed:
            epochs = ", ".join(map(str, self._history.guessed))
            self._notes.append(
                f"the record does not say from which versions these continued: {epochs}; inferred by step"
            )

    def _remember(self, place: RecordPlace, batch_id: int, version: Version) -> None:
        self._history.step(version)
        if version in self._batches:
            detail = "another batch was recorded for this step before"
            self._faults.add(RECORDED_TWICE, Where(step=version, batch=batch_id, detail=detail))
            self._left.append(self._batches[version])
        self._batches[version] = place._replace(
            record=Resumed(version)
        )  # items are read again when the batch is counted

    def _count(self, tokens: TokenCount, samples: SampleCount) -> dict[Version, int]:
        """Count the kept steps. Returns the number of tokens trained by each, keyed by the version that it made."""
        kept, trained = set(self._kept), dict[Version, int]()
        for place in [*self._left, *(place for version, place in self._batches.items() if version not in kept)]:
            samples.leave(self._file.batch(place))
        for version in self._kept:
            place = self._batches.get(version)
            if place is None:
                self._faults.add(NOT_RECORDED, Where(step=version, detail="the record lacks the batch of this step"))
                continue
            batch, before = self._file.batch(place), tokens.tokens
            samples.add(batch)
            items: list[tuple[Item, int]] = []
            for item in batch.trained_items:
                runs = self._file.runs(item, place.blob_at)
                tokens.add(batch, item, runs)
                items.append((item, sum(end - start for start, end in runs)))
            self._groups.add(batch, items)
            trained[Version(version.epoch, version.step + 1)] = tokens.tokens - before
        return trained

    def _compare_rows(self, trained: Mapping[Version, int]) -> None:
        """Check that metrics.jsonl has the same number of tokens for each step."""
        for row in self._rows:
            recorded = trained.get(row.version)
            if row.kind == "step" and recorded is not None and recorded != row.tokens:
                detail = f"metrics.jsonl has {row.tokens} tokens for the step that made it, the record {recorded}"
                self._faults.add(OTHER_TOKENS, Where(step=row.version, detail=detail))

    def _frontier(self) -> tuple[Frontier | None, str]:
        """The frontier of the newest usable checkpoint on the kept branch, and the name of its folder."""
        newest = self._history.newest
        assert newest is not None, "there is a batch"
        found = [
            (frontier, name)
            for name, frontier in read_frontiers(self._run / "checkpoints")
            if self._history.on_branch(frontier.version, newest)
        ]
        return max(found, key=lambda one: one[0].version.step, default=(None, ""))

    def _filters(self, now: Filters) -> Filters:
        """Those that are on now and were so at first: a run may be resumed with others."""
        assert self._begin is not None
        first = read_filters(self._begin.config)
        return Filters(*(a and b for a, b in zip(first, now, strict=True)))

    def _widest_bound(self, bound: int) -> int:
        """The staleness bound. A run may be resumed with another bound; the wider one applies to all steps."""
        assert self._begin is not None
        first = _at(self._begin.config, "buffer", "max_staleness")
        if isinstance(first, int) and first != bound:
            self._notes.append(f"max_staleness was {first} at first and is {bound} now; the larger one was used")
            return max(first, bound)
        return bound


def read_settings(run: Path, record: Path | None) -> AuditSettings:
    """Raises AuditError if the folder is not a run's, or the run has no record."""
    file = run / "config.yaml"
    try:
        plain: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise AuditError(f"{run} cannot be audited: {file} cannot be read: {error}") from error
    named, bound = _at(plain, "learner", "record"), _at(plain, "buffer", "max_staleness")
    size = _at(plain, "learner", "tasks", "group_size")
    if not isinstance(bound, int) or not isinstance(size, int):
        raise AuditError(f"{file} does not say buffer.max_staleness and learner.tasks.group_size; is it complete?")
    if record is None and not named:
        raise AuditError(f"{run} was not recorded (learner.record is empty); {HOW_TO_RECORD}")
    path = record or Path(str(named).replace("{run}", str(run), 1)).expanduser()
    path = path / DEFAULT_NAME if path.is_dir() else path
    if not path.is_file():
        raise AuditError(f"the record {path} is missing; give its path with --record FILE, or {HOW_TO_RECORD}")
    return AuditSettings(path, bound, size, read_filters(plain))


def read_filters(config: object) -> Filters:
    """Whether each of the two is on."""
    return Filters(*(bool(_at(config, "buffer", key)) for key in ("dynamic_sampling", "mask_truncated")))


def read_rows(file: Path) -> Iterator[Row]:
    """Yield the lines of metrics.jsonl about a step or a resume. Incomplete or damaged lines are skipped."""
    with suppress(FileNotFoundError), file.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                version = Version(int(row["epoch"]), int(row["step"]))
                yield Row(str(row["kind"]), version, int(row.get("train/tokens", 0)))
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
    next_task_id: int = 0
    outstanding: tuple[_Open, ...] = ()
    """Nothing in checkpoints of replays, which have no tasks."""
    progress: tuple[_Progress, ...] = ()
    """Open tasks, and later tasks with a settled sample."""


class _Trainer(msgspec.Struct):
    version: Version
    tasks: _Tasks


def read_frontiers(checkpoints: Path) -> Iterator[tuple[str, Frontier]]:
    """Yield (name, frontier) of every usable checkpoint. Sizes of all files and the checksum of the one that is read
    are checked."""
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
    for key in keys:
        plain = plain.get(key) if isinstance(plain, dict) else None
    return plain
