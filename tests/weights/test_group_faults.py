"""A short campaign of bench/faults/group_faults.py, and that it finds what it is there for."""

from __future__ import annotations

import time

import pytest

from stillhouse.weights.group_operations import GroupOperations
from tests.sim.weights.group_campaign import Kind, run_campaign


@pytest.mark.parametrize("kind", ["engines", "servers"])
def test_the_newest_version_reaches_all_who_live_after_each_of_20_faults(kind: Kind) -> None:
    verdict = run_campaign(kind, 20, seed=3)
    assert verdict.struck.total() >= 20
    assert not verdict.findings, verdict


def test_it_finds_an_error_of_a_finished_operation_that_nobody_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the code was: "completed" was taken for a success."""

    def finished(group: GroupOperations, until_s: float) -> bool:
        completed = group._under_way[0].is_completed()  # pyright: ignore[reportPrivateUsage]
        if completed:
            group._under_way[0].wait()  # pyright: ignore[reportPrivateUsage]
        else:
            time.sleep(0.0005)
        return completed

    monkeypatch.setattr(GroupOperations, "_finished_on_gpu", finished)
    verdict = run_campaign("engines", 20, seed=3)
    assert any("PublisherFailed" in finding for finding in verdict.findings), verdict
