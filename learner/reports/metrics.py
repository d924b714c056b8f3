"""The learner's metrics: TensorBoard events, and the same figures as JSON lines.

`metrics.jsonl` has one object per line, of one of these kinds:
    step     one optimizer step; `step` is the number of steps made, so the first has 1
    eval     one evaluation, at `step`; `set` names its set, if it is not the run's own
    resume   the learner resumed from the checkpoint of version (`parent_epoch`, `step`), under the new `epoch`. Earlier
             lines of the abandoned branch stay in the file; `read_metrics` leaves them out.
Keys of a line are the TensorBoard tags (`train/loss`). Evaluation generations are in `samples.jsonl`.

A non-finite number is written as the string "NaN", "Infinity" or "-Infinity" (JSON has no such numbers; `float()` reads
them), as NaN in TensorBoard, and counted in `health/nonfinite_total`.

Reports never end the training: a row that cannot be written (disk full) is lost, and counted in
`health/unwritten_rows_total` of later rows.
"""

from __future__ import annotations

import io
import json
import logging
import math
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
from torch.utils.tensorboard.summary import histogram_raw, scalar, text

from stillhouse.learner.evaluation.evaluation import EvalSample, EvaluationResult
from stillhouse.learner.reports import board
from stillhouse.learner.reports.event_file import EventFile
from stillhouse.learner.reports.figures import RATES_S, TokenRates
from stillhouse.learner.reports.figures import staleness as staleness_of
from stillhouse.learner.reports.settings import Setting
from stillhouse.learner.reports.trackers.feed import Trackers
from stillhouse.learner.reports.wait_clock import WaitReport
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.messages import Snapshot, WeightVersion
from stillhouse.recording.append_file import AppendFile, Unwritten
from stillhouse.recording.format import Branches

METRICS_FILE: Final = "metrics.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"
TENSORBOARD_FOLDER: Final = "tensorboard"
NO_FIGURES: Final[Mapping[str, float]] = {}
_BLOCK_BYTES: Final = 64 << 10

Row = dict[str, Any]
log = logging.getLogger(__name__)


class _Place(msgspec.Struct, frozen=True):
    kind: str
    step: int
    epoch: int


_PLACE: Final = ("kind", "step", "epoch", "set")


class MetricsWriter:
    """Writes the metrics of one run folder. Owned by one thread. A context manager; `close` is idempotent."""

    def __init__(
        self,
        folder: Path,
        *,
        resume: WeightVersion | None = None,
        parent: WeightVersion | None = None,
        settings: Mapping[str, Setting] | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """`resume`: version that a resumed learner starts with, of a new epoch; new rows are appended to the existing
        files. `parent`: version of its checkpoint; None = the last epoch in the file. `settings`: keys by which boards
        tell this run from others (`learner.reports.settings`). `trackers` get every row, and are closed with the
        writer. Raises FileExistsError if there are metrics of a run and `resume` is None. Failed writes are counted in
        `unwritten`."""
        folder.mkdir(parents=True, exist_ok=True)
        metrics_file, samples_file = folder / METRICS_FILE, folder / SAMPLES_FILE
        if resume is None and metrics_file.exists() and metrics_file.stat().st_size:
            raise FileExistsError(f"{metrics_file} holds another run's metrics; resume it, or take a new folder")
        torn_bytes = _cut_torn_line(metrics_file)
        _cut_torn_line(samples_file)
        self.unwritten = Unwritten()
        self._rates = TokenRates(RATES_S)
        self._nonfinite_total = 0
        self._epoch = resume.epoch if resume else 0
        # Written before any other row: without it a reader would take two branches for one.
        resumed = None
        if resume is not None:
            left = {} if parent is None else {"parent_epoch": parent.epoch}
            resumed = self._row("resume", resume.step, {**left, "torn_bytes": torn_bytes})
        self._metrics = AppendFile(metrics_file, self.unwritten, first=_json_line(resumed) if resumed else b"")
        self._samples = AppendFile(samples_file, self.unwritten)
        self._trackers = trackers or Trackers((), folder, {})
        board_folder = _board_folder(folder)
        self._board = EventFile(
            board_folder,
            self.unwritten,
            about=[board.layout(), *board.run_starts(board_folder.name, settings or {}, time.time())],
            purge_step=resume.step + 1 if resume else None,
        )

    def step(
        self,
        step: int,
        train: Mapping[str, float],
        *,
        staleness: Mapping[int, int],
        waits: WaitReport,
        snapshot: Snapshot | None,
        weights: Mapping[str, float],
        tasks_dropped: Mapping[str, int],
        tasks_done: Sequence[int] = (),
        others: Mapping[str, float] | None = None,
    ) -> Row:
        """Record optimizer step `step`; returns its line.

        `train`: figures of the step, as `train/<name>`. `staleness`: distance -> tokens of the batch. `waits`: wall
        time of this step. `snapshot`: the buffer's; None without a buffer (a replay). `weights`: figures of
        the last publication, as `weights/<name>`. `tasks_dropped`: prompts dropped, by reason. `tasks_done`: ids of the
        tasks that this step settled, for metrics.jsonl only. `others`: more figures, by their tags."""
        scalars = {
            **{f"train/{name}": value for name, value in train.items()},
            **_staleness_scalars(staleness),
            **{"time/step_s": waits.wall_s, "time/busy_s": waits.busy_s},
            **{f"wait/{cause}_s": wait_s for cause, wait_s in waits.wait_s.items()},
            **(self._buffer_scalars(snapshot) if snapshot is not None else {}),
            **{f"tasks/dropped_{reason}_total": n for reason, n in tasks_dropped.items()},
            **{f"weights/{name}": value for name, value in weights.items()},
            **(others or {}),
        }
        extra = {
            "staleness": {str(distance): n for distance, n in sorted(staleness.items())},
            "tasks_done": list(tasks_done),
        }
        return self._record("step", step, scalars, extra, _histogram("staleness/tokens", staleness))

    def evaluation(self, result: EvaluationResult, beside: Mapping[str, float] = NO_FIGURES) -> Row:
        """Record one evaluation with the figures `beside` it, and its samples as text; returns its line. Figures of a
        tag are `eval/<tag>/<name>`, those of an environment `eval/environments/<env>/<name>`; on another set than the
        run's own, they begin with `eval/sets/<set>/`. Figures that could not be measured are null in the line and left
        out of TensorBoard."""
        plain = msgspec.to_builtins(result)
        left_out = ("step", "name", "samples", "tags", "environments")
        figures = _flat({name: value for name, value in plain.items() if name not in left_out})
        groups = plain["tags"] | {f"environments/{env}": own for env, own in plain["environments"].items()}
        figures |= {f"{group}/{name}": value for group, own in groups.items() for name, value in _flat(own).items()}
        figures |= beside
        version_min = result.version_min
        figures["version_min"] = None if version_min is None else version_min.step
        lines = [_json_line({"step": result.step, **msgspec.to_builtins(sample)}) for sample in result.samples]
        self._samples.append(b"".join(lines), rows=len(lines))
        of = f"eval/sets/{result.name}" if result.name else "eval"
        shown = [text(f"{of}/samples", _samples_table(result.samples))] if result.samples else []
        scalars = {f"{of}/{name}": value for name, value in figures.items() if value is not None}
        extra: Row = {f"{of}/{name}": None for name, value in figures.items() if value is None}
        extra |= {"set": result.name} if result.name else {}
        return self._record("eval", result.step, scalars, extra, shown)

    def ended(self, *, ok: bool) -> None:
        """Tell boards that the run is over, and how."""
        self._trackers.ended(ok=ok)
        self._board.add([board.run_ends("SUCCESS" if ok else "FAILURE", time.time())], step=0, rows=0)

    def close(self) -> None:
        self._trackers.close()
        self._board.close()
        self._metrics.close()
        self._samples.close()
        self.unwritten.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def gauges(self) -> dict[str, float]:
        """For the heartbeat: what could not be written or passed on."""
        return {"metrics_unwritten_rows_total": float(self.unwritten.rows_total), **self._trackers.gauges()}

    def _buffer_scalars(self, snapshot: Snapshot) -> dict[str, float]:
        self._rates.update(snapshot)
        tokens = snapshot.ledger.tokens
        return {
            **{f"rate/{role}_tokens_per_s": rate for role, rate in self._rates.tokens_per_s.items()},
            **{f"queue/{name}": depth for name, depth in snapshot.queues.items()},
            **{"tokens/accepted_total": tokens.accepted, "tokens/trained_total": tokens.trained},
            **{f"masked/{reason}_total": n for reason, n in tokens.masked.items()},
            **{f"dropped/{reason}_total": n for reason, n in tokens.dropped.items()},
            **{f"failed_rollouts/{each.reason}_total": each.n for each in snapshot.failures},
        }

    def _record(self, kind: str, step: int, scalars: Mapping[str, float], extra: Row, summaries: Sequence[Any]) -> Row:
        """`summaries`: for TensorBoard, in addition to the scalars. The line is written first and in one write, so a
        killed learner leaves at most one torn line, at the end."""
        self._nonfinite_total += sum(not math.isfinite(value) for value in scalars.values())
        health = {
            "health/nonfinite_total": self._nonfinite_total,
            "health/unwritten_rows_total": self.unwritten.rows_total,
        }
        health |= {f"health/{name}_rows_lost_total": n for name, n in self._trackers.lost.items()}
        scalars = {**scalars, **health}
        row = self._row(kind, step, {**scalars, **extra})
        self._metrics.append(_json_line(row), rows=1)
        # An evaluation is written after later steps, so a chart of what every row has would go backwards.
        charted = {tag: value for tag, value in scalars.items() if kind == "step" or tag not in health}
        self._board.add([*summaries, *(scalar(tag, float(value)) for tag, value in charted.items())], step)
        self._trackers.add(step, {tag: float(value) for tag, value in scalars.items()})
        return row

    def _row(self, kind: str, step: int, figures: Row) -> Row:
        return {"kind": kind, "step": step, "epoch": self._epoch, "unix_s": time.time(), **figures}


def _board_folder(folder: Path) -> Path:
    """A folder with the name of the run: TensorBoard tells runs apart by it. A run that is resumed under another name
    keeps the one that it has."""
    boards = folder / TENSORBOARD_FOLDER
    former = sorted(path for path in boards.iterdir() if path.is_dir()) if boards.is_dir() else []
    return former[0] if former else boards / (folder.resolve().name or "run")


def newest_epoch(folder: Path) -> int | None:
    """Highest epoch in the metrics of a run folder; None without any."""
    file = folder / METRICS_FILE
    if not file.exists() or not file.stat().st_size:
        return None
    return max((row["epoch"] for row in _read_lines(file)), default=0)


def read_metrics(folder: Path, tags: Container[str] | None = None) -> list[Row]:
    """Step and eval lines of the branch of versions that was kept, in the order of writing. Of two lines of one kind
    and step (an evaluation repeated after a resume; of one set) only the later one. A torn last line is left out. With
    `tags`, a line has no other figures."""
    rows, branches = list[Row](), Branches()
    for row in _read_lines(folder / METRICS_FILE):
        version = WeightVersion(row["epoch"], row["step"])
        if row["kind"] == "resume":
            parent_epoch = row.get("parent_epoch")
            branches.fork(version, None if parent_epoch is None else WeightVersion(parent_epoch, version.step))
        elif tags is None:
            rows.append(row)
        else:
            rows.append({key: value for key, value in row.items() if key in tags or key in _PLACE})
    kept: dict[tuple[str, int, str], Row] = {}
    for row in rows:
        if branches.keeps(WeightVersion(row["epoch"], row["step"])):
            place = row["kind"], row["step"], row.get("set", "")
            kept.pop(place, None)
            kept[place] = row
    return list(kept.values())


def _read_lines(file: Path) -> Iterator[Row]:
    """Whole lines. Damaged ones are left out and logged, because reports never end the training."""
    damaged: list[int] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                row: Row = json.loads(line)
                msgspec.convert(row, _Place)
            except (ValueError, msgspec.ValidationError):
                damaged.append(number)
                continue
            yield row
    if damaged:
        log.warning("%s: %d damaged lines are left out, the first is line %d", file, len(damaged), damaged[0])


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, with those of `at_k` among them."""
    return {name: value for name, value in figures.items() if name != "at_k"} | figures["at_k"]


def _histogram(tag: str, counts: Mapping[int, int]) -> list[Any]:
    """A TensorBoard histogram with one bucket per distance, half a step to either side. Empty without tokens."""
    if not sum(counts.values()):
        return []
    distances = np.arange(min(counts), max(counts) + 1)
    tokens = np.array([counts.get(int(distance), 0) for distance in distances])
    summary = histogram_raw(
        tag,
        min=int(distances[0]),
        max=int(distances[-1]),
        num=int(tokens.sum()),
        sum=int((tokens * distances).sum()),
        sum_squares=int((tokens * distances**2).sum()),
        bucket_limits=(distances + 0.5).tolist(),
        bucket_counts=tokens.tolist(),
    )
    return [summary]


def _staleness_scalars(tokens_by_distance: Mapping[int, int]) -> dict[str, float]:
    if not sum(tokens_by_distance.values()):
        return {}
    mean, largest = staleness_of(tokens_by_distance)
    return {"staleness/mean": mean, "staleness/max": largest}


def _samples_table(samples: tuple[EvalSample, ...]) -> str:
    """Markdown for TensorBoard; an indent of four spaces shows text verbatim."""
    parts: list[str] = []
    for sample in samples:
        reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
        expected = "" if sample.ground_truth is None else f", expected {sample.ground_truth!r}"
        turns = ", ".join(f"turn {turn}: {value:g}" for turn, value in sample.turn_rewards)
        by_turn = f" ({turns})" if turns else ""
        head = f"**{sample.half}** {reward}{by_turn}{expected}, ended by {sample.finish_reason}"
        text = (sample.prompt + "⟶" + sample.completion).replace("\n", "\n    ")
        parts.append(f"{head}\n\n    {text}")
    return "\n\n".join(parts)


def _json_line(row: Row) -> bytes:
    named = {key: _named(value) if isinstance(value, float) else value for key, value in row.items()}
    return (json.dumps(named, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _named(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _cut_torn_line(file: Path) -> int:
    """Cut an unfinished last line, left by a killed learner. Returns the number of bytes cut."""
    if not file.exists():
        return 0
    with open(file, "r+b", opener=not_a_link) as stream:
        size = at = stream.seek(0, io.SEEK_END)
        whole = 0
        while at > 0 and whole == 0:
            start = max(0, at - _BLOCK_BYTES)
            stream.seek(start)
            whole = start + stream.read(at - start).rfind(b"\n") + 1
            whole, at = (whole, start) if whole > start else (0, start)
        stream.truncate(whole)
    return size - whole
