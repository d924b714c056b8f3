"""Whole actor and teacher processes on real SGLang servers: without torch, and what they do when their server dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.wire
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol import messages as m
from stillhouse.protocol.context import ExitCode
from stillhouse.sglang_server.servers import Servers, SGLangServer
from tests.patience import PATIENCE_S
from tests.sglang.conftest import READY_S, STUDENT, TEACHER, TOLERANCE, Reference
from tests.wire import RUN, ScriptedBuffer

WORKER = """
import faulthandler, logging, sys
from pathlib import Path
from types import SimpleNamespace
import msgspec
from stillhouse.actors.config import ActorConfig
from stillhouse.protocol.context import RoleContext
from stillhouse.teachers.config import TeacherConfig
from stillhouse.weights.config import WeightsConfig
import {role}s.worker

faulthandler.dump_traceback_later(60, exit=True)
logging.basicConfig(level="INFO")
settings = dict(engine="sglang", sglang=dict(start_timeout_s=1.0, health_every_s=0.1))
config = SimpleNamespace(
    actor=msgspec.convert(settings, ActorConfig),
    teacher=msgspec.convert(settings, TeacherConfig),
    buffer=SimpleNamespace(lease_s=60.0),
    models=SimpleNamespace(student={student!r}, teacher={teacher!r}),
    weights=WeightsConfig(),
    learner=SimpleNamespace(tasks=SimpleNamespace(env="single_turn")),
)
context = RoleContext(
    role={role!r}, index=0, name="{role}-0", incarnation="first", run_id={run!r}, run_dir=Path({run_dir!r}),
    buffer_address={address!r}, resume=False, config=config, server_url={url!r},
)
code = {role}s.worker.main(context)
assert not {{"torch", "transformers"}} & set(sys.modules), "torch was imported"
sys.exit(code)
"""


@contextmanager
def worker(role: str, peer: ScriptedBuffer, server: SGLangServer, run_dir: Path) -> Generator[subprocess.Popen[bytes]]:
    """A process that runs the role's main; ended here if it has not ended by itself."""
    code = WORKER.format(
        role=role,
        student=str(STUDENT),
        teacher=str(TEACHER),
        run=RUN,
        run_dir=str(run_dir),
        address=peer.address,
        url=server.url,
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2])
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Generator[ScriptedBuffer]:
    monkeypatch.setattr(tests.wire, "VOCAB", FileTokenizer(STUDENT).fingerprint)
    with ScriptedBuffer() as peer:
        yield peer


@pytest.fixture
def doomed(servers: Servers) -> Generator[SGLangServer]:
    server = servers.start("doomed-worker", STUDENT)
    servers.wait_ready([server], READY_S)
    yield server
    if servers.exit_code(server) is None:
        servers.stop(server, grace_s=0.0)


def ticket(i: int, n: int) -> m.Ticket:
    sampling = m.Sampling(max_new_tokens=n, seed=i)
    return m.Ticket(f"train-{i}-0-0", i, 0, "train", sampling, "single_turn", "", "7", m.WeightVersion(0, 0))


def test_an_actor_writes_on_a_server_and_never_loads_torch(
    peer: ScriptedBuffer, student: SGLangServer, tmp_path: Path, student_reference: Reference
) -> None:
    prompt = np.array([65, 66, 67], np.int32)
    with worker("actor", peer, student, tmp_path) as process:
        peer.expect(m.TicketCredit)
        peer.send(m.Tickets(tuple(ticket(i, 24) for i in range(6))), [prompt] * 6, to=("actor", "actor-0"))
        segments = peer.expect(m.Segment, 6)
        peer.send(m.Shutdown(True, "done"), to=("actor", "actor-0"))
        assert process.wait(PATIENCE_S) == ExitCode.OK

    assert {segment.message.rollout_id for segment in segments} == {f"train-{i}-0-0" for i in range(6)}
    for segment in segments:
        ids, logprobs, mask = segment.arrays[:3]
        expected = student_reference.of_tokens(ids.tolist(), 3)
        assert logprobs[mask.astype(bool)] == pytest.approx(expected, abs=TOLERANCE)
    said: dict[str, Any] = json.loads((tmp_path / "servers" / "actor-0.json").read_text())
    assert said["url"] == student.url and said["facts"]["tp"] == 1 and said["facts"]["device"] == "cpu"


def test_an_actor_whose_server_dies_says_so(peer: ScriptedBuffer, doomed: SGLangServer, tmp_path: Path) -> None:
    prompt = np.array([65, 66, 67], np.int32)
    with worker("actor", peer, doomed, tmp_path) as process:
        peer.expect(m.TicketCredit)
        peer.send(m.Tickets((ticket(0, 900),)), [prompt], to=("actor", "actor-0"))
        peer.expect(m.Segment)
        os.killpg(doomed.pid, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == ExitCode.SERVER_LOST


def test_a_teacher_grades_on_a_server_and_never_loads_torch(
    peer: ScriptedBuffer, teacher: SGLangServer, tmp_path: Path, teacher_reference: Reference
) -> None:
    ids = np.random.default_rng(5).integers(0, 256, 60).astype(np.int32)
    items = tuple(m.ScoreItem(i, f"train-{i}-0-0", 5 * i, 60) for i in range(4))
    with worker("teacher", peer, teacher, tmp_path) as process:
        peer.expect(m.ScoreCredit)
        peer.send(m.ScoreWork(items), [ids] * 4, to=("teacher", "teacher-0"))
        scores = peer.expect(m.Scores)
        peer.send(m.Shutdown(True, "done"), to=("teacher", "teacher-0"))
        assert process.wait(PATIENCE_S) == ExitCode.OK

    grades = {i: grade for got in scores for i, grade in zip(got.message.leases, got.arrays, strict=True)}
    for i in range(1, 4):
        assert grades[i] == pytest.approx(teacher_reference.of_tokens(ids.tolist(), 5 * i), abs=TOLERANCE)
    assert (tmp_path / "servers" / "teacher-0.json").exists()


def test_a_teacher_whose_server_dies_says_so_and_fails_no_lease(
    peer: ScriptedBuffer, doomed: SGLangServer, tmp_path: Path
) -> None:
    with worker("teacher", peer, doomed, tmp_path) as process:
        peer.expect(m.ScoreCredit)
        os.killpg(doomed.pid, signal.SIGKILL)
        ids = np.arange(40, dtype=np.int32)
        peer.send(m.ScoreWork((m.ScoreItem(0, "train-0-0-0", 1, 40),)), [ids], to=("teacher", "teacher-0"))
        assert process.wait(PATIENCE_S) == ExitCode.SERVER_LOST
    assert peer.got(m.ScoreFailed) == []
