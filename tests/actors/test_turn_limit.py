"""A ticket may allow fewer turns than its environment."""

from __future__ import annotations

import msgspec
import pytest

from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.protocol.messages import Segment
from tests.actors.in_hand import BREAKABLE, STOP, InHand, ScriptedEngine, ids_of, ticket


@pytest.mark.parametrize(("limit", "turns"), [(0, 3), (2, 2), (9, 3)])
def test_the_lower_limit_on_turns_counts(tokenizer: TextTokenizer, limit: int, turns: int) -> None:
    engine = ScriptedEngine()
    env = EnvConfig(name=BREAKABLE, max_turns=3)
    hand = InHand(engine, tokenizer, ActorConfig(environments={"env": env}))
    try:
        given = ticket(env="env")
        sampling = msgspec.structs.replace(given.sampling, max_turns=limit)
        hand.rollouts.add(msgspec.structs.replace(given, sampling=sampling), ids_of(1, 2, 3))
        for turn in range(turns):
            request_id = f"{given.rollout_id}/{turn}"
            hand.until(lambda asked=request_id: asked in engine.requests)
            engine.say(request_id, 5, STOP, end="stop")
            hand.until(lambda asked=request_id: asked not in engine.requests)
        hand.until_gone()
        last = hand.messages(Segment)[-1]
        assert (last.final, last.n_turns, hand.failures) == (True, turns, {})
    finally:
        hand.environments.close()
