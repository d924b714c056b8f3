"""Runs of numbers against a plain dict, and ended rollouts by any text that may ask for them."""

from __future__ import annotations

from random import Random

import pytest

from stillhouse.buffer import history
from stillhouse.buffer.history import EndedRollouts, Runs


@pytest.mark.parametrize("seed", range(20))
def test_runs_hold_what_a_dict_would_hold(seed: int) -> None:
    rng = Random(seed)
    runs: Runs[str] = Runs()
    expected: dict[int, str] = {}
    for _ in range(400):
        number = rng.randrange(-5, 25)
        if rng.random() < 0.3:
            runs.discard(number)
            expected.pop(number, None)
        else:
            expected[number] = rng.choice("ab")
            runs.put(number, expected[number])
        assert {i: runs.get(i) for i in range(-6, 27) if i in runs} == expected
        assert runs.n_numbers == len(expected)
        assert runs.n_runs == sum(expected.get(i - 1) != value for i, value in expected.items())


def test_forgetting_begins_with_the_lowest_run() -> None:
    runs: Runs[str] = Runs()
    for number in (7, 8, 1, 2, 4):
        runs.put(number, "x")
    runs.forget_lowest()
    assert [number in runs for number in (1, 2, 4, 7, 8)] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "text",
    ["", "train-1", "train-1-0-0-0", "train-01-0-0", "train-+1-0-0", "train-1-0-0\n", "other-1-0-0", "eval-1-0-0",
     "train-1-1-0", "train-1-0-1", "train-٣-0-0", "train-1_0-0-0", f"train-{'9' * 5000}-0-0"],
)  # fmt: skip
def test_a_rollout_that_did_not_end_is_not_taken_for_one_that_did(text: str) -> None:
    rollouts = EndedRollouts()
    for rollout_id in ("train-1-0-0", "train-3-0-0", "train-10-0-0"):
        rollouts.put(rollout_id, 2)
    assert rollouts.get(text) is None
    assert rollouts.get("train-1-0-0") == 2


def test_an_id_that_no_ticket_has_is_refused() -> None:
    with pytest.raises(ValueError, match="expected kind-task-sample-attempt"):
        EndedRollouts().put("train-01-0-0", 1)


def test_ended_rollouts_are_forgotten_oldest_first_when_there_are_too_many_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "MAX_RUNS_REMEMBERED", 10)
    rollouts = EndedRollouts()
    for task_id in range(100):
        for sample in (0, 1):
            rollouts.put(f"train-{task_id}-{sample}-0", task_id)  # no two alike
    assert rollouts.n_runs == 10
    for sample in (0, 1):
        remembered = [i for i in range(100) if rollouts.get(f"train-{i}-{sample}-0") is not None]
        assert remembered == [95, 96, 97, 98, 99]
        assert rollouts.get(f"train-97-{sample}-0") == 97
