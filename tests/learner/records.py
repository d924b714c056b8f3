"""Made-up batches and files of them, for tests of what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stillhouse.protocol.messages import (
    Batch,
    BatchItem,
    Ledger,
    LedgerCounts,
    Settled,
    Snapshot,
    VersionSpan,
    WeightVersion,
)
from stillhouse.recording.append_file import Unwritten
from stillhouse.recording.format import FORMAT, RecordedRollout, RecordHeader, Writer
from stillhouse.recording.writer import BatchRecorder

VOCABULARY = "ab" * 32
NONE = LedgerCounts(0, 0, {}, {}, 0, 0)
Array = np.ndarray[Any, Any]


def header(**changes: Any) -> RecordHeader:
    told: dict[str, Any] = {
        "format": FORMAT,
        "run": "run",
        "vocab_fingerprint": VOCABULARY,
        "writer": "student",
        "config_digest": "0",
        "config": {"steps": 3},
    }
    return RecordHeader(**(told | changes))


def rollout(
    rollout_id: str, n_trained: int = 3, *, teachers: tuple[str, ...] = ("default",), reward: float | None = 1.0
) -> RecordedRollout:
    """Two tokens of a prompt and `n_trained` sampled ones, random by the id."""
    random = np.random.default_rng(list(rollout_id.encode()))
    end = 2 + n_trained
    spans = (VersionSpan(WeightVersion(0, 1), 2, end),)
    item = BatchItem(rollout_id, 7, 0, 1, "sum", teachers, end, spans, True, "stop", reward, 1)
    arrays = (
        random.integers(0, 23, end).astype(np.int32),
        -random.exponential(1.0, end).astype(np.float32),
        (np.arange(end) >= 2).astype(np.uint8),
        -random.exponential(1.0, (len(teachers), end)).astype(np.float32),
    )
    return RecordedRollout(item, arrays)


def batch(step: int, rollouts: Sequence[RecordedRollout], *, epoch: int = 0) -> tuple[Batch, list[Array]]:
    """As it comes from the buffer, for the step that makes `step + 1`."""
    version = WeightVersion(epoch, step)
    snapshot = Snapshot(0.0, "running", "", version, version, Ledger(NONE, NONE, NONE, {}, NONE), {}, {}, 4, ())
    tokens = sum(int(r.arrays[2].sum()) for r in rollouts)
    settled = (Settled(step, 0, "trained"),)
    message = Batch(step + 1, version, tuple(r.item for r in rollouts), {1: tokens}, settled, snapshot)
    return message, [array for r in rollouts for array in r.arrays]


def add(
    recorder: BatchRecorder, message: Batch, arrays: Sequence[Array], offline: Sequence[RecordedRollout] = ()
) -> None:
    """As a step that trained all of it and settled a task for each of its samples."""
    done = tuple(one.task_id for one in message.settled)
    recorder.add(message, message.settled, done, (), arrays, offline)


def record(
    path: Path, batches: Sequence[Sequence[RecordedRollout]], *, writer: Writer = "student", **changes: Any
) -> Path:
    """A file of these batches, of steps 0, 1, ..."""
    recorder = BatchRecorder(path, header(writer=writer, **changes), Unwritten())
    for step, rollouts in enumerate(batches):
        add(recorder, *batch(step, rollouts))
    recorder.close()
    return path


def same(one: RecordedRollout, other: RecordedRollout) -> bool:
    """Items equal, frames equal in dtype, shape and every bit."""
    return one.item == other.item and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(one.arrays, other.arrays, strict=True)
    )
