"""What the tests of rewards share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import pytest

from stillhouse.actors.rewards import Answered, Verdict, make_reward

Judge: TypeAlias = Callable[..., Verdict]


@pytest.fixture
def judge() -> Judge:
    """Makes a reward and judges one response with it."""

    def judged(name: str, response: str, ground_truth: str | None = None, /, **options: object) -> Verdict:
        reward = make_reward(name, **options)
        return asyncio.run(reward(Answered(response, ground_truth, prompt="1+1=")))

    return judged
