"""`stillhouse doctor` with real SGLang servers: sound ones pass, and faults of a server's start are found."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil
import pytest

from stillhouse.launch.checks.finding import Finding
from stillhouse.sglang_server.servers import Servers, SGLangServer
from stillhouse.tools.doctor.command import DoctorReport, main
from tests.sglang.conftest import READY_S, TEACHER, start

SERVED = "servers,off-by-one,temperature,known-text,replica-noise,weights-taken"


def examined(tmp_path: Path, *arguments: str) -> list[Finding]:
    report = tmp_path / "report.json"
    main([f"--json={report}", f"--run-dir={tmp_path / 'run'}", "--device=cpu", *arguments])
    return msgspec.json.decode(report.read_bytes(), type=DoctorReport).findings


def of(found: list[Finding], check: str, subject: str) -> Finding:
    return next(one for one in found if one.check == check and one.subject == subject)


def test_running_servers_pass_and_have_their_weights_back(
    servers: Servers, teacher: SGLangServer, tmp_path: Path
) -> None:
    (student,) = start(servers, "examined")  # not the one of other tests: its weights have the doctor's label then
    urls = (f"--actor.urls={student.url}", f"--teacher.urls={teacher.url}")
    found = examined(tmp_path, *urls, f"--only={SERVED}")
    assert [(one.check, one.subject) for one in found if one.status not in ("ok", "skipped")] == [], found
    assert of(found, "weights taken", "actor").figures["former_nats"] > 0.1
    again = examined(tmp_path, *urls, "--only=off-by-one")
    assert of(again, "off by one", "actor").status == "ok", "the student's weights are back"
    servers.stop(student)


def test_servers_are_started_and_ended(servers: Servers, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    engines = ("--actor.engine=sglang", "--teacher.engine=sglang", "--actors=4", "--teachers=2")
    found = examined(tmp_path, *engines, f"--only={SERVED}")
    assert {one.status for one in found} == {"ok"}, found
    assert of(found, "servers", "").measured.startswith("server-actor-0, server-teacher-0 answered")
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_teacher_with_dummy_weights(servers: Servers, tmp_path: Path) -> None:
    server = servers.start("dummy", TEACHER, ("--load-format", "dummy"))
    servers.wait_ready([server], READY_S)
    found = examined(tmp_path, f"--teacher.urls={server.url}", "--only=off-by-one,known-text")
    assert of(found, "off by one", "pool default").status == "failed"
    assert of(found, "known text", "pool default").status == "failed"


def test_a_server_that_does_not_start(servers: Servers, tmp_path: Path) -> None:
    wrong = ("--teacher.engine=sglang", "--teacher.server.args=--no-such-argument")
    found = examined(tmp_path, *wrong, "--only=servers,known-text")
    failed = of(found, "servers", "")
    assert failed.status == "failed" and "no-such-argument" in failed.measured
    assert of(found, "known text", "").status == "skipped"


def test_a_server_that_reports_logprobs_at_temperature_1(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    found = examined(tmp_path, "--actor.engine=sglang", "--only=temperature")
    assert of(found, "temperature", "actor").status == "ok", "the run samples at 1"
    assert "the engine refuses temperature 1.5" in of(found, "temperature", "actor").measured
    refused = examined(tmp_path, "--actor.engine=sglang", "--learner.tasks.temperature=0.8", "--only=temperature")
    assert of(refused, "temperature", "actor").status == "failed"
