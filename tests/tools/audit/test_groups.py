"""An audit checks what dynamic sampling and overlong filtering promise, in runs that have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stillhouse.tools.audit import report
from stillhouse.tools.audit.run import audit
from tests.tools.audit.written import MAGIC, Written, batch, begin, item, trained

KEYS = {"max_staleness": 1, "dynamic_sampling": 10, "mask_truncated": True}


def run_of(tmp_path: Path, *records: bytes, first: Mapping[str, Any] = KEYS, now: Mapping[str, Any] = KEYS) -> Written:
    """`first`: the keys that the record says the run began with."""
    run = Written(tmp_path)
    run.file.write_bytes(MAGIC + begin(config={"buffer": dict(first)}) + b"".join(records))
    run.config(now)
    return run


def faults(run: Written) -> dict[str, int]:
    return {kind: fault.count for kind, fault in audit(run.path).faults.items() if fault.count}


def pair(task: int, *rewards: float | None, finish: str = "stop") -> list[tuple[dict[str, Any], bytes]]:
    return [item(task, n, (2, 5), reward=reward, finish=finish) for n, reward in enumerate(rewards)]


def test_groups_that_differ_and_groups_that_were_dropped_are_clean(tmp_path: Path) -> None:
    dropped = [(1, n, "dropped", "equal_rewards") for n in range(2)]
    run = run_of(tmp_path, batch((0, 0), *pair(0, 0.0, 1.0), settled=[*dropped, *trained((0, 0), (0, 1))]))
    found = audit(run.path)
    assert found.clean and found.fates == {"trained": 2, "dropped (equal_rewards)": 2}
    assert "settled     2 dropped (equal_rewards), 2 trained" in str(found)


@pytest.mark.parametrize(("rewards", "said"), [((1.0, 1.0), "1.0"), ((0.5, None), "0.5"), ((None, None), "not there")])
def test_a_group_of_equal_rewards_in_a_batch_is_found(
    tmp_path: Path, rewards: tuple[float | None, ...], said: str
) -> None:
    run = run_of(tmp_path, batch((0, 0), *pair(0, 0.0, 1.0), *pair(1, *rewards), settled=[]))
    assert faults(run) == {report.EQUAL_GROUPS: 1}
    (place,) = audit(run.path).faults[report.EQUAL_GROUPS].places
    assert str(place) == f"step 0.0, batch 1, task 1: its rewards are {said}"


def test_a_rollout_without_a_token_to_train_counts_in_its_group(tmp_path: Path) -> None:
    """Masked as truncated: its reward is there, and no token of it is trained."""
    items = [item(0, 0, (2, 5), reward=1.0), item(0, 1, reward=0.0, finish="length")]
    assert faults(run_of(tmp_path, batch((0, 0), *items, settled=[]))) == {}


def test_trained_tokens_of_a_truncated_rollout_are_found(tmp_path: Path) -> None:
    run = run_of(tmp_path, batch((0, 0), *pair(0, 0.0, 1.0, finish="length"), settled=[]))
    assert faults(run) == {report.TRUNCATED: 6}


def test_a_sample_that_was_dropped_for_equal_rewards_and_trained_is_found(tmp_path: Path) -> None:
    wrong = [(0, 0, "dropped", "equal_rewards"), (0, 1, "trained", "")]
    assert faults(run_of(tmp_path, batch((0, 0), *pair(0, 0.0, 1.0), settled=wrong))) == {report.SETTLED_WRONG: 1}


@pytest.mark.parametrize("off", ["first", "now"])
def test_a_run_that_was_without_them_at_one_time_is_not_held_to_them(tmp_path: Path, off: str) -> None:
    records = batch((0, 0), *pair(0, 1.0, 1.0, finish="length"), settled=[])
    assert faults(run_of(tmp_path, records, **{off: {"max_staleness": 1}})) == {}
