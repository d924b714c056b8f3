"""Whole runs whose teacher is behind an API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse.builtin import TEACHER_DIR
from tests.engines.api.completions import KEY, Api, serving
from tests.integration.conftest import Launched
from tests.vllm import attached

SHORT = ("--actors=1", "--learner.eval_every=0", "--buffer.max_staleness=0", "--seed=5")


def kls(run: Launched) -> list[float]:
    return [row["train/reverse_kl"] for row in run.steps()]


def test_a_run_with_an_api_trains_on_what_an_embedded_teacher_says(
    launch: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At staleness 0, so both runs see the same tokens."""
    monkeypatch.setenv("SOME_KEY", KEY)
    with serving(Api("vllm", key=KEY)) as api:
        run = launch(*SHORT, "--steps=3", "--teacher.api", api.url, "--teacher.api.key_env=SOME_KEY")
        assert run.wait() == 0, run.text()
    embedded = launch(*SHORT, "--steps=3", folder="embedded")
    assert embedded.wait() == 0, embedded.text()
    assert kls(run) == pytest.approx(kls(embedded), abs=1e-4)
    last, summary = run.steps()[-1], run.summary()
    assert summary["tokens"]["balanced"] and last["teachers/api_sent_tokens"] > last["train/tokens"]
    assert not any(name.startswith(("teachers/api_unscored", "flops/teacher")) for name in last), last
    assert embedded.steps()[-1]["flops/teacher"] > 0, "of a model that is not here nothing is known"
    run.expect_clean_audit()
    files = [file for file in run.run_dir.rglob("*") if file.is_file()]
    assert not [str(file) for file in [*files, run.record, run.output] if KEY.encode() in file.read_bytes()]


def test_a_spent_budget_ends_the_run_with_a_checkpoint_and_stays_spent(launch: Callable[..., Launched]) -> None:
    with serving(Api("sglang")) as api:
        flags = ("--pools.far.api", api.url, "--learner.tasks.routes={far: []}", "--pools.far.api.budget_tokens=9000")
        run = launch(*SHORT, "--steps=500", *flags)
        assert run.wait() == 7, run.text()
        text, summary = run.text(), run.summary()
        again = launch("--resume")
        assert again.wait() == 7, again.text()
    assert "teacher-0 has spent the budget of its API" in text and "tokens sent of 9,000" in text
    assert summary["state"] == "stopped" and 0 < summary["steps"] < 500 and summary["checkpoint"]
    assert sum(len(one["prompt"]) + 1 for one in api.asked) <= 9000
    spent = json.loads((run.run_dir / "spent" / "teacher-0.json").read_text())
    assert 8000 < spent["tokens"] <= 9000


def test_a_vllm_server_that_is_killed_and_comes_back_teaches_what_an_embedded_teacher_does(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """A real server. What it owed is asked again, so no token is masked."""
    with attached.serving(TEACHER_DIR, tmp_path / "first.log") as server:
        attached.wait_ready(server)
        flags = ("--teacher.api", server.url, "--teacher.api.timeout_s=40", "--teacher.api.reference", str(TEACHER_DIR))
        run = launch(*SHORT, "--steps=4", *flags)
        run.until(lambda: len(run.steps()) >= 2, "a second step")
        server.kill()
        with attached.serving(TEACHER_DIR, tmp_path / "second.log", server.port):
            assert run.wait() == 0, run.text()
    embedded = launch(*SHORT, "--steps=4", folder="embedded")
    assert embedded.wait() == 0, embedded.text()
    assert kls(run) == pytest.approx(kls(embedded), abs=1e-4)
    tokens = run.summary()["tokens"]
    assert tokens["balanced"] and tokens["trained"] == tokens["accepted"] == embedded.summary()["tokens"]["accepted"]
    run.expect_clean_audit()
