"""Rewards by name: what each says, what is refused, and what an environment and an agent get of it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from stillhouse.actors.envs.base import Action, EnvTask, no_tokens
from stillhouse.actors.envs.registry import check_options, make_environment, options_of_row
from stillhouse.actors.rewards import Answered, UnknownReward, Verdict, make_reward
from stillhouse.actors.rewards.answer import AnswerCheck
from stillhouse.actors.row_options import RowRefused
from tests.actors.rewards.conftest import Judge

HERE = __name__


def by_length(answered: Answered, *, per_character: float = 0.5) -> float | None:
    return len(answered.response) * per_character if answered.response else None


async def echoed(answered: Answered) -> Verdict:
    await asyncio.sleep(0)
    return Verdict(float(answered.row["worth"]), {"echoed": 1.0})


def words(answered: Answered) -> object:
    return "1.0"


@pytest.mark.parametrize(
    ("response", "ground_truth", "reward"),
    [
        ("12 #1,234.", "1234", 1.0),
        ("#12", "13", 0.0),
        ("twelve", "12", 0.0),
        ("#11 or rather #12", "12", 1.0),
        ("# -7", "-7.0", 1.0),
        ("#12", None, None),
        ("#12", "3 * 4 = 12\n#### 12", 1.0),  # as in GSM8K
        ("#4", "3 * 4 = 12\n#### 12", 0.0),
    ],
)
def test_answer(judge: Judge, response: str, ground_truth: str | None, reward: float | None) -> None:
    assert judge("answer", response, ground_truth).reward == reward


def test_pattern(judge: Judge) -> None:
    assert judge("pattern", "so: <b>7</b>", pattern=r"<b>\d</b>").reward == 1.0
    assert judge("pattern", "so: <b>7</b>", pattern=r"<b>\d</b>", full=True).reward == 0.0


def test_a_catastrophic_pattern_is_given_up_and_other_threads_run_meanwhile(judge: Judge) -> None:
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.01):
            ticks += 1

    other = threading.Thread(target=tick)
    other.start()
    try:
        verdict = judge("pattern", "a" * 40 + "b", pattern=r"(a|a|aa)+(a|aa)*$", timeout_s=0.3)
    finally:
        stop.set()
        other.join()
    assert verdict == Verdict(None, {"reward_unscored": 1.0, "reward_unscored_pattern_timeout": 1.0})
    assert ticks >= 3, "Python's lock was kept"


def test_an_answer_pattern_is_given_up_too(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.actors.rewards.answer.TIMEOUT_S", 0.1)
    verdict = judge("answer", "a" * 40 + "b", "a", answer_pattern=r"((?:a|a|aa)+)(?:a|aa)*$")
    assert verdict == Verdict(None, {"reward_unscored": 1.0, "reward_unscored_pattern_timeout": 1.0})
    with pytest.raises(TimeoutError, match=r"answer_pattern took longer than 0.1 s to search 41 characters"):
        AnswerCheck(r"((?:a|a|aa)+)(?:a|aa)*$").find("a" * 40 + "b")


def test_functions_plain_and_async(judge: Judge) -> None:
    assert judge(f"{HERE}:by_length", "four", per_character=2.0) == Verdict(8.0)
    assert judge(f"{HERE}:by_length", "").reward is None
    reward = make_reward(f"{HERE}:echoed")
    assert asyncio.run(reward(Answered("x", row={"worth": 3}))) == Verdict(3.0, {"echoed": 1.0})
    with pytest.raises(TypeError, match=r"gave '1.0', expected a number"):
        judge(f"{HERE}:words", "x")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("patern", {}, "did you mean 'pattern'"),
        ("pattern", {}, "needs the option pattern"),
        ("pattern", {"patern": "x"}, "no option 'patern'; did you mean 'pattern'"),
        ("pattern", {"pattern": "("}, "is not a regular expression"),
        ("pattern", {"pattern": "x", "timeout_s": 0}, "timeout_s: got 0"),
        ("answer", {"answer_pattern": "x"}, "0 groups, expected 1"),
        ("judge", {"base_url": "http://x/v1"}, "needs the option model"),
        ("judge", {"base_url": "x/v1", "model": "m"}, "expected http"),
        ("judge", {"base_url": "http://x/v1", "model": "m", "prompt": "?"}, "without {response}"),
        ("judge", {"base_url": "http://x/v1", "model": "m", "key_env": "NO_SUCH_KEY"}, "'NO_SUCH_KEY' is not set"),
        ("judge", {"base_url": "http://x/v1", "model": "m", "lowest": 3, "highest": 3}, "lowest below highest"),
        ("judge", {"base_url": "http://x/v1", "model": "m", "tries": 0}, "tries: got 0"),
        (f"{HERE}:by_lenght", {}, "cannot load"),
        (f"{HERE}:by_length", {"per_charcter": 1.0}, "did you mean 'per_character'"),
    ],
)
def test_mistakes_are_refused_before_the_run(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options("single_turn", {"reward": name, "reward_options": options})


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    with pytest.raises(ValueError, match=r"'math': it needs the package math-verify: pip install -e '\.\[math-"):
        make_reward("math", limit_s=4.25)  # not made before: made ones are kept


def test_unknown_names_have_a_class_of_their_own() -> None:
    with pytest.raises(UnknownReward, match="Known: answer, code, ifeval, json_schema, judge, math, pattern"):
        make_reward("zzz")


def test_single_turn_is_judged_by_the_reward_of_its_options_and_a_row_may_name_another() -> None:
    task = EnvTask(no_tokens(), "7", "", "train-0", 0, {"prompt": "?", "worth": 2})

    def played(text: str, of_row: dict[str, object]) -> tuple[float | None, dict[str, float]]:
        configured = {"reward": "pattern", "reward_options": {"pattern": "seven"}}

        async def run() -> tuple[float | None, dict[str, float]]:
            options = options_of_row(configured, of_row, "single_turn")
            environment = make_environment("single_turn", tokenizer=None, options=options)  # pyright: ignore[reportArgumentType]
            await environment.reset(task)
            result = await environment.step(Action(no_tokens(), text, "stop", 0, True))
            return result.reward, dict(result.info)

        return asyncio.run(run())

    assert played("seven", {}) == (1.0, {})
    assert played("#7", {}) == (0.0, {})
    assert played("#7", {"reward": "answer", "reward_options": {}}) == (1.0, {})
    with pytest.raises(RowRefused):
        played("#7", {"reward": f"{HERE}:echoed", "reward_options": {}})


def test_a_reward_is_made_once_for_all_rollouts() -> None:
    assert make_reward("pattern", pattern="once") is make_reward("pattern", pattern="once")
