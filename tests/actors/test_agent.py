"""Agents on a scripted engine: what they ask for, what is recorded, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.agent import Context, EpisodeOver
from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.envs.registry import UnknownEnvironment, check_options
from stillhouse.protocol.messages import Segment
from tests.actors.in_hand import STOP, InHand, ScriptedEngine, ids_of, ticket
from tests.patience import PATIENCE_S

PROMPT = ids_of(1, 2, 3)
RESULT, HELP = ids_of(50), ids_of(70)


async def two_turns(ctx: Context, task: EnvTask, *, reward: float = 1.0) -> None:
    first = await ctx.generate()
    assert first.token_ids.tolist() == [10, STOP] and first.finish_reason == "stop"
    ctx.observe(RESULT)
    await ctx.generate()
    ctx.reward(reward)
    ctx.note(tools=1.0)


async def branches(ctx: Context, task: EnvTask) -> None:
    """Two answers from one place at the same time; the second line goes on, a helper is asked in between."""
    one, two = ctx, ctx.branch()
    await asyncio.gather(one.generate(max_new_tokens=10), two.generate(max_new_tokens=10))
    helper = ctx.root(HELP)
    await helper.generate(max_new_tokens=2)
    two.observe(RESULT)
    await two.generate()


async def impatient(ctx: Context, task: EnvTask) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ctx.branch().generate(), 0.05)
    await ctx.generate()
    ctx.observe(RESULT)
    await ctx.generate()


async def endless(ctx: Context, task: EnvTask) -> None:
    ctx.reward(0.5)
    while True:
        await ctx.generate(max_new_tokens=3)
        ctx.observe(RESULT)


async def catches(ctx: Context, task: EnvTask) -> None:
    try:
        while True:
            await ctx.generate()
            ctx.observe(RESULT)
    except EpisodeOver as over:
        assert "calls were made" in str(over)
        ctx.reward(2.0)


async def silent(ctx: Context, task: EnvTask) -> None:
    return


async def wrong_return(ctx: Context, task: EnvTask) -> float:
    await ctx.generate()
    return 1.0


async def breaks(ctx: Context, task: EnvTask) -> None:
    await ctx.generate()
    raise KeyError("tool")


async def blocks(ctx: Context, task: EnvTask) -> None:
    await ctx.generate()
    time.sleep(1.0)
    await ctx.generate()


async def blocks_beside(ctx: Context, task: EnvTask) -> None:
    """One line blocks the thread while the other waits for the engine."""

    async def blocking(line: Context) -> None:
        await line.generate(max_new_tokens=5)
        time.sleep(1.5)

    await asyncio.gather(blocking(ctx), ctx.branch().generate(max_new_tokens=5))


async def takes_all(ctx: Context, task: EnvTask) -> None:
    """The first call reserves all tokens, so the second has none."""
    both = await asyncio.gather(ctx.generate(), ctx.branch().generate(), return_exceptions=True)
    assert isinstance(both[1], EpisodeOver) and "40 reserved by calls under way" in str(both[1])
    ctx.reward(1.0)


async def hangs(ctx: Context, task: EnvTask) -> None:
    await ctx.generate()
    await asyncio.Event().wait()


async def goes_on(ctx: Context, task: EnvTask) -> None:
    await ctx.generate()
    ctx.observe("12", role="user")
    await ctx.generate()


def path(agent: Callable[..., object]) -> str:
    return f"{__name__}:{agent.__name__}"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def start(engine: ScriptedEngine, tokenizer: TextTokenizer) -> Iterator[Callable[..., InHand]]:
    """One rollout of this agent, begun."""
    made: list[InHand] = []

    def begin(
        agent: Callable[..., object], *, timeout_s: float = PATIENCE_S, max_turns: int = 8, **options: object
    ) -> InHand:
        env = EnvConfig(name=path(agent), options=options, step_timeout_s=timeout_s, max_turns=max_turns)
        made.append(InHand(engine, tokenizer, ActorConfig(segment_tokens=4, environments={"agent": env})))
        made[-1].rollouts.add(ticket(env="agent"), PROMPT)
        return made[-1]

    yield begin
    for hand in made:
        hand.environments.close()


def answer(hand: InHand, engine: ScriptedEngine, number: int, *ids: int, end: str = "stop") -> list[int]:
    """Wait for request `number` and answer it; its prompt."""
    request_id = f"train-0-0-0/{number}"
    hand.until(lambda: request_id in engine.requests)
    prompt_ids = engine.requests[request_id].prompt_ids.tolist()
    engine.say(request_id, *ids, end=end)
    hand.until(lambda: request_id not in engine.requests)
    return prompt_ids


def test_an_agent_of_two_turns_is_one_row_of_tokens(start: Callable[..., InHand], engine: ScriptedEngine) -> None:
    hand = start(two_turns, reward=0.5)
    assert answer(hand, engine, 0, 10, STOP) == [1, 2, 3]
    assert answer(hand, engine, 1, 11, 12, STOP) == [1, 2, 3, 10, STOP, 50]
    hand.until_gone()
    segments, ids, _, mask = hand.whole("train-0-0-0")
    assert ids.tolist() == [1, 2, 3, 10, STOP, 50, 11, 12, STOP]
    assert mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 1]
    last = segments[-1]
    assert (last.finish_reason, last.reward, last.n_turns, last.dropped) == ("stop", 0.5, 2, ())
    assert all(segment.follows is None and segment.own_prompt_tokens == 0 for segment in segments)
    assert hand.rollouts.counts["env_tools_total"] == 1.0
    assert hand.rollouts.counts["agent_calls_total"] == hand.rollouts.counts["generations_total"] == 2.0
    assert hand.rollouts.counts["agent_rollouts_total"] == hand.rollouts.counts["agent_roots_total"] == 1.0


def test_branches_and_helpers_follow_their_own_tokens_and_draw_other_random_numbers(
    start: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = start(branches)
    hand.until(lambda: len(engine.requests) == 2)
    offsets = {request.sample_offset for request in engine.requests.values()}
    assert len(offsets) == 2, "the same prompt, seed and offset would give the same response twice"
    answer(hand, engine, 0, 10, STOP)
    answer(hand, engine, 1, 20, STOP)
    assert answer(hand, engine, 2, 30, 31, end="length") == [70]
    assert answer(hand, engine, 3, 40, STOP) == [1, 2, 3, 20, STOP, 50]
    hand.until_gone()
    segments, ids, _, mask = hand.whole("train-0-0-0")
    before = list(range(len(ids)))
    for segment in segments:
        before[segment.start] = segment.start if segment.follows is None else segment.follows

    def read(token: int) -> list[int]:
        places, at = list[int](), int(np.flatnonzero(ids == token)[0]) + 1
        while at:
            places.append(int(ids[at - 1]))
            at = before[at - 1]
        return places[::-1]

    assert read(10) == [1, 2, 3, 10] and read(40) == [1, 2, 3, 20, STOP, 50, 40] and read(31) == [70, 30, 31]
    assert sorted(ids[mask == 1].tolist()) == sorted([10, STOP, 20, STOP, 30, 31, 40, STOP])
    assert segments[-1].reward is None, "no reward is not 0"
    assert segments[-1].dropped == ()


def test_a_response_that_an_agent_stopped_waiting_for_is_aborted_and_dropped(
    start: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = start(impatient)
    hand.until(lambda: "train-0-0-0/0" in engine.requests)
    engine.say("train-0-0-0/0", 20, 21, 22, 23, 24, 25)
    hand.until(lambda: engine.aborted == ["train-0-0-0/0"])
    answer(hand, engine, 1, 10, STOP)
    answer(hand, engine, 2, 11, STOP)
    hand.until_gone()
    segments, ids, _, _ = hand.whole("train-0-0-0")
    assert hand.rollouts.counts["agent_dropped_responses_total"] == 1.0
    dropped = [ids[one.start : one.end].tolist() for one in segments[-1].dropped]
    assert dropped == [[20, 21, 22, 23]], "what was sent of it already; the rest is not sent"
    assert [one.reason for one in segments[-1].dropped] == ["undelivered"]
    assert 24 not in ids.tolist()


@pytest.mark.parametrize(("agent", "reward"), [(endless, 0.5), (catches, 2.0)])
def test_used_up_turns_end_the_episode(
    start: Callable[..., InHand], engine: ScriptedEngine, agent: Callable[..., object], reward: float
) -> None:
    hand = start(agent, max_turns=2)
    answer(hand, engine, 0, 10, STOP)
    answer(hand, engine, 1, 11, STOP)
    hand.until_gone()
    last = hand.messages(Segment)[-1]
    assert (last.final, last.reward, last.n_turns) == (True, reward, 2)
    assert last.finish_reason == ("length" if agent is endless else "stop")


def test_used_up_tokens_end_the_episode(start: Callable[..., InHand], engine: ScriptedEngine) -> None:
    """The ticket allows 40 tokens, and a call reserves what it may use."""
    hand = start(endless, max_turns=100)
    for number in range(13):
        request_id = f"train-0-0-0/{number}"
        hand.until(lambda request_id=request_id: request_id in engine.requests)
        assert engine.requests[request_id].max_new_tokens == 3
        engine.say(request_id, 10, 11, 12, end="length")
        hand.until(lambda request_id=request_id: request_id not in engine.requests)
    answer(hand, engine, 13, 10, end="length")
    hand.until_gone()
    assert (hand.messages(Segment)[-1].finish_reason, hand.failures) == ("length", {})


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (silent, "the agent ended without a response of the student"),
        (wrong_return, "the agent returned 1.0, expected None: rewards go to ctx.reward"),
        (breaks, "env_error (KeyError)"),
    ],
)
def test_an_agent_that_breaks_fails_its_rollout_by_name(
    start: Callable[..., InHand], engine: ScriptedEngine, agent: Callable[..., object], message: str
) -> None:
    hand = start(agent)
    if agent is not silent:
        answer(hand, engine, 0, 10, STOP)
    hand.until_gone()
    assert message in hand.failures["train-0-0-0"]


@pytest.mark.parametrize(("agent", "message"), [(hangs, "took longer than 0.2 s"), (blocks, "has blocked its thread")])
def test_an_agent_has_step_timeout_s_between_its_calls(
    start: Callable[..., InHand],
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    agent: Callable[..., object],
    message: str,
) -> None:
    monkeypatch.setattr("stillhouse.actors.env_runner.GRACE_S", 0.1)
    hand = start(agent, timeout_s=0.2)
    hand.until(lambda: "train-0-0-0/0" in engine.requests)
    waited_until_s = time.monotonic() + 0.6
    hand.until(lambda: time.monotonic() > waited_until_s)
    assert not hand.failures, "the engine may take as long as it likes"
    answer(hand, engine, 0, 10, STOP)
    hand.until(lambda: bool(hand.failures))
    assert message in hand.failures["train-0-0-0"]


def test_an_agent_that_blocks_beside_a_waiting_line_is_noticed_when_that_is_answered(
    start: Callable[..., InHand], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.actors.env_runner.GRACE_S", 0.1)
    hand = start(blocks_beside, timeout_s=0.2)
    answer(hand, engine, 0, 10, STOP)
    answer(hand, engine, 1, 20, STOP)
    hand.until(lambda: bool(hand.failures) or not len(hand.rollouts))
    assert "has blocked its thread" in hand.failures["train-0-0-0"]


def test_calls_at_the_same_time_share_the_rollouts_tokens(start: Callable[..., InHand], engine: ScriptedEngine) -> None:
    hand = start(takes_all)
    answer(hand, engine, 0, 10, STOP)
    hand.until_gone()
    assert (hand.messages(Segment)[-1].reward, hand.failures) == (1.0, {})


def test_an_engine_that_answers_without_a_token_fails_the_rollout(
    start: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = start(takes_all)
    answer(hand, engine, 0, end="length")
    hand.until_gone()
    assert "engine_error" in hand.failures["train-0-0-0"]
    assert "without a token" in hand.failures["train-0-0-0"]


def test_a_cancelled_agent_ends_and_its_requests_are_aborted(
    start: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = start(branches)
    hand.until(lambda: len(engine.requests) == 2)
    hand.rollouts.cancel("train-0-0-0", "a test")
    hand.until_gone()
    assert sorted(engine.aborted) == ["train-0-0-0/0", "train-0-0-0/1"]
    assert hand.messages(Segment) == []


def test_options_of_an_agent_are_its_keyword_arguments() -> None:
    check_options(path(two_turns), {"reward": 2.0})
    with pytest.raises(ValueError, match="has no option 'rewerd'; did you mean 'reward'"):
        check_options(path(two_turns), {"rewerd": 2.0})
    with pytest.raises(UnknownEnvironment, match="cannot load"):
        check_options(f"{__name__}:nothing", {})


def test_later_turns_are_rendered_with_the_arguments_of_the_row(
    hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = str(hf_tokenizer.chat_template)
    short = "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}=={% endif %}"
    monkeypatch.setattr(hf_tokenizer, "chat_template", given + short)
    engine = ScriptedEngine()
    env = EnvConfig(name=path(goes_on), max_turns=8)
    hand = InHand(engine, TextTokenizer(hf_tokenizer), ActorConfig(environments={"agent": env}))
    turns = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}, {"role": "user", "content": "12"}]
    for number, kwargs in enumerate([{"enable_thinking": False}, {"enable_thinking": True}, {}, None]):
        row = msgspec.json.encode({"prompt": "7", "chat_template_kwargs": kwargs})
        hand.rollouts.add(ticket(number, env="agent", row=row), PROMPT)
        requests = [f"train-{number}-0-0/{i}" for i in range(2)]
        hand.until(lambda asked=requests[0]: asked in engine.requests)
        engine.say(requests[0], 10, STOP, end="stop")
        hand.until(lambda asked=requests[1]: asked in engine.requests)
        asked = engine.requests[requests[1]].prompt_ids.tolist()
        whole: str = cast(Any, hf_tokenizer).apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **(kwargs or {})
        )
        behind = whole[whole.index("8<|im_end|>") + len("8<|im_end|>") :]
        assert hf_tokenizer.decode(asked[len(PROMPT) + 2 :]) == behind
        assert behind.endswith("==") == (number == 0)
        engine.say(requests[1], 11, STOP, end="stop")
    hand.until_gone()
    hand.environments.close()
