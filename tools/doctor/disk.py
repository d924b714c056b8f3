"""Check of the disk of the run folder: its room and its speed, against what journal and checkpoints need."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stillhouse.launch.checks.model_files import check_weights
from stillhouse.launch.config.pools import teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.tools.doctor.case import Case
from stillhouse.tools.doctor.finding import Finding
from stillhouse.tools.doctor.host import existing

MB: Final = 1_000_000
SNAPSHOTS: Final = 2
"""Files of all weights that the publisher keeps (weights.publisher)."""
WRITTEN_BYTES: Final = 16 << 20
PIECE_BYTES: Final = 1 << 20
RECORD_BYTES: Final = 4096
"""About one turn of the journal."""
RECORDS: Final = 16
LONGEST_CHECKPOINT_S: Final = 120.0
SLOW_SYNC_S: Final = 0.05
"""With buffer.journal_sync = disk: every turn of the buffer's loop waits this long."""
STUCK_SYNC_S: Final = 1.0
"""Without: checkpoints and summaries are synced too."""
STEP_BYTES: Final = 4 + 8
"""Bytes of a checkpoint per parameter: float32 weights, and both moments of AdamW."""
HELD_TOKEN_BYTES: Final = 12
"""Bytes of a held token in the journal, without the teacher's set: docs/results/reliability.md."""


class Speed(NamedTuple):
    """The measured speed of a folder."""

    bytes_s: float
    """Rate at which a large file is written, until it is on the disk."""
    sync_s: float
    """Median time of an fsync after a small record."""


class Need(NamedTuple):
    """Room that a run needs, in bytes."""

    checkpoint: float
    least: float
    """One checkpoint, and the journal while little is held."""
    journal: float
    """Its logs, its reserve and all that the buffer may hold."""
    whole: float
    """All that is kept at one time."""


def disk(case: Case) -> Iterator[Finding]:
    """Write a few megabytes, measure, and compare."""
    folder = existing(case.run_path)
    need = needed(case.config)
    free = shutil.disk_usage(folder).free
    try:
        speed = measure(folder)
    except OSError as error:
        yield Finding(
            check="disk",
            status="failed",
            measured=f"{folder}: {WRITTEN_BYTES / MB:.0f} MB could not be written: {error}; {free / MB:,.0f} MB free",
            normal=f"{need.whole / MB:,.0f} MB free, and writable",
            advice="free some room, or put the run elsewhere with --run-dir",
            figures={"free_bytes": float(free)},
        )
        return
    yield _room(folder, free, need, case.config)
    yield _speed(folder, speed, need, case.config)


def _room(folder: Path, free: int, need: Need, config: RunConfig) -> Finding:
    status = "failed" if free < need.least else "warning" if free < need.whole else "ok"
    return Finding(
        check="disk",
        subject="room",
        status=status,
        measured=f"{free / MB:,.0f} MB free in {folder}",
        normal=f"at least {need.whole / MB:,.0f} MB: {config.learner.keep_checkpoints + 1} checkpoints of "
        f"{need.checkpoint / MB:,.1f} MB, copies of the weights, and {need.journal / MB:,.0f} MB of journal with all "
        "that the buffer may hold; recordings come on top",
        advice="free some room, another --run-dir, fewer learner.keep_checkpoints, or a smaller buffer.journal_log_mb",
        figures={"free_bytes": float(free), "needed_bytes": need.whole},
    )


def _speed(folder: Path, speed: Speed, need: Need, config: RunConfig) -> Finding:
    checkpoint_s = need.checkpoint / speed.bytes_s
    by_sync = config.buffer.journal and config.buffer.journal_sync == "disk"
    longest_sync_s = SLOW_SYNC_S if by_sync else STUCK_SYNC_S
    slow = checkpoint_s > LONGEST_CHECKPOINT_S or speed.sync_s > longest_sync_s
    return Finding(
        check="disk",
        subject="speed",
        status="warning" if slow else "ok",
        measured=f"{folder}: {speed.bytes_s / MB:,.0f} MB/s, {speed.sync_s * 1000:.1f} ms per fsync; about "
        f"{checkpoint_s:.1f} s per checkpoint",
        normal=f"less than {LONGEST_CHECKPOINT_S:.0f} s per checkpoint, and less than {longest_sync_s * 1000:.0f} ms "
        f"per fsync (buffer.journal_sync = {config.buffer.journal_sync})",
        advice="a local disk for --run-dir, a larger learner.checkpoint_every, or buffer.journal_sync = process",
        figures={"bytes_per_s": speed.bytes_s, "fsync_s": speed.sync_s, "checkpoint_s": checkpoint_s},
    )


def needed(config: RunConfig) -> Need:
    """Without recordings, whose size depends on the answers. Adapters are small, and counted as nothing."""
    student = Path(config.models.student)
    parameters = check_weights("", student).parameters if student.is_dir() else 0
    learner, buffer = config.learner, config.buffer
    trained = 0 if learner.frozen or learner.lora.rank else parameters
    averages = 4 * parameters if learner.ema.decay else 0
    checkpoint = float(STEP_BYTES * trained + averages)
    snapshots = 4 * parameters * SNAPSHOTS
    journal = least_journal = 0.0
    if buffer.journal:
        log, reserve = buffer.journal_log_mb << 20, buffer.journal_reserve_mb << 20  # each shard has its own
        least_journal = float(buffer.shards * (log + reserve))
        journal = float(buffer.shards * (2 * log + reserve)) + held_bytes(config)
    whole = checkpoint * (learner.keep_checkpoints + 1) + snapshots + averages + journal
    return Need(checkpoint, checkpoint + least_journal, journal, whole)


def held_bytes(config: RunConfig) -> float:
    """Bytes of the most that the buffer may hold: as many batches as `max_staleness` lets be out, all of the greatest
    length."""
    sends = any(pool.config.teacher.sends.distributions for pool in teacher_pools(config))
    sets = config.buffer.max_top_k_bytes if sends else 0
    rollouts = (config.buffer.max_staleness + 1) * config.buffer.batch_rollouts
    return float(rollouts * config.learner.tasks.max_new_tokens * (HELD_TOKEN_BYTES + sets))


def measure(folder: Path) -> Speed:
    """Raises OSError where the folder cannot be written. Leaves nothing there."""
    probe = folder / f".doctor-disk-{os.getpid()}"
    piece = os.urandom(PIECE_BYTES)  # not zeros, which some file systems do not store
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began_s = time.monotonic()
        for _ in range(WRITTEN_BYTES // PIECE_BYTES):
            _write(descriptor, piece)
        os.fsync(descriptor)
        bytes_s = WRITTEN_BYTES / max(time.monotonic() - began_s, 1e-9)
        syncs_s: list[float] = []
        for _ in range(RECORDS):
            _write(descriptor, piece[:RECORD_BYTES])
            began_s = time.monotonic()
            os.fsync(descriptor)
            syncs_s.append(time.monotonic() - began_s)
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)
    return Speed(bytes_s, statistics.median(syncs_s))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
