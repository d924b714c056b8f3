"""Rewards that an environment or an agent gives for a turn: their place on the row, and their sum."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from stillhouse.actors.agent import Context
from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.protocol.messages import Segment, TurnReward
from tests.actors.in_hand import STOP, InHand, ScriptedEngine, ids_of, ticket


class Paying(Environment):
    """Three turns; rewards by the row's list, None where it says null."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._rewards: list[float | None] = []

    async def reset(self, task: EnvTask) -> Observation:
        self._rewards = list(task.row["rewards"])
        return Observation()

    async def step(self, action: Action) -> StepResult:
        reward = self._rewards[action.turn]
        return StepResult(done=True, reward=reward) if action.turn == 2 else StepResult(ids_of(8), reward=reward)


async def lines(ctx: Context, task: EnvTask) -> None:
    """A reward on each of two lines that go on from one response, in the wrong order, and twice on one of them."""
    await ctx.generate(max_new_tokens=4)
    other = ctx.branch()
    ctx.observe(ids_of(50))
    await ctx.generate(max_new_tokens=4)
    other.reward(0.125)  # of the first response
    other.observe(ids_of(60))
    await other.generate(max_new_tokens=4)
    ctx.reward(2.0)
    other.reward(4.0)
    ctx.reward(-1.0)
    ctx.root(ids_of(70)).reward(8.0)  # a line without a response: the newest of the episode, that of `other`


async def early(ctx: Context, task: EnvTask) -> None:
    ctx.reward(0.5)
    await ctx.generate(max_new_tokens=4)
    ctx.observe(ids_of(50))
    await ctx.generate(max_new_tokens=4)


async def gives_up(ctx: Context, task: EnvTask) -> None:
    """The reward of a response that is not trained is in the sum alone."""
    slow = asyncio.ensure_future(ctx.branch().generate(max_new_tokens=8))
    await asyncio.sleep(0)
    await ctx.generate(max_new_tokens=4)
    slow.cancel()
    ctx.reward(1.0)


async def silent(ctx: Context, task: EnvTask) -> None:
    await ctx.generate()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def play(engine: ScriptedEngine, tokenizer: TextTokenizer) -> Iterator[Callable[..., Segment]]:
    """Run one episode of a class or function of this module; each response has one token and STOP."""
    made: list[InHand] = []

    def run(what: object, *, n: int, row: bytes = b"") -> Segment:
        name = f"{__name__}:{getattr(what, '__name__', '')}"
        hand = InHand(engine, tokenizer, ActorConfig(segment_tokens=2, environments={"env": EnvConfig(name=name)}))
        made.append(hand)
        hand.rollouts.add(ticket(env="env", row=row), ids_of(1, 2, 3))
        for number in range(n):
            request_id = f"train-0-0-0/{number}"
            hand.until(lambda asked=request_id: asked in engine.requests)
            engine.say(request_id, 10 + number, STOP, end="stop")
            hand.until(lambda asked=request_id: asked not in engine.requests)
        hand.until_gone()
        assert hand.failures == {}
        return hand.messages(Segment)[-1]

    yield run
    for hand in made:
        hand.environments.close()


def test_an_environment_s_rewards_are_those_of_its_turns(play: Callable[..., Segment]) -> None:
    last = play(Paying, n=3, row=b'{"rewards": [0.5, null, -2.0]}')
    # 1 2 3 | 10 STOP | 8 | 11 STOP | 8 | 12 STOP
    assert (last.end, last.reward) == (11, -1.5)
    assert last.turn_rewards == (TurnReward(5, 0.5), TurnReward(11, -2.0))


def test_a_reward_before_the_end_alone_makes_the_rollout_scored_and_none_leaves_it_unscored(
    play: Callable[..., Segment],
) -> None:
    early_one = play(Paying, n=3, row=b'{"rewards": [0.0, null, null]}')
    assert (early_one.reward, early_one.turn_rewards) == (0.0, (TurnReward(5, 0.0),))
    for row in (b'{"rewards": [null, null, null]}', b'{"rewards": [1.0, 1e308, 1e308]}'):  # whose sum is no number
        none = play(Paying, n=3, row=row)
        assert (none.reward, none.turn_rewards) == (None, ())


def test_an_agent_s_rewards_belong_to_the_last_response_of_their_line(play: Callable[..., Segment]) -> None:
    last = play(lines, n=3)
    # 1 2 3 | 10 STOP | 50 | 11 STOP    and behind the first response    60 | 12 STOP
    assert (last.end, last.reward) == (11, 13.125)
    # STOP of the second response is written behind the 60, where segments are this short.
    assert last.turn_rewards == (TurnReward(5, 0.125), TurnReward(10, 1.0), TurnReward(11, 12.0))


def test_a_reward_before_the_first_response_is_the_first_response_s(play: Callable[..., Segment]) -> None:
    last = play(early, n=2)
    assert (last.reward, last.turn_rewards) == (0.5, (TurnReward(5, 0.5),))


def test_an_agent_that_gives_none_has_none(play: Callable[..., Segment]) -> None:
    last = play(silent, n=1)
    assert (last.reward, last.turn_rewards) == (None, ())


def test_the_reward_of_a_response_beside_one_that_was_given_up_keeps_its_place(
    engine: ScriptedEngine, tokenizer: TextTokenizer
) -> None:
    hand = InHand(
        engine, tokenizer, ActorConfig(segment_tokens=2, environments={"env": EnvConfig(name=f"{__name__}:gives_up")})
    )
    try:
        hand.rollouts.add(ticket(env="env"), ids_of(1, 2, 3))
        hand.until(lambda: len(engine.requests) == 2)
        engine.say("train-0-0-0/0", 20, 21, 22, 23)
        engine.say("train-0-0-0/1", 11, STOP, end="stop")
        hand.until_gone()
        last = hand.messages(Segment)[-1]
        assert last.dropped and last.reward == 1.0
        (part,) = last.turn_rewards
        _, ids, _, _ = hand.whole("train-0-0-0")
        assert ids[part.end - 2 : part.end].tolist() == [11, STOP] and part.reward == 1.0
    finally:
        hand.environments.close()
