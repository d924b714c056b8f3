"""Importance weights against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch

from learner.importance import IMPORTANCE, ImportanceOptions

OPTIONS = ImportanceOptions(cap=1.5, low=0.5, high=2.0)
RATIOS = [0.0, 0.1, 0.5, 0.999, 1.0, 1.5, 1.7, 2.0, 2.1, 30.0, math.inf]


def _slow(name: str, ratio: float) -> tuple[float, bool]:
    if name == "none":
        return 1.0, False
    if name == "truncated":
        return (OPTIONS.cap, True) if ratio > OPTIONS.cap else (ratio, False)
    return (ratio, False) if OPTIONS.low <= ratio <= OPTIONS.high else (0.0, True)


@pytest.mark.parametrize("name", IMPORTANCE)
def test_equal_to_the_loop(name: str) -> None:
    weights_N, cut_N = IMPORTANCE[name](torch.tensor(RATIOS, dtype=torch.float64), OPTIONS)
    expected = [_slow(name, ratio) for ratio in RATIOS]
    assert weights_N.tolist() == [weight for weight, _ in expected]
    assert cut_N.tolist() == [cut for _, cut in expected]
