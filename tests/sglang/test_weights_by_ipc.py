"""Versions that real SGLang servers copy out of the learner's memory: /update_weights_from_tensor, flattened_bucket."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillhouse.engines.sglang import weights
from stillhouse.sglang_server.servers import SGLangServer
from stillhouse.weights import shared_memory
from tests.patience import eventually
from tests.sglang.conftest import Named
from tests.sglang.test_weight_push import V1, V2, V3, WAIT_S, Run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found: list[Path] = []
    reserve = vars(shared_memory)["_reserve"]
    monkeypatch.setattr(shared_memory, "_reserve", lambda path, n: (found.append(path), reserve(path, n)))
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
    publisher = run.start(three[:n_servers], transport="ipc", verify_every=1)
    for version in (V1, V2, V3):
        run.publish(version)
        assert publisher.wait_idle(WAIT_S)
        run.delivered(version)
    assert {plan.backend for plan in run.plans} == {"ipc"}
    assert run.published == [V1, V2, V3]
    assert (publisher.stats.members, publisher.stats.dropped_total) == (n_servers, {})
    assert 1 <= len(made) <= 2
    for actor in run.actors.values():
        assert actor.stats["weight_canaries_total"] == 3 and actor.stats["weight_checks_total"] == 1


def test_nothing_is_left_when_the_learner_is_done(run: Run, three: list[SGLangServer], made: list[Path]) -> None:
    publisher = run.start(three[:1], transport="ipc")
    run.publish(V1)
    run.delivered(V1)
    publisher.close()
    publisher._spare.clear()  # pyright: ignore[reportPrivateUsage]
    publisher._newest = None  # pyright: ignore[reportPrivateUsage]
    gc.collect()
    eventually(lambda: not any(path.exists() for path in made), "segments are removed")


def test_servers_that_somebody_else_started_get_none(run: Run, three: list[SGLangServer]) -> None:
    run.start(three[:1], transport="ipc")
    (actor,) = run.actors.values()
    theirs = weights.ServerWeights(actor.engine, student="/nowhere", ours=False)
    with pytest.raises(ValueError, match="only servers that the launcher started"):
        theirs.check(run.plans[0])
