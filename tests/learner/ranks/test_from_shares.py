"""Weights that several ranks publish reach actors bit for bit, while no rank holds a whole copy of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.learner.ranks.from_shares import CASES
from tests.learner.ranks.processes import run_ranks

MODULE = "tests.learner.ranks.from_shares"


def found_by(n_ranks: int, *cases: str) -> dict[str, Any]:
    ended = run_ranks(n_ranks, MODULE, *cases)
    for one in ended:
        assert one.returncode == 0, one.stderr[-3000:]
    return {name: of_case for line in ended[0].stdout.splitlines() for name, of_case in json.loads(line).items()}


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_actors_get_what_one_process_has_and_no_rank_holds_it_all(n_ranks: int) -> None:
    cases = [name for name in CASES if name != "dead rank"]
    found = found_by(n_ranks, *cases)
    assert list(found) == cases, "every case ran"
    memory = found.pop("memory")
    wrong = {case: {what: n for what, n in of_case.items() if n} for case, of_case in found.items()}
    assert all(found.values()) and not any(wrong.values()), wrong
    # Two versions, each a share of the weights; a bucket, and the other ranks' parts of it. Shares differ by a row.
    assert memory["living"] <= 2.1 * memory["whole"] / n_ranks + 3 * memory["bucket"], memory
    assert memory["living"] > memory["whole"] / n_ranks, "it was looked at"
    assert memory["largest"] <= 1.1 * memory["whole"] / n_ranks, "no tensor was put together before it was copied"


def test_a_rank_that_dies_fails_the_publisher() -> None:
    first, second = run_ranks(2, MODULE, "dead rank")
    assert second.returncode == 9
    assert first.returncode == 0, first.stderr[-3000:]
    found = json.loads(first.stdout.splitlines()[-1])["dead rank"]
    assert found["cause"] == "RanksLost" and "rank 1 did not send its share" in found["said"], found
