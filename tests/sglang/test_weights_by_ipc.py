"""Versions that real SGLang servers copy out of the learner's memory: /update_weights_from_tensor, flattened_bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stillhouse.sglang_server.servers import SGLangServer
from stillhouse.weights import shared_memory
from tests.sglang.conftest import Named
from tests.sglang.test_weight_push import V1, V2, V3, WAIT_S, Run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found: list[Path] = []
    reserve = vars(shared_memory)["_reserve"]

    def noted(path: Path, n_bytes: int) -> None:
        found.append(path)
        reserve(path, n_bytes)

    monkeypatch.setattr(shared_memory, "_reserve", noted)
    return found


@pytest.fixture
def run(tmp_path: Path, student_weights: Named) -> Iterator[Run]:
    run = Run(tmp_path, student_weights)
    yield run
    run.close()


@pytest.mark.parametrize("n_servers", [1, 3])
def test_each_server_answers_under_the_version_as_transformers_does(
    run: Run, three: list[SGLangServer], n_servers: int, made: list[Path]
) -> None:
    publisher = run.start(three[:n_servers], transport="ipc", verify_every=1, bucket_bytes=65536)
    for version in (V1, V2, V3):
        run.publish(version)
        assert publisher.wait_idle(WAIT_S)
        run.delivered(version)
    assert {plan.backend for plan in run.plans} == {"ipc"}
    assert run.published == [V1, V2, V3]
    assert (publisher.stats.members, publisher.stats.dropped_total) == (n_servers, {})
    assert len(made) == 2
    for actor in run.actors.values():
        assert actor.stats["weight_canaries_total"] == 3 and actor.stats["weight_checks_total"] == 1
