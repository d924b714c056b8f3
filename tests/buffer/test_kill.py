"""The buffer is killed at any moment, started again, and nobody notices: real processes, real clients."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from bench.synthetic_run import BufferProcess, Shape, SyntheticRun
from buffer.config import BufferConfig

SHAPE = Shape(n_tasks=150, group_size=2, segments=3, segment_tokens=6, pause_s=0.01)


@pytest.mark.parametrize(("seed", "log_mb"), [(1, 256), (2, 1)])
def test_a_run_whose_buffer_is_killed_again_and_again_loses_and_repeats_nothing(
    tmp_path: Path, seed: int, log_mb: int
) -> None:
    config = BufferConfig(
        heartbeat_s=0.2, peer_timeout_s=20.0, tick_s=0.01, max_staleness=2, batch_rollouts=8, journal_log_mb=log_mb
    )
    rng = Random(seed)
    process = BufferProcess(config, tmp_path)
    try:
        address = process.start()
        run = SyntheticRun(address, SHAPE, config, seed=seed)
        run.start()
        while not run.finished and process.starts <= 8:
            time.sleep(rng.uniform(0.05, 0.5))
            process.kill()
            assert process.start() == address
        run.join()
        assert process.wait() == 0
        run.account.check(SHAPE, process.final())
        assert process.starts > 3
        assert not (tmp_path / "journal").exists()
    finally:
        process.close()
