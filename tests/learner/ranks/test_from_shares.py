"""Weights that several ranks publish reach actors bit for bit, while no rank holds a whole copy of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.learner.ranks.from_shares import CASES
from tests.learner.ranks.processes import run_ranks

MODULE = "tests.learner.ranks.from_shares"


def found_by(n_ranks: int, *cases: str, replicas: int = 1) -> dict[str, Any]:
    ended = run_ranks(n_ranks, MODULE, *cases, replicas=replicas)
    for one in ended:
        assert one.returncode == 0, one.stderr[-3000:]
    return {name: of_case for line in ended[0].stdout.splitlines() for name, of_case in json.loads(line).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("n_ranks", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_actors_get_what_one_process_has_and_no_rank_holds_it_all(n_ranks: int, replicas: int) -> None:
    cases, shares = [name for name in CASES if name != "dead rank"], n_ranks // replicas
    found = found_by(n_ranks, *cases, replicas=replicas)
    assert list(found) == cases, "every case ran"
    memory = found.pop("memory")
    wrong = {case: {what: n for what, n in of_case.items() if n} for case, of_case in found.items()}
    assert all(found.values()) and not any(wrong.values()), wrong
    # Two versions, each a share of the weights; a bucket, and the other ranks' parts of it. Shares differ by a row.
    assert memory["living"] <= 2.1 * memory["whole"] / shares + 3 * memory["bucket"], memory
    assert memory["living"] > memory["whole"] / shares, "it was looked at"
    assert memory["largest"] <= 1.1 * memory["whole"] / shares, "no tensor was put together before it was copied"


@pytest.mark.slow
def test_a_rank_that_dies_fails_the_publisher() -> None:
    first, second = run_ranks(2, MODULE, "dead rank")
    assert second.returncode == 9
    assert first.returncode == 0, first.stderr[-3000:]
    found = json.loads(first.stdout.splitlines()[-1])["dead rank"]
    assert found["cause"] == "RanksLost" and "rank 1 did not send its share" in found["said"], found
