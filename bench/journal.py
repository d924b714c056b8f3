"""Measures the cost of the journal, and how fast a buffer recovers from it.

    python bench/journal.py                 all of it, three to five minutes
    python bench/journal.py --only stores   stores | cost | replay | image | written | kills

stores   commits per second and MB/s of LMDB (what the journal uses) and of SQLite, by size of turn, with one commit per
         turn, without (`process`) and with (`disk`) waiting for the disk
cost     a synthetic run (`tests.sim.synthetic_run`: real processes and clients) with and without journal, in turns: CPU
         seconds of the buffer's process per accepted segment, and segments per second of wall time
replay   a buffer killed in the middle of such a run is started again: how long until it listens, without imports
image    how long the loop stands still, by number of tokens held: for an image that it makes itself (as it did before
         images were made by a fork), for the fork, and for the longest turn until the image is complete (and before)
written  bytes in turns, blobs and images for each token that a buffer holds, while it fills up with an image at each 16
         MiB of log, and what is on the disk then
kills    a run whose buffer is killed `--kills` times at random moments; raises when anything was lost or came twice
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import psutil

from bench.journal_images import image, written
from bench.journal_sqlite import SqliteStore
from stillhouse.buffer.config import BufferConfig, Sync
from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.buffer.journal.image import release_hash
from stillhouse.buffer.journal.imaging import write_image
from stillhouse.buffer.journal.recovery import Beginning, start
from stillhouse.buffer.journal.store import Store
from stillhouse.protocol.messages import WeightVersion
from tests.sim.synthetic_run import RUN, VOCAB, BufferProcess, Shape, SyntheticRun

CONFIG = BufferConfig(heartbeat_s=0.5, peer_timeout_s=30.0, max_staleness=4, batch_rollouts=32)
SYNCS: tuple[Sync, ...] = ("process", "disk")


def stores(folder: Path) -> None:
    print(f"{'sync':8} {'turn':>9}   {'LMDB':>28}   {'SQLite':>28}   LMDB / SQLite")
    for sync in SYNCS:
        for n_bytes, n in ((200, 2000), (10_000, 2000), (300_000, 200)):
            n = n if sync == "process" else n // 10
            rates: list[float] = []
            cells: list[str] = []
            for kind in (Store, SqliteStore):
                seconds, cpu_s = median_of(3, partial(_fill, kind, folder, sync, n_bytes, n))
                rates.append(n / seconds)
                cells.append(
                    f"{n / seconds:8,.0f}/s {n * n_bytes / seconds / 1e6:6.1f} MB/s {cpu_s / n * 1e6:5,.0f} us"
                )
            print(f"{sync:8} {n_bytes:>7} B   {cells[0]:>28}   {cells[1]:>28}   {rates[0] / rates[1]:5.2f}")


def _fill(kind: type[Store] | type[SqliteStore], folder: Path, sync: Sync, n_bytes: int, n: int) -> tuple[float, float]:
    path = Path(tempfile.mkdtemp(dir=folder))
    store = kind(path, sync=sync)
    body = os.urandom(n_bytes)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(n):
        store.append([body])
        if store.log_bytes > 64 << 20:
            put_image(store, body)
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    store.close()
    shutil.rmtree(path)
    return seconds, cpu_s


def put_image(store: Store | SqliteStore, body: bytes) -> None:
    if isinstance(store, SqliteStore):
        store.put_image(body)
    else:
        write_image(store.next_image, Frozen(body), flush=False)
        store.adopt(store.position)


def median_of(n: int, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    got = [measure() for _ in range(n)]
    return statistics.median(a for a, _ in got), statistics.median(b for _, b in got)


def cost(folder: Path, pairs: int) -> None:
    for tokens, n_tasks in ((32, 600), (512, 300), (4096, 150)):
        shape = Shape(n_tasks=n_tasks, group_size=2, segments=3, segment_tokens=tokens, n_actors=3, capacity=32)
        ratios: list[tuple[float, float]] = []
        for pair in range(pairs):
            order = (True, False) if pair % 2 == 0 else (False, True)
            got = {journal: _run(folder, shape, journal=journal) for journal in order}
            (cpu_on, wall_on), (cpu_off, wall_off) = got[True], got[False]
            ratios.append((cpu_off / cpu_on, wall_off / wall_on))
            us = 1e6 / shape.n_segments
            print(
                f"  segments of {tokens} tokens: CPU per segment {cpu_on * us:5.0f} us with, {cpu_off * us:5.0f} us "
                f"without; {shape.n_segments / wall_on:6.0f}/s with, {shape.n_segments / wall_off:6.0f}/s without"
            )
        cpu, wall = (statistics.median(r[i] for r in ratios) for i in (0, 1))
        print(f"segments of {tokens} tokens: throughput with / without journal {wall:.2f}, by CPU {cpu:.2f}")


def _run(folder: Path, shape: Shape, *, journal: bool) -> tuple[float, float]:
    """(CPU seconds of the buffer, wall seconds) of a run, without its beginning and end."""
    path = Path(tempfile.mkdtemp(dir=folder))
    config = msgspec.structs.replace(CONFIG, journal=journal)
    process = BufferProcess(config, path)
    try:
        address = process.start()
        buffer = psutil.Process(process.pid)
        at: list[tuple[float, float]] = []

        def look() -> None:
            cpu = buffer.cpu_times()
            at.append((cpu.user + cpu.system, time.perf_counter()))

        run = SyntheticRun(address, shape, config, at_end=look)
        look()
        run.start()
        run.join()
        assert process.wait() == 0
        run.account.check(shape, process.final())
    finally:
        process.close()
        shutil.rmtree(path, ignore_errors=True)
    (cpu_before_s, before_s), (cpu_after_s, after_s) = at
    return cpu_after_s - cpu_before_s, after_s - before_s


def replay(folder: Path) -> None:
    for tokens, n_tasks in ((32, 2000), (512, 2000), (4096, 300)):
        shape = Shape(n_tasks=n_tasks, group_size=2, segments=3, segment_tokens=tokens, n_actors=3, capacity=32)
        path = Path(tempfile.mkdtemp(dir=folder))
        process = BufferProcess(CONFIG, path)
        run = SyntheticRun(process.start(), shape, CONFIG)
        run.start()
        while not run.finished and len(run.account.sampled) < shape.n_segments * 0.8:
            time.sleep(0.01)
        process.kill()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        started = start(path / "journal", _beginning(CONFIG))
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        assert started.journal is not None
        n_segments = started.core.snapshot(0.0).ledger.segments.accepted
        n_bytes = started.journal.store.log_bytes
        started.journal.close()
        print(
            f"segments of {tokens} tokens: {n_segments} segments, {n_bytes / 1e6:.1f} MB of turns replayed in "
            f"{seconds:.2f} s (CPU {cpu_s:.2f}): {n_segments / cpu_s:,.0f} segments and {n_bytes / cpu_s / 1e6:.0f} MB "
            "per CPU second"
        )
        process.start()
        run.join()
        process.wait()
        process.close()
        shutil.rmtree(path)


def _beginning(config: BufferConfig) -> Beginning:
    return Beginning(
        release=release_hash(),
        run_id=RUN,
        config=config,
        version=WeightVersion(0, 0),
        carried=None,
        vocab_fingerprint=VOCAB,
        vocab_size=None,
    )


def kills(folder: Path, n: int, seed: int) -> None:
    rng = Random(seed)
    shape = Shape(n_tasks=60 * n, group_size=2, segments=3, segment_tokens=16, n_actors=3, capacity=16, pause_s=0.02)
    config = msgspec.structs.replace(CONFIG, journal_log_mb=1, heartbeat_s=0.2)
    path = Path(tempfile.mkdtemp(dir=folder))
    process = BufferProcess(config, path)
    back_s: list[float] = []
    try:
        run = SyntheticRun(process.start(), shape, config, seed=seed)
        run.start()
        while not run.finished and len(back_s) < n:
            time.sleep(rng.uniform(0.0, 0.5))
            if not process.kill():
                break
            began_s = time.perf_counter()
            process.start()
            back_s.append(time.perf_counter() - began_s)
        run.join()
        assert process.wait() == 0
        run.account.check(shape, process.final())
    finally:
        process.close()
    ledger = process.final().ledger
    print(
        f"{len(back_s)} kills (seed {seed}) over {run.account.steps} steps: {ledger.segments.accepted} segments and "
        f"{ledger.tokens.accepted} tokens accepted, {ledger.tokens.trained} trained, {ledger.tokens.masked} masked, "
        f"nothing lost, repeated or past the bound; back after {statistics.median(back_s):.2f} s (median, with imports)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("stores", "cost", "replay", "image", "written", "kills"))
    parser.add_argument("--pairs", type=int, default=5, help="runs with and without journal")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        parts: dict[str, Callable[[], None]] = {
            "stores": lambda: stores(Path(folder)),
            "cost": lambda: cost(Path(folder), options.pairs),
            "replay": lambda: replay(Path(folder)),
            "image": lambda: image(Path(folder)),
            "written": lambda: written(Path(folder)),
            "kills": lambda: kills(Path(folder), options.kills, options.seed),
        }
        for name, part in parts.items():
            if options.only in (None, name):
                print(f"== {name}", flush=True)
                part()


if __name__ == "__main__":
    main()
