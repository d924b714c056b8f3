"""What is known about data sets of the hub becomes part of a run's configuration, unless the user says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets.utils.logging import disable_progress_bar

from stillhouse.actors.envs.single_turn import reward_for
from stillhouse.launch.config.known_sets import describe_known_sets, with_known_sets
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.run import main
from tests.known_sets import write_known_set

BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
MATH, GSM = "hf:HuggingFaceH4/MATH-500", "hf:openai/gsm8k"


def config_of(tasks: dict[str, Any], options: dict[str, Any] | None = None, env: str = "single_turn") -> RunConfig:
    environments = {} if options is None else {env: {"options": options}}
    given = {"learner": {"tasks": {"env": env} | tasks}, "actor": {"environments": environments}}
    return with_known_sets(build(RunConfig, given))


def judged(config: RunConfig, tag: str) -> object:
    return reward_for(config.environments[config.learner.tasks.env].options, tag)[0]


def test_template_and_reward_are_filled_in_by_tag() -> None:
    config = config_of({"prompts": "mine.jsonl", "eval_prompts": MATH})
    assert config.learner.tasks.templates == {"math500": BOXED}
    assert (judged(config, "math500"), judged(config, "")) == ("math", "answer")
    assert with_known_sets(config) == config  # a resumed run's configuration has them
    assert [*describe_known_sets(config)] == [
        (
            "learner.tasks.eval_prompts",
            "a known data set: prompt from 'problem', ground_truth from 'answer', tag 'math500', prompts in "
            f"{BOXED!r}, judged by the reward math",
        )
    ]


def test_what_the_user_says_comes_first() -> None:
    own = {"math500": "{prompt}", "other": "Q: {prompt}"}
    config = config_of({"eval_prompts": MATH, "templates": own}, {"rewards": {"math500": "answer"}})
    assert config.learner.tasks.templates == own and judged(config, "math500") == "answer"
    assert config_of({"eval_prompts": MATH, "system_prompt": "Box it."}).learner.tasks.templates == {}


def test_a_reward_for_all_rows_keeps_the_training_prompts() -> None:
    config = config_of({"prompts": "hf:openai/gsm8k:train", "eval_prompts": MATH}, {"reward": "my:fn"})
    assert (judged(config, "gsm8k"), judged(config, "math500")) == ("my:fn", "math")
    config = config_of({"prompts": "hf:openai/gsm8k:train", "eval_prompts": GSM}, {"reward": "my:fn"})
    assert judged(config, "gsm8k") == "my:fn"  # the same tag
    options = {"reward": "math", "reward_options": {"limit_s": 1.0}}
    config = config_of({"eval_prompts": MATH}, options)  # it would be judged by it anyway, and with its options
    assert reward_for(config.environments["single_turn"].options, "math500") == ("math", {"limit_s": 1.0})
    config = config_of({"eval_prompts": GSM}, {"answer_pattern": r"= (\d+)"})
    assert reward_for(config.environments["single_turn"].options, "gsm8k")[1] == {"answer_pattern": r"= (\d+)"}


def test_other_environments_judge_for_themselves() -> None:
    config = config_of({"eval_prompts": MATH, "env": "calculator"})
    assert config.actor.environments == {}
    assert next(said for _, said in describe_known_sets(config)).endswith("judged by the environment calculator")


def test_a_check_reads_known_sets_beside_other_files_and_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disable_progress_bar()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("HuggingFaceH4/MATH-500", "openai/gsm8k", "math-ai/aime25"):
        write_known_set(name, tmp_path)
    (tmp_path / "own.jsonl").write_text('{"ask": "1+1=", "ground_truth": "2", "tag": "sums"}\n' * 3)
    monkeypatch.chdir(tmp_path)
    flags = ["--prompts=own.jsonl", f"--eval-prompts={MATH}", "--learner.tasks.columns.prompt=ask"]
    flags += ["--learner.tasks.mix.sums=1", f"--learner.eval_sets.gsm8k.prompts={GSM}"]
    flags += ["--learner.eval_sets.aime25.prompts=hf:math-ai/aime25"]
    assert main([*flags, "--check"]) == 0
    printed = capsys.readouterr().out
    assert "learner.eval_sets.gsm8k.prompts: a known data set: prompt from 'question'" in printed
    assert "learner.tasks.eval_prompts: reward: math of single_turn; 1 of 1 rows have a ground_truth" in printed
    assert "it can read the ground_truth of 1 of 1 rows" in printed  # GSM8K's text behind ####
    assert "Please reason step by step" in printed and "dropped:" not in printed
