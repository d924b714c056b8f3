"""A teacher's process that gets SIGTERM finishes what it holds, or goes when its time is up: real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final, NoReturn

import numpy as np

from stillhouse.engines.base import LOGPROBS_ONLY, ScoreOptions, ScoreRequest, ScoreResult
from stillhouse.engines.provider import ScorerSource
from stillhouse.protocol import messages as m
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.protocol.server_events import PeerDown
from stillhouse.teachers.config import TeacherConfig
from stillhouse.teachers.worker import _run  # pyright: ignore[reportPrivateUsage]
from tests.patience import PATIENCE_S, eventually
from tests.wire import RUN, VOCAB, ScriptedBuffer

TEACHER: tuple[m.Role, str] = ("teacher", "teacher-0")
"""Bound of every wait: a busy machine takes long to start a process."""


WORK_TOKENS: Final = 10
"""Of each item; no text of a teacher's check of itself is as long."""


class Slow:
    """Grades one batch of work in `pause_s`; leaves a mark when it has begun."""

    vocab_size, max_context = 50, 100

    def __init__(self, begun: Path, pause_s: float) -> None:
        self._begun = begun
        self._pause_s = pause_s

    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        if len(requests[0].token_ids) == WORK_TOKENS:
            self._begun.touch()
            time.sleep(self._pause_s)
        return [ScoreResult(np.full(len(r.token_ids) - r.start, -1.0, np.float32)) for r in requests]

    def close(self) -> None: ...


def _obey(_signum: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(int(ExitCode.TERMINATED))


def teach(address: str, run_dir: str, pause_s: float, drain_s: float) -> None:
    """The process. Its SIGTERM handler stands for that of `launch.workers.roles`."""
    signal.signal(signal.SIGTERM, _obey)
    teacher = TeacherConfig(max_batch_tokens=10, device="cpu", drain_s=drain_s)
    models = SimpleNamespace(student=run_dir, teacher=run_dir)
    config: Any = SimpleNamespace(teacher=teacher, buffer=SimpleNamespace(lease_s=60.0), models=models)
    ctx = RoleContext(
        role="teacher", index=0, name="teacher-0", incarnation="first", run_id=RUN, run_dir=Path(run_dir),
        buffer_address=address, resume=False, config=config,
    )  # fmt: skip
    engine: Any = Slow(Path(run_dir) / "begun", pause_s)
    sys.exit(_run(ctx, ScorerSource(VOCAB, Slow.vocab_size, lambda: engine)))


@contextmanager
def teacher_process(address: str, run_dir: Path, *, pause_s: float, drain_s: float) -> Generator[SpawnProcess]:
    process = multiprocessing.get_context("spawn").Process(target=teach, args=(address, str(run_dir), pause_s, drain_s))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def give_work(peer: ScriptedBuffer, n: int, run_dir: Path) -> None:
    """Items, one to a batch; the first is being scored afterwards."""
    items = tuple(m.ScoreItem(i, f"train-{i}-0-0", 1, WORK_TOKENS) for i in range(n))
    eventually(lambda: bool(peer.got(m.ScoreCredit)), "it asked for work")
    peer.send(m.ScoreWork(items), [np.ones(WORK_TOKENS, np.int32)] * n, to=TEACHER)
    eventually((run_dir / "begun").exists, "it began to score")


def gone(peer: ScriptedBuffer, process: SpawnProcess) -> None:
    process.join(PATIENCE_S)
    assert process.exitcode == ExitCode.TERMINATED
    eventually(lambda: any(isinstance(event, PeerDown) for event in peer.events), "it said goodbye")


def test_a_teacher_asked_to_leave_scores_what_it_holds_takes_no_more_and_says_goodbye(tmp_path: Path) -> None:
    with (
        ScriptedBuffer() as peer,
        teacher_process(peer.address, tmp_path, pause_s=0.2, drain_s=PATIENCE_S) as process,
    ):
        give_work(peer, 4, tmp_path)
        os.kill(process.pid or 0, signal.SIGTERM)
        gone(peer, process)
        credits = [got.message.tokens for got in peer.got(m.ScoreCredit)]
        assert credits[0] > 0 and credits[-1] == 0, "it asked for work, and in the end for none"
        assert sorted(lease for got in peer.got(m.Scores) for lease in got.message.leases) == [0, 1, 2, 3]
        assert any(got.message.stats.get("draining") == 1.0 for got in peer.got(m.Heartbeat))


def test_a_teacher_that_cannot_finish_in_time_leaves_all_the_same(tmp_path: Path) -> None:
    """Its engine hangs: the alarm ends that, too."""
    with ScriptedBuffer() as peer, teacher_process(peer.address, tmp_path, pause_s=600.0, drain_s=0.1) as process:
        give_work(peer, 1, tmp_path)
        os.kill(process.pid or 0, signal.SIGTERM)
        gone(peer, process)
        assert not peer.got(m.Scores)


def _still_there(process: SpawnProcess) -> bool:
    """Asked again."""
    if process.is_alive():
        os.kill(process.pid or 0, signal.SIGTERM)
    return process.is_alive()


def test_a_second_request_is_obeyed_at_once(tmp_path: Path) -> None:
    with ScriptedBuffer() as peer, teacher_process(peer.address, tmp_path, pause_s=600.0, drain_s=600.0) as process:
        give_work(peer, 1, tmp_path)
        os.kill(process.pid or 0, signal.SIGTERM)
        eventually(lambda: not _still_there(process), "it left")
        process.join(PATIENCE_S)
        assert process.exitcode in (ExitCode.TERMINATED, -signal.SIGTERM), "the last one may meet no handler any more"
