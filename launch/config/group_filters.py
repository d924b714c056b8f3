"""Checks of the two keys that keep rollouts from being trained: `buffer.dynamic_sampling`, `buffer.mask_truncated`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stillhouse.launch.config.run import RunConfig

EQUAL_REWARDS_TEACH: Final = {
    "none": "which trains on no reward",
    "reinforce_pp": "which compares the rollouts of the whole batch, so that groups of equal rewards teach something",
    "gae": "which compares a reward with its value function, so that groups of equal rewards teach something",
    "turn_returns": "which compares turns, so that groups of equal rewards teach something",
}
"""Advantages for which dropping groups of equal rewards would be wrong, and why."""


def group_filters(config: RunConfig) -> Iterator[str]:
    """Mistakes, one line each."""
    buffer, tasks, advantage = config.buffer, config.learner.tasks, config.learner.objective.advantage.name
    if buffer.mask_truncated and buffer.release != "rollout":
        yield (
            f"buffer.mask_truncated: got true with buffer.release = {buffer.release}, expected buffer.release = "
            "rollout; the other policies train the beginning of a rollout before its end is known"
        )
    if not buffer.dynamic_sampling:
        return
    got = f"buffer.dynamic_sampling: got {buffer.dynamic_sampling} with"
    if buffer.release != "rollout":
        yield (
            f"{got} buffer.release = {buffer.release}, expected buffer.release = rollout; the other policies do not "
            "keep groups together"
        )
    if tasks.group_size == 1:
        yield (
            f"{got} learner.tasks.group_size = 1, expected 2 or more; the rewards of one rollout are always equal, so "
            "everything would be dropped"
        )
    if advantage in EQUAL_REWARDS_TEACH:
        yield (
            f"{got} learner.objective.advantage = {advantage!r}, {EQUAL_REWARDS_TEACH[advantage]}; expected grpo, "
            "reinforce_pp_baseline or another one that compares the rollouts of a group"
        )
    if tasks.group_reward:
        yield (
            f"{got} learner.tasks.group_reward = {tasks.group_reward!r}, whose rewards are made by the learner, after "
            "groups have left the buffer; expected an environment that gives the rewards, or 0"
        )


def undistilled_groups(config: RunConfig) -> Iterator[str]:
    """Warn of groups that a teacher would have taught something."""
    if config.buffer.dynamic_sampling and config.learner.objective.has_divergence:
        yield (
            f"buffer.dynamic_sampling: {config.buffer.dynamic_sampling} with learner.objective.coef above 0; groups of "
            "equal rewards are dropped before teachers score them, so they are not distilled either"
        )
