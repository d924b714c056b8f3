"""Environments: what they see, what they may say, and how an episode ends. The student is a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.actors.envs.episode import Continuation, EnvironmentFault, Episode
from stillhouse.engines.base import Int32s

MakeEpisode = Callable[..., Episode]


def play(
    episode: Episode,
    *turns: Int32s,
    end: Literal["stop", "length"] = "stop",
    budget_left: int = 500,
    context_left: int = 500,
) -> list[Continuation]:
    """Start, give the turns one after the other (the last one ends for `end`), close."""

    async def run() -> list[Continuation]:
        await episode.start()
        answers: list[Continuation] = []
        for i, ids in enumerate(turns):
            reason = end if i == len(turns) - 1 else "stop"
            answers.append(await episode.advance(ids, reason, budget_left=budget_left, context_left=context_left))
        await episode.close()
        return answers

    return asyncio.run(run())


def test_single_turn_judges_its_only_answer(make_episode: MakeEpisode, tokenizer: TextTokenizer) -> None:
    for said, reward in (("3+8+0=11 #11<|im_end|>", 1.0), ("3+8+0=11 #12<|im_end|>", 0.0)):
        (answer,) = play(make_episode("single_turn", "11"), tokenizer.encode(said))
        assert (answer.finish_reason, answer.reward, answer.token_ids.size) == ("stop", reward, 0)


def test_calculator_answers_calls_until_the_student_ends(make_episode: MakeEpisode, tokenizer: TextTokenizer) -> None:
    episode = make_episode("calculator", "102")
    turns = ["<calc>12+34</calc>", "<calc>46+56</calc>", " #102<|im_end|>"]
    first, second, last = play(episode, *map(tokenizer.encode, turns))
    assert tokenizer.single_token("</calc>") in episode.stop_token_ids
    assert tokenizer.decode(first.token_ids) == "<result>46</result>"
    assert tokenizer.decode(second.token_ids) == "<result>102</result>"
    assert (first.finish_reason, first.reward) == (None, None)
    assert (last.finish_reason, last.reward) == ("stop", 1.0)


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        ("1/0", "error: division by zero"),
        ("__import__('os').getcwd()", "error: only numbers, + - * / // % and parentheses"),
        ("", "error: not an expression"),
    ],
)
def test_calculator_says_what_is_wrong_and_goes_on(
    make_episode: MakeEpisode, tokenizer: TextTokenizer, call: str, reply: str
) -> None:
    (answer,) = play(make_episode("calculator"), tokenizer.encode(f"<calc>{call}</calc>"))
    assert tokenizer.decode(answer.token_ids) == f"<result>{reply}</result>"
    assert answer.info["calculator_errors"] == 1.0


def test_a_close_tag_without_a_call_ends_the_episode(make_episode: MakeEpisode, tokenizer: TextTokenizer) -> None:
    (answer,) = play(make_episode("calculator", "5"), tokenizer.encode("12+34</calc>"))
    assert (answer.finish_reason, answer.reward) == ("env_done", 0.0)


def test_calculator_answers_in_a_chat_turn_when_the_student_ended_its_own(
    make_episode: MakeEpisode, tokenizer: TextTokenizer, hf_tokenizer: PreTrainedTokenizerBase
) -> None:
    """So it works for a tokenizer to which `</calc>` is ordinary text: the stop token stands behind the call."""
    (answer,) = play(make_episode("calculator"), tokenizer.encode("<calc>1+2</calc><|im_end|>"))
    text = hf_tokenizer.decode(answer.token_ids.tolist())
    assert text == "\n<|im_start|>user\n<result>3</result><|im_end|>\n<|im_start|>assistant\n"


def test_turns_run_out(make_episode: MakeEpisode, tokenizer: TextTokenizer) -> None:
    call = tokenizer.encode("<calc>1+2</calc>")
    first, second = play(make_episode("calculator", "3", max_turns=2), call, call)
    assert first.finish_reason is None
    assert (second.finish_reason, second.reward) == ("length", 0.0)


@pytest.mark.parametrize(
    ("end", "left"), [("length", {"budget_left": 0}), ("stop", {"budget_left": 0}), ("stop", {"context_left": 0})]
)
def test_out_of_tokens_the_environment_is_asked_for_the_reward(
    make_episode: MakeEpisode, tokenizer: TextTokenizer, end: Literal["stop", "length"], left: dict[str, int]
) -> None:
    (answer,) = play(make_episode("calculator", "3"), tokenizer.encode("#3 <calc>1+2</calc>"), end=end, **left)
    assert (answer.finish_reason, answer.reward, answer.token_ids.size) == ("length", 1.0, 0)


def test_a_reply_that_fills_the_context_window_ends_the_rollout(
    make_episode: MakeEpisode, tokenizer: TextTokenizer
) -> None:
    (answer,) = play(make_episode("calculator"), tokenizer.encode("<calc>1+2</calc>"), context_left=3)
    assert (answer.finish_reason, answer.token_ids.size) == ("length", 0)


def test_a_long_reply_does_not_count_against_the_sampling_budget(
    make_episode: MakeEpisode, tokenizer: TextTokenizer
) -> None:
    (answer,) = play(make_episode("calculator"), tokenizer.encode("<calc>1+2</calc>"), budget_left=1)
    assert (answer.finish_reason, answer.token_ids.size) == (None, 3)


class Bad(Environment):
    """Gives what it was told to."""

    def __init__(self, result: Any, observation: Any = None, stops: Any = ()) -> None:
        self.result = result
        self.observation = Observation() if observation is None else observation
        self.stops = stops
        self.seen: list[Action] = []

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.stops

    async def reset(self, task: EnvTask) -> Observation:
        return self.observation

    async def step(self, action: Action) -> StepResult:
        self.seen.append(action)
        return self.result


class Sync(Bad):
    """Its step is a plain function."""

    def step(self, action: Action) -> Any:
        return self.result


def bad_episode(tokenizer: TextTokenizer, result: Any) -> tuple[Episode, Bad]:
    environment = Bad(result)
    task = EnvTask(np.array([1], dtype=np.int32), None, "", "r", 0)
    return Episode(lambda: environment, task, tokenizer, model_stop_token_ids=(313,), max_turns=4), environment


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (StepResult(), "neither ended the episode"),
        (StepResult(np.array([320], dtype=np.int32)), "expected 0 to 319"),
        (StepResult(np.array([-1], dtype=np.int32)), "expected 0 to 319"),
        (StepResult(np.array([[1]], dtype=np.int32)), "expected token ids"),
        (StepResult(np.array([0.5])), "expected token ids"),  # type: ignore[arg-type]
        (StepResult(np.array("abc")), r"Bad.step gave <U3 of shape \(\), expected token ids"),  # type: ignore[arg-type]
        (StepResult([[1], [2, 3]]), "a list, expected token ids"),  # type: ignore[arg-type]
        (StepResult(done=True, reward="1.0"), r"the reward '1.0' \(str\), expected"),  # type: ignore[arg-type]
        (StepResult(done=True, reward={"r": 1}), "the reward a dict, expected"),  # type: ignore[arg-type]
        ({"reward": 1.0, "done": True}, "Bad.step gave a dict, expected a StepResult"),
        (1.0, r"Bad.step gave 1.0 \(float\), expected a StepResult"),
        (None, "Bad.step gave None, expected a StepResult"),
        (StepResult(info={"score": "high"}), r"the info 'score' \(str\): 'high' \(str\), expected a name and"),  # type: ignore[arg-type]
        (StepResult(info=7), r"step gave 7 \(int\), expected StepResult.info to be a mapping"),  # type: ignore[arg-type]
    ],
)
def test_an_environment_that_breaks_a_rule_is_stopped(tokenizer: TextTokenizer, result: Any, complaint: str) -> None:
    episode, _ = bad_episode(tokenizer, result)
    with pytest.raises(EnvironmentFault, match=complaint):
        play(episode, np.array([5, 313], dtype=np.int32))


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (Sync(StepResult(done=True)), "Sync.step gave a StepResult, expected a coroutine: write `async def step`"),
        (Bad(None, observation={}), "Bad.reset gave a dict, expected an Observation"),
        (Bad(None, observation="text"), "Bad.reset gave 'text' .str., expected an Observation"),
        (Bad(None, stops=(999,)), "Bad.stop_token_ids gave token ids 999 to 999, expected 0 to 319"),
        (Bad(None, stops="</calc>"), "Bad.stop_token_ids gave .*, expected token ids"),
    ],
)
def test_an_environment_of_another_shape_is_told_what_was_expected(
    tokenizer: TextTokenizer, environment: Bad, complaint: str
) -> None:
    task = EnvTask(np.array([1], dtype=np.int32), None, "", "r", 0)
    episode = Episode(lambda: environment, task, tokenizer, model_stop_token_ids=(313,), max_turns=4)
    with pytest.raises(EnvironmentFault, match=complaint):
        play(episode, np.array([5, 313], dtype=np.int32))


@pytest.mark.parametrize("reward", [1, True, np.float32(0.5), np.int64(1), np.array(0.25), torch.tensor(0.5)])
def test_a_reward_may_be_any_kind_of_number(tokenizer: TextTokenizer, reward: Any) -> None:
    episode, _ = bad_episode(tokenizer, StepResult(done=True, reward=reward))
    (answer,) = play(episode, np.array([5, 313], dtype=np.int32))
    assert type(answer.reward) is float and answer.reward == float(reward)


def test_an_environment_cannot_change_what_the_student_wrote(tokenizer: TextTokenizer) -> None:
    episode, environment = bad_episode(tokenizer, StepResult(done=True))
    written = np.array([5, 313], dtype=np.int32)
    play(episode, written)
    seen = environment.seen[0].token_ids
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 6
    assert not np.shares_memory(seen, written)


def test_the_students_tokens_need_not_be_what_its_text_tokenises_to(tokenizer: TextTokenizer) -> None:
    """`a` `n` as two tokens reads `an`, which tokenises to one: the ids given are the ids that stay."""
    ids = np.concatenate([tokenizer.encode("a"), tokenizer.encode("n")])
    assert tokenizer.encode(tokenizer.decode(ids)).tolist() != ids.tolist()
    episode, environment = bad_episode(tokenizer, StepResult(done=True))
    play(episode, ids)
    assert environment.seen[0].token_ids.tolist() == ids.tolist()
    assert environment.seen[0].text == "an"


def test_only_added_tokens_count_as_single_tokens(tokenizer: TextTokenizer) -> None:
    assert tokenizer.single_token("</calc>") is not None
    assert tokenizer.single_token("user") is None
    assert tokenizer.single_token("</tool>") is None


def test_chat_turn_continues_the_template_exactly(
    tokenizer: TextTokenizer, hf_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Prompt + what the student wrote + chat_turn = the template's own rendering of that conversation."""
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "#3"}]
    told = [*turns, {"role": "user", "content": "too high"}]
    opening = hf_tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    whole = hf_tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
    written = tokenizer.encode("#3<|im_end|>").tolist()
    assert opening + written + tokenizer.chat_turn("too high").tolist() == whole


def test_chat_turn_needs_a_template(hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        TextTokenizer(hf_tokenizer).chat_turn("hello")
    monkeypatch.setattr(hf_tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] + '. ' }}{% endfor %}")
    with pytest.raises(ValueError, match="expected a special token"):
        TextTokenizer(hf_tokenizer).chat_turn("hello")


def test_chat_prompt_is_the_template_s_own_rendering(
    tokenizer: TextTokenizer, hf_tokenizer: PreTrainedTokenizerBase
) -> None:
    turns = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "#3"},
        {"role": "user", "content": "no"},
    ]
    expected = hf_tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    ids = tokenizer.chat_prompt(turns)
    assert ids.dtype == np.int32 and ids.tolist() == expected


def test_chat_prompt_hands_tools_to_the_template(
    hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ tools[0]['name'] }}:{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    monkeypatch.setattr(hf_tokenizer, "chat_template", template)
    tokenizer = TextTokenizer(hf_tokenizer)
    ids = tokenizer.chat_prompt([{"role": "user", "content": "go"}], [{"name": "look"}])
    assert tokenizer.decode(ids) == "look:go>"
    monkeypatch.setattr(hf_tokenizer, "chat_template", "{{ raise_exception('no tool turns here') }}")
    with pytest.raises(ValueError, match=r"refuses these messages \(roles \['tool'\]\): no tool turns here"):
        tokenizer.chat_prompt([{"role": "tool", "content": "go"}])


def test_chat_prompt_without_a_template_joins_the_contents(
    hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_tokenizer, "chat_template", None)
    tokenizer = TextTokenizer(hf_tokenizer)
    turns = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    assert tokenizer.chat_prompt(turns).tolist() == hf_tokenizer("add\n1+1=")["input_ids"]
    with pytest.raises(ValueError, match="tools need a tokenizer with a chat template"):
        tokenizer.chat_prompt(turns, [{"name": "look"}])
