"""A buffer of several shards, with real processes and clients: as one buffer, whichever of them is killed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from random import Random

import msgspec
import pytest

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.server import shard_folder
from stillhouse.protocol import messages as m
from stillhouse.protocol.shards.snapshots import whole_snapshot
from tests.patience import PATIENCE_S
from tests.sim.synthetic_run import BufferProcess, Shape, SyntheticRun, start_all

SHAPE = Shape(n_tasks=90, group_size=2, segments=3, segment_tokens=6, n_actors=4, n_teachers=3, pause_s=0.01)
CONFIG = BufferConfig(heartbeat_s=0.2, peer_timeout_s=PATIENCE_S, max_staleness=2, batch_rollouts=12, shards=3)


def finals(processes: list[BufferProcess]) -> list[m.Snapshot]:
    """The last word of each shard, which has ended well."""
    assert [process.wait() for process in processes] == [0] * len(processes)
    return [process.final() for process in processes]


def steps(run: SyntheticRun, shape: Shape) -> tuple[int, int]:
    """Steps made, and those that batches of CONFIG.batch_rollouts would take if each were full."""
    return run.account.steps, -(-shape.n_tasks * shape.group_size // CONFIG.batch_rollouts)


def test_three_shards_are_one_buffer(tmp_path: Path) -> None:
    address, processes = start_all(CONFIG, tmp_path)
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.close)
        run = SyntheticRun(address, SHAPE, CONFIG)
        run.start()
        run.join()
        parts = finals(processes)
        run.account.check(SHAPE, whole_snapshot(parts))
        made, least = steps(run, SHAPE)
        assert made <= least + 2, "every batch but the last ones has a full piece of each shard"
        per_shard = [part.ledger.rollouts.accepted for part in parts]
        assert per_shard == [SHAPE.n_tasks * SHAPE.group_size // 3] * 3, "each owns every third task"
        ports = [int(listed(tmp_path, shard).rpartition(":")[2]) for shard in range(3)]
        assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
        assert not (tmp_path / "journal").exists() and not list(tmp_path.glob("shards/*/journal"))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_shards_killed_again_and_again_lose_and_repeat_nothing(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    config = msgspec.structs.replace(CONFIG, journal_log_mb=1)
    address, processes = start_all(config, tmp_path)
    kills = [0] * len(processes)
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.close)
        run = SyntheticRun(address, SHAPE, config, seed=seed)
        run.start()
        # Not at the very end: a shard that dies before it has read all goodbyes waits for them, for half a minute.
        while len(run.account.sampled) < 0.8 * SHAPE.n_segments and sum(kills) < 9:
            assert not run.finished
            time.sleep(rng.uniform(0.05, 0.4))
            fewest_first = sorted(range(len(processes)), key=lambda shard: (kills[shard], rng.random()))
            for shard in [shard for shard in fewest_first[: rng.choice((1, 1, 2))] if processes[shard].kill()]:
                kills[shard] += 1
                processes[shard].start()
        run.join()
        run.account.check(SHAPE, whole_snapshot(finals(processes)))
        assert min(kills) > 0, kills


def listed(run_dir: Path, shard: int) -> str:
    """The address that a shard has written."""
    text = (shard_folder(run_dir, shard) / "buffer.json").read_text()
    return str(msgspec.json.decode(text)["address"])
