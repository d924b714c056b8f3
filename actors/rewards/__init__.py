"""Rewards: each judges one response of the student (docs/rewards.md). Environments name one, agents call one.

judge = make_reward("math")
verdict = await judge(Answered(turn.text, task.ground_truth))
"""

from stillhouse.actors.rewards.base import Answered, Reward, Verdict
from stillhouse.actors.rewards.registry import UnknownReward, known_rewards, make_reward

__all__ = ["Answered", "Reward", "UnknownReward", "Verdict", "known_rewards", "make_reward"]
