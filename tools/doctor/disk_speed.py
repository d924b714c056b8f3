"""Check of the speed of the run folder's disk: a few megabytes are written."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stillhouse.launch.checks.disk import MB, existing, needed
from stillhouse.launch.checks.finding import Case, Finding

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


class Speed(NamedTuple):
    """The measured speed of a folder."""

    bytes_s: float
    """Rate at which a large file is written, until it is on the disk."""
    sync_s: float
    """Median time of an fsync after a small record."""


def disk_speed(case: Case) -> Iterator[Finding]:
    """Write, measure, and compare."""
    folder, need, config = existing(case.run_path), needed(case.config), case.config
    try:
        speed = measure(folder)
    except OSError as error:
        yield Finding(
            check="disk speed",
            status="failed",
            measured=f"{folder}: {WRITTEN_BYTES / MB:.0f} MB could not be written: {error}",
            normal="writable",
            advice="free some room, or put the run elsewhere with --run-dir",
        )
        return
    checkpoint_s = need.checkpoint / speed.bytes_s
    by_sync = config.buffer.journal_sync == "disk"
    longest_sync_s = SLOW_SYNC_S if by_sync else STUCK_SYNC_S
    slow = checkpoint_s > LONGEST_CHECKPOINT_S or speed.sync_s > longest_sync_s
    yield Finding(
        check="disk speed",
        status="warning" if slow else "ok",
        measured=f"{folder}: {speed.bytes_s / MB:,.0f} MB/s, {speed.sync_s * 1000:.1f} ms per fsync; about "
        f"{checkpoint_s:.1f} s per checkpoint",
        normal=f"less than {LONGEST_CHECKPOINT_S:.0f} s per checkpoint, and less than {longest_sync_s * 1000:.0f} ms "
        f"per fsync (buffer.journal_sync = {config.buffer.journal_sync})",
        advice="a local disk for --run-dir, a larger learner.checkpoint_every, or buffer.journal_sync = process",
        figures={"bytes_per_s": speed.bytes_s, "fsync_s": speed.sync_s, "checkpoint_s": checkpoint_s},
    )


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
