"""What the longest rollouts take on the wire is told before anything starts, with the keys for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import stillhouse.buffer.batch_size
from stillhouse.launch.config.message_sizes import batches_that_will_be_cut, rollouts_that_no_message_holds
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from tests.buffer.driver import PROMPT, Driver

ROWS = 150_000


def config(*, new: int = 30_000, top_k: int = 0, env: str = "single_turn", **branches: Any) -> RunConfig:
    """A batch of 64."""
    learner = {"tasks": {"max_new_tokens": new, "max_prompt_tokens": 768, "env": env}}
    return build(RunConfig, {"learner": learner, "teacher": {"top_k": top_k}, **branches})


def one(found: Iterator[str]) -> str:
    (told,) = found
    return told


def test_tokens_prompts_and_sets_of_a_full_batch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [*batches_that_will_be_cut(config(), ROWS, None)]
    told = one(batches_that_will_be_cut(config(top_k=256), ROWS, None))
    a_rollout = 30_768 * 13 + 30_000 * 963
    assert f"64 rollouts of 30768 tokens take {64 * a_rollout >> 20} MiB, but a message 1016" in told
    assert f"down to {(1016 << 20) // a_rollout};" in told
    for key in ("buffer.batch_rollouts", "learner.tasks.max_prompt_tokens", "max_new_tokens", "teacher.top_k"):
        assert key in told
    # 100,000 tokens of 13 bytes are 1.2 MiB: 830 rollouts without any set
    assert not [*batches_that_will_be_cut(config(new=99_232, buffer={"batch_rollouts": 819}), ROWS, None)]
    assert [*batches_that_will_be_cut(config(new=99_232, buffer={"batch_rollouts": 820}), ROWS, None)]


def test_what_an_environment_adds_counts_up_to_the_window() -> None:
    buffer = {"batch_rollouts": 1000}
    assert not [*batches_that_will_be_cut(config(new=512, buffer=buffer), ROWS, 100_000)]
    told = one(batches_that_will_be_cut(config(new=512, env="calculator", buffer=buffer), ROWS, 100_000))
    assert "rollouts of 100000 tokens" in told and "tokens of the environment count" in told


def test_each_pool_that_grades_counts() -> None:
    routes = {f"p{i}": [] for i in range(40)}
    tasks = {"max_new_tokens": 99_232, "max_prompt_tokens": 768, "routes": routes}
    many = build(RunConfig, {"learner": {"tasks": tasks}})
    told = one(batches_that_will_be_cut(many, ROWS, None))
    assert f"take {64 * 100_000 * (9 + 4 * 40) >> 20} MiB" in told and "learner.tasks.routes" in told
    assert not [*batches_that_will_be_cut(config(new=99_232), ROWS, None)]


def test_a_rollout_and_a_group_that_can_never_be_sent_are_mistakes() -> None:
    sets = config(new=120_000, top_k=256)
    assert "make 110 MiB of a rollout of learner.tasks.max_new_tokens = 120000; expected at most 64 MiB" in one(
        rollouts_that_no_message_holds(sets, ROWS, None)
    )
    assert not [*rollouts_that_no_message_holds(config(new=60_000, top_k=256), ROWS, None)]
    learner = {"tasks": {"max_new_tokens": 60_000, "group_size": 32}}
    whole = {"learner": learner, "teacher": {"top_k": 256}, "buffer": {"release": "rollout"}}
    told = one(rollouts_that_no_message_holds(build(RunConfig, whole), ROWS, None))
    assert told.startswith("learner.tasks.group_size: a group of 32 rollouts may take ") and "sends it whole" in told


def test_the_buffer_reckons_as_the_launcher_does() -> None:
    """A real rollout of the longest kind."""
    driver = Driver(batch=1)
    driver.offer(0)
    driver.write("train-0-0-0", 500 - len(PROMPT), final=True)
    (rollout,) = driver.state._life.rollouts.values()  # pyright: ignore[reportPrivateUsage]
    tight = config(new=500 - 100, buffer={"batch_rollouts": 1})
    longest = 400 + 768
    per_token = stillhouse.buffer.batch_size.size_of(rollout).array_bytes / 500
    assert per_token == stillhouse.buffer.batch_size.TOKEN_BYTES + stillhouse.buffer.batch_size.SCORE_BYTES
    limit = int(longest * per_token)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stillhouse.launch.config.message_sizes.BATCH_BYTES", limit)
        assert not [*batches_that_will_be_cut(tight, None, None)]
        patch.setattr("stillhouse.launch.config.message_sizes.BATCH_BYTES", limit - 1)
        assert [*batches_that_will_be_cut(tight, None, None)]
