"""A user's function that judges the answers of a group: what it sees, what becomes of its rewards and of its faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from stillhouse.learner.group_rewards import GroupRewards, GroupRewardsFailed
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.protocol.messages import Batch, BatchItem, Branch, TurnReward, VersionSpan, WeightVersion
from tests.learner.records import NONE, batch
from tests.learner.settings import learner_config

V0: Final = WeightVersion(0, 0)
Rows = Sequence[Mapping[str, Any]]
seen: list[tuple[Rows, Sequence[str], Sequence[float | None]]] = []


def notes(rows: Rows, texts: Sequence[str], rewards: Sequence[float | None]) -> list[float | None]:
    """Longest text 1, others 0; no reward for a text of two tokens."""
    seen.append((rows, texts, rewards))
    return [None if len(t) == 2 else float(len(t) == max(map(len, texts))) for t in texts]


def raises(rows: Rows, texts: Sequence[str], rewards: Sequence[float | None]) -> list[float | None]:
    if rows[0]["n"] == 1:
        raise KeyError("judge")
    return [1.0] * len(texts)


def short(rows: Rows, texts: Sequence[str], rewards: Sequence[float | None]) -> list[float | None]:
    return [1.0]


def nan(rows: Rows, texts: Sequence[str], rewards: Sequence[float | None]) -> list[float | None]:
    return [float("nan")] * len(texts)


def huge(rows: Rows, texts: Sequence[str], rewards: Sequence[float | None]) -> list[float | None]:
    return [-101.0, *[None] * (len(texts) - 1)]


def text(rows: Rows, texts: Sequence[str], rewards: Sequence[float | None]) -> list[Any]:
    return ["good"] * len(texts)


def nothing(rows: Rows, texts: Sequence[str], rewards: Sequence[float | None]) -> None:
    return None


def group_rewards(function: object, rows: Mapping[int, bytes] | None = None) -> GroupRewards:
    found = {1: b'{"n": 1}', 2: b'{"n": 2}'} if rows is None else rows
    path = f"{__name__}:{getattr(function, '__name__', '')}"
    return GroupRewards(path, found.get, lambda ids: "".join(chr(97 + i) for i in ids), limit=100.0)


def given() -> tuple[Batch, list[np.ndarray]]:
    """Two groups, mixed up; of a branching answer of two turns one token was trained before; one is not whole."""

    def item(name: str, task_id: int, sampled: Sequence[int], **fields: Any) -> tuple[BatchItem, list[np.ndarray]]:
        spans = tuple(VersionSpan(V0, t, t + 1) for t, s in enumerate(sampled) if s)
        plain: dict[str, Any] = {"final": True, "finish_reason": "stop", "reward": 0.5, "n_turns": 1} | fields
        made = BatchItem(name, task_id, 0, 3, "", (), len(sampled), spans, **plain)
        mask = np.array(sampled, np.uint8)
        if name == "a":
            mask[1] = 0  # trained before
        ids = np.arange(len(sampled), dtype=np.int32)
        return made, [ids, np.zeros(len(ids), np.float32), mask, np.zeros((0, len(ids)), np.float32)]

    parts = (TurnReward(3, 0.25), TurnReward(6, 0.25))
    made = [
        item("a", 1, [0, 1, 1, 0, 1, 1], turn_rewards=parts, branches=(Branch(3, 1),)),
        item("b", 2, [0, 0, 1]),
        item("c", 1, [0, 1, 1], reward=None),
        item("d", 2, [0, 1, 0], final=False, reward=None, finish_reason=None),
        item("e", 2, [0, 1, 1, 1], reward=1.0),
    ]
    plain, _ = batch(0, [])
    arrays = [array for _, frames in made for array in frames]
    return msgspec.structs.replace(plain, items=tuple(one for one, _ in made)), arrays


def test_a_group_is_judged_at_once_and_its_rewards_replace_the_environment_s() -> None:
    seen.clear()
    message, arrays = given()
    got = group_rewards(notes).apply(message, arrays)
    (first, second) = seen
    assert first == ([{"n": 1}, {"n": 1}], ["bc\nef", "bc"], [0.5, None])
    assert second == ([{"n": 2}, {"n": 2}], ["c", "bcd"], [0.5, 1.0])
    assert [item.reward for item in got.items] == [1.0, 0.0, None, None, 1.0]
    assert got.items[0].turn_rewards and msgspec.structs.replace(got, items=message.items) == message


@pytest.mark.parametrize(("function", "reason"), [(raises, "raised")])
def test_a_group_for_which_it_fails_is_not_judged_and_counted(function: object, reason: str) -> None:
    judge = group_rewards(function)
    got = judge.apply(*given())
    assert [item.reward for item in got.items] == [None, 1.0, None, None, 1.0]
    assert got.items[0].turn_rewards == ()
    assert judge.figures == {f"rollouts/group_reward_{reason}_total": 1.0}


def test_a_group_whose_row_is_not_known_is_not_judged() -> None:
    judge = group_rewards(notes, {2: b""})
    assert [item.reward for item in judge.apply(*given()).items] == [None, 0.0, None, None, 1.0]
    assert judge.figures == {"rollouts/group_reward_no_row_total": 1.0}


@pytest.mark.parametrize("function", [short, nan, huge, text, nothing])
def test_a_function_that_judges_no_group_ends_the_run(function: object) -> None:
    with pytest.raises(GroupRewardsFailed, match="failed for all 2 groups of a batch; task 2: it returned"):
        group_rewards(function).apply(*given())


def test_a_function_that_cannot_be_loaded_or_trains_nothing_is_refused() -> None:
    for path, message in (
        ("no_module:f", "cannot load"),
        (f"{__name__}:V0", "is a WeightVersion, expected a function"),
    ):
        with pytest.raises(ValueError, match=message):
            GroupRewards(path, lambda task_id: b"", lambda ids: "", limit=100.0)
    with pytest.raises(ValueError, match="expected module:function"):
        TaskConfig(group_reward="judge")
    with pytest.raises(ValueError, match="which trains on no reward"):
        learner_config(tasks=TaskConfig(group_reward="my:judge"))
    assert NONE.balanced
