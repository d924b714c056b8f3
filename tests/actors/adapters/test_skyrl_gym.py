"""Environments of the real package skyrl_gym, answered by scripts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from stillhouse.actors.envs.registry import check_options
from tests.actors.adapters.conftest import MADE_BY, Talk

package: Any = pytest.importorskip("skyrl_gym", reason=MADE_BY)

OWN = '''
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import register

class Parrot(BaseTextEnv):
    """Says what it was made with; `mode` decides what else it does."""
    def __init__(self, env_config, extras):
        super().__init__()
        self.mode, self.extras, self.closed = env_config.mode, extras, False
    def init(self, prompt):
        return [{"role": "system", "content": str(sorted(self.extras))}, *prompt], {}
    def step(self, action):
        self.turns += 1
        say = lambda role, text: {"role": role, "content": text}
        observations = {
            "two": [say("user", "one"), say("user", "two")],
            "roles": [say("user", "one"), say("tool", "two")],
            "rewrite": [say("user", "again")],
        }[self.mode]
        step = {"observations": observations, "reward": 0.25, "done": self.turns == 2, "metadata": {}}
        return step | ({"postprocessed_action": action.upper()} if self.mode == "rewrite" else {})
    def get_metrics(self):
        return {"said": self.turns, "mode": self.mode, "bad": float("nan")}

register("parrot", Parrot)
'''


@pytest.fixture(scope="module", autouse=True)
def own_module(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The package registers a name once per process."""
    folder = tmp_path_factory.mktemp("own_skyrl")
    (folder / "own_skyrl.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        check_options("skyrl_gym", {"id": "own_skyrl:parrot", "env_config": {"mode": "two"}})


@pytest.mark.parametrize(("said", "reward"), [("it is #### 42", 1.0), ("it is #### 41", 0.0), ("42", 0.0)])
def test_gsm8k_scores_the_answer_to_the_rows_prompt(talk: Talk, said: str, reward: float) -> None:
    talked = talk("skyrl_gym", [said], {"id": "gsm8k"}, row={"prompt": "6*7="}, truth="42")
    assert talked.reward == reward
    assert talked.prompt == "<|im_start|>user\nthe row's own<|im_end|>\n<|im_start|>assistant\n"
    assert dict(talked.info) == {"skyrl_gym_turns": 1.0}


def test_rows_of_skyrls_own_data_are_taken_as_they_are(talk: Talk) -> None:
    row = {"prompt": [{"role": "user", "content": "6*7="}], "reward_spec": {"method": "rule", "ground_truth": "42"}}
    assert talk("skyrl_gym", ["#### 42"], {"id": "gsm8k"}, row=row).reward == 1.0
    assert talk("skyrl_gym", ["Answer: 42"], {"id": "aime"}, row={"prompt": "6*7="}, truth="42").reward == 1.0


def test_several_turns_are_answered_and_their_rewards_added(talk: Talk) -> None:
    turns = ["#### 1", "no idea", "#### 42", "never said"]
    options = {"id": "gsm8k_multi_turn", "extras": {"max_turns": 4}}
    talked = talk("skyrl_gym", turns, options, row={"prompt": "6*7="}, truth="42")
    assert talked.reward == pytest.approx(0.2 / 4 + 1.0)
    assert len(talked.heard) == 2
    assert talked.heard[0].startswith("\n<|im_start|>user\nPlease provide your step-by-step reasoning")
    assert (talked.info["skyrl_gym_turns"], talked.info["skyrl_gym_steps"]) == (3.0, 3.0)


def test_when_no_turn_is_left_the_reward_so_far_counts(talk: Talk) -> None:
    options = {"id": "gsm8k_multi_turn", "extras": {"max_turns": 4}}
    talked = talk("skyrl_gym", ["#### 1"], options, row={"prompt": "6*7="}, truth="42")
    assert talked.reward == pytest.approx(0.05)
    assert (getattr(talked.end, "finish_reason", None), talked.info["skyrl_gym_steps"]) == ("length", 1.0)


def test_an_environment_may_make_the_prompt_and_sees_the_rows_columns(talk: Talk) -> None:
    row = {"prompt": "Go.", "data": "spider", "env": "parrot", "max_turns": 3}
    options = {"id": "own_skyrl:parrot", "env_config": {"mode": "two"}, "extras": {"max_turns": 9}}
    talked = talk("skyrl_gym", ["a", "b"], options, row=row)
    columns = "['data', 'extra_info', 'max_turns', 'reward_model', 'reward_spec']"
    assert talked.prompt.startswith(f"<|im_start|>system\n{columns}<|im_end|>\n<|im_start|>user\nGo.<|im_end|>")
    assert talked.heard == ["\n<|im_start|>user\none\n\ntwo<|im_end|>\n<|im_start|>assistant\n"]
    assert talked.reward == 0.5
    assert dict(talked.info) == {"skyrl_gym_turns": 2.0, "skyrl_gym_said": 2.0}


def test_a_turn_that_the_environment_would_change_stays_and_is_counted(talk: Talk) -> None:
    options = {"id": "own_skyrl:parrot", "env_config": {"mode": "rewrite"}}
    talked = talk("skyrl_gym", ["a", "B"], options, row={"prompt": "Go."})
    assert talked.info["skyrl_gym_rewritten_turns"] == 1.0


def test_answers_in_two_roles_are_refused(talk: Talk) -> None:
    options = {"id": "own_skyrl:parrot", "env_config": {"mode": "roles"}}
    assert "expected one role" in str(talk("skyrl_gym", ["a", "b"], options, row={"prompt": "Go."}).end)


def test_what_a_row_lacks_fails_its_rollout_by_name(talk: Talk) -> None:
    assert "ground_truth is required" in str(talk("skyrl_gym", ["1"], {"id": "gsm8k"}, row={"prompt": "Go."}).end)


def test_environments_that_run_what_the_student_writes_are_known_by_name() -> None:
    from stillhouse.actors.envs.adapters.skyrl_gym import RUNS_CODE

    running: set[str] = set()
    for name, spec in package.registry.items():
        if isinstance(spec.entry_point, str):
            made = package.envs.registration.load_env_creator(spec.entry_point)
            folder = Path(inspect.getfile(made)).parent
            text = "".join(file.read_text() for file in folder.glob("*.py"))
            if "exec(" in text or "PythonCodeExecutor" in text:
                running.add(name)
    assert running == RUNS_CODE


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"id": "gsm8"}, "nothing is registered as 'gsm8'; did you mean 'gsm8k'.* Known: aime, gsm8k"),
        ({"id": "no_such_module:gsm8k"}, "No module named 'no_such_module'"),
        ({"id": "lcb"}, "'lcb' runs what the student writes as Python .*allow_code = true"),
        ({"id": "gsm8k", "extra": {}}, "no option 'extra'; did you mean 'extras'"),
        ({}, "missing a required .*argument: 'id'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_options("skyrl_gym", options)


def test_what_runs_code_is_allowed_by_name() -> None:
    check_options("skyrl_gym", {"id": "lcb", "allow_code": True})
