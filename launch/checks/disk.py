"""Check of the room on the run folder's disk, against what journal and checkpoints need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stillhouse.launch.checks.finding import Case, Finding
from stillhouse.launch.checks.model_files import check_weights
from stillhouse.launch.config.pools import teacher_pools
from stillhouse.launch.config.run import RunConfig

MB: Final = 1_000_000
SNAPSHOTS: Final = 2
"""Files of all weights that the publisher keeps (weights.publisher)."""
HELD_TOKEN_BYTES: Final = 12
"""Bytes of a held token in the journal, without the teacher's set: docs/results/reliability.md."""


class DiskNeed(NamedTuple):
    """Room that a run needs, in bytes."""

    checkpoint: float
    least: float
    """One checkpoint, and the journal while little is held."""
    journal: float
    """Its logs and all that the buffer may hold."""
    whole: float
    """All that is kept at one time."""


def disk(case: Case) -> Iterator[Finding]:
    """The room on the run folder's disk against what checkpoints and the journal need."""
    folder, need, config = existing(case.run_path), needed(case.config), case.config
    free = shutil.disk_usage(folder).free
    yield Finding(
        check="disk",
        status="failed" if free < need.least else "warning" if free < need.whole else "ok",
        measured=f"{free / MB:,.0f} MB free in {folder}",
        normal=f"at least {need.whole / MB:,.0f} MB: {config.learner.keep_checkpoints + 1} checkpoints of "
        f"{need.checkpoint / MB:,.1f} MB, copies of the weights, and {need.journal / MB:,.0f} MB of journal with all "
        "that the buffer may hold; recordings come on top",
        advice="free some room, another --run-dir, fewer learner.keep_checkpoints, or a smaller buffer.journal_log_mb",
        figures={"free_bytes": float(free), "needed_bytes": need.whole},
    )


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def needed(config: RunConfig) -> DiskNeed:
    """Without recordings, whose size depends on the answers. Adapters are small, and counted as nothing."""
    student = Path(config.models.student)
    parameters = check_weights("", student).parameters if student.is_dir() else 0
    learner, buffer = config.learner, config.buffer
    trained = 0 if learner.frozen or learner.lora.rank else parameters
    averages = 4 * parameters if learner.ema.decay else 0
    of_moments = max(learner.optimizer.matrix_bytes, learner.optimizer.table_bytes)
    checkpoint = (4 + of_moments) * trained + averages
    snapshots = 4 * parameters * SNAPSHOTS
    logs = float(buffer.journal_log_mb << 20)
    journal = 2 * logs + held_bytes(config)
    whole = checkpoint * (learner.keep_checkpoints + 1) + snapshots + averages + journal
    return DiskNeed(checkpoint, checkpoint + logs, journal, whole)


def held_bytes(config: RunConfig) -> float:
    """Bytes of the most that the buffer may hold: as many batches as `max_staleness` lets be out, all of the greatest
    length."""
    sends = any(pool.config.teacher.sends.distributions for pool in teacher_pools(config))
    sets = config.buffer.max_top_k_bytes if sends else 0
    rollouts = (config.buffer.max_staleness + 1) * config.buffer.batch_rollouts
    return float(rollouts * config.learner.tasks.max_new_tokens * (HELD_TOKEN_BYTES + sets))
