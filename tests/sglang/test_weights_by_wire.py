"""Versions that actors fetch from the learner and hand to real SGLang servers as files: the way between hosts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import stillhouse.weights.transports.wire
import stillhouse.weights.wire
from stillhouse.sglang_server.servers import SGLangServer
from stillhouse.weights.wire import WINDOW
from tests.sglang.conftest import Named
from tests.sglang.test_weight_push import V1, V2, WAIT_S, Run, wait_until

PIECE_BYTES: Final = 32 << 10
"""So small that a version of the built-in student does not fit into one window."""


@pytest.fixture
def run(tmp_path: Path, student_weights: Named, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    for module in (stillhouse.weights.wire, stillhouse.weights.transports.wire):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)
    assert sum(tensor.nbytes for _, tensor in student_weights) > WINDOW * PIECE_BYTES
    run = Run(tmp_path, student_weights)
    yield run
    run.close()
    assert list(files.iterdir()) == [], "no copy of a version is left"


@pytest.mark.parametrize("n_servers", [1, 3])
def test_each_server_answers_under_the_version_that_its_actor_fetched(
    run: Run, three: list[SGLangServer], n_servers: int
) -> None:
    publisher = run.start(three[:n_servers], check_by="canary", transport="wire")
    for version in (V1, V2):
        run.publish(version)
        assert publisher.wait_idle(WAIT_S)
        run.delivered(version)
    assert {plan.backend for plan in run.plans} == {"wire"}
    assert run.published == [V1, V2]
    assert (publisher.stats.members, publisher.stats.dropped_total) == (n_servers, {})
    assert not list(run.folder.glob("**/*.safetensors")), "nothing was written where only the learner's host sees it"
    for actor in run.actors.values():
        assert actor.stats["weight_canaries_total"] == 1


def test_a_file_that_its_server_cannot_see_is_refused_by_name_and_the_next_one_arrives(
    run: Run, three: list[SGLangServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a server on another machine than its actor would see of it: nothing."""
    publisher = run.start(three[:1], check_by="canary", transport="wire")
    (actor,) = run.actors.values()
    from_disk = actor.weights._from_disk  # pyright: ignore[reportPrivateUsage]

    def from_another_disk(folder: str, label: dict[str, str]) -> tuple[str, dict[str, Any]]:
        return from_disk(f"{folder}-elsewhere", label)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(actor.weights, "_from_disk", from_another_disk)
        run.publish(V1)
        wait_until(lambda: publisher.stats.dropped_total.get("refused", 0) >= 1)
        assert actor.weights.version is None, "it samples under no version until it has one whole"
    assert "/update_weights_from_disk" in caplog.text and "-elsewhere" in caplog.text
    run.publish(V2)
    run.delivered(V2)
