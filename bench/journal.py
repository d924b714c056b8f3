"""Measures the cost of the journal, and how fast a buffer recovers from it.

    python bench/journal.py                 all of it, three to five minutes
    python bench/journal.py --only stores   stores | cost | replay | image | kills

stores   commits per second and MB/s of LMDB (what the journal uses) and of SQLite, by size of turn, with one commit per
         turn, without (`process`) and with (`disk`) waiting for the disk
cost     a synthetic run (`tests.sim.synthetic_run`: real processes and clients) with and without journal, in turns: CPU
         seconds of the buffer's process per accepted segment, and segments per second of wall time
replay   a buffer killed in the middle of such a run is started again: how long until it listens, without imports
image    how long the loop stands still, by number of tokens held: for an image that it makes itself (as it did before
         images were made by a fork), for the fork, and for the longest turn until the image is complete (and before)
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
import numpy as np
import psutil

from bench.journal_sqlite import SqliteStore
from buffer.config import BufferConfig, Sync
from buffer.core import Core, Turn, encode_turn
from buffer.journal.image import make_checked_image, make_image, release_hash
from buffer.journal.imaging import Outcome, write_image
from buffer.journal.journal import Journal
from buffer.journal.recovery import Beginning, start
from buffer.journal.store import Store
from buffer.state import BufferState
from protocol import messages as m
from protocol.codec import Received
from protocol.handshake import Doorkeeper
from protocol.messages import WeightVersion
from protocol.server import FromPeer
from protocol.session import SessionBook
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
        write_image(store.next_image, body, flush=False)
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


def image(folder: Path) -> None:
    columns = ("tokens held", "image", "in the loop", "fork", "longest turn", "(before)", "done after")
    print(" ".join(f"{column:>12}" for column in columns))
    for n_rollouts, n_segments, n_tokens in ((320, 8, 256), (1280, 8, 256), (5120, 8, 256), (5120, 8, 880)):
        path = Path(tempfile.mkdtemp(dir=folder))
        core = _full_core(n_rollouts, n_segments, n_tokens)
        book = SessionBook(Doorkeeper(run_id=RUN, vocab_fingerprint=None))
        journal = Journal(path, sync="process", log_bytes=1 << 40, reserve_bytes=0, memory_bytes=1 << 30)
        before_s = max(_small_turn(core, journal, i) for i in range(1000))
        journal.start_image(partial(make_checked_image, core, book, 1.0))
        finished, longest_s, n = None, 0.0, 1000
        while finished is None:
            longest_s, n = max(longest_s, _small_turn(core, journal, n)), n + 1
            began_s = time.perf_counter()
            finished = journal.tend_image()
            longest_s = max(longest_s, time.perf_counter() - began_s)
            time.sleep(0.001)
        assert finished.outcome is Outcome.WRITTEN, finished
        began_s = time.perf_counter()
        body = make_image(core, book, 1.0)
        write_image(path / "in-the-loop", body, flush=False)
        in_loop_s, n_bytes = time.perf_counter() - began_s, len(body)
        del body
        journal.close()
        cells = (
            f"{n_rollouts * n_segments * n_tokens:,}",
            f"{n_bytes / 1e6:.0f} MB",
            *(f"{s * 1e3:.1f} ms" for s in (in_loop_s, finished.paused_s, longest_s, before_s)),
            f"{finished.seconds:.1f} s",
        )
        print(" ".join(f"{cell:>12}" for cell in cells), flush=True)


def _small_turn(core: Core, journal: Journal, i: int) -> float:
    """Seconds for a turn with a heartbeat, from its application to its commit."""
    heartbeat = m.Heartbeat(WeightVersion(0, 0), {"n": float(i)}, 0)
    turn = Turn(1.0, (FromPeer("actor", "a", Received(heartbeat, ())),), 1.0)
    began_s = time.perf_counter()
    core.apply(turn)
    journal.write(encode_turn(turn), began_s)
    return time.perf_counter() - began_s


def _full_core(n_rollouts: int, n_segments: int, n_tokens: int) -> Core:
    config = BufferConfig(max_staleness=0, batch_rollouts=n_rollouts, task_queue=n_rollouts)
    state = BufferState(config, version=WeightVersion(0, 0))
    state.peer_joined(0.0, "learner", "l", "1")
    state.peer_joined(0.0, "actor", "a", "1")
    state.handle(0.0, "actor", "a", m.TicketCredit(n_rollouts, 1, 0))
    tasks = tuple(m.Task(i, "train", 1, m.Sampling(seed=i)) for i in range(n_rollouts))
    prompts = [np.array([1], np.int32)] * n_rollouts
    for at in range(0, n_rollouts, 512):
        state.handle(0.0, "learner", "l", m.TasksOffered(tasks[at : at + 512]), prompts[at : at + 512])
    ids, mask = np.ones(n_tokens, np.int32), np.ones(n_tokens, np.uint8)
    logprobs = np.full(n_tokens, -0.5, np.float32)
    for task in tasks:
        for index in range(n_segments):
            begin = index * n_tokens
            mask_N = mask.copy()
            mask_N[: index == 0] = 0
            span = m.VersionSpan(WeightVersion(0, 0), begin, begin + n_tokens)
            segment = m.Segment(f"train-{task.task_id}-0-0", index, begin, begin + n_tokens, (span,), False)
            state.handle(0.0, "actor", "a", segment, (ids, logprobs, mask_N))
    assert state.snapshot(0.0).ledger.segments.accepted == n_rollouts * n_segments
    return Core(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("stores", "cost", "replay", "image", "kills"))
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
            "kills": lambda: kills(Path(folder), options.kills, options.seed),
        }
        for name, part in parts.items():
            if options.only in (None, name):
                print(f"== {name}", flush=True)
                part()


if __name__ == "__main__":
    main()
