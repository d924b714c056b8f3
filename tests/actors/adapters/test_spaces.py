"""Spaces in words, and actions out of words."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from tests.actors.adapters.conftest import MADE_BY

spaces: Any = pytest.importorskip("gymnasium", reason=MADE_BY).spaces
ours: Any = importlib.import_module("stillhouse.actors.envs.adapters.shared.spaces")

POINT = spaces.Tuple((spaces.Discrete(3, start=1), spaces.Text(4)))


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Discrete(4), "a whole number from 0 to 3"),
        (spaces.Discrete(2, start=-1), "a whole number from -1 to 0"),
        (spaces.MultiDiscrete([3, 3]), "2 whole numbers, each from 0 to 2"),
        (spaces.MultiDiscrete([3, 5]), "2 whole numbers: from 0 to 2, from 0 to 4"),
        (spaces.MultiBinary(3), "3 numbers, each 0 or 1"),
        (spaces.Box(-2.0, 2.0, (1,)), "a number from -2 to 2"),
        (spaces.Box(-np.inf, 1.0, (2, 2)), "4 numbers, each of at most 1"),
        (spaces.Box(np.zeros(9), np.arange(9.0), dtype=np.float64), "9 numbers from 0 to 8"),
        (POINT, "a JSON list of a whole number from 1 to 3; a text of 1 to 4 characters out of"),
        (spaces.Dict({"a": spaces.Discrete(2)}), 'a JSON object with "a": a whole number from 0 to 1'),
    ],
)
def test_a_space_in_words(space: Any, words: str) -> None:
    assert ours.describe(space).startswith(words)


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Discrete(4), np.int64(3), "3"),
        (spaces.Box(-9, 9, (2, 2)), np.array([[1.0, 0.33333], [1e-9, -2.5]]), "[[1, 0.3333], [0, -2.5]]"),
        (POINT, (2, "ab"), "2, ab"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"a": 1}, "a: 1"),
        (spaces.Graph(spaces.Discrete(2), None), "whatever", "whatever"),
    ],
)
def test_an_observation_in_words(space: Any, value: Any, text: str) -> None:
    assert ours.show(space, value) == text


@pytest.mark.parametrize(
    ("space", "turn", "action"),
    [
        (spaces.Discrete(3, start=1), "2, no, 3.", 3),
        (spaces.Discrete(3, start=1), "0", None),
        (spaces.MultiDiscrete([3, 5]), "first 1, then 4", [1, 4]),
        (spaces.MultiDiscrete([3, 5]), "7 or rather 2 4", [2, 4]),
        (spaces.MultiDiscrete([3, 5]), "1.5, 4", None),
        (spaces.MultiDiscrete([3, 5]), "4", None),
        (spaces.MultiBinary(2), "[1, 0]", [1, 0]),
        (spaces.Box(-2.0, 2.0, (2,)), "x = -1.25, y = 1e-1", [-1.25, 0.1]),
        (spaces.Box(-2.0, 2.0, (2,)), "3, 0", None),
        (spaces.Text(4), "  abc ", "abc"),
        (spaces.Text(4), "abcde", None),
        (POINT, 'x [1, "no"] y [2, "yes"]', (2, "yes")),
        (POINT, '[2, "yes", 3]', None),
        (POINT, "[" * 5_000, None),
        (spaces.Dict({"a": spaces.Discrete(2)}), '{"a": {"a": 1}}', None),
        (spaces.Dict({"a": spaces.Discrete(2)}), '{"a": true', None),
    ],
)
def test_the_last_action_in_a_turn(space: Any, turn: str, action: Any) -> None:
    found = ours.Actions(space).read(turn)
    if action is None:
        assert found is None
    elif isinstance(action, list):
        assert found.tolist() == pytest.approx(action) and found.dtype == space.dtype
    else:
        assert found == action
