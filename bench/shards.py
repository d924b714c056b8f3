"""One process against several shards: what a segment costs each process of the buffer.

    OMP_NUM_THREADS=1 PYTHONPATH=. python bench/shards.py [--shards 1,2,4] [--tokens 32] [--rounds 3]

The same synthetic run (`tests.sim.synthetic_run`: real processes, links and journals; the peers are threads of this
process) with one shard and with several, in turn. Everything is counted in CPU seconds of the buffer's processes, from
when the run begins until all of it is trained, so the figures also hold where there are fewer cores than processes.

us per segment   CPU of all shards together, over all segments
busiest          CPU of the shard that did most, over all segments: its inverse is how many segments/s the buffer holds
                 where each shard has a core
MB               resident memory of the largest shard, and of all
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from stillhouse.buffer.config import BufferConfig
from stillhouse.protocol.shards.snapshots import whole_snapshot
from tests.sim.synthetic_run import Shape, SyntheticRun, start_all


def measured(n_shards: int, shape: Shape, folder: Path) -> tuple[list[float], list[int], float]:
    """CPU seconds and resident bytes of each shard, and wall seconds."""
    config = BufferConfig(
        heartbeat_s=0.5, peer_timeout_s=30.0, max_staleness=4, batch_rollouts=32, shards=n_shards, task_queue=256
    )
    address, processes = start_all(config, folder)
    try:
        buffers = [psutil.Process(process.pid) for process in processes]
        began = [sum(buffer.cpu_times()[:2]) for buffer in buffers]
        ended: list[float] = []
        resident: list[int] = []

        def at_end() -> None:
            ended.extend(sum(buffer.cpu_times()[:2]) for buffer in buffers)
            resident.extend(buffer.memory_info().rss for buffer in buffers)

        run = SyntheticRun(address, shape, config, at_end=at_end)
        began_s = time.monotonic()
        run.start()
        run.join()
        wall_s = time.monotonic() - began_s
        assert [process.wait() for process in processes] == [0] * n_shards
        run.account.check(shape, whole_snapshot([process.final() for process in processes]))
    finally:
        for process in processes:
            process.close()
    return [after - before for before, after in zip(began, ended, strict=True)], resident, wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", default="1,2,4", help="numbers of shards, in turn")
    parser.add_argument("--tokens", type=int, default=32, help="per segment")
    parser.add_argument("--tasks", type=int, default=960)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    numbers = [int(number) for number in options.shards.split(",")]
    shape = Shape(options.tasks, segment_tokens=options.tokens, n_actors=4, n_teachers=4, capacity=32)
    rows: dict[int, list[tuple[float, float, float, float, float]]] = {number: [] for number in numbers}
    for _ in range(options.rounds):
        for number in numbers:
            with tempfile.TemporaryDirectory(prefix="shards-") as folder:
                cpu_s, resident, wall_s = measured(number, shape, Path(folder))
            per_segment = 1e6 / shape.n_segments
            figures = sum(cpu_s) * per_segment, max(cpu_s) * per_segment, max(resident) / 1e6, sum(resident) / 1e6
            rows[number].append((*figures, shape.n_segments / wall_s))
    print("| shards | us per segment | busiest | segments/s that it holds | segments/s here | MB: largest, all |")
    print("|---|---|---|---|---|---|")
    for number, found in rows.items():
        whole, busiest, largest, memory, here = (statistics.median(column) for column in zip(*found, strict=True))
        cells = f"{whole:.0f} | {busiest:.0f} | {1e6 / busiest:,.0f} | {here:,.0f} | {largest:.0f}, {memory:.0f}"
        print(f"| {number} | {cells} |")


if __name__ == "__main__":
    main()
