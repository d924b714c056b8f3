"""Servers that the doctor starts for the examination, with a stand-in for SGLang that a process each runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stillhouse.launch.checks.finding import Finding
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.examiner import findings
from stillhouse.tools.doctor.table import CHECKS
from tests.tools.doctor.conftest import Examine

FAKE_SGLANG = Path(__file__).parents[2] / "launch" / "fake_sglang"
ENGINE = ("--teachers=3", "--teacher.engine=sglang", f"--teacher.server.python={sys.executable}")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FAKE_SGLANG}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def examined(name: str, case: ModelCase) -> list[Finding]:
    return list(findings(next(check for check in CHECKS if check.name == name), case))


def test_one_server_of_each_kind_is_started_and_ended(case: Callable[..., ModelCase]) -> None:
    one, before = case(*ENGINE), set(psutil.Process().children(recursive=True))  # other tests' helpers among them
    (found,) = examined("servers", one)
    assert found.status == "ok" and found.measured.startswith("server-teacher-0 answered after")
    assert set(psutil.Process().children(recursive=True)) - before
    one.close()
    assert set(psutil.Process().children(recursive=True)) - before == set()


def test_a_server_that_dies(case: Callable[..., ModelCase]) -> None:
    """The end of its log says why, and what needs it is skipped."""
    one = case(*ENGINE, "--teacher.server.args=--behave,crash")
    (found,) = examined("servers", one)
    assert found.status == "failed"
    assert "the server of teacher-0 ended with exit code 1; its log ends with" in found.measured
    assert "RuntimeError: no such attention backend" in found.measured
    (scores,) = examined("known text", one)
    assert scores.status == "skipped" and "starting servers failed, see above" in scores.measured


def test_a_server_that_never_answers(case: Callable[..., ModelCase]) -> None:
    one = case(*ENGINE, "--teacher.server.args=--behave,mute", "--teacher.server.start_timeout_s=2")
    (found,) = examined("servers", one)
    assert found.status == "failed" and "did not answer within 2 s (server.start_timeout_s)" in found.measured


def test_a_run_without_servers(examine: Examine) -> None:
    (found,) = examine("servers")
    assert found.status == "skipped" and found.measured == "no engine is a server"
