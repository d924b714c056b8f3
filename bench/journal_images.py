"""Images of the journal: how long the loop stands still for them, and what they write (`bench/journal.py`)."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.core import Core, Joined, Turn, encode_turn
from stillhouse.buffer.journal.image import make_checked_image, make_image
from stillhouse.buffer.journal.imaging import Outcome, write_image
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.state import BufferState
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Received
from stillhouse.protocol.handshake import Doorkeeper
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.server import FromPeer
from stillhouse.protocol.session import SessionBook
from tests.sim.synthetic_run import RUN, VOCAB


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
        image = make_image(core, book, 1.0)
        write_image(path / "in-the-loop", image, flush=False)
        in_loop_s = time.perf_counter() - began_s
        del image
        journal.close()
        cells = (
            f"{n_rollouts * n_segments * n_tokens:,}",
            f"{finished.n_bytes / 1e6:.0f} MB",
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
    journal.write(encode_turn(turn, core.state.blobs_total).body, began_s)
    return time.perf_counter() - began_s


class Filling:
    """A journal that a core fills up, and what is written to it."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path, sync="process", log_bytes=16 << 20, reserve_bytes=0, memory_bytes=1 << 30)
        self._book = SessionBook(Doorkeeper(run_id=RUN, vocab_fingerprint=None))
        self.turn_bytes = self.blob_bytes = self.image_bytes = self.images = 0
        self.image_cpu_s = 0.0

    def take(self, core: Core, turn: Turn) -> None:
        body, blobs = encode_turn(turn, core.state.blobs_total)
        core.apply(turn)
        self.journal.write(body, 0.0, blobs)
        self.turn_bytes += len(body)
        self.blob_bytes += sum(len(content) for _, content in blobs)
        if self.journal.wants_image:
            self.journal.start_image(partial(make_checked_image, core, self._book, 1.0))
            while (finished := self.journal.tend_image()) is None:
                time.sleep(0.001)
            self.image_bytes += finished.n_bytes
            self.images += 1
            self.image_cpu_s += finished.cpu_s


def written(folder: Path) -> None:
    columns = ("tokens held", "turns", "blobs", "images", "in all", "of images", "their CPU", "on disk")
    print(" ".join(f"{column:>12}" for column in columns))
    for n_rollouts, n_segments, n_tokens in ((5120, 8, 32), (5120, 8, 256), (2560, 8, 1024)):
        path = Path(tempfile.mkdtemp(dir=folder))
        filling = Filling(path)
        _full_core(n_rollouts, n_segments, n_tokens, filling.take)
        held = n_rollouts * n_segments * n_tokens
        on_disk = sum(file.stat().st_blocks * 512 for file in path.iterdir())
        filling.journal.close()
        shutil.rmtree(path)
        amounts = (filling.turn_bytes, filling.blob_bytes, filling.image_bytes)
        cells = (
            *(f"{held:,}", *(f"{n / held:.1f} B" for n in (*amounts, sum(amounts)))),
            *(f"{filling.images}", f"{filling.image_cpu_s:.1f} s", f"{on_disk / held:.1f} B"),
        )
        print(" ".join(f"{cell:>12}" for cell in cells), flush=True)


def _apply(core: Core, turn: Turn) -> None:
    core.apply(turn)


def _full_core(n_rollouts: int, n_segments: int, n_tokens: int, take: Callable[[Core, Turn], None] = _apply) -> Core:
    """A core that holds so many segments. `take` applies a turn."""
    config = BufferConfig(max_staleness=0, batch_rollouts=n_rollouts, task_queue=n_rollouts)
    core = Core(BufferState(config, version=WeightVersion(0, 0)))
    for hello in (m.Hello("learner", "l", "1", RUN, VOCAB), m.Hello("actor", "a", "1", RUN, VOCAB)):
        take(core, Turn(0.0, (Joined(hello),)))

    def say(role: m.Role, message: m.Message, *arrays: np.ndarray) -> None:
        take(core, Turn(0.0, (FromPeer(role, role[0], Received(message, arrays)),)))

    say("actor", m.TicketCredit(n_rollouts, 1, 0))
    tasks = tuple(m.Task(i, "train", 1, m.Sampling(seed=i)) for i in range(n_rollouts))
    for at in range(0, n_rollouts, 512):
        some = tasks[at : at + 512]
        say("learner", m.TasksOffered(some), *[np.array([1], np.int32)] * len(some))
    ids, mask = np.ones(n_tokens, np.int32), np.ones(n_tokens, np.uint8)
    logprobs = np.full(n_tokens, -0.5, np.float32)
    for task in tasks:
        for index in range(n_segments):
            begin = index * n_tokens
            mask_N = mask.copy()
            mask_N[: index == 0] = 0
            span = m.VersionSpan(WeightVersion(0, 0), begin, begin + n_tokens)
            segment = m.Segment(f"train-{task.task_id}-0-0", index, begin, begin + n_tokens, (span,), False)
            say("actor", segment, ids, logprobs, mask_N)
    assert core.state.snapshot(0.0).ledger.segments.accepted == n_rollouts * n_segments
    return core
